"""The operations with a linear layer as torch custom operators: see torch_operators.py.

A layer alone is no call of other ranks, and keeps no place in a graph. The bias may be None. Scales, and the dtype of
the result, are None unless operands are FP8. They have no defaults: what comes behind them is found by its place
(torch_operators.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from llm_comm.operations.fp8 import Scaling
from llm_comm.operations.linear import weight_of
from llm_comm.operations.linear_all_reduce import scaling_before_norm
from llm_comm.operations.torch_operators import (
    OPERAND,
    check_outputs,
    check_tensors,
    define,
    define_norms,
    find,
    put,
)

_Tensor = torch.Tensor
_Results = tuple[torch.Tensor, ...]


# ---- Calls that go by the dispatcher --------------------------------------------------------------------------------


def linear(operation: str, x: Any, weight: Any, out: Any, bias: Any, scaling: Scaling | None, communicator: str) -> Any:
    """A method of ``Communicator`` whose only result is that of a layer, of tensors that are no ordinary ones, or not
    yet.

    Args:
        operation: Name of the method.
    """
    x_scale, weight_scale, out_dtype = scaling or (None, None, None)
    operands = {"x": x, weight_of(operation): weight, "bias": bias, "x_scale": x_scale, "weight_scale": weight_scale}
    check_tensors(operation, operands, optional=("bias", "x_scale", "weight_scale"))
    check_outputs(operation, out=out)
    result = getattr(torch.ops.llm_comm, operation)(*operands.values(), out_dtype, communicator)
    return result if out is None else put(result, f"{operation}: out", out)


# ---- The operators --------------------------------------------------------------------------------------------------

_OPTIONAL = "Tensor? bias, Tensor? x_scale, Tensor? weight_scale, ScalarType? out_dtype"


def _define_layer(name: str, parts: int = 1, behind: str = "", in_order: bool = True) -> None:
    """Whose only result is one tensor.

    Args:
        name: Of the operation.
        parts: Rows of the weight for an output.
        behind: Of the schema, behind the communicator.
    """

    def run(x: _Tensor, weight: _Tensor, bias: Any, *others: Any) -> _Tensor:
        *scaling, communicator = others[:4]  # behind it, what the call comes after
        result: _Tensor = getattr(find(communicator), name).run(x, weight, None, bias, *scaling)
        return result

    def fake(
        x: _Tensor, weight: _Tensor, bias: Any, x_scale: Any, weight_scale: Any, out_dtype: Any, *_: Any
    ) -> _Tensor:
        return _empty_result(x, weight.shape[0] // parts, Scaling.of(x_scale, weight_scale, out_dtype))

    schema = f"Tensor x, Tensor {weight_of(name)}, {_OPTIONAL}, str communicator{behind}"
    define(f"{name}({schema}) -> Tensor", run, fake, in_order=in_order)


def _empty_result(x: _Tensor, outputs: int, scaling: Scaling | None) -> _Tensor:
    dtype = x.dtype if scaling is None else scaling.out_dtype
    return x.new_empty((*x.shape[:-1], outputs), dtype=dtype)


def _empty_sum(operands: Mapping[str, Any]) -> _Tensor:
    scaling = scaling_before_norm(operands["x_scale"], operands["weight_scale"], operands["norm_weight"])
    return _empty_result(operands["x"], operands["linear_weight"].shape[0], scaling)


_define_layer("linear", in_order=False)
_define_layer("linear_of_any_batch", in_order=False)
_define_layer("linear_silu_and_mul", parts=2, in_order=False)
_define_layer("linear_gelu_tanh_and_mul", parts=2, in_order=False)
_define_layer("linear_all_reduce", behind=f", {OPERAND}")
define_norms(
    "linear_all_reduce_add_rms_norm",
    "Tensor x, Tensor linear_weight, Tensor? residual, Tensor norm_weight, Tensor? bias, Tensor? x_scale, "
    "Tensor? weight_scale",
    _empty_sum,
)
