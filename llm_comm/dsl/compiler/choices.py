"""What a row of a tuning table, or the tuner, may say of the grid of a program, and what is worth measuring."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from llm_comm.dsl.compiler.grid import WARP, Limits, why_not_threads
from llm_comm.planning.programs import OWN_CHOICE, LaunchChoice

#: How often blocks and threads of the largest grid are halved.
_HALVINGS = 3


def why_not(choice: LaunchChoice, limits: Limits, groups: int, device: torch.device) -> str:
    """Why a program cannot be launched so, or "".

    Args:
        choice: What is asked for.
        limits: That it was compiled for.
        groups: Of the program.
        device: That it runs on.
    """
    if choice.blocks is not None:
        most = limits.instances * groups
        if not groups <= choice.blocks <= most or choice.blocks % groups:
            return (
                f"blocks is {choice.blocks}; the program has {groups} group(s) and was compiled for {most} block(s), "
                f"so it takes a multiple of {groups} up to {most}"
            )
    if choice.threads is not None:
        why = why_not_threads(choice.threads, device.type == "cuda", limits.threads)
        if why:
            return why
    return ""


def narrowed(limits: Limits, choice: LaunchChoice, groups: int) -> Limits:
    """The limits of a launch by a choice that ``why_not`` does not refuse."""
    if choice.blocks is not None:
        instances = choice.blocks // groups
        limits = dataclasses.replace(limits, instances=instances, few_instances=instances)
    if choice.threads is not None:
        limits = dataclasses.replace(limits, threads=choice.threads, few_threads=choice.threads)
    return limits


def candidates(limits: Limits, groups: int, lines: int) -> list[LaunchChoice]:
    """Choices for chunks of so many lines, the program's own first, none of which ends in the grid of another one."""
    found = {limits.of_call(lines): OWN_CHOICE}
    for instances in _halved(limits.instances, 1, 1):
        for threads in _halved(limits.threads, limits.few_threads, WARP):
            choice = LaunchChoice(instances * groups, threads)
            found.setdefault(narrowed(limits, choice, groups).of_call(lines), choice)
    return list(found.values())


def _halved(most: int, least: int, multiple: int) -> Iterator[int]:
    """The largest number and its halves, as far as they are multiples, and no smaller than the least."""
    number = most
    for _ in range(_HALVINGS + 1):
        yield number
        number //= 2
        if number < least or number % multiple:
            return
