"""The names and parameters are those of FlashInfer 0.7.2; what is computed goes by torch.distributed and torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .mnnvl import TorchDistBackend as TorchDistBackend

#: The pattern of each call that was computed here, in order.
calls: list[int] = []


class AllReduceFusionPattern:
    kAllReduce = 0
    kARResidualRMSNorm = 1
    kARResidualRMSNormFP8Quant = 2
    kARResidualRMSNormFP4Quant = 3


class QuantizationSFLayout:
    SWIZZLED_128x4 = 0
    SWIZZLED_8x4 = 1
    LINEAR = 2


class Workspace:
    backend = "trtllm"

    def __init__(self, world_size: int, rank: int, group: dist.ProcessGroup) -> None:
        self.world_size, self.rank, self._group = world_size, rank, group
        self.metadata = {"use_fp32_lamport": False}

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def is_buffer_size_sufficient(
        self, tp_size: int, num_tokens: int, hidden_dim: int, dtype: torch.dtype, use_oneshot: bool | None = None
    ) -> bool:
        return True

    def destroy(self) -> None:
        pass


def create_allreduce_fusion_workspace(
    backend: str = "auto",
    world_size: int = 1,
    rank: int = 0,
    max_token_num: int = 0,
    hidden_dim: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    gpus_per_node: int | None = None,
    comm_backend: TorchDistBackend | None = None,
    group: dist.ProcessGroup | None = None,
) -> Workspace:
    assert group is not None
    return Workspace(world_size, rank, group)


def allreduce_fusion(
    input: torch.Tensor,
    workspace: Workspace,
    pattern: int,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool = True,
    output: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    residual_in: torch.Tensor | None = None,
    rms_gamma: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
    scale_factor: torch.Tensor | float | None = None,
    layout_code: int | None = None,
    use_oneshot: bool | None = None,
    fp32_acc: bool = False,
    weight_bias: float = 0.0,
) -> torch.Tensor | None:
    calls.append(pattern)
    total = input.float()
    dist.all_reduce(total, group=workspace._group)
    if pattern == AllReduceFusionPattern.kAllReduce:
        assert output is not None
        return output.copy_(total)
    assert residual_in is not None and rms_gamma is not None and residual_out is not None  # noqa: PT018
    total += residual_in.float()
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + rms_eps) * (rms_gamma.float() + weight_bias)
    residual_out.copy_(total)
    if pattern == AllReduceFusionPattern.kARResidualRMSNorm:
        assert norm_out is not None
        return norm_out.copy_(normed)
    assert pattern == AllReduceFusionPattern.kARResidualRMSNormFP8Quant and quant_out is not None  # noqa: PT018
    largest = torch.finfo(quant_out.dtype).max
    return quant_out.copy_((normed / scale_factor).clamp(-largest, largest))
