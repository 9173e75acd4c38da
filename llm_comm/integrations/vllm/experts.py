"""Replacement of vLLM's ``UnquantizedFusedMoEMethod.apply`` that computes the experts of few tokens by llm_comm, with
option ``fuse_experts``.

Its operands are the rows of tokens, and the experts and factors that the router chose for each. Its result is this
rank's part of the sum, which vLLM all-reduces later, so the replacement involves no other rank. vLLM calls it inside of
an operator that torch.compile does not look into.

llm_comm serves layers that vLLM computes by its Triton kernels, whose weights are in the order of the model. Layers
with a bias, shared experts, LoRA, another activation than silu or limits of it are vLLM's, and so are all layers with
data or expert parallelism, where other ranks' tokens are exchanged around the call.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from llm_comm.integrations.experts import Batch, Choice, computed

logger = logging.getLogger("vllm.llm_comm")

#: Settings of a layer that change what is computed. Each must be absent, None or False.
_UNSET = ("expert_map", "apply_router_weight_on_input", "swiglu_alpha", "swiglu_beta", "swiglu_limit")
#: The same of its ``FusedMoEConfig``.
_UNSET_IN_CONFIG = ("has_bias", "is_lora_enabled", "swiglu_limit", "_defer_moe_finalize")
#: Sizes of its ``FusedMoEParallelConfig`` that must be 1.
_NOT_PARALLEL = ("dp_size", "ep_size", "pcp_size", "sp_size")


class _State:
    """State of the process.

    Attributes:
        communicator: vLLM's communicator of the tensor-parallel group, which computes the experts; None: vLLM does.
        choice: Which batches it computes.
    """

    communicator: Any = None
    choice: Any = None


def activate(communicator: Any, measures: bool) -> None:
    """Have ``communicator`` compute experts, all of them or those that are faster as measured."""
    _State.communicator, _State.choice = communicator, Choice(measures, "vLLM", logger)


def apply(
    theirs: Any,
    method: Any,
    layer: Any,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    shared_experts: Any,
    shared_experts_input: torch.Tensor | None,
) -> Any:
    """Replacement of ``UnquantizedFusedMoEMethod.apply``: use llm_comm if it serves the layer and the batch."""
    compute = getattr(_State.communicator, "fused_experts", None)
    if compute is None or torch.compiler.is_compiling() or shared_experts is not None or not _is_served(method, layer):
        return theirs(method, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
    batch = Batch(x, topk_weights, topk_ids)

    def by_theirs(layer: Any, batch: Batch) -> Any:
        return theirs(method, layer, *batch, None, None)

    def by_ours(layer: Any, batch: Batch) -> torch.Tensor | None:
        return computed(compute, layer, batch)

    experts = len(layer.w2_weight)
    y = by_ours(layer, batch) if _State.choice.is_ours(layer, batch, experts, by_theirs, by_ours) else None
    return by_theirs(layer, batch) if y is None else y


def _is_served(method: Any, layer: Any) -> bool:
    """Return whether llm_comm computes what ``method`` would, apart from shapes and dtypes."""
    config = method.moe
    return (
        type(method) is UnquantizedFusedMoEMethod  # others compute more
        and method.unquantized_backend is UnquantizedMoeBackend.TRITON
        and method.experts_cls is TritonExperts
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
