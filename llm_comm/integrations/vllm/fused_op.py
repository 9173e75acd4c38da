"""The operator that vLLM's compiled graphs call where an all-reduce and the RMSNorm after it were (``fusion_pass.py``).

Compiled graphs are kept on disk and loaded by processes that compile nothing, so the operator is defined apart from the
pass, when a communicator is made. It is functional and opaque to inductor, and decides at run time, by the shape of the
batch, who serves it: a graph is compiled for all batch sizes, and llm_comm declines the largest. It declines none in
batch-invariant mode (``Config.batch_invariant_norm``).
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.ir.ops
from vllm import _custom_ops
from vllm.distributed import parallel_state

FP8 = torch.float8_e4m3fn

#: Holds the operators for as long as it lives.
library = torch.library.Library("llm_comm_vllm", "DEF")
library.define(
    "all_reduce_add_rms_norm(Tensor x, Tensor? residual, Tensor weight, float epsilon, Tensor? scale, str group_name)"
    " -> (Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def run(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    scale: torch.Tensor | None,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The RMSNorm of (the sum of ``x`` over the group + ``residual``), and what was normed.

    Args:
        x: [..., hidden], this rank's addend.
        residual: Like ``x``, the same on all ranks; None adds nothing.
        weight: [hidden], like ``x``.
        epsilon: Added to the mean of squares.
        scale: One fp32 number: the norm is divided by it and rounded to FP8 e4m3. None leaves it in the dtype of ``x``.
        group_name: vLLM's name of the group.

    Raises:
        ValueError: There is no such group (any more).
    """
    group = find_group(group_name)
    fused = getattr(group.device_communicator, "all_reduce_add_rms_norm", None)
    result = None if fused is None else fused(x, residual, weight, epsilon, scale)
    if result is None:
        return run_one_by_one(group, x, residual, weight, epsilon, scale)
    return result  # type: ignore[no-any-return]


def find_group(name: str) -> Any:
    """vLLM's group of a name, as torch.ops.vllm.all_reduce finds it.

    Raises:
        ValueError: There is no such group (any more).
    """
    reference = parallel_state._groups.get(name)
    group = None if reference is None else reference()
    if group is None:
        raise ValueError(f"there is no group {name!r} in this process (any more)")
    return group


def run_one_by_one(
    group: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the graph held before: the group's all-reduce, whoever serves it, vLLM's norm, and its quantization."""
    total = group._all_reduce_out_place(x)
    if residual is None:
        normed, new_residual = _run_ir(vllm.ir.ops.rms_norm, total, weight, epsilon), total
    else:
        normed, new_residual = _run_ir(vllm.ir.ops.fused_add_rms_norm, total, residual, weight, epsilon)
    if scale is not None:
        normed, _ = _custom_ops.scaled_fp8_quant(normed, scale, group_shape=(-1, -1))
    return normed, new_residual


def _run_ir(op: Any, total: torch.Tensor, *arguments: Any) -> Any:
    """Runs an operator of vLLM's IR by vLLM's CUDA kernel, if it serves the arguments.

    In compiled graphs vLLM prefers "native", a chain of torch operators for inductor to generate a kernel of. Called
    eagerly, as here, that would be a kernel for each operator.
    """
    kernel = op.impls.get("vllm_c")
    if kernel is None or not kernel.supported or not kernel.supports_args(total, *arguments):
        return op(total, *arguments)
    if kernel.inplace:  # it may have ``total``, but the residual belongs to the graph
        arguments = (arguments[0].clone(), *arguments[1:])
    return kernel.impl_fn(total, *arguments)


def _fake(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    scale: torch.Tensor | None,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x, dtype=x.dtype if scale is None else FP8), torch.empty_like(x)


for _device in ("CPU", "CUDA"):
    library.impl("all_reduce_add_rms_norm", run, _device)
torch.library.register_fake("llm_comm_vllm::all_reduce_add_rms_norm", _fake, lib=library)

all_reduce_add_rms_norm = torch.ops.llm_comm_vllm.all_reduce_add_rms_norm.default
