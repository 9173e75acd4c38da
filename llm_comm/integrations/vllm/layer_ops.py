"""The operators that vLLM's compiled graphs call where linear layers were: alone, with silu-and-mul behind gate and up
(``column_pass.py``), and with the all-reduce and the RMSNorm behind them (``linear_pass.py``).

They are functional and opaque to inductor, and decide at run time, by the number of tokens, who computes. What llm_comm
declines goes by what the graph held before. No other rank takes part in a layer.

A layer has ``x`` [..., inputs] and ``weight`` [outputs, inputs], bf16 or fp16. Of FP8 it has scales, and operands as
vLLM's ``cutlass_scaled_mm`` takes them: ``weight`` [inputs, outputs], the transpose of a contiguous tensor, ``x_scale``
one number or [tokens, 1], ``weight_scale`` one or one for each output, both fp32. Weight and its scale are read before
the kernels ahead have ended, so none of these may write them.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops

from llm_comm.integrations.vllm import fused_op

_Tensor = torch.Tensor
_SCALES = "Tensor? x_scale, Tensor? weight_scale"

for _schema in (
    "silu_and_mul(Tensor y) -> Tensor",
    f"linear(Tensor x, Tensor weight, {_SCALES}, ScalarType? out_dtype, str group_name) -> Tensor",
    f"linear_silu_and_mul(Tensor x, Tensor weight, {_SCALES}, ScalarType? out_dtype, str group_name) -> Tensor",
    f"linear_all_reduce_add_rms_norm(Tensor x, Tensor weight, {_SCALES}, Tensor? residual, Tensor norm_weight, "
    "float epsilon, Tensor? scale, str group_name) -> (Tensor, Tensor)",
):
    fused_op.library.define(_schema, tags=(torch.Tag.needs_fixed_stride_order,))


def _linear(
    x: _Tensor,
    weight: _Tensor,
    x_scale: _Tensor | None,
    weight_scale: _Tensor | None,
    out_dtype: torch.dtype | None,
    group_name: str,
) -> _Tensor:
    """``x @ weight.T``.

    Args:
        x, weight, x_scale, weight_scale: See above.
        out_dtype: Of the result of FP8; None: that of ``x``.
        group_name: vLLM's name of the group whose communicator computes the layer.

    Raises:
        ValueError: There is no such group (any more).
    """
    result = _by_llm_comm("linear", x, weight, x_scale, weight_scale, out_dtype, group_name)
    return _as_before(x, weight, x_scale, weight_scale, out_dtype) if result is None else result


def _linear_silu_and_mul(
    x: _Tensor,
    weight: _Tensor,
    x_scale: _Tensor | None,
    weight_scale: _Tensor | None,
    out_dtype: torch.dtype | None,
    group_name: str,
) -> _Tensor:
    """``silu(x @ gate.T) * (x @ up.T)``: half of the outputs of ``weight`` are those of gate, then come those of up.
    Arguments and errors as of ``linear``."""
    result = _by_llm_comm("linear_silu_and_mul", x, weight, x_scale, weight_scale, out_dtype, group_name)
    if result is None:
        return _silu_and_mul(_linear(x, weight, x_scale, weight_scale, out_dtype, group_name))
    return result


def _by_llm_comm(
    method: str,
    x: _Tensor,
    weight: _Tensor,
    x_scale: _Tensor | None,
    weight_scale: _Tensor | None,
    out_dtype: torch.dtype | None,
    group_name: str,
) -> _Tensor | None:
    """By a method of the group's communicator; None, if it declines, or is not llm_comm's."""
    ours = getattr(fused_op.find_group(group_name).device_communicator, method, None)
    if ours is None:
        return None
    return ours(x, *_as_ours(weight, x_scale, weight_scale), out_dtype)  # type: ignore[no-any-return]


def _as_ours(weight: _Tensor, x_scale: _Tensor | None, weight_scale: _Tensor | None) -> tuple[_Tensor, Any]:
    """The weight, [outputs, inputs], and the scales as llm_comm takes them."""
    return (weight, None) if x_scale is None else (weight.t(), (x_scale, weight_scale))


def _as_before(
    x: _Tensor,
    weight: _Tensor,
    x_scale: _Tensor | None,
    weight_scale: _Tensor | None,
    out_dtype: torch.dtype | None,
) -> _Tensor:
    """The layer by what the graph held before."""
    if x_scale is None:
        return torch.nn.functional.linear(x, weight)
    result: _Tensor = _custom_ops.cutlass_scaled_mm(x, weight, x_scale, weight_scale, out_dtype)
    return result


def _silu_and_mul(y: _Tensor) -> _Tensor:
    """silu of the first half of each row times the second half. No graph holds it in the end.

    By vLLM's kernel, also where the graph held torch's operators for inductor to generate one of: called eagerly, as
    here, that would be a kernel for each. As those it rounds silu before it multiplies.
    """
    result = _fake_silu_and_mul(y)
    torch.ops._C.silu_and_mul(result, y)
    return result


def _linear_all_reduce_add_rms_norm(
    x: _Tensor,
    weight: _Tensor,
    x_scale: _Tensor | None,
    weight_scale: _Tensor | None,
    residual: _Tensor | None,
    norm_weight: _Tensor,
    epsilon: float,
    scale: _Tensor | None,
    group_name: str,
) -> tuple[_Tensor, _Tensor]:
    """The RMSNorm of (the sum of the layer's result over the group + ``residual``), and what was normed.

    Args:
        x, weight, x_scale, weight_scale: See above, of this rank.
        residual: [..., outputs], the same on all ranks; None adds nothing.
        norm_weight: [outputs], of the dtype of the layer's result.
        epsilon, scale, group_name: As of ``all_reduce_add_rms_norm``.

    Raises:
        ValueError: There is no such group (any more).
    """
    communicator = fused_op.find_group(group_name).device_communicator
    fused = getattr(communicator, "linear_all_reduce_add_rms_norm", None)
    ours, scales = _as_ours(weight, x_scale, weight_scale)
    result = None if fused is None else fused(x, ours, residual, norm_weight, epsilon, scale, scales)
    if result is None:
        y = _as_before(x, weight, x_scale, weight_scale, norm_weight.dtype)
        return fused_op.run(y, residual, norm_weight, epsilon, scale, group_name)
    return result  # type: ignore[no-any-return]


def _fake_silu_and_mul(y: _Tensor) -> _Tensor:
    return y.new_empty((*y.shape[:-1], y.shape[-1] // 2))


def _fake_linear(
    x: _Tensor,
    weight: _Tensor,
    x_scale: _Tensor | None,
    weight_scale: _Tensor | None,
    out_dtype: torch.dtype | None,
    group_name: str,
) -> _Tensor:
    outputs = weight.shape[0 if x_scale is None else 1]
    return x.new_empty((*x.shape[:-1], outputs), dtype=out_dtype or x.dtype)


def _fake_linear_silu_and_mul(*operands: Any) -> _Tensor:
    return _fake_silu_and_mul(_fake_linear(*operands))


def _fake_linear_all_reduce_add_rms_norm(
    x: _Tensor,
    weight: _Tensor,
    x_scale: _Tensor | None,
    weight_scale: _Tensor | None,
    residual: _Tensor | None,
    norm_weight: _Tensor,
    epsilon: float,
    scale: _Tensor | None,
    group_name: str,
) -> tuple[_Tensor, _Tensor]:
    total = _fake_linear(x, weight, x_scale, weight_scale, norm_weight.dtype, group_name)
    return torch.empty_like(total, dtype=total.dtype if scale is None else fused_op.FP8), total


for _name, _kernel, _fake in (
    ("silu_and_mul", _silu_and_mul, _fake_silu_and_mul),
    ("linear", _linear, _fake_linear),
    ("linear_silu_and_mul", _linear_silu_and_mul, _fake_linear_silu_and_mul),
    ("linear_all_reduce_add_rms_norm", _linear_all_reduce_add_rms_norm, _fake_linear_all_reduce_add_rms_norm),
):
    for _device in ("CPU", "CUDA"):
        fused_op.library.impl(_name, _kernel, _device)
    torch.library.register_fake(f"llm_comm_vllm::{_name}", _fake, lib=fused_op.library)

silu_and_mul = torch.ops.llm_comm_vllm.silu_and_mul.default
linear = torch.ops.llm_comm_vllm.linear.default
linear_silu_and_mul = torch.ops.llm_comm_vllm.linear_silu_and_mul.default
linear_all_reduce_add_rms_norm = torch.ops.llm_comm_vllm.linear_all_reduce_add_rms_norm.default
