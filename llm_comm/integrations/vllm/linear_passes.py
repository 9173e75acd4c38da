"""Passes of vLLM's compiler that replace linear layers by operators of llm_comm (``operators.py``).

``LinearNormPass`` merges a linear layer into the operator that ``fusion_pass.py`` made of the all-reduce and norm after
the layer. ``ColumnLinearPass`` runs next and replaces column-parallel layers, which no all-reduce follows. Gate and up
become one operator with their activation, silu-and-mul or gelu-tanh-and-mul. In both supported versions of vLLM the
graph has an activation as torch operators, or as vLLM's operator if ``custom_ops`` has it (``+silu_and_mul``).

Both passes walk the graph (``graph_layers.py``). They skip layers that the group's communicator would decline for every
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch._inductor.pattern_matcher as pm
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from vllm.compilation.passes.fusion.matcher_utils import MatcherSiluAndMul
from vllm.compilation.passes.inductor_pass import enable_fake_mode, get_pass_context
from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass, VllmPatternMatcherPass
from vllm.config import VllmConfig
from vllm.config.utils import Range
from vllm.distributed import get_tp_group

from llm_comm.integrations.vllm import compiled_graphs
from llm_comm.integrations.vllm.compiled_graphs import log_once
from llm_comm.integrations.vllm.graph_layers import RESHAPES, Layer, Node, erase, layer_of, reshaped
from llm_comm.integrations.vllm.operators import (
    all_reduce_add_rms_norm,
    all_reduce_add_rms_norm_group_fp8,
    all_reduce_add_rms_norm_nvfp4,
    gelu_tanh_and_mul,
    linear,
    linear_all_reduce_add_rms_norm,
    linear_gelu_tanh_and_mul,
    linear_silu_and_mul,
    silu_and_mul,
)

#: Operator of gate, up and activation, by the operator of the activation alone.
_WITH_ACTIVATION = {silu_and_mul: linear_silu_and_mul, gelu_tanh_and_mul: linear_gelu_tanh_and_mul}
# Operators that sum the result of a layer over the ranks. Layers before the last two stay vLLM's: a layer whose norm
# quantizes by groups or blocks has no operator.
_SUMS = (
    torch.ops.vllm.all_reduce.default,
    torch.ops.vllm.reduce_scatter.default,
    all_reduce_add_rms_norm,
    all_reduce_add_rms_norm_group_fp8,
    all_reduce_add_rms_norm_nvfp4,
)


class LayerPass(VllmInductorPass):  # type: ignore[misc]
    """Base of the passes. They apply to compile ranges whose linear layers llm_comm may compute."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        communicator = get_tp_group().device_communicator
        self._max_tokens = communicator.max_linear_tokens
        self._uuid = f"{compiled_graphs.digest_of_sources()} {self._max_tokens} {communicator.linear_key}"

    def is_applicable_for_range(self, compile_range: Range) -> bool:
        """Return whether the range ends at or below ``max_linear_tokens``; larger batches keep vLLM's layers."""
        return compile_range.end <= self._max_tokens  # type: ignore[no-any-return]

    def uuid(self) -> str:
        return self._uuid


class LinearNormPass(LayerPass):
    """Merges linear layers with the fused all-reduce and norm after them, if llm_comm is preferred for some batch."""

    @VllmInductorPass.time_and_log  # type: ignore[untyped-decorator]
    def __call__(self, graph: torch.fx.Graph) -> None:
        prefers = get_tp_group().device_communicator.prefers_linear
        norms = [node for node in graph.nodes if node.target is all_reduce_add_rms_norm]
        found = [
            pair
            for pair in map(_layer_before, norms)
            if pair is not None and prefers(*pair.layer.shape, *pair.layer.kind)
        ]
        for pair in found:
            _replace_with_norm(graph, pair)
        VllmPatternMatcherPass.match_table[self.pass_name] += len(found)
        batches = get_pass_context().compile_range
        if norms:
            log_once(
                f"llm_comm fused {len(found)} of {len(norms)} all-reduces with RMSNorm of a graph for batches of "
                f"{batches.start} to {batches.end} tokens with the linear layers before them"
            )


class _Pair(NamedTuple):
    """Linear layer, and the node of the fused all-reduce and norm that takes its result."""

    layer: Layer
    norm: Node


def _layer_before(norm: Node) -> _Pair | None:
    """Return the linear layer whose result only ``norm`` uses, as its addend; None if there is no such layer."""
    total: Any = norm.args[0]
    layer = layer_of(total)
    if layer is None or len(total.users) != 1 or total in norm.args[1:]:
        return None
    if layer.blocks and layer.reshape is not None:  # block scales of x have two dimensions, so x cannot be reshaped
        return None
    return _Pair(layer, norm)


def _replace_with_norm(graph: torch.fx.Graph, pair: _Pair) -> None:
    layer, norm = pair
    with graph.inserting_before(norm):
        x = layer.x if layer.reshape is None else reshaped(graph, layer.x, layer.reshape)
        operands = (x, *layer.operands, *norm.args[1:])
        fused = graph.call_function(linear_all_reduce_add_rms_norm, operands)
    fused.meta.update(norm.meta)
    norm.replace_all_uses_with(fused)
    erase(graph, [norm, *layer.nodes()])


