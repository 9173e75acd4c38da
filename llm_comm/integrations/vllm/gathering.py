"""All-gathers and reduce-scatters of vLLM's CUDA communicator, served by llm_comm where it accepts them.

Two kinds of callers end in the methods below. ``torch.ops.vllm.all_gather`` and ``reduce_scatter`` serve logits,
column-parallel linear layers, and sequence and context parallelism. ``AgRsAll2AllManager``, which exchanges tokens
between experts, calls ``all_gatherv`` and ``reduce_scatterv``. vLLM's operators around these calls are opaque to
torch.compile.

Option ``wire`` may quantize the tokens' hidden states, which ``AgRsAll2AllManager`` passes first in its lists. Router
logits, weights and ids of experts, and all other tensors are gathered exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from llm_comm.integrations.gather_scatter import EngineGatherScatter

#: Values of ``all2all_backend`` that exchange tokens by all-gather and reduce-scatter. Other backends have own kernels.
_EXCHANGES = ("naive", "allgather_reducescatter")
#: Data types of hidden states that are not quantized yet.
_HIDDEN = (torch.bfloat16, torch.float16)


def only_gathers(kind: str) -> bool:
    """Return whether groups of ``kind`` use all-gather and reduce-scatter, and no all-reduce, in vLLM's configuration.

    The answer must be exact: each group that llm_comm serves takes memory, and vLLM makes the group "ep" for every
    model with experts, whether the group is used or not.
    """
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None:
        return False
    if kind == "pcp":
        return True  # this group has several ranks only if prefills are split
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if parallel.all2all_backend not in _EXCHANGES or not (model is None or model.is_moe):
        return False
    if kind == "ep":
        splits_prefills = parallel.enable_expert_parallel and parallel.prefill_context_parallel_size > 1
        return bool(parallel.use_sequence_parallel_moe or splits_prefills)
    return kind == "dp"


def gathering(kind: type) -> type:
    """Return a subclass of communicator class ``kind`` whose all-gathers and reduce-scatters try llm_comm first.

    A communicator changes to this class after its ranks have agreed. So in a release with unknown methods nothing is
    overridden.
    """
    return type(kind.__name__, (_Gathering, kind), {})


# The base class only declares the methods. In the classes that ``gathering`` makes, ``kind`` comes next in the method
# resolution order, so ``super()`` finds the methods of ``kind``.
class _Gathering(CudaCommunicator):  # type: ignore[misc]
    """Mixin: calls that llm_comm accepts use llm_comm, and all other calls use vLLM's communicator."""

    #: None after ``destroy``.
    _gather_scatter: EngineGatherScatter | None = None

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the shards of all ranks along ``dim``. Return a new tensor."""
        ours = self._gather_scatter
        result = None if ours is None else ours.all_gather("all_gather", input_, dim)
        return super().all_gather(input_, dim) if result is None else result

    def all_gatherv(
        self, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        """Concatenate shards of different sizes along ``dim``, for one tensor or for each tensor of a list."""
        ours = self._gather_scatter
        if ours is None or dim != 0:  # vLLM raises its own error for another dimension
            return super().all_gatherv(input_, dim, sizes)  # type: ignore[no-any-return]
        if isinstance(input_, torch.Tensor):
            result = ours.all_gather("all_gatherv", input_, dim, sizes)
            return super().all_gatherv(input_, dim, sizes) if result is None else result
        is_hidden = len(input_) > 1 and input_[0].dim() == 2 and input_[0].dtype in _HIDDEN
        results = [
            ours.all_gather("all_gatherv", x, dim, sizes, lossy=is_hidden and place == 0)
            for place, x in enumerate(input_)
        ]
        declined = [place for place, result in enumerate(results) if result is None]
        if declined:  # in one call, which NCCL runs as one grouped operation
            theirs = super().all_gatherv([input_[place] for place in declined], dim, sizes)
            for place, result in zip(declined, theirs, strict=True):
                results[place] = result
        return results  # type: ignore[return-value]

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Sum over the group. Return this rank's shard of the sum along ``dim``, a new tensor."""
        result = self._try_reduce_scatter("reduce_scatter", input_, dim, None)
        return super().reduce_scatter(input_, dim) if result is None else result

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        """Sum over the group, with shards of different sizes. Return this rank's shard, a new tensor."""
        result = self._try_reduce_scatter("reduce_scatterv", input_, dim, sizes)
        return super().reduce_scatterv(input_, dim, sizes) if result is None else result

    def reduce_scatterv_into_output(
        self, input_: torch.Tensor, output: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """Sum over the group, with shards of different sizes, and write this rank's shard to ``output``.

        vLLM 0.26 has no such method and does not call it.
        """
        result = self._try_reduce_scatter("reduce_scatterv_into_output", input_, dim, sizes, output)
        return super().reduce_scatterv_into_output(input_, output, dim, sizes) if result is None else result

    def custom_all_gather(self, input_: torch.Tensor) -> torch.Tensor | None:
        """Concatenate the shards along the first dimension; None makes vLLM call ``all_gather`` instead.

        vLLM 0.33 calls this method first in models that split their sequence.
        """
        ours = self._gather_scatter
        result = None
        if ours is not None and ours.gathers:
            if torch.compiler.is_compiling():
                return None  # ``all_gather`` goes through an operator, which calls this class at run time
            result = ours.all_gather("custom_all_gather", input_)
        return super().custom_all_gather(input_) if result is None else result

    def custom_reduce_scatter(self, input_: torch.Tensor) -> torch.Tensor | None:
        """Sum, and return this rank's shard along the first dimension; None makes vLLM call ``reduce_scatter`` instead.

        vLLM 0.33 calls this method first in models that split their sequence.
        """
        ours = self._gather_scatter
        result = None
        if ours is not None and ours.scatters:
            if torch.compiler.is_compiling():
                return None
            result = ours.reduce_scatter("custom_reduce_scatter", input_)
        return super().custom_reduce_scatter(input_) if result is None else result

    def _try_reduce_scatter(
        self, method: str, x: torch.Tensor, dim: int, sizes: Sequence[int] | None, out: Any = None
    ) -> torch.Tensor | None:
        ours = self._gather_scatter
        return None if ours is None else ours.reduce_scatter(method, x, dim, sizes, out)
