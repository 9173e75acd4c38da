"""Launch config of a program's call, and the launch parameters that a tuning table's row may name.

Both depend on the message size only, so they are equal on all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from llm_comm.dsl import ir
from llm_comm.dsl.compiler.layout import synchronizing_blocks_of_sm
from llm_comm.dsl.compiler.runs import GroupRuns, blocks_synchronize, uses_ports
from llm_comm.dsl.compiler.source import MAX_THREADS
from llm_comm.planning.programs import DEFAULT_LAUNCH, LaunchParameters

WARP = 32
#: Maximum blocks of a launch, as for algorithms of the core.
MAX_BLOCKS = 65535
#: Programs whose blocks neither signal nor wait (docs/experiments/dsl.md). First: maximum blocks for each SM. Then:
#: threads of a block by the chunk size in lines (up to the first number, the second), and threads for larger chunks.
_BLOCKS_OF_SM = 8
_THREADS_UP_TO = ((2048, 64), (32768, 128))
_THREADS = 256
#: Threads of a block in programs whose blocks signal and wait, while SMs are idle.
_FEW_THREADS = 64
#: Lines of a chunk for each thread up to which an SM gets one block that signals and waits, instead of two.
_LINES_OF_ONE_BLOCK = 2
#: Grid on emulated GPUs, where fibers of one thread execute the threads.
_EMULATED_BLOCKS, _EMULATED_THREADS = 4, 16
_MIN_THREADS = 8
#: Instances of programs with port channels. Proxies copy each block's share separately, and copy engines are efficient
#: with large copies only.
_PORT_INSTANCES = 4
#: Number of times that candidates halve the largest grid.
_HALVINGS = 3


@dataclass(frozen=True)
class Limits:
    """Limits of a program's grid.

    Attributes:
        instances: Maximum blocks of each group.
        few_instances: Maximum blocks of each group for small messages.
        threads: Maximum threads of a block.
        few_threads: Threads of a block for small messages.
        synchronizes: Blocks signal and wait. Each block then gets as large a share as possible; otherwise many blocks
            are better.
    """

    instances: int
    few_instances: int
    threads: int
    few_threads: int
    synchronizes: bool

    def of_call(self, lines: int) -> tuple[int, int]:
        """Return blocks of each group and threads of a block for chunks of ``lines`` lines."""
        instances = self.instances
        if self.synchronizes:
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
    """Return the grid limits of a program on a device.

    Args:
        program: Program to run.
        groups_of_runs: Its groups, cut into runs.
        device: A GPU, or the CPU for an emulated one.
        blocks: Blocks of all groups together, chosen by the user. None: the program's ``instances``; if that is 1, as
            many as are resident at once.
        threads: Threads of a block, chosen by the user. None: a default.

    Raises:
        ValueError: The grid is impossible.
    """
    groups = len(program.groups)
    is_gpu = device.type == "cuda"
    synchronizes = blocks_synchronize(groups_of_runs)
    of_sm = 1
    if blocks is None:
        most = _EMULATED_BLOCKS * groups
        if is_gpu:
            of_sm = synchronizing_blocks_of_sm(groups_of_runs) if synchronizes else _BLOCKS_OF_SM
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
        threads = _EMULATED_THREADS if not is_gpu else MAX_THREADS if synchronizes else _THREADS
    why = why_not_threads(threads, is_gpu, MAX_THREADS)
    if why:
        raise ValueError(why)
    instances = blocks // groups
    few_instances = instances // of_sm if synchronizes else instances
    return Limits(instances, few_instances, threads, min(threads, _FEW_THREADS), synchronizes)


def why_not_threads(threads: int, is_gpu: bool, most: int) -> str:
    """Return why a block cannot have ``threads`` threads, or "". ``most``: upper bound."""
    if _MIN_THREADS <= threads <= most and not (is_gpu and threads % WARP):
        return ""
    return f"threads is {threads}; a block has {_MIN_THREADS} to {most}, on a GPU a multiple of {WARP}"


def why_not(parameters: LaunchParameters, limits: Limits, groups: int, device: torch.device) -> str:
    """Return why a program cannot be launched with ``parameters``, or "".

    Args:
        parameters: Launch parameters.
        limits: Limits that the program was compiled for.
        groups: Number of groups.
        device: Device of the program.
    """
    if parameters.blocks is not None:
        most = limits.instances * groups
        if not groups <= parameters.blocks <= most or parameters.blocks % groups:
            return (
                f"blocks is {parameters.blocks}; the program has {groups} group(s) and was compiled for {most} "
                f"block(s), so it takes a multiple of {groups} up to {most}"
            )
    if parameters.threads is not None:
        why = why_not_threads(parameters.threads, device.type == "cuda", limits.threads)
        if why:
            return why
    return ""


def narrowed(limits: Limits, parameters: LaunchParameters, groups: int) -> Limits:
    """Return the limits under launch parameters that ``why_not`` accepts."""
    if parameters.blocks is not None:
        instances = parameters.blocks // groups
        limits = dataclasses.replace(limits, instances=instances, few_instances=instances)
    if parameters.threads is not None:
        limits = dataclasses.replace(limits, threads=parameters.threads, few_threads=parameters.threads)
    return limits


def candidates(limits: Limits, groups: int, lines: int) -> list[LaunchParameters]:
    """Return launch parameters to measure for chunks of ``lines`` lines, the program's own first. No two give one
    grid."""
    found = {limits.of_call(lines): DEFAULT_LAUNCH}
    for instances in _halved(limits.instances, 1, 1):
        for threads in _halved(limits.threads, limits.few_threads, WARP):
            parameters = LaunchParameters(instances * groups, threads)
            found.setdefault(narrowed(limits, parameters, groups).of_call(lines), parameters)
    return list(found.values())


def _halved(most: int, least: int, multiple: int) -> Iterator[int]:
    """Yield ``most`` and its halves, while they are multiples and at least ``least``."""
    number = most
    for _ in range(_HALVINGS + 1):
        yield number
        number //= 2
        if number < least or number % multiple:
            return
