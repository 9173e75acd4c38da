"""Linear layers in graphs of vLLM's compiler, for the passes that replace them.

In both supported versions of vLLM a linear layer without bias is ``mm(x, permute(weight))`` there, between reshapes
where activations have more than two dimensions. With bias it is an ``addmm``. Where pointwise operators alone take the
result on a GPU, inductor of older torch makes the sum of the bias and an ``mm`` of that. A layer of FP8 whose scales
are those of tensors, of tokens or of outputs is ``cutlass_scaled_mm`` on Hopper. That writes into an empty tensor, and
takes the weight transposed, as it is kept, and a bias. A layer of FP8 with scales of blocks is one of two operators.
Where FlashInfer and DeepGEMM are there, ``dynamic_flashinfer_deepgemm_blockscale_gemm`` takes x in bf16 and quantizes
it. With DeepGEMM alone ``fp8_gemm_nt_op`` takes x in FP8 with its scales, and writes into an empty tensor. Both take
the weight as it is. Other quantized layers are other operators of vLLM's. They are left alone.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from llm_comm.operations.fp8 import FP8, GROUP_SIZE

Node = torch.fx.Node
#: Types of activations that llm_comm computes with.
DTYPES = (torch.bfloat16, torch.float16)
_aten = torch.ops.aten
#: Before inductor tidies the graph, and after.
RESHAPES = (_aten.view.default, _aten.reshape.default)


class Scales(NamedTuple):
    """Of a layer of FP8."""

    #: None: x is bf16, and the layer quantizes it.
    x: Node | None
    #: An input of the graph.
    weight: Node


class Layer(NamedTuple):
    """A linear layer in a graph, of a shape that llm_comm may compute."""

    x: Node
    #: An input of the graph, [outputs, inputs]; of FP8 without scales of blocks its transpose.
    weight: Node
    #: Added to the product, an input of the graph, [outputs]; None: nothing is.
    bias: Node | None
    #: The result, as a matrix.
    mm: Node
    #: What is of no use without ``mm``, the last one first.
    before: tuple[Node, ...]
    #: Of the result; None where it is taken as it is.
    reshape: Node | None
    #: Of FP8.
    scales: Scales | None = None
    #: Whether these are scales of blocks.
    blocks: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        value: torch.Tensor = self.weight.meta["val"]
        rows, columns = value.shape
        return (rows, columns) if self.scales is None or self.blocks else (columns, rows)

    @property
    def kind(self) -> tuple[bool, bool]:
        """Whether operands are FP8, and whether scales are those of blocks."""
        return self.scales is not None, self.blocks

    @property
    def dtype(self) -> torch.dtype:
        """Of the result."""
        value: torch.Tensor = self.mm.meta["val"]
        return value.dtype

    @property
    def operands(self) -> tuple[Node | None, ...]:
        """Weight, bias and scales, as an operator takes them."""
        return self.weight, self.bias, *((None, None) if self.scales is None else self.scales)

    def nodes(self) -> list[Node]:
        """Those that are of no use without the layer, the last one first."""
        return [node for node in (self.reshape, self.mm, *self.before) if node is not None]


def layer_of(y: Node) -> Layer | None:
    """The linear layer whose result ``y`` is, reshaped or not; None where there is none that llm_comm may compute."""
    reshape = y if y.target in RESHAPES else None
    mm: Any = y if reshape is None else reshape.args[0]
    if not isinstance(mm, Node) or (reshape is not None and len(mm.users) != 1):
        return None
    layer = _plain_layer(mm, reshape) or _scaled_layer(mm, reshape) or _block_layer(mm, reshape)
    # They are read before the kernels ahead have ended: none that is computed in the graph will do.
    if layer is None or layer.weight.op != "placeholder" or not _is_bias(layer):
        return None
    return layer if _are(y.meta["val"].shape[-1:], layer.shape[:1]) else None  # of whole rows


def _plain_layer(mm: Any, reshape: Node | None) -> Layer | None:
    bias: Any = None
    before: tuple[Node, ...] = ()
    if mm.target is _aten.mm.default:
        x, transposed = mm.args
    elif mm.target is _aten.addmm.default and len(mm.args) == 3 and set(mm.kwargs.values()) <= {1}:  # no factors
        bias, x, transposed = mm.args
    elif mm.target is _aten.add.Tensor and not mm.kwargs:
        products = [node for node in mm.args if isinstance(node, Node) and node.target is _aten.mm.default]
        if len(products) != 1 or len(products[0].users) != 1:
            return None
        before = (products[0],)
        (bias,) = (other for other in mm.args if other is not products[0])
        x, transposed = products[0].args
    else:
        return None
    if transposed.target is not _aten.permute.default:
        return None
    weight = transposed.args[0]
    if x.meta["val"].dtype not in DTYPES or mm.meta["val"].dtype != x.meta["val"].dtype or not _fit(x, transposed):
        return None
    return Layer(x, weight, bias, mm, (*before, transposed), reshape)


def _scaled_layer(mm: Any, reshape: Node | None) -> Layer | None:
    call = _writing_call(mm, getattr(torch.ops._C, "cutlass_scaled_mm", None))  # not in every build of vLLM
    if call is None:
        return None
    given: Any = call.kwargs
    x, weight, scales = given["a"], given["b"], Scales(given["a_scales"], given["b_scales"])
    if scales.weight.op != "placeholder":
        return None
    if {node.meta["val"].dtype for node in (x, weight)} != {FP8} or mm.meta["val"].dtype not in DTYPES:
        return None
    if not _fit(x, weight) or not _are_of_rows(given["a_scales"], scales.weight, weight.meta["val"].shape[1]):
        return None
    return Layer(x, weight, given.get("bias"), mm, (call, given["out"]), reshape, scales)


def _writing_call(result: Any, operator_: Any) -> Node | None:
    """The call of an operator that writes into an empty tensor, which is ``result``; None where it is no such call."""
    if operator_ is None or result.target is not operator.getitem or result.args[1] != 1:  # 0: None, which it returns
        return None
    call: Node = result.args[0]
    is_it = call.target is auto_functionalized and call.args[0] is operator_.default
    return call if is_it else None


def _block_layer(mm: Any, reshape: Node | None) -> Layer | None:
    # Operators of vLLM that are defined where its layers of FP8 are.
    both = getattr(torch.ops.vllm, "dynamic_flashinfer_deepgemm_blockscale_gemm", None)
    call = _writing_call(mm, getattr(torch.ops.vllm, "fp8_gemm_nt_op", None))
    before: tuple[Node, ...] = ()
    if call is not None:
        given: Any = call.kwargs
        x, weight, scales = given["q_input"], given["weight"], Scales(given["input_scale"], given["weight_scale"])
        before = (call, given["output"])
    elif both is not None and mm.target is both.default and mm.args[3] == GROUP_SIZE:
        x, weight, scales = mm.args[0], mm.args[1], Scales(None, mm.args[2])
    else:
        return None
    of_x, of_weight = x.meta["val"], weight.meta["val"]
    if of_weight.dtype is not FP8 or of_x.dtype is not (FP8 if call is not None else torch.bfloat16):
        return None
    rows, inputs = of_weight.shape
    layouts = of_weight.stride() == (inputs, 1) and of_x.dim() == 2 and _are(of_x.stride(), (inputs, 1))
    if not layouts or mm.meta["val"].dtype not in DTYPES or not _are_of_blocks(scales, rows, inputs):
        return None
    return Layer(x, weight, None, mm, before, reshape, scales, blocks=True)


def _are_of_blocks(scales: Scales, rows: int, inputs: int) -> bool:
    """Whether scales are those of blocks. How many tokens have some, and their strides, a call checks."""
    of_weight: torch.Tensor = scales.weight.meta["val"]
    if scales.weight.op != "placeholder" or of_weight.dtype is not torch.float32 or not of_weight.is_contiguous():
        return False
    blocks = inputs // GROUP_SIZE
    if of_weight.shape != (-(-rows // GROUP_SIZE), blocks):
        return False
    if scales.x is None:
        return True
    of_x: torch.Tensor = scales.x.meta["val"]
    return of_x.dtype is torch.float32 and of_x.dim() == 2 and _are(of_x.shape[1:], (blocks,))


def _is_bias(layer: Layer) -> bool:
    """Return whether llm_comm adds the bias of a layer. A layer without a bias is as good."""
    bias: Any = layer.bias
    if bias is None:
        return True
    if not isinstance(bias, Node) or bias.op != "placeholder":
        return False
    value: torch.Tensor = bias.meta["val"]
    return (
        value.dtype == layer.dtype
        and value.dim() == 1
        and _are(value.shape, layer.shape[:1])
        and _are(value.stride(), (1,))
    )


def _fit(x: Node, transposed: Node) -> bool:
    """Whether shapes and layouts are such that a batch of some size may be served."""
    value: torch.Tensor = transposed.meta["val"]
    inputs = value.shape[0]
    # So x is contiguous, and the weight.
    return _are(value.stride(), (1, inputs)) and _are(x.meta["val"].stride(), (inputs, 1))


def _are_of_rows(x_scale: Node, weight_scale: Node, outputs: int) -> bool:
    """Whether each scale is that of a tensor, or of a row, not of blocks. How many tokens have one, a call checks."""
    of_x, of_weight = x_scale.meta["val"], weight_scale.meta["val"]
    return (
        of_x.dtype is torch.float32
        and of_weight.dtype is torch.float32
        and (_are(of_x.shape, (1,) * of_x.dim()) or (of_x.dim() == 2 and _are(of_x.shape[1:], (1,))))
        and of_weight.numel() in (1, outputs)
        and of_weight.is_contiguous()
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
