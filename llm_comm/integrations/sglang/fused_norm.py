"""SGLang's norm with the all-reduce before it: one kernel of llm_comm, or both one after the other if it declines."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.layers import layernorm
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.runtime_context import get_parallel

_library = torch.library.Library("llm_comm_sglang", "DEF")
_library.define(
    "all_reduce_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float epsilon, float weight_bias, "
    "str group_name) -> (Tensor, Tensor)"
)


class State:
    """State of the process that all hooks share.

    Attributes:
        group: SGLang's tensor-parallel group, or None.
        is_active: Whether norms include the all-reduce before them. Every hook reads it. Equal on all ranks.
        computes_linears: Whether llm_comm computes linear layers too (``linear.py``). Needs ``is_active``.
        their_gate: SGLang's own function that decides about fusion, without llm_comm's hook.
        at_every_size: Whether SGLang is in deterministic mode. Then only the layers that ``dense_models`` runs are
            fused, and these in every batch.
        overwrites_residuals: Whether a norm may overwrite its residual argument, as SGLang's unfused norms do. False
            with a draft model: SGLang does not copy a captured residual if it expects a fused norm, which leaves its
            argument unchanged.
    """

    group: Any = None
    is_active = False
    computes_linears = False
    at_every_size = False
    their_gate: Any = None
    overwrites_residuals = False


def norms_of_boundaries_sum() -> bool:
    """Return whether llm_comm fuses norms to which SGLang itself leaves an all-reduce.

    SGLang decides for each batch, so this is never done in deterministic mode.
    """
    return State.is_active and not State.at_every_size and all_sums_are_of_the_group()


def all_sums_are_of_the_group() -> bool:
    """Return whether attention and experts all-reduce over all ranks of the tensor-parallel group."""
    parallel = get_parallel()
    size = parallel.tp_size
    return (
        not is_dp_attention_enabled()
        and parallel.attn_tp_size == size
        and size in (parallel.moe_tp_size, parallel.moe_ep_size)
    )


def around_norm(
    theirs: Any,
    norm_module: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    post_residual_addition: torch.Tensor | None,
    weight: torch.Tensor,
    use_attn_tp_group: bool = True,
) -> Any:
    """Hook of ``_forward_with_allreduce_fusion``: all-reduce, residual add and norm by ``sum_and_norm``."""
    if residual is None or not norms_of_boundaries_sum():
        return theirs(norm_module, x, residual, post_residual_addition, weight, use_attn_tp_group)
    if post_residual_addition is not None:
        residual = residual + post_residual_addition
        return sum_and_norm(norm_module, x, residual, may_overwrite=True)
    return sum_and_norm(norm_module, x, residual, may_overwrite=State.overwrites_residuals)


def sum_and_norm(
    norm: Any, x: torch.Tensor, residual: torch.Tensor, may_overwrite: bool, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """All-reduce ``x``, add ``residual``, and apply ``norm``. Return the normed rows and the new residual.

    Args:
        norm: SGLang's norm module.
        x: This rank's addend. It may be overwritten, as by SGLang's in-place all-reduce, so it must not be read later.
        residual: Tensor like ``x``, equal on all ranks.
        may_overwrite: Whether the new residual may be written into ``residual``.
        options: Further keyword arguments for ``norm`` if the fused kernel declines.
    """
    if x.shape[0] == 0:
        return x, residual
    group, weight_bias = State.group, weight_bias_of(norm)
    if torch.compiler.is_compiling():
        # Clone tensors that are written: compiled graphs are functional, and would copy such tensors anyway.
        if weight_bias is not None:
            result: tuple[torch.Tensor, torch.Tensor] = torch.ops.llm_comm_sglang.all_reduce_add_rms_norm(
                x, residual, norm.weight.data, norm.variance_epsilon, weight_bias, group.unique_name
            )
            return result
        normed, new_residual = norm.forward(group.all_reduce(x.clone()), residual.clone(), None, **options)
        return normed, new_residual
    if weight_bias is not None:
        fused = _fused(group, x, residual, norm.weight.data, norm.variance_epsilon, weight_bias)
        if fused is not None:
            return fused
    # SGLang's unfused path, which overwrites both tensors.
    residual = residual if may_overwrite else residual.clone()
    normed, new_residual = norm.forward(group.all_reduce(x), residual, None, **options)
    return normed, new_residual


def weight_bias_of(norm: Any) -> float | None:
    """Return the constant that ``norm`` adds to its weights in fp32; None if the fused kernel cannot compute
    ``norm``."""
    is_gemma = type(norm) is layernorm.GemmaRMSNorm
    is_plain = (
        type(norm) is layernorm.RMSNorm
        and norm.variance_size_override is None
        and not norm.cast_x_before_out_mul
        and not norm.fp32_residual
        and norm.override_orig_dtype is None
    )
    if not (is_gemma or is_plain) or norm.weight.dtype not in (torch.bfloat16, torch.float16):
        return None
    return 1.0 if is_gemma else 0.0


def _all_reduce_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, weight_bias: float, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Operator of compiled graphs: all-reduce, residual add and RMSNorm, with results in new tensors."""
    reference = parallel_state._groups.get(group_name)
    group = None if reference is None else reference()
    if group is None:
        raise ValueError(f"there is no group {group_name!r} in this process")
    norm = (residual, weight, epsilon, weight_bias)
    result = _fused(group, x, *norm)
    return _one_by_one(_sum(group, x), *norm) if result is None else result


def _fused(
    group: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, weight_bias: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Run llm_comm's fused kernel, with results in new tensors; None if it declines or the communicator is closed."""
    fused = getattr(group.ca_comm, "all_reduce_add_rms_norm", None)
    return None if fused is None else fused(x, residual, weight, epsilon, weight_bias)


def _sum(group: Any, x: torch.Tensor) -> torch.Tensor:
    """Sum ``x`` over the group. Return a new tensor, and leave ``x`` unchanged."""
    by_llm_comm = getattr(group.ca_comm, "sum_of", None)
    total: torch.Tensor | None = None if by_llm_comm is None else by_llm_comm(x)
    if total is None:
        # Clone: SGLang's all-reduce may write in place, but the graph may read x later.
        total = group.all_reduce(x.clone())
    return total


def _one_by_one(
    total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, weight_bias: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply residual add and RMSNorm as SGLang's norm does, with results in new tensors. ``total`` is overwritten."""
    kernel = getattr(layernorm, "fused_add_rmsnorm" if weight_bias == 0 else "gemma_fused_add_rmsnorm", None)
    if kernel is not None and total.is_cuda:
        new_residual = residual.clone()
        kernel(total, new_residual, weight, epsilon)  # in place: the caller does not use ``total`` again
        return total, new_residual
    new_residual = total + residual
    values = new_residual.float()
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + epsilon)
    return (values * (weight.float() + weight_bias)).to(total.dtype), new_residual


def _fake(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, weight_bias: float, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(residual)


_library.impl("all_reduce_add_rms_norm", _all_reduce_add_rms_norm, "CompositeExplicitAutograd")
torch.library.register_fake("llm_comm_sglang::all_reduce_add_rms_norm", _fake, lib=_library)
