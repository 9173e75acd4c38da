"""The operations with a linear layer as torch custom operators: see torch_operators.py.

A layer alone is no call of other ranks, and keeps no place in a graph. Scales, and the dtype of the result, are None
unless operands are FP8. They have no defaults: what comes behind them is found by its place (graph_order.py).
"""

from __future__ import annotations

from typing import Any

import torch

from llm_comm.operations.all_reduce_add_rms_norm import check_quantization
from llm_comm.operations.graph_order import OPERAND
from llm_comm.operations.linear_all_reduce import scaling_before_norm
from llm_comm.operations.quantization import FP8, GROUPS, empty_scales, makes_scales
from llm_comm.operations.scaling import Scaling
from llm_comm.operations.torch_operators import (
    OF_QUANTIZATION,
    add_rms_norm,
    check_outputs,
    check_tensors,
    define,
    find,
    implement,
    put,
)

_Tensor = torch.Tensor
_Results = tuple[torch.Tensor, ...]


# ---- Calls that go by the dispatcher --------------------------------------------------------------------------------


def linear(x: Any, weight: Any, out: Any, scaling: Scaling | None, communicator: str) -> Any:
    """``Communicator.linear`` of tensors that are no ordinary ones, or not yet."""
    return _call("linear", {"x": x, "weight": weight}, out, scaling, communicator)


def linear_of_any_batch(x: Any, weight: Any, out: Any, communicator: str) -> Any:
    """``Communicator.linear_of_any_batch`` of tensors that are no ordinary ones, or not yet."""
    return _call("linear_of_any_batch", {"x": x, "weight": weight}, out, None, communicator)


def linear_silu_and_mul(x: Any, weight: Any, out: Any, scaling: Scaling | None, communicator: str) -> Any:
    """The same for ``Communicator.linear_silu_and_mul``."""
    return _call("linear_silu_and_mul", {"x": x, "gate_up_weight": weight}, out, scaling, communicator)


def linear_all_reduce(x: Any, weight: Any, out: Any, scaling: Scaling | None, communicator: str) -> Any:
    """The same for ``Communicator.linear_all_reduce``."""
    return _call("linear_all_reduce", {"x": x, "linear_weight": weight}, out, scaling, communicator)


def linear_all_reduce_add_rms_norm(
    x: Any,
    linear_weight: Any,
    residual: Any,
    norm_weight: Any,
    eps: float,
    out: Any,
    residual_out: Any,
    quantize: str | None,
    scale: Any,
    x_scale: Any,
    weight_scale: Any,
    communicator: str,
) -> _Results:
    """The same for ``Communicator.linear_all_reduce_add_rms_norm``."""
    operands = {"x": x, "linear_weight": linear_weight, "residual": residual, "norm_weight": norm_weight}
    operands |= {"x_scale": x_scale, "weight_scale": weight_scale}
    name = "linear_all_reduce_add_rms_norm"
    return add_rms_norm(name, operands, eps, out, residual_out, quantize, scale, communicator)


def _call(operation: str, operands: dict[str, Any], out: Any, scaling: Scaling | None, communicator: str) -> Any:
    x_scale, weight_scale, out_dtype = scaling or (None, None, None)
    operands |= {"x_scale": x_scale, "weight_scale": weight_scale}
    check_tensors(operation, operands, optional=("x_scale", "weight_scale"))
    check_outputs(operation, out=out)
    result = getattr(torch.ops.llm_comm, operation)(*operands.values(), out_dtype, communicator)
    return result if out is None else put(result, f"{operation}: out", out)


# ---- The operators --------------------------------------------------------------------------------------------------

_SCALING = "Tensor? x_scale, Tensor? weight_scale, ScalarType? out_dtype"


