"""vLLM's CUDA communicator with llm_comm in front of its all-gathers and reduce-scatters.

All of vLLM's ways end in these methods: ``torch.ops.vllm.all_gather`` and ``reduce_scatter`` of a group (logits,
linears split by columns, sequence and context parallelism), and the exchange of tokens between experts by all-gather
and reduce-scatter (``AgRsAll2AllManager``), which calls ``all_gatherv`` and ``reduce_scatterv``. The operators around
them are opaque to torch.compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from llm_comm.integrations.parts import Parts

#: Names of the exchange of tokens that gathers and scatters; the others have kernels of their own.
_EXCHANGES = ("naive", "allgather_reducescatter")


def only_gathers(kind: str) -> bool:
    """Whether groups of a kind gather and scatter under the current configuration, and sum nothing.

    Each group that llm_comm serves takes memory, and the one of experts is made for every model that has some.
    """
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None:
        return False
    if kind == "pcp":
        return True  # of more than one rank only where prefills are split
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if parallel.all2all_backend not in _EXCHANGES or not (model is None or model.is_moe):
        return False
    if kind == "ep":
        splits_prefills = parallel.enable_expert_parallel and parallel.prefill_context_parallel_size > 1
        return bool(parallel.use_sequence_parallel_moe or splits_prefills)
    return kind == "dp"


def gathering(kind: type) -> type:
    """Return ``kind``, a class of communicators, with the methods below in front of its own.

    A communicator gets this class once its ranks have agreed: methods of a release that llm_comm does not know are not
    overridden.
    """
    return type(kind.__name__, (_Gathering, kind), {})


# Its base is vLLM's for the methods that follow it in the classes of ``gathering``.
class _Gathering(CudaCommunicator):  # type: ignore[misc]
    """Gathers and scatters by llm_comm what it accepts, and takes vLLM's way for the rest."""

    #: None where llm_comm has left the group.
    _parts: Parts | None = None

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The parts of all ranks along ``dim``, a new tensor."""
        parts = self._parts
        result = None if parts is None else parts.all_gather("all_gather", input_, dim)
        return super().all_gather(input_, dim) if result is None else result

    def all_gatherv(
        self, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        """The same of parts of any sizes, and for each of a list of tensors."""
        parts = self._parts
        if parts is None or dim != 0:  # vLLM has its own words for another one
            return super().all_gatherv(input_, dim, sizes)  # type: ignore[no-any-return]
        if isinstance(input_, torch.Tensor):
            result = parts.all_gather("all_gatherv", input_, dim, sizes)
            return super().all_gatherv(input_, dim, sizes) if result is None else result
        results = [parts.all_gather("all_gatherv", x, dim, sizes) for x in input_]
        declined = [place for place, result in enumerate(results) if result is None]
        if declined:  # together: NCCL makes one operation of them
            theirs = super().all_gatherv([input_[place] for place in declined], dim, sizes)
            for place, result in zip(declined, theirs, strict=True):
                results[place] = result
        return results  # type: ignore[return-value]

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """This rank's part of the sum over the group along ``dim``, a new tensor."""
        parts = self._parts
        result = None if parts is None else parts.reduce_scatter("reduce_scatter", input_, dim)
        return super().reduce_scatter(input_, dim) if result is None else result

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        """The same with parts of any sizes."""
        result = self._scatter_parts("reduce_scatterv", input_, dim, sizes)
        return super().reduce_scatterv(input_, dim, sizes) if result is None else result

    def reduce_scatterv_into_output(
        self, input_: torch.Tensor, output: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """The same into a tensor of the caller's. vLLM 0.26 has no such method, and does not call it."""
        result = self._scatter_parts("reduce_scatterv_into_output", input_, dim, sizes, output)
        return super().reduce_scatterv_into_output(input_, output, dim, sizes) if result is None else result

    def custom_all_gather(self, input_: torch.Tensor) -> torch.Tensor | None:
        """What vLLM 0.33 asks before ``all_gather`` along the first dimension, where a model splits its sequence; None
        sends it there."""
        parts = self._parts
        result = None
        if parts is not None and parts.gathers:
            if torch.compiler.is_compiling():
                return None  # there lies an operator, which comes back to us
            result = parts.all_gather("custom_all_gather", input_)
        return super().custom_all_gather(input_) if result is None else result

    def custom_reduce_scatter(self, input_: torch.Tensor) -> torch.Tensor | None:
        """The same for ``reduce_scatter``."""
        parts = self._parts
        result = None
        if parts is not None and parts.scatters:
            if torch.compiler.is_compiling():
                return None
            result = parts.reduce_scatter("custom_reduce_scatter", input_)
        return super().custom_reduce_scatter(input_) if result is None else result

    def _scatter_parts(
        self, method: str, x: torch.Tensor, dim: int, sizes: Sequence[int] | None, out: Any = None
    ) -> torch.Tensor | None:
        parts = self._parts
        return None if parts is None else parts.reduce_scatter(method, x, dim, sizes, out)
