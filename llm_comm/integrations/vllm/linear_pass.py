"""A pass of vLLM's compiler: a linear layer goes into the operator that ``fusion_pass.py`` has made of the all-reduce
and the norm after it (``linear_op.py``).

It walks the graph. In both supported versions of vLLM a linear layer without bias is ``mm(x, permute(weight))`` there,
between reshapes where activations have more than two dimensions; with bias it is an ``addmm``, and quantized layers are
operators of vLLM's. Both are left alone, as is what the group's communicator would decline for every batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from vllm.compilation.passes.inductor_pass import get_pass_context
from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass, VllmPatternMatcherPass
from vllm.config import VllmConfig
from vllm.config.utils import Range
from vllm.distributed import get_tp_group

from llm_comm.integrations.vllm import cache_key
from llm_comm.integrations.vllm.fused_op import all_reduce_add_rms_norm
from llm_comm.integrations.vllm.fusion_pass import log_once
from llm_comm.integrations.vllm.linear_op import linear_all_reduce_add_rms_norm

_Node = torch.fx.Node
_aten = torch.ops.aten
# Before inductor tidies the graph, and after.
_RESHAPES = (_aten.view.default, _aten.reshape.default)


class LinearNormPass(VllmInductorPass):  # type: ignore[misc]
    """Replaces a linear layer and the fused all-reduce after it, where a batch of the graph may gain by it."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        communicator = get_tp_group().device_communicator
        self._max_tokens = communicator.max_linear_tokens
        self._uuid = f"{cache_key.digest_of_sources()} {self._max_tokens} {communicator.linear_key}"

    @VllmInductorPass.time_and_log  # type: ignore[untyped-decorator]
    def __call__(self, graph: torch.fx.Graph) -> None:
        prefers = get_tp_group().device_communicator.prefers_linear
        norms = [node for node in graph.nodes if node.target is all_reduce_add_rms_norm]
        layers = [layer for layer in map(_layer_before, norms) if layer is not None and prefers(*layer.shape)]
        for layer in layers:
            _replace(graph, layer)
        VllmPatternMatcherPass.match_table[self.pass_name] += len(layers)
        batches = get_pass_context().compile_range
        if norms:
            log_once(
                f"llm_comm fused {len(layers)} of {len(norms)} all-reduces with RMSNorm of a graph for batches of "
                f"{batches.start} to {batches.end} tokens with the linear layers before them"
            )

    def is_applicable_for_range(self, compile_range: Range) -> bool:
        """Larger batches keep their linear layers as they are."""
        return compile_range.end <= self._max_tokens  # type: ignore[no-any-return]

    def uuid(self) -> str:
        return self._uuid


class _Layer(NamedTuple):
    """A linear layer and what comes after it, in a graph."""

    x: _Node
    #: [outputs, inputs], an input of the graph.
    weight: _Node
    transposed: _Node
    mm: _Node
    #: Of the result; None where the norm takes it as it is.
    reshape: _Node | None
    #: The all-reduce with its norm.
    norm: _Node

    @property
    def shape(self) -> torch.Size:
        """Of the weight."""
        value: torch.Tensor = self.weight.meta["val"]
        return value.shape


def _layer_before(norm: _Node) -> _Layer | None:
    """The linear layer whose result ``norm``, and nothing else, takes; None where there is none that can go with it."""
    total: Any = norm.args[0]
    reshape = total if total.target in _RESHAPES else None
    mm = total if reshape is None else reshape.args[0]
    if mm.target is not _aten.mm.default:
        return None
    if any(len(node.users) != 1 for node in (mm, total)) or total in norm.args[1:]:
        return None
    x, transposed = mm.args
    if transposed.target is not _aten.permute.default:
        return None
    weight = transposed.args[0]
    if weight.op != "placeholder":
        return None  # it is read before the kernels ahead have ended: none that is computed in the graph will do
    if not _fit(*(node.meta["val"] for node in (x, weight, transposed, total))):
        return None
    return _Layer(x, weight, transposed, mm, reshape, norm)


def _fit(x: torch.Tensor, weight: torch.Tensor, transposed: torch.Tensor, total: torch.Tensor) -> bool:
    """Whether shapes and layouts are such that a batch of some size may be served. Of types, ``mm`` has one, and the
    pass before has looked at it."""
    outputs, inputs = weight.shape
    return (
        _are(transposed.stride(), (1, inputs))  # so the weight is contiguous
        and _are(x.stride(), (inputs, 1))
        and _are(total.shape[-1:], (outputs,))  # of whole rows
    )


def _are(found: Iterable[int | torch.SymInt], wanted: Sequence[int]) -> bool:
    # What depends on the batch is no int: nothing is asked of it, which could bind the graph to some batches.
    return all(isinstance(one, int) and one == other for one, other in zip(found, wanted, strict=True))


def _replace(graph: torch.fx.Graph, layer: _Layer) -> None:
    norm = layer.norm
    with graph.inserting_before(norm):
        x = layer.x if layer.reshape is None else _reshaped(graph, layer.x, layer.reshape)
        fused = graph.call_function(linear_all_reduce_add_rms_norm, (x, layer.weight, *norm.args[1:]))
    fused.meta.update(norm.meta)
    norm.replace_all_uses_with(fused)
    for node in (norm, layer.reshape, layer.mm, layer.transposed):
        if node is not None and not node.users:  # the transposed weight may serve other layers
            graph.erase_node(node)


def _reshaped(graph: torch.fx.Graph, x: _Node, like: _Node) -> _Node:
    """``x`` in the shape of ``like`` but for the last dimension, which stays its own."""
    value: torch.Tensor = x.meta["val"]
    sizes: Any = like.args[1]
    node = graph.call_function(_aten.reshape.default, (x, [*sizes[:-1], value.shape[-1]]))
    node.meta["val"] = value.new_empty((*like.meta["val"].shape[:-1], value.shape[-1]))
    return node