def _implement_layer(name: str, weight_name: str, parts: int = 1, behind: str = "", in_order: bool = True) -> None:
    """Whose only result is one tensor.

    Args:
        name: Of the operation.
        weight_name: What it calls the weight.
        parts: Rows of the weight for an output.
        behind: Of the schema, behind the communicator.
    """

    def run(
        x: _Tensor,
        weight: _Tensor,
        x_scale: _Tensor | None,
        weight_scale: _Tensor | None,
        out_dtype: torch.dtype | None,
        communicator: str,
        after: _Tensor | None = None,
    ) -> _Tensor:
        result: _Tensor = getattr(find(communicator), name).run(x, weight, None, x_scale, weight_scale, out_dtype)
        return result

    def fake(
        x: _Tensor,
        weight: _Tensor,
        x_scale: _Tensor | None,
        weight_scale: _Tensor | None,
        out_dtype: torch.dtype | None,
        communicator: str,
        after: _Tensor | None = None,
    ) -> _Tensor:
        return _empty_result(x, weight.shape[0] // parts, Scaling.of(x_scale, weight_scale, out_dtype))

    schema = f"Tensor x, Tensor {weight_name}, {_SCALING}, str communicator{behind}"
    implement(define(f"{name}({schema}) -> Tensor"), run, fake, in_order=in_order)


def _empty_result(x: _Tensor, outputs: int, scaling: Scaling | None) -> _Tensor:
    dtype = x.dtype if scaling is None else scaling.out_dtype
    return x.new_empty((*x.shape[:-1], outputs), dtype=dtype)


def _implement_norm(quantize: str | None, operands: str, results: str) -> None:
    """One operator for each quantization: only ``static`` has a scale for an operand. ``group`` stands for all with
    groups, of which the operator is told."""
    name = f"linear_all_reduce_add_rms_norm{OF_QUANTIZATION[quantize]}"

    def quantization_of(operands: tuple[Any, ...]) -> str | None:
        return operands[0] if quantize in GROUPS else quantize

    def run(
        x: _Tensor,
        linear_weight: _Tensor,
        residual: _Tensor | None,
        norm_weight: _Tensor,
        x_scale: _Tensor | None,
        weight_scale: _Tensor | None,
        eps: float,
        communicator: str,
        *own_and_after: Any,
    ) -> _Results:
        scale = own_and_after[0] if quantize == "static" else None
        call = find(communicator).linear_all_reduce_add_rms_norm.run
        scales = {"scale": scale, "x_scale": x_scale, "weight_scale": weight_scale}
        return call(x, linear_weight, residual, norm_weight, eps, quantize=quantization_of(own_and_after), **scales)

    def fake(
        x: _Tensor,
        linear_weight: _Tensor,
        residual: _Tensor | None,
        norm_weight: _Tensor,
        x_scale: _Tensor | None,
        weight_scale: _Tensor | None,
        eps: float,
        communicator: str,
        *own_and_after: Any,
    ) -> _Results:
        total = _empty_result(x, linear_weight.shape[0], scaling_before_norm(x_scale, weight_scale, norm_weight))
        of_call = quantization_of(own_and_after)
        check_quantization("linear_all_reduce_add_rms_norm", of_call, None, total.shape)
        if of_call is None:
            return torch.empty_like(total), total
        normed = torch.empty_like(total, dtype=FP8)
        return (normed, total, empty_scales(of_call, total)) if makes_scales(of_call) else (normed, total)

    schema = (
        "Tensor x, Tensor linear_weight, Tensor? residual, Tensor norm_weight, Tensor? x_scale, Tensor? weight_scale, "
        "float eps, str communicator"
    )
    define(f"{name}({schema}, {operands}{OPERAND}) -> ({results})")
    implement(name, run, fake)


_implement_layer("linear", "weight", in_order=False)
_implement_layer("linear_of_any_batch", "weight", in_order=False)
_implement_layer("linear_silu_and_mul", "gate_up_weight", parts=2, in_order=False)
_implement_layer("linear_all_reduce", "linear_weight", behind=f", {OPERAND}")
_implement_norm(None, "", "Tensor, Tensor")
_implement_norm("static", "Tensor scale, ", "Tensor, Tensor")
_implement_norm("dynamic", "", "Tensor, Tensor, Tensor")
_implement_norm("group", "str quantize, ", "Tensor, Tensor, Tensor")
