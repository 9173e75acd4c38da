"""Linear layers in graphs of vLLM's compiler, for the passes that replace them.

In both supported versions of vLLM a linear layer without bias is ``mm(x, permute(weight))`` there, between reshapes
where activations have more than two dimensions; with bias it is an ``addmm``, and quantized layers are operators of
vLLM's. Both are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from llm_comm.integrations.vllm.fusion_pass import DTYPES

Node = torch.fx.Node
_aten = torch.ops.aten
#: Before inductor tidies the graph, and after.
RESHAPES = (_aten.view.default, _aten.reshape.default)


class Layer(NamedTuple):
    """A linear layer in a graph, of a shape that llm_comm may compute."""

    x: Node
    #: [outputs, inputs], an input of the graph.
    weight: Node
    transposed: Node
    mm: Node
    #: Of the result; None where it is taken as it is.
    reshape: Node | None

    @property
    def shape(self) -> torch.Size:
        """Of the weight."""
        value: torch.Tensor = self.weight.meta["val"]
        return value.shape

    def nodes(self) -> list[Node]:
        """Those that are of no use without the layer, the last one first."""
        nodes = (self.reshape, self.mm, self.transposed)
        return [node for node in nodes if node is not None]


def layer_of(y: Node) -> Layer | None:
    """The linear layer whose result ``y`` is, reshaped or not; None where there is none that llm_comm may compute."""
    reshape = y if y.target in RESHAPES else None
    mm: Any = y if reshape is None else reshape.args[0]
    if mm.target is not _aten.mm.default or (reshape is not None and len(mm.users) != 1):
        return None
    x, transposed = mm.args
    if transposed.target is not _aten.permute.default:
        return None
    weight = transposed.args[0]
    if weight.op != "placeholder":
        return None  # it is read before the kernels ahead have ended: none that is computed in the graph will do
    if not _fit(*(node.meta["val"] for node in (x, weight, transposed, y))):
        return None
    return Layer(x, weight, transposed, mm, reshape)


def _fit(x: torch.Tensor, weight: torch.Tensor, transposed: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether type, shapes and layouts are such that a batch of some size may be served."""
    outputs, inputs = weight.shape
    return (
        x.dtype in DTYPES  # and so is the rest
        and _are(transposed.stride(), (1, inputs))  # so the weight is contiguous
        and _are(x.stride(), (inputs, 1))
        and _are(y.shape[-1:], (outputs,))  # of whole rows
    )


def _are(found: Iterable[int | torch.SymInt], wanted: Sequence[int]) -> bool:
    # What depends on the batch is no int: nothing is asked of it, which could bind the graph to some batches.
    return all(isinstance(one, int) and one == other for one, other in zip(found, wanted, strict=True))


def reshaped(graph: torch.fx.Graph, x: Node, like: Node) -> Node:
    """``x`` in the shape of ``like`` but for the last dimension, which stays its own."""
    value: torch.Tensor = x.meta["val"]
    sizes: Any = like.args[1]
    node = graph.call_function(_aten.reshape.default, (x, [*sizes[:-1], value.shape[-1]]))
    node.meta["val"] = value.new_empty((*like.meta["val"].shape[:-1], value.shape[-1]))
    return node


def erase(graph: torch.fx.Graph, nodes: Iterable[Node]) -> None:
    """Takes those out that nothing uses any more, the last ones first. A transposed weight may serve other layers."""
    for node in nodes:
        if not node.users:
            graph.erase_node(node)
