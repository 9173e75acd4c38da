"""Blocks and threads of a call, and the choices of them that a row of a tuning table may name.

Both follow from the size of the message alone, so they are the same on all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from llm_comm.dsl import ir
from llm_comm.dsl.compiler.layout import meeting_blocks_of_sm
from llm_comm.dsl.compiler.runs import GroupRuns, blocks_meet, uses_ports
from llm_comm.dsl.compiler.source import MAX_THREADS
from llm_comm.planning.programs import OWN_CHOICE, LaunchChoice

WARP = 32
#: Of a launch, as for algorithms of the core.
MAX_BLOCKS = 65535
#: Of blocks whose lines are on their way one by one (docs/experiments/dsl.md): how many there are for each
#: multiprocessor, at most; and their threads, for chunks of so many lines and for larger ones.
_BLOCKS_OF_SM = 8
_THREADS_UP_TO = ((2048, 64), (32768, 128))
_THREADS = 256
#: Of blocks that meet, while there are multiprocessors without one.
_FEW_THREADS = 64
#: Up to so many lines of a chunk for each thread a multiprocessor has one block that meets, and no second one.
_LINES_OF_ONE_BLOCK = 2
#: Where fibers of one thread stand for those of a GPU.
_EMULATED_BLOCKS, _EMULATED_THREADS = 4, 16
_MIN_THREADS = 8
#: Of programs whose blocks have proxies copy their shares, one by one: large copies are what copy engines are good at.
_PORT_INSTANCES = 4
#: How often blocks and threads of the largest grid are halved.
_HALVINGS = 3


@dataclass(frozen=True)
class Limits:
    """Of the grid of a program.

    Attributes:
        instances: Blocks of each group, at most.
        few_instances: The same where there is little to do.
        threads: Of a block, at most.
        few_threads: Of a block where there is little to do.
        meets: Blocks signal and wait, so each takes as large a share as it can; else there are rather many of them.
    """

    instances: int
    few_instances: int
    threads: int
    few_threads: int
    meets: bool

    def of_call(self, lines: int) -> tuple[int, int]:
        """Blocks of each group, and their threads, for chunks of so many lines."""
        instances = self.instances
        if self.meets:
            if lines <= _LINES_OF_ONE_BLOCK * self.few_instances * self.threads:
                instances = self.few_instances
            per_block = -(-lines // instances)
            threads = min(self.threads, max(self.few_threads, -(-per_block // WARP) * WARP))
        else:
            fitting = (threads for most, threads in _THREADS_UP_TO if lines <= min(most, self.instances * threads))
            threads = min(self.threads, max(self.few_threads, next(fitting, self.threads)))
        return min(instances, -(-lines // threads)), threads


def limits_of(
    program: ir.Program,
    groups_of_runs: tuple[GroupRuns, ...],
    device: torch.device,
    blocks: int | None,
    threads: int | None,
) -> Limits:
    """The limits of a program on a device.

    Args:
        program: What is to run.
        groups_of_runs: Its groups, cut into runs.
        device: A GPU, or the CPU for an emulated one.
        blocks: Of all groups together, as the user wants it; None: as many as the program has instances, or, if it has
            one, as many as run at once.
        threads: Of a block, as the user wants it; None: as many as serve.

    Raises:
        ValueError: There can be no such grid.
    """
    groups = len(program.groups)
    is_gpu = device.type == "cuda"
    meets = blocks_meet(groups_of_runs)
    of_sm = 1
    if blocks is None:
        most = _EMULATED_BLOCKS * groups
        if is_gpu:
            of_sm = meeting_blocks_of_sm(groups_of_runs) if meets else _BLOCKS_OF_SM
            most = torch.cuda.get_device_properties(device).multi_processor_count * of_sm
        instances = min(most // groups, _PORT_INSTANCES) if uses_ports(groups_of_runs) else most // groups
        if program.instances > 1:
            of_sm, instances = 1, program.instances
        blocks = instances * groups
    if not groups <= blocks <= MAX_BLOCKS or blocks % groups:
        raise ValueError(
            f"program {program.name!r} has {groups} group(s), so it takes a multiple of {groups} block(s), at most "
            f"{MAX_BLOCKS}; blocks is {blocks}"
        )
    if threads is None:
        threads = _EMULATED_THREADS if not is_gpu else MAX_THREADS if meets else _THREADS
    why = why_not_threads(threads, is_gpu, MAX_THREADS)
    if why:
        raise ValueError(why)
    instances = blocks // groups
    few_instances = instances // of_sm if meets else instances
    return Limits(instances, few_instances, threads, min(threads, _FEW_THREADS), meets)


def why_not_threads(threads: int, is_gpu: bool, most: int) -> str:
    """Why a block cannot have so many threads, of at most so many, or ""."""
    if _MIN_THREADS <= threads <= most and not (is_gpu and threads % WARP):
        return ""
    return f"threads is {threads}; a block has {_MIN_THREADS} to {most}, on a GPU a multiple of {WARP}"


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
