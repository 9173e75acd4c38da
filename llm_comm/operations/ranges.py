"""NVTX ranges around launches, for Nsight Systems (option ``nvtx``)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from llm_comm.planning.plan import Plan


def in_range(run: Callable[..., bool], text: str) -> Callable[..., bool]:
    """``run`` within an NVTX range of the calling thread."""
    push, pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop

    def run_in_range(*arguments: int) -> bool:
        push(text)
        try:
            return run(*arguments)
        finally:
            pop()

    return run_in_range


def title_of(plan: Plan) -> str:
    """What Nsight shows of a call: "llm_comm all_reduce one_shot LL 16384 B"."""
    return f"llm_comm {plan.operation} {plan.algorithm} {plan.protocol} {plan.message_bytes} B"
