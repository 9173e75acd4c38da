"""NVTX ranges around launches, for Nsight Systems (option ``nvtx``)."""

from __future__ import annotations

from collections.abc import Callable

import torch


def within_range(
    run: Callable[..., bool], device: torch.device, operation: str, message_bytes: int, algorithm: str, protocol: str
) -> Callable[..., bool]:
    """``run`` within an NVTX range of the calling thread, such as "llm_comm all_reduce one_shot LL 16384 B". On
    emulated GPUs ``run`` itself, as torch may be one without CUDA.

    Args:
        run: Launches a call, as ``Core.prepare`` returns it.
        device: Of the communicator.
        operation, message_bytes, algorithm, protocol: As of ``Plan``.
    """
    if device.type != "cuda":
        return run
    push, pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    title = f"llm_comm {operation} {algorithm} {protocol} {message_bytes} B"

    def run_in_range(*arguments: int) -> bool:
        push(title)
        try:
            return run(*arguments)
        finally:
            pop()

    return run_in_range
