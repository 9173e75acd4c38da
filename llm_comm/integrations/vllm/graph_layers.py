"""Linear layers in graphs of vLLM's compiler, for the passes that replace them.

Forms of a layer in the graphs of both supported versions of vLLM:

- Without bias: ``mm(x, permute(weight))``, between reshapes if activations have more than two dimensions.
- With bias: ``addmm``. Inductor of older torch turns it into ``add(bias, mm)`` if only pointwise operators use the
  result on a GPU.
- FP8 with scales of tensors, tokens or outputs, on Hopper: ``cutlass_scaled_mm``. It takes the transposed weight and
  a bias, and writes into an empty tensor.
- FP8 with block scales, with FlashInfer and DeepGEMM: ``dynamic_flashinfer_deepgemm_blockscale_gemm``. It takes x in
  bf16 and quantizes it. The weight is [outputs, inputs].
- FP8 with block scales, with DeepGEMM alone: ``fp8_gemm_nt_op``. It takes x in FP8 with its scales, and writes into an
  empty tensor. The weight is [outputs, inputs].

Other quantized layers use other operators of vLLM and are not replaced.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from llm_comm.operations.fp8 import FP8, GROUP_SIZE

Node = torch.fx.Node
#: Dtypes of activations of layers without FP8, and of results.
DTYPES = (torch.bfloat16, torch.float16)
_aten = torch.ops.aten
#: Targets of reshapes: both forms occur, depending on whether inductor has normalized the graph.
RESHAPES = (_aten.view.default, _aten.reshape.default)


class Scales(NamedTuple):
    """Scales of an FP8 layer."""

    #: Scales of x. None: x is bf16, and the operator quantizes it.
    x: Node | None
    #: Scales of the weight, an input of the graph.
    weight: Node


class Layer(NamedTuple):
    """Linear layer in a graph, of a shape and layout that llm_comm may compute."""

    x: Node
    #: Input of the graph, [outputs, inputs]; [inputs, outputs] for FP8 without block scales.
    weight: Node
    #: Bias, an input of the graph, [outputs], or None.
    bias: Node | None
    #: Node of the result as a matrix, [tokens, outputs].
    mm: Node
    #: Nodes that only ``mm`` needs, from last to first in the graph.
    before: tuple[Node, ...]
    #: Reshape of the result, or None.
    reshape: Node | None
    #: Scales of FP8 operands; None for other dtypes.
    scales: Scales | None = None
    #: The scales are block scales.
    blocks: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""
        value: torch.Tensor = self.weight.meta["val"]
        rows, columns = value.shape
        return (rows, columns) if self.scales is None or self.blocks else (columns, rows)

    @property
    def kind(self) -> tuple[bool, bool]:
        """Operands are FP8, and the scales are block scales: ``fp8`` and ``block_scales`` of ``prefers_linear``."""
        return self.scales is not None, self.blocks

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the result."""
        value: torch.Tensor = self.mm.meta["val"]
        return value.dtype

    @property
    def operands(self) -> tuple[Node | None, ...]:
        """Weight, bias, scales of x and scales of the weight, in the order of the operators."""
        return self.weight, self.bias, *((None, None) if self.scales is None else self.scales)

    def nodes(self) -> list[Node]:
        """Return the nodes that only the layer needs, from last to first in the graph."""
        return [node for node in (self.reshape, self.mm, *self.before) if node is not None]


def layer_of(y: Node) -> Layer | None:
    """Return the linear layer that computes ``y``, reshaped or not. None: ``y`` is no layer that llm_comm may compute.

    Weight, bias and scales of the weight must be inputs of the graph. llm_comm reads them before earlier kernels have
    ended, so none may be computed in the graph.
    """
    reshape = y if y.target in RESHAPES else None
    mm: Any = y if reshape is None else reshape.args[0]
    if not isinstance(mm, Node) or (reshape is not None and len(mm.users) != 1):
        return None
    layer = _plain_layer(mm, reshape) or _scaled_layer(mm, reshape) or _block_layer(mm, reshape)
    if layer is None or layer.weight.op != "placeholder" or not _is_bias(layer):
        return None
    keeps_rows = _equal_static(y.meta["val"].shape[-1:], layer.shape[:1])  # the reshape, if there is one
    return layer if keeps_rows else None


def _plain_layer(mm: Any, reshape: Node | None) -> Layer | None:
    bias: Any = None
    before: tuple[Node, ...] = ()
    if mm.target is _aten.mm.default:
        x, transposed = mm.args
    elif mm.target is _aten.addmm.default and len(mm.args) == 3 and set(mm.kwargs.values()) <= {1}:  # alpha, beta
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
    call = _writing_call(mm, getattr(torch.ops._C, "cutlass_scaled_mm", None))  # some builds of vLLM lack it
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
    """Return the call of ``operator_`` that writes its result into the tensor ``result``, or None."""
    # Item 0 is the call's own result, None. Item 1 is the tensor that it has written.
    if operator_ is None or result.target is not operator.getitem or result.args[1] != 1:
        return None
    call: Node = result.args[0]
    is_it = call.target is auto_functionalized and call.args[0] is operator_.default
    return call if is_it else None


