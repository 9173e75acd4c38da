"""The operators that vLLM's compiled graphs call where linear layers of FP8 were: those of ``linear_op.py`` and
``column_op.py`` with scales.

Operands are those of vLLM's ``cutlass_scaled_mm``, by which a call goes that llm_comm declines: weights are transposed.
"""

from __future__ import annotations

import torch
from vllm import _custom_ops

from llm_comm.integrations.vllm import column_op, fused_op

_SCALED = "Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale"

for _schema in (
    f"scaled_linear({_SCALED}, ScalarType out_dtype, str group_name) -> Tensor",
    f"scaled_linear_silu_and_mul({_SCALED}, ScalarType out_dtype, str group_name) -> Tensor",
    f"scaled_linear_all_reduce_add_rms_norm({_SCALED}, Tensor? residual, Tensor norm_weight, float epsilon, "
    "Tensor? scale, str group_name) -> (Tensor, Tensor)",
):
    fused_op.library.define(_schema, tags=(torch.Tag.needs_fixed_stride_order,))


def _scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
    group_name: str,
) -> torch.Tensor:
    """``x @ weight``, scaled.

    Args:
        x: [tokens, inputs], FP8.
        weight: [inputs, outputs], FP8, the transpose of a contiguous tensor. It is read before the kernels ahead have
            ended, so none of them may write it.
        x_scale: fp32: one, or [tokens, 1].
        weight_scale: fp32: one, or one for each output. It is read as early as ``weight``.
        out_dtype: Of the result.
        group_name: vLLM's name of the group whose communicator computes it.

    Raises:
        ValueError: There is no such group (any more).
    """
    linear = getattr(fused_op.find_group(group_name).device_communicator, "scaled_linear", None)
    result = None if linear is None else linear(x, weight.t(), x_scale, weight_scale, out_dtype)
    if result is None:  # what the graph held before
        result = _custom_ops.cutlass_scaled_mm(x, weight, x_scale, weight_scale, out_dtype)
    return result  # type: ignore[no-any-return]


def _scaled_linear_silu_and_mul(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
    group_name: str,
) -> torch.Tensor:
    """silu-and-mul of the same: the columns of ``weight`` are those of gate and then those of up.

    Raises:
        ValueError: There is no such group (any more).
    """
    communicator = fused_op.find_group(group_name).device_communicator
    silu_and_mul = getattr(communicator, "scaled_linear_silu_and_mul", None)
    result = None if silu_and_mul is None else silu_and_mul(x, weight.t(), x_scale, weight_scale, out_dtype)
    if result is None:
        result = column_op.silu_and_mul(_scaled_linear(x, weight, x_scale, weight_scale, out_dtype, group_name))
    return result  # type: ignore[no-any-return]


def _scaled_linear_all_reduce_add_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    epsilon: float,
    scale: torch.Tensor | None,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The RMSNorm of (the sum of the layer's result over the group + ``residual``), and what was normed.

    Args:
        x, weight, x_scale, weight_scale: As of ``scaled_linear``, of this rank; x [..., inputs].
        residual: [..., outputs], the same on all ranks; None adds nothing.
        norm_weight: [outputs], of the dtype of the layer's result.
        epsilon, scale, group_name: As of ``all_reduce_add_rms_norm``.

    Raises:
        ValueError: There is no such group (any more).
    """
    communicator = fused_op.find_group(group_name).device_communicator
    fused = getattr(communicator, "linear_all_reduce_add_rms_norm", None)
    scales = (x_scale, weight_scale)
    result = None if fused is None else fused(x, weight.t(), residual, norm_weight, epsilon, scale, scales)
    if result is None:
        y = _custom_ops.cutlass_scaled_mm(x, weight, x_scale, weight_scale, norm_weight.dtype)
        return fused_op.run(y, residual, norm_weight, epsilon, scale, group_name)
    return result  # type: ignore[no-any-return]


def _fake_scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
    group_name: str,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[1]), dtype=out_dtype)


def _fake_scaled_linear_silu_and_mul(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
    group_name: str,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[1] // 2), dtype=out_dtype)


def _fake_scaled_linear_all_reduce_add_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    epsilon: float,
    scale: torch.Tensor | None,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x.new_empty((*x.shape[:-1], weight.shape[1]), dtype=norm_weight.dtype)
    return torch.empty_like(total, dtype=total.dtype if scale is None else fused_op.FP8), total


for _name, _kernel, _fake in (
    ("scaled_linear", _scaled_linear, _fake_scaled_linear),
    ("scaled_linear_silu_and_mul", _scaled_linear_silu_and_mul, _fake_scaled_linear_silu_and_mul),
    (
        "scaled_linear_all_reduce_add_rms_norm",
        _scaled_linear_all_reduce_add_rms_norm,
        _fake_scaled_linear_all_reduce_add_rms_norm,
    ),
):
    for _device in ("CPU", "CUDA"):
        fused_op.library.impl(_name, _kernel, _device)
    torch.library.register_fake(f"llm_comm_vllm::{_name}", _fake, lib=fused_op.library)

scaled_linear = torch.ops.llm_comm_vllm.scaled_linear.default
scaled_linear_silu_and_mul = torch.ops.llm_comm_vllm.scaled_linear_silu_and_mul.default
scaled_linear_all_reduce_add_rms_norm = torch.ops.llm_comm_vllm.scaled_linear_all_reduce_add_rms_norm.default
