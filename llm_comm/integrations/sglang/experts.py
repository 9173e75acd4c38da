"""Hook in SGLang that computes the experts of few tokens by llm_comm, with option ``fuse_experts``.

``UnquantizedFusedMoEMethod.apply`` is hooked. Its input is what the router has chosen: rows of tokens, and the experts
and factors of each. Its result is this rank's part of the sum, which SGLang, or a fused norm, all-reduces later. So the
hook involves no other rank. Ranks decide alike, since the decision depends on shapes, dtypes and the layer's settings.

llm_comm serves layers that SGLang computes by its Triton kernels, whose weights are in the order of the model. Layers
with a bias, with another activation than silu or with any setting of ``MoeRunnerConfig`` that changes what is computed
are SGLang's, as are batches of more tokens. With expert parallelism SGLang numbers a rank's own experts from 0, and
gives -1 for others, which add nothing.

SGLang's Triton kernels may write the result over their input. llm_comm returns a new tensor, which SGLang takes too.

With ``fuse_experts="auto"`` llm_comm computes the batches that it has measured to be faster. Before SGLang captures a
batch size, it runs the model with it. The first such run times both kernels in graphs of several layers, whose weights
together exceed the L2 cache, with experts chosen at random. Each rank decides for itself: its part of the sum is right
by either kernel. Batches that were not measured are SGLang's.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput

from llm_comm import _core
from llm_comm.bench.layer_chains import time_chain

logger = logging.getLogger("sglang.llm_comm")

#: Maximum layers of a graph that is timed.
_MOST_LAYERS = 8
_REPS = 7
#: llm_comm computes a batch if it is faster by more than this share, by which repeated runs may differ.
_MARGIN = 0.02
#: Settings of ``MoeRunnerConfig`` that may have any value: sizes, names, and where results are written. Any other one
#: must have its default, one of a later release too.
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
}


class _State:
    """State of the process.

    Attributes:
        group: SGLang's tensor-parallel group, whose communicator computes the experts; None: SGLang does.
        measured: Only batches that were measured to be faster are llm_comm's. None: all.
    """

    group: Any = None
    measured: _Measured | None = None


class _Layers:
    """Layers with weights of one shape."""

    def __init__(self) -> None:
        self._found: list[weakref.ReferenceType[Any]] = []
        self._are_enough = False

    def add(self, layer: Any) -> None:
        """Add a layer. They are enough when one comes again, since a model runs all of its layers in turn."""
        if not self._are_enough and any(found() is layer for found in self._found):
            self._are_enough = True
        if not self._are_enough:
            self._found.append(weakref.ref(layer))
            self._are_enough = len(self._found) == _MOST_LAYERS

    def to_measure(self) -> list[Any]:
        """Return the layers; [] if they are not enough yet."""
        found = [layer() for layer in self._found] if self._are_enough else []
        return [layer for layer in found if layer is not None]


def activate(group: Any, measures: bool) -> None:
    """Have the communicator of SGLang's ``group`` compute experts, all of them or those that are faster as measured."""
    _State.group, _State.measured = group, _Measured() if measures else None


def around_apply(theirs: Any, method: Any, layer: Any, dispatch_output: Any) -> Any:
    """Hook of ``UnquantizedFusedMoEMethod.apply``: use llm_comm if it serves the layer and the batch."""
    compute = getattr(getattr(_State.group, "ca_comm", None), "fused_experts", None)
    if compute is None or torch.compiler.is_compiling() or not _is_served(method, layer, dispatch_output):
        return theirs(method, layer, dispatch_output)
    y = None
    if _State.measured is None or _State.measured.is_faster(theirs, compute, method, layer, dispatch_output):
        y = _computed(compute, layer, dispatch_output)
    return theirs(method, layer, dispatch_output) if y is None else StandardCombineInput(hidden_states=y)


def _computed(compute: Callable[..., torch.Tensor | None], layer: Any, dispatch_output: Any) -> torch.Tensor | None:
    return compute(
        dispatch_output.hidden_states,
        layer.w13_weight,
        down_weight=layer.w2_weight,
        topk_weights=dispatch_output.topk_output.topk_weights,
        topk_ids=dispatch_output.topk_output.topk_ids,
    )


# ---- Measurement ----------------------------------------------------------------------------------------------------


class _Measured:
    """What has been measured, and layers to measure with."""

    def __init__(self) -> None:
        #: By shapes and dtype of the weights.
        self._layers: dict[tuple[Any, ...], _Layers] = {}
        #: By these, and the numbers of tokens and of experts of a token.
        self._is_faster: dict[tuple[Any, ...], bool] = {}

    def is_faster(self, theirs: Any, compute: Any, method: Any, layer: Any, given: Any) -> bool:
        """Return whether llm_comm has been measured to be faster for a batch, after a measurement if it can be made."""
        x, ids = given.hidden_states, given.topk_output.topk_ids
        if not 1 <= len(x) <= _core.linear_max_tokens:
            return False
        shapes = layer.w13_weight.shape, layer.w2_weight.shape, x.dtype
        key = (*shapes, *ids.shape)
        if key not in self._is_faster:
            if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return False
            layers = self._layers.setdefault(shapes, _Layers())
            layers.add(layer)
            links = [(one, _drawn(given, len(one.w2_weight))) for one in layers.to_measure()]
            if not links:
                return False
            self._is_faster[key] = _measure(theirs, compute, method, links)
        return self._is_faster[key]


def _measure(theirs: Any, compute: Any, method: Any, links: list[tuple[Any, Any]]) -> bool:
    """Time both kernels with layers and their batches, and return whether llm_comm is faster."""
    x = links[0][1].hidden_states
    if _computed(compute, *links[0]) is None:
        return False
    try:
        own_us = time_chain(lambda link: theirs(method, *link), links, _REPS, x.device)
        us = time_chain(lambda link: _computed(compute, *link), links, _REPS, x.device)
    except RuntimeError as error:  # no memory, or kernels that cannot be captured
        logger.warning("llm_comm: experts of %d tokens were not measured and are SGLang's: %s", len(x), error)
        return False
    if dist.get_rank() == 0:
        logger.info("llm_comm: experts of %d tokens: %.1f us, SGLang's %.1f", len(x), us, own_us)
    return us * (1 + _MARGIN) < own_us


def _drawn(given: Any, experts: int) -> Any:
    """Return a copy of the batch whose tokens have chosen experts at random."""
    chosen = given.topk_output
    drawn = torch.rand(len(chosen.topk_ids), experts, device=chosen.topk_ids.device).topk(chosen.topk_ids.shape[1])
    output = chosen._replace(
        topk_weights=drawn.values.to(chosen.topk_weights.dtype), topk_ids=drawn.indices.to(chosen.topk_ids.dtype)
    )
    return given._replace(hidden_states=given.hidden_states.clone(), topk_output=output)


# ---- What is served -------------------------------------------------------------------------------------------------


def _is_served(method: Any, layer: Any, dispatch_output: Any) -> bool:
    """Return whether llm_comm computes what ``method`` would, apart from shapes and dtypes."""
    return (
        method.runner.runner_backend.is_triton()
        # Rows of gate and up in turn: in 0.5.22 and later, with SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED.
        and not getattr(method, "w13_swiglu_interleaved", False)
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
