"""The operator that vLLM's compiled graphs call where a linear layer, its all-reduce and the RMSNorm after it were
(``linear_pass.py``).

As that without the layer (``fused_op.py``) it is functional, opaque to inductor, and decides at run time who serves it.
"""

from __future__ import annotations

import torch

from llm_comm.integrations.vllm import fused_op

fused_op.library.define(
    "linear_all_reduce_add_rms_norm(Tensor x, Tensor linear_weight, Tensor? residual, Tensor weight, float epsilon, "
    "Tensor? scale, str group_name) -> (Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _linear_all_reduce_add_rms_norm(
    x: torch.Tensor,
    linear_weight: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    scale: torch.Tensor | None,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The RMSNorm of (the sum of ``x @ linear_weight.T`` over the group + ``residual``), and what was normed.

    Args:
        x: [..., inputs], of this rank.
        linear_weight: [outputs, inputs], of this rank. It is read before the kernels ahead have ended, so none of them
            may write it.
        residual: [..., outputs], the same on all ranks; None adds nothing.
        weight: [outputs], of the norm.
        epsilon, scale, group_name: As of ``all_reduce_add_rms_norm``.

    Raises:
        ValueError: There is no such group (any more).
    """
    communicator = fused_op.find_group(group_name).device_communicator
    fused = getattr(communicator, "linear_all_reduce_add_rms_norm", None)
    result = None if fused is None else fused(x, linear_weight, residual, weight, epsilon, scale)
    if result is None:  # what the graph held before
        y = torch.nn.functional.linear(x, linear_weight)
        return fused_op.run(y, residual, weight, epsilon, scale, group_name)
    return result  # type: ignore[no-any-return]


def _fake(
    x: torch.Tensor,
    linear_weight: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    scale: torch.Tensor | None,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x.new_empty((*x.shape[:-1], linear_weight.shape[0]))
    return torch.empty_like(total, dtype=x.dtype if scale is None else fused_op.FP8), total


for _device in ("CPU", "CUDA"):
    fused_op.library.impl("linear_all_reduce_add_rms_norm", _linear_all_reduce_add_rms_norm, _device)
torch.library.register_fake("llm_comm_vllm::linear_all_reduce_add_rms_norm", _fake, lib=fused_op.library)

linear_all_reduce_add_rms_norm = torch.ops.llm_comm_vllm.linear_all_reduce_add_rms_norm.default
