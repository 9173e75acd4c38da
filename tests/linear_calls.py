"""Operands of ones for the operations with a linear layer, and what these make of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fused_reference import EPS

from llm_comm import Communicator

TOKENS, INPUTS, OUTPUTS = 2, 128, 64


def ones(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


X, WEIGHT, RESIDUAL, NORM = ones(TOKENS, INPUTS), ones(OUTPUTS, INPUTS), ones(TOKENS, OUTPUTS), ones(OUTPUTS)


def call_all(comm: Communicator, x: Any, weight: Any) -> list[Callable[[], Any]]:
    """Each operation once, with what it needs else."""
    return [
        lambda: comm.linear(x, weight),
        lambda: comm.linear_all_reduce(x, weight),
        lambda: comm.linear_all_reduce_add_rms_norm(x, weight, None, NORM, EPS),
    ]


def accept_all(comm: Communicator, x: torch.Tensor, weight: torch.Tensor) -> list[bool]:
    return [
        comm.accepts_linear(x, weight),
        comm.accepts_linear_all_reduce(x, weight),
        comm.accepts_linear_all_reduce_add_rms_norm(x, weight, NORM),
    ]


def compute_right(comm: Communicator) -> None:
    """What was declined has left nothing behind on any rank."""
    total = INPUTS * comm.world_size
    assert comm.linear(X, WEIGHT).eq(INPUTS).all()
    assert comm.linear_all_reduce(X, WEIGHT).eq(total).all()
    if comm.world_size > 1:
        normed, new_residual = comm.linear_all_reduce_add_rms_norm(X, WEIGHT, None, NORM, EPS)
        assert new_residual.eq(total).all()
        assert normed.eq(1).all()
