"""The operator that vLLM's compiled graphs call where an all-reduce, the RMSNorm after it, and the FP8 quantization of
that by groups of 128 were (``fusion_pass.py``).

As that without quantization (``fused_op.py``) it is functional, opaque to inductor, and decides at run time who serves
it.
"""

from __future__ import annotations

import torch

from llm_comm.integrations.vllm import fused_op
from llm_comm.operations import fp8

#: vLLM's, and numbers with which its layers call it: what llm_comm computes.
VLLM_QUANTIZATION = torch.ops._C.per_token_group_fp8_quant.default
EPS = 1e-10
LARGEST = 448.0

fused_op.library.define(
    "all_reduce_add_rms_norm_group_fp8(Tensor x, Tensor? residual, Tensor weight, float epsilon, str quantize, "
    "str group_name) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def name_of(by_columns: bool, for_tma: bool, ue8m0: bool) -> str:
    """What llm_comm calls the quantization of vLLM's with these switches."""
    layout = "_column_major_tma" if for_tma else "_column_major"
    return f"group{layout if by_columns else ''}{'_ue8m0' if ue8m0 else ''}"


def _run(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float, quantize: str, group_name: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The RMSNorm of (the sum of ``x`` over the group + ``residual``) in FP8, what was normed, and the scales.

    Args:
        x: [tokens, hidden], this rank's addend.
        residual, weight, epsilon, group_name: As of ``all_reduce_add_rms_norm``.
        quantize: As of ``Communicator.all_reduce_add_rms_norm``: one of those by groups.

    Raises:
        ValueError: There is no such group (any more).
    """
    group = fused_op.find_group(group_name)
    fused = getattr(group.device_communicator, "all_reduce_add_rms_norm_group_fp8", None)
    result = None if fused is None else fused(x, residual, weight, epsilon, quantize)
    if result is None:  # what the graph held before
        normed, new_residual = fused_op.run_one_by_one(group, x, residual, weight, epsilon, None)
        return _quantize(normed, quantize, new_residual)
    return result  # type: ignore[no-any-return]


def _quantize(
    normed: torch.Tensor, quantize: str, new_residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By vLLM's operator."""
    quantized = torch.empty_like(normed, dtype=fused_op.FP8)
    scales = fp8.empty_scales(quantize, normed)
    switches = (quantize.endswith("_ue8m0"), "column_major" in quantize, "tma" in quantize)
    VLLM_QUANTIZATION(normed, quantized, scales, fp8.GROUP_SIZE, EPS, -LARGEST, LARGEST, *switches)
    return quantized, new_residual, scales


def _fake(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float, quantize: str, group_name: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scales = fp8.empty_scales(quantize, x)
    return torch.empty_like(x, dtype=fused_op.FP8), torch.empty_like(x), scales


for _device in ("CPU", "CUDA"):
    fused_op.library.impl("all_reduce_add_rms_norm_group_fp8", _run, _device)
torch.library.register_fake("llm_comm_vllm::all_reduce_add_rms_norm_group_fp8", _fake, lib=fused_op.library)

all_reduce_add_rms_norm_group_fp8 = torch.ops.llm_comm_vllm.all_reduce_add_rms_norm_group_fp8.default