class ColumnLinearPass(LayerPass, VllmPatternMatcherPass):  # type: ignore[misc]
    """Replaces linear layers whose results are not summed over ranks, if llm_comm is preferred for some batch."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self.pm_pass = pm.PatternMatcherPass(pass_name=self.pass_name)
        self._register(MatcherSiluAndMul(enabled=False), silu_and_mul)
        self._register(MatcherSiluAndMul(enabled=True), silu_and_mul)
        self._register(_gelu_tanh_and_mul_of_torch, gelu_tanh_and_mul)
        self._register(_gelu_tanh_and_mul_of_vllm, gelu_tanh_and_mul)
        self.dump_patterns(config, self.pm_pass)

    @enable_fake_mode  # type: ignore[untyped-decorator]
    def _register(self, theirs: Callable[[Any], Any], ours: Callable[[Any], Any]) -> None:
        """Register a pattern: an activation after a preferred layer becomes one operator, which ``__call__`` finds."""

        def search(y: Any) -> Any:
            return theirs(y)

        def replacement(y: Any) -> Any:
            return ours(y)

        example = torch.empty(5, 16, dtype=torch.bfloat16)  # matching ignores the device
        pm.register_replacement(search, replacement, [example], pm.fwd_only, self.pm_pass, extra_check=_is_wanted)

    @VllmInductorPass.time_and_log  # type: ignore[untyped-decorator]
    def __call__(self, graph: torch.fx.Graph) -> None:
        group = get_tp_group()
        self.pm_pass.apply(graph)
        activations = [node for node in graph.nodes if node.target in _WITH_ACTIVATION]
        for node in activations:
            _replace_with_activation(graph, node, group.unique_name)
        alone = list(_alone(graph))
        prefers = group.device_communicator.prefers_linear
        preferred = [layer for layer in alone if prefers(*layer.shape, *layer.kind)]
        for layer in preferred:
            _replace(graph, layer, group.unique_name)
        self.matched_count = len(activations) + len(preferred)
        VllmPatternMatcherPass.match_table[self.pass_name] += self.matched_count
        batches = get_pass_context().compile_range
        layers = len(activations) + len(alone)
        if layers > 0:
            log_once(
                f"llm_comm computes {self.matched_count} of {layers} column-parallel linear layers of a graph for "
                f"batches of {batches.start} to {batches.end} tokens, {len(activations)} of them with their activation"
            )


def _gelu_tanh_and_mul_of_torch(y: torch.Tensor) -> torch.Tensor:
    """Pattern of vLLM's ``GeluAndMul(approximate="tanh")`` without ``+gelu_and_mul`` in ``custom_ops``."""
    half = y.shape[-1] // 2
    return torch.nn.functional.gelu(y[..., :half], approximate="tanh") * y[..., half:]


def _gelu_tanh_and_mul_of_vllm(y: torch.Tensor) -> torch.Tensor:
    """Pattern of vLLM's ``GeluAndMul(approximate="tanh")`` with ``+gelu_and_mul`` in ``custom_ops``."""
    half = y.shape[-1] // 2
    out = torch.empty((*y.shape[:-1], half), dtype=y.dtype, device=y.device)
    operator: Any = torch.ops._C.gelu_tanh_and_mul.default
    return auto_functionalized(operator, out=out, input=y)[1]  # type: ignore[return-value]


def _is_wanted(match: pm.Match) -> bool:
    """Return whether only the activation uses the layer's result, and llm_comm is preferred for both together."""
    y = match.kwargs["y"]
    layer = layer_of(y)
    if layer is None or not set(y.users) <= set(match.nodes):
        return False
    rows, inputs = layer.shape
    prefers = get_tp_group().device_communicator.prefers_linear_silu_and_mul
    return prefers(rows // 2, inputs, *layer.kind)  # type: ignore[no-any-return]


def _replace_with_activation(graph: torch.fx.Graph, activation: Node, group: str) -> None:
    """Replace a layer and the activation operator, the only user of its result, by one operator."""
    y: Any = activation.args[0]
    layer: Any = layer_of(y)
    x = layer.x.meta["val"]
    with graph.inserting_before(activation):
        ours = graph.call_function(_WITH_ACTIVATION[activation.target], _operands(layer, group))
        ours.meta["val"] = x.new_empty((x.shape[0], layer.shape[0] // 2), dtype=layer.dtype)
        if layer.reshape is not None:
            ours = reshaped(graph, ours, layer.reshape)
    ours.meta.update(activation.meta)
    activation.replace_all_uses_with(ours)
    erase(graph, [activation, *layer.nodes()])


def _alone(graph: torch.fx.Graph) -> Iterator[Layer]:
    """Yield the layers whose results are not summed over ranks."""
    found = {node: layer_of(node) for node in graph.nodes if node.target not in RESHAPES}
    # The mm of add(bias, mm) is part of that layer and no layer of its own.
    products = {node for layer in found.values() if layer is not None for node in layer.before}
    for node, layer in found.items():
        if layer is not None and node not in products and not _is_summed(node):
            yield layer


def _is_summed(y: Node) -> bool:
    return any(user.target in _SUMS or (user.target in RESHAPES and _is_summed(user)) for user in y.users)


def _operands(layer: Layer, group: str) -> tuple[Any, ...]:
    """Return the arguments of a layer's operator."""
    out_dtype = None if layer.scales is None else layer.dtype
    return layer.x, *layer.operands, out_dtype, group


def _replace(graph: torch.fx.Graph, layer: Layer, group: str) -> None:
    with graph.inserting_before(layer.mm):
        ours = graph.call_function(linear, _operands(layer, group))
    ours.meta.update(layer.mm.meta)
    layer.mm.replace_all_uses_with(ours)
    erase(graph, layer.nodes())
