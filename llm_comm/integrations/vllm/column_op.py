"""The operators that vLLM's compiled graphs call where linear layers were that no all-reduce comes after: those split
by columns, alone and with silu-and-mul behind gate and up (``column_pass.py``).

They are functional and opaque to inductor, and decide at run time, by the number of tokens, who computes. No other rank
takes part: nothing would wait if ranks chose differently.
"""

from __future__ import annotations

import torch

from llm_comm.integrations.vllm import fused_op

for _schema in (
    "silu_and_mul(Tensor y) -> Tensor",
    "linear(Tensor x, Tensor weight, str group_name) -> Tensor",
    "linear_silu_and_mul(Tensor x, Tensor gate_up_weight, str group_name) -> Tensor",
):
    fused_op.library.define(_schema, tags=(torch.Tag.needs_fixed_stride_order,))


def _linear(x: torch.Tensor, weight: torch.Tensor, group_name: str) -> torch.Tensor:
    """``x @ weight.T``.

    Args:
        x: [..., inputs].
        weight: [outputs, inputs]. It is read before the kernels ahead have ended, so none of them may write it.
        group_name: vLLM's name of the group whose communicator computes it.

    Raises:
        ValueError: There is no such group (any more).
    """
    linear = getattr(fused_op.find_group(group_name).device_communicator, "linear", None)
    result = None if linear is None else linear(x, weight)
    if result is None:  # what the graph held before
        return torch.nn.functional.linear(x, weight)
    return result  # type: ignore[no-any-return]


def _linear_silu_and_mul(x: torch.Tensor, gate_up_weight: torch.Tensor, group_name: str) -> torch.Tensor:
    """``silu(x @ gate.T) * (x @ up.T)``.

    Args:
        x: [..., inputs].
        gate_up_weight: [2 * outputs, inputs], the rows of gate and then those of up. As of ``linear``.
        group_name: As of ``linear``.

    Raises:
        ValueError: There is no such group (any more).
    """
    communicator = fused_op.find_group(group_name).device_communicator
    linear_silu_and_mul = getattr(communicator, "linear_silu_and_mul", None)
    result = None if linear_silu_and_mul is None else linear_silu_and_mul(x, gate_up_weight)
    if result is None:
        return _silu_and_mul(_linear(x, gate_up_weight, group_name))
    return result  # type: ignore[no-any-return]


def _silu_and_mul(y: torch.Tensor) -> torch.Tensor:
    """silu of the first half of each row times the second half. No graph holds it in the end.

    By vLLM's kernel, also where the graph held torch's operators for inductor to generate one of: called eagerly, as
    here, that would be a kernel for each. As those it rounds silu before it multiplies.
    """
    result = _fake_silu_and_mul(y)
    torch.ops._C.silu_and_mul(result, y)
    return result


def _fake_silu_and_mul(y: torch.Tensor) -> torch.Tensor:
    return y.new_empty((*y.shape[:-1], y.shape[-1] // 2))


def _fake_linear(x: torch.Tensor, weight: torch.Tensor, group_name: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_linear_silu_and_mul(x: torch.Tensor, gate_up_weight: torch.Tensor, group_name: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], gate_up_weight.shape[0] // 2))


for _name, _kernel, _fake in (
    ("silu_and_mul", _silu_and_mul, _fake_silu_and_mul),
    ("linear", _linear, _fake_linear),
    ("linear_silu_and_mul", _linear_silu_and_mul, _fake_linear_silu_and_mul),
):
    for _device in ("CPU", "CUDA"):
        fused_op.library.impl(_name, _kernel, _device)
    torch.library.register_fake(f"llm_comm_vllm::{_name}", _fake, lib=fused_op.library)

silu_and_mul = torch.ops.llm_comm_vllm.silu_and_mul.default
linear = torch.ops.llm_comm_vllm.linear.default
linear_silu_and_mul = torch.ops.llm_comm_vllm.linear_silu_and_mul.default
