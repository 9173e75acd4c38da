"""A pass of vLLM's compiler: a linear layer goes into the operator that ``fusion_pass.py`` has made of the all-reduce
and the norm after it (``layer_ops.py``).

It walks the graph (``graph_layers.py``), and leaves alone what the group's communicator would decline for every batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from vllm.compilation.passes.inductor_pass import get_pass_context
from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass, VllmPatternMatcherPass
from vllm.distributed import get_tp_group

from llm_comm.integrations.vllm.fused_op import all_reduce_add_rms_norm
from llm_comm.integrations.vllm.fusion_pass import log_once
from llm_comm.integrations.vllm.graph_layers import Layer, Node, erase, layer_of, reshaped
from llm_comm.integrations.vllm.layer_ops import linear_all_reduce_add_rms_norm
from llm_comm.integrations.vllm.layer_pass import LayerPass


class LinearNormPass(LayerPass):
    """Replaces a linear layer and the fused all-reduce after it, where a batch of the graph may gain by it."""

    @VllmInductorPass.time_and_log  # type: ignore[untyped-decorator]
    def __call__(self, graph: torch.fx.Graph) -> None:
        prefers = get_tp_group().device_communicator.prefers_linear
        norms = [node for node in graph.nodes if node.target is all_reduce_add_rms_norm]
        found = [
            pair
            for pair in map(_layer_before, norms)
            if pair is not None and prefers(*pair.layer.shape, pair.layer.scales is not None)
        ]
        for pair in found:
            _replace(graph, pair)
        VllmPatternMatcherPass.match_table[self.pass_name] += len(found)
        batches = get_pass_context().compile_range
        if norms:
            log_once(
                f"llm_comm fused {len(found)} of {len(norms)} all-reduces with RMSNorm of a graph for batches of "
                f"{batches.start} to {batches.end} tokens with the linear layers before them"
            )


class _Pair(NamedTuple):
    """A linear layer, and the all-reduce with its norm that comes after it."""

    layer: Layer
    norm: Node


def _layer_before(norm: Node) -> _Pair | None:
    """The linear layer whose result ``norm``, and nothing else, takes; None where there is none that can go with it."""
    total: Any = norm.args[0]
    layer = layer_of(total)
    if layer is None or len(total.users) != 1 or total in norm.args[1:]:
        return None
    return _Pair(layer, norm)


def _replace(graph: torch.fx.Graph, pair: _Pair) -> None:
    layer, norm = pair
    with graph.inserting_before(norm):
        x = layer.x if layer.reshape is None else reshaped(graph, layer.x, layer.reshape)
        operands = (x, layer.weight, *layer.scales_or_none, *norm.args[1:])
        fused = graph.call_function(linear_all_reduce_add_rms_norm, operands)
    fused.meta.update(norm.meta)
    norm.replace_all_uses_with(fused)
    erase(graph, [norm, *layer.nodes()])
