"""Hooks in SGLang that compute the experts of few tokens by llm_comm, with option ``fuse_experts``.

``UnquantizedFusedMoEMethod.apply`` and ``Fp8MoEMethod.apply`` are hooked. Their input is what the router has chosen:
rows of tokens, and the experts and factors of each. Their result is this rank's part of the sum, which SGLang, or a
fused norm, all-reduces later. So the hooks involve no other rank, and each rank's part is right by either
kernel. Without measurements ranks decide alike: by shapes, dtypes and the layer's settings.

llm_comm serves layers that SGLang computes by its Triton kernels, whose weights are in the order of the model. Layers
with a bias, with another activation than silu or with any setting of ``MoeRunnerConfig`` that changes what is computed
are SGLang's, as are batches of more tokens. With expert parallelism SGLang numbers a rank's own experts from 0, and
gives -1 for others, which add nothing.

FP8 experts have float32 scales: of blocks of 128 x 128, or one for each expert's gate and up and one for its down
projection. For the latter, SGLang requantizes gate and up of an expert to one scale when it loads the model. Experts of
MXFP8 and FP4, other blocks, and scales that were packed for other kernels are SGLang's. On Hopper, SGLang uses Triton
for FP8 experts, unless an all-to-all backend or ``--moe-runner-backend`` selects another runner.

SGLang's Triton kernels may write the result over their input. llm_comm returns a new tensor, which SGLang takes too.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput

from llm_comm.integrations.experts import Batch, Choice, Weights, computed, scaled, unquantized

logger = logging.getLogger("sglang.llm_comm")

#: Settings of ``MoeRunnerConfig`` that may have any value: sizes, names, where results are written, and the factor of
#: the sum. Any other one must have its default, one of a later release too.
_ANY_VALUE = {
    "num_experts",
    "num_local_experts",
    "hidden_size",
    "intermediate_size_per_partition",
    "layer_id",
    "top_k",
    "num_fused_shared_experts",
    "params_dtype",
    "routing_method_type",
    "runner_backend",
    "inplace",
    "layer",
    "routed_scaling_factor",
}


class _State:
    """State of the process.

    Attributes:
        group: SGLang's tensor-parallel group, whose communicator computes the experts; None: SGLang does.
        choice: Which batches it computes.
        serves_fp8: It computes those of FP8 too.
    """

    group: Any = None
    choice: Any = None
    serves_fp8 = False


def activate(group: Any, measures: bool, fp8: bool) -> None:
    """Have the communicator of SGLang's ``group`` compute experts, all of them or those that are faster as measured.

    Args:
        group: SGLang's tensor-parallel group.
        measures: Measure which are faster.
        fp8: Also those of FP8.
    """
    _State.group, _State.choice = group, Choice(measures, "SGLang", logger, numbers_own=True)
    _State.serves_fp8 = fp8


def around_apply(theirs: Any, method: Any, layer: Any, dispatch_output: Any) -> Any:
    """Hook of ``UnquantizedFusedMoEMethod.apply``: use llm_comm if it serves the layer and the batch."""
    return _apply(_unquantized, theirs, method, layer, dispatch_output)


def around_fp8_apply(theirs: Any, method: Any, layer: Any, dispatch_output: Any) -> Any:
    """Hook of ``Fp8MoEMethod.apply``: use llm_comm if it serves the layer and the batch."""
    return _apply(_fp8, theirs, method, layer, dispatch_output)


def _apply(
    weights_of: Callable[[Any, Any], Weights | None], theirs: Any, method: Any, layer: Any, dispatch_output: Any
) -> Any:
    compute = getattr(getattr(_State.group, "ca_comm", None), "fused_experts", None)
    if compute is None or torch.compiler.is_compiling() or not _is_served(method, layer, dispatch_output):
        return theirs(method, layer, dispatch_output)
    weights = weights_of(method, layer)
    if weights is None:
        return theirs(method, layer, dispatch_output)
    config = method.moe_runner_config
    factor = config.routed_scaling_factor
    weights = weights._replace(
        routed_scaling_factor=1.0 if factor is None else float(factor),
        num_experts=max(config.num_experts or 0, len(weights.down_weight)),
    )
    chosen = dispatch_output.topk_output
    batch = Batch(dispatch_output.hidden_states, chosen.topk_weights, chosen.topk_ids)

    def by_theirs(batch: Batch) -> Any:
        output = chosen._replace(topk_weights=batch.topk_weights, topk_ids=batch.topk_ids)
        return theirs(method, layer, dispatch_output._replace(hidden_states=batch.x, topk_output=output))

    def by_ours(batch: Batch) -> torch.Tensor | None:
        return computed(compute, weights, batch)

    y = by_ours(batch) if _State.choice.is_ours(weights, batch, by_theirs, by_ours) else None
    return theirs(method, layer, dispatch_output) if y is None else StandardCombineInput(hidden_states=y)


def _unquantized(method: Any, layer: Any) -> Weights | None:
    # Rows of gate and up in turn: in 0.5.22 and later, with SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED.
    return None if getattr(method, "w13_swiglu_interleaved", False) else unquantized(layer)


def _fp8(method: Any, layer: Any) -> Weights | None:
    if not _State.serves_fp8 or getattr(layer, "_mega_moe_weights_built", False):  # the latter: rows in turn
        return None
    return scaled(layer, method.weight_block_size if method.block_quant else None)


def _is_served(method: Any, layer: Any, dispatch_output: Any) -> bool:
    """Return whether llm_comm computes what ``method`` would, apart from weights, shapes and dtypes."""
    runner = getattr(method, "runner", None)  # FP8 by CUTLASS has none
    return (
        runner is not None
        and runner.runner_backend.is_triton()
        and getattr(layer, "w13_weight_bias", None) is None
        and getattr(layer, "w2_weight_bias", None) is None
        and isinstance(dispatch_output, StandardDispatchOutput)
        and isinstance(dispatch_output.topk_output, StandardTopKOutput)
        and all(
            getattr(method.moe_runner_config, field.name) == field.default
            for field in dataclasses.fields(method.moe_runner_config)
            if field.name not in _ANY_VALUE
        )
    )