def _block_layer(mm: Any, reshape: Node | None) -> Layer | None:
    # vLLM defines both operators in its FP8 modules, so they may be absent.
    quantizing_gemm = getattr(torch.ops.vllm, "dynamic_flashinfer_deepgemm_blockscale_gemm", None)
    call = _writing_call(mm, getattr(torch.ops.vllm, "fp8_gemm_nt_op", None))
    before: tuple[Node, ...] = ()
    if call is not None:
        given: Any = call.kwargs
        x, weight, scales = given["q_input"], given["weight"], Scales(given["input_scale"], given["weight_scale"])
        before = (call, given["output"])
    elif quantizing_gemm is not None and mm.target is quantizing_gemm.default and mm.args[3] == GROUP_SIZE:
        x, weight, scales = mm.args[0], mm.args[1], Scales(None, mm.args[2])
    else:
        return None
    of_x, of_weight = x.meta["val"], weight.meta["val"]
    if of_weight.dtype is not FP8 or of_x.dtype is not (FP8 if call is not None else torch.bfloat16):
        return None
    rows, inputs = of_weight.shape
    layouts = of_weight.stride() == (inputs, 1) and of_x.dim() == 2 and _equal_static(of_x.stride(), (inputs, 1))
    if not layouts or mm.meta["val"].dtype not in DTYPES or not _are_of_blocks(scales, rows, inputs):
        return None
    return Layer(x, weight, None, mm, before, reshape, scales, blocks=True)


def _are_of_blocks(scales: Scales, rows: int, inputs: int) -> bool:
    """Return whether scales are block scales. The call checks the number of tokens and the strides of x's scales."""
    of_weight: torch.Tensor = scales.weight.meta["val"]
    if scales.weight.op != "placeholder" or of_weight.dtype is not torch.float32 or not of_weight.is_contiguous():
        return False
    blocks = inputs // GROUP_SIZE
    if of_weight.shape != (-(-rows // GROUP_SIZE), blocks):
        return False
    if scales.x is None:
        return True
    of_x: torch.Tensor = scales.x.meta["val"]
    return of_x.dtype is torch.float32 and of_x.dim() == 2 and _equal_static(of_x.shape[1:], (blocks,))


def _is_bias(layer: Layer) -> bool:
    """Return whether llm_comm can add the bias of a layer. True without a bias."""
    bias: Any = layer.bias
    if bias is None:
        return True
    if not isinstance(bias, Node) or bias.op != "placeholder":
        return False
    value: torch.Tensor = bias.meta["val"]
    return (
        value.dtype == layer.dtype
        and value.dim() == 1
        and _equal_static(value.shape, layer.shape[:1])
        and _equal_static(value.stride(), (1,))
    )


def _fit(x: Node, transposed: Node) -> bool:
    """Return whether x and the weight are contiguous with the same number of inputs, for any batch size."""
    value: torch.Tensor = transposed.meta["val"]
    inputs = value.shape[0]
    # Strides (1, inputs) of the transpose: the weight is contiguous.
    return _equal_static(value.stride(), (1, inputs)) and _equal_static(x.meta["val"].stride(), (inputs, 1))


def _are_of_rows(x_scale: Node, weight_scale: Node, outputs: int) -> bool:
    """Return whether each scale has one value for the tensor or one for each row. The call checks the number of
    tokens with a scale."""
    of_x, of_weight = x_scale.meta["val"], weight_scale.meta["val"]
    return (
        of_x.dtype is torch.float32
        and of_weight.dtype is torch.float32
        and (_equal_static(of_x.shape, (1,) * of_x.dim()) or (of_x.dim() == 2 and _equal_static(of_x.shape[1:], (1,))))
        and of_weight.numel() in (1, outputs)
        and of_weight.is_contiguous()
    )


def _equal_static(found: Iterable[int | torch.SymInt], wanted: Sequence[int]) -> bool:
    # Sizes that depend on the batch are SymInts and never equal. Comparing one would add a guard, which restricts the
    # graph to some batches.
    return all(isinstance(one, int) and one == other for one, other in zip(found, wanted, strict=True))


def reshaped(graph: torch.fx.Graph, x: Node, like: Node) -> Node:
    """Insert a reshape of ``x`` to the shape of the reshape ``like``, except for the last dimension of ``x``."""
    value: torch.Tensor = x.meta["val"]
    sizes: Any = like.args[1]
    node = graph.call_function(_aten.reshape.default, (x, [*sizes[:-1], value.shape[-1]]))
    node.meta["val"] = value.new_empty((*like.meta["val"].shape[:-1], value.shape[-1]))
    return node


def erase(graph: torch.fx.Graph, nodes: Iterable[Node]) -> None:
    """Erase those of ``nodes`` that have no users; the order must be from last to first in the graph.

    A transposed weight stays if other layers use it.
    """
    for node in nodes:
        if not node.users:
            graph.erase_node(node)
