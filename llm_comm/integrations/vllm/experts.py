"""Replacements of vLLM's ``UnquantizedFusedMoEMethod.apply`` and ``Fp8MoEMethod.apply`` that compute the experts of few
tokens by llm_comm, with option ``fuse_experts``.

Their operands are the rows of tokens, and the experts and factors that the router chose for each. Their result is this
rank's part of the sum, which vLLM all-reduces later, so the replacements involve no other rank. vLLM calls them inside
of an operator that torch.compile does not look into.

llm_comm serves layers that vLLM computes by its Triton kernels, whose weights are in the order of the model. Layers
with a bias, LoRA, another activation than silu or limits of it are vLLM's. All layers with data parallelism are vLLM's,
since other ranks' tokens are exchanged around the call. With expert parallelism alone each rank has all tokens and some
of the experts, and a map from the router's numbers to its own. llm_comm serves maps whose experts follow one another.
Shared experts are another layer, which vLLM computes around the call.

FP8 experts have float32 scales: of blocks of 128 x 128, or one for each expert's gate and up and one for its down
projection. For the latter, vLLM requantizes gate and up of an expert to one scale when it loads the model. On Hopper
with tensor parallelism alone, vLLM uses Triton for blocks, and for one scale if the model gives none for tokens. Models
with scales of tokens use FlashInfer if it is installed. vLLM exchanges gate and up for FlashInfer, and repacks weights
for other kernels. So experts of any kernel but Triton's are vLLM's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from llm_comm import _core
from llm_comm.integrations.experts import Batch, Choice, Weights, computed, scaled, unquantized

logger = logging.getLogger("vllm.llm_comm")

#: Settings of a layer that change what is computed. Each must be absent, None or False.
_UNSET = ("apply_router_weight_on_input", "swiglu_alpha", "swiglu_beta", "swiglu_limit")
#: The same of its ``FusedMoEConfig``.
_UNSET_IN_CONFIG = ("has_bias", "is_lora_enabled", "swiglu_limit", "_defer_moe_finalize")
#: Sizes of its ``FusedMoEParallelConfig`` that must be 1.
_NOT_PARALLEL = ("dp_size", "pcp_size", "sp_size")


class _State:
    """State of the process.

    Attributes:
        communicator: vLLM's communicator of the tensor-parallel group, which computes the experts; None: vLLM does.
        choice: Which batches it computes.
        serves_fp8: It computes those of FP8 too.
    """

    communicator: Any = None
    choice: Any = None
    serves_fp8 = False


def activate(communicator: Any, measures: bool, fp8: bool) -> None:
    """Have ``communicator`` compute experts, all of them or those that are faster as measured.

    Args:
        communicator: The communicator of this integration.
        measures: Measure which are faster.
        fp8: Also those of FP8.
    """
    _State.communicator, _State.choice = communicator, Choice(measures, "vLLM", logger, numbers_own=False)
    _State.serves_fp8 = fp8


def apply(theirs: Any, method: Any, *operands: Any, **named: Any) -> Any:
    """Replacement of ``UnquantizedFusedMoEMethod.apply``: use llm_comm if it serves the layer and the batch."""
    return _apply(_unquantized, theirs, method, *operands, **named)


def fp8_apply(theirs: Any, method: Any, *operands: Any, **named: Any) -> Any:
    """Replacement of ``Fp8MoEMethod.apply``: use llm_comm if it serves the layer and the batch."""
    return _apply(_fp8, theirs, method, *operands, **named)


def _apply(
    weights_of: Callable[[Any, Any], Weights | None],
    theirs: Any,
    method: Any,
    layer: Any,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    shared_experts: Any,
    shared_experts_input: torch.Tensor | None,
) -> Any:
    compute: Any = getattr(_State.communicator, "fused_experts", None)
    weights = weights_of(method, layer) if compute is not None and not torch.compiler.is_compiling() else None
    # A kernel that exchanges tokens may compute the shared experts meanwhile. Else vLLM does so around this call.
    has_shared = shared_experts is not None and method.mk_can_overlap_shared_experts
    numbers = None if weights is None or has_shared or not _is_served(method, layer) else _numbers(layer, len(x))
    if weights is None or numbers is None:
        return theirs(method, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
    batch, weights = Batch(x, topk_weights, topk_ids), weights._replace(**numbers)

    def by_theirs(batch: Batch) -> Any:
        return theirs(method, layer, *batch, None, None)

    def by_ours(batch: Batch) -> torch.Tensor | None:
        return computed(compute, weights, batch)

    y = by_ours(batch) if _State.choice.is_ours(weights, batch, by_theirs, by_ours) else None
    return theirs(method, layer, *batch, shared_experts, shared_experts_input) if y is None else y


def _unquantized(method: Any, layer: Any) -> Weights | None:
    # Subclasses compute more.
    if type(method) is not UnquantizedFusedMoEMethod or method.unquantized_backend is not UnquantizedMoeBackend.TRITON:
        return None
    return unquantized(layer)


def _fp8(method: Any, layer: Any) -> Weights | None:
    if not _State.serves_fp8:
        return None
    # Here, so that a release without them loses experts of FP8 alone.
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

    if type(method) is not Fp8MoEMethod or method.fp8_backend is not Fp8MoeBackend.TRITON:
        return None
    # In 0.32 and later: smaller blocks, if tensor parallelism would divide those of the model.
    block = getattr(method, "moe_block_shape", method.weight_block_size)
    return scaled(layer, block if method.block_quant else None)


def _numbers(layer: Any, tokens: int) -> dict[str, Any] | None:
    """Return the numbers of this rank's experts, as ``Weights`` has them; None if they do not follow one another.

    With expert parallelism they are read once for a map, not while a graph is captured.
    """
    numbers = layer.expert_map
    if numbers is None:
        return {}
    known: Any = getattr(layer, "llm_comm_numbers", (None, None))
    if known[0] is not numbers:
        is_capturing = numbers.is_cuda and torch.cuda.is_current_stream_capturing()
        if is_capturing or tokens > _core.linear_max_tokens:  # the engine's, whatever the numbers
            return None
        known = layer.llm_comm_numbers = numbers, _in_a_row(numbers.tolist())
    first, count = known[1]
    # Further experts in the weights, such as shared ones, would take the numbers of the next rank.
    return {"first_expert": first, "num_experts": len(numbers)} if count == len(layer.w2_weight) else None


def _in_a_row(numbers: list[int]) -> tuple[int, int]:
    """Return the first index of 0, 1, 2 and so on in ``numbers``, and how many these are; 0 of them if anything but -1
    stands around them."""
    first, count = next((i for i, number in enumerate(numbers) if number >= 0), 0), sum(n >= 0 for n in numbers)
    return first, count if numbers[first : first + count] == list(range(count)) else 0


def _is_served(method: Any, layer: Any) -> bool:
    """Return whether llm_comm computes what ``method`` would, apart from weights, shapes and dtypes."""
    config = method.moe
    return (
        method.experts_cls is TritonExperts
        and layer.activation is MoEActivation.SILU
        and all(_is_unset(layer, name) for name in _UNSET)
        and all(_is_unset(config, name) for name in _UNSET_IN_CONFIG)
        and all(getattr(config.moe_parallel_config, name) == 1 for name in _NOT_PARALLEL)
        # Since 0.33: a model's own steps before the rows of a token are added.
        and _is_unset(getattr(method.moe_kernel, "fused_experts", None), "post_gemm2_hook")
    )


def _is_unset(settings: Any, name: str) -> bool:
    value = getattr(settings, name, None)
    return value is None or value is False
