"""Torch custom operators for the operations with a linear layer (torch_operators.py has the mechanism).

A layer alone is not collective, so torch.compile may reorder it (``in_order=False``). The bias may be None. Scales and
the dtype of the result are None unless the operands are FP8. No argument has a default, because torch_operators.py adds
an argument at the end and finds the others by position.
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


# ---- Calls through torch's dispatcher -------------------------------------------------------------------------------


def linear(operation: str, x: Any, weight: Any, out: Any, bias: Any, scaling: Scaling | None, communicator: str) -> Any:
    """Call a method of ``Communicator`` that returns one tensor through its torch operator, for tensors that torch
    traces, fake tensors and subclasses.

    Args:
        operation: Name of the method.
        x, weight, out, bias, scaling: Arguments of the method.
        communicator: Name of the communicator (``torch_operators.register``).
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
    """Define the operator of an operation that returns one tensor.

    Args:
        name: Name of the operation.
        parts: Rows of the weight for an output: 2 for gate and up.
        behind: Arguments of the schema after the communicator.
        in_order: The operation is collective: all ranks must run it in the same order.
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
_define_layer("batch_invariant_linear", in_order=False)
_define_layer("linear_silu_and_mul", parts=2, in_order=False)
_define_layer("linear_gelu_tanh_and_mul", parts=2, in_order=False)
_define_layer("linear_all_reduce", behind=f", {OPERAND}")
define_norms(
    "linear_all_reduce_add_rms_norm",
    "Tensor x, Tensor linear_weight, Tensor? residual, Tensor norm_weight, Tensor? bias, Tensor? x_scale, "
    "Tensor? weight_scale",
    _empty_sum,
)
