"""Plan of a program's schedules: kernel, small grids, message sizes, and number of schedules."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llm_comm.dsl import ir
from llm_comm.dsl.compiler.analysis import works_in_place
from llm_comm.dsl.compiler.grid import Limits
from llm_comm.dsl.compiler.layout import LINE_BYTES, Layout, batch_of, chunk_lines, lay_out, outer_parts
from llm_comm.dsl.compiler.runs import GroupRuns, LoopRuns, SignalRun, WaitRun, blocks_synchronize, runs_of
from llm_comm.dsl.compiler.source import generate, is_moved, shared_bytes
from llm_comm.dsl.compiler.text import element_of

#: Blocks of each group, so that blocks have different shares of a chunk.
_INSTANCES = 2
#: Blocks of each group if they signal in a world of more than _SMALL_WORLD ranks: the emulator's time for a signal
#: grows with the memory written.
_INSTANCES_THAT_SIGNAL = 1
_SMALL_WORLD = 4
#: Minimum threads of a block. Fewer threads need fewer steps.
_THREADS = 4
#: Lines of a thread: more than the longest distance between operations in a thread's loop over lines.
_LINES_OF_A_THREAD = 4
#: fp32: the emulator's memory model has 4-byte words. Kernels for other dtypes differ in conversions only.
ELEMENT_BYTES = 4
#: Maximum lines of all ranks in one call; second: if blocks signal. Larger messages are skipped if three smaller ones
#: exist.
_MOST_LINES, _MOST_LINES_THAT_SIGNAL = 4096, 1280
#: Work of all schedules of a program together, in the units of _work.
_WORK = 50_000
_FEWEST, _MOST = 12, 200
#: Assumed pieces of a loop, for the estimate of work.
_PIECES = 4


@dataclass(frozen=True)
class Size:
    """Message size, and the grid for it.

    Attributes:
        part_bytes: Shard size in bytes.
        blocks: Blocks of all groups.
        threads: Threads of a block.
    """

    part_bytes: int
    blocks: int
    threads: int


@dataclass(frozen=True)
class Plan:
    """Set-up of a program's schedules.

    Attributes:
        program: Program for one world.
        source: Source of its kernel.
        layout: Layout of its workspace.
        sizes: Message sizes from which calls are drawn.
        instances: Blocks of a group.
        shared_bytes: Shared memory of a block in bytes.
        works_in_place: Output and input may be one tensor.
    """

    program: ir.Program
    source: str
    layout: Layout
    sizes: tuple[Size, ...]
    instances: int
    shared_bytes: int
    works_in_place: bool


def plan_of(program: ir.Program) -> Plan:
    """Return the plan for a program.

    Raises:
        CompileError: No kernel exists for an operation of the program.
    """
    groups = runs_of(program)
    # Consecutive signals, or waits, are performed by one thread each.
    talkers = [len(run.ops) for group in groups for run in group.runs() if isinstance(run, SignalRun | WaitRun)]
    instances = _INSTANCES_THAT_SIGNAL if talkers and program.world > _SMALL_WORLD else _INSTANCES
    threads = max([_THREADS, *talkers])
    limits = Limits(instances, instances, threads, threads, blocks_synchronize(groups))
    outer = outer_parts(program.operation, program.world)
    pieces = min((buffer.parts for buffer in program.buffers), default=outer) // outer
    parts = _parts(program, groups, instances * threads, _MOST_LINES_THAT_SIGNAL if talkers else _MOST_LINES)
    layout = lay_out(program, groups, max(parts) * outer, limits.instances, limits.threads, masks=is_moved(program))
    sizes = []
    for part in parts:
        blocks, of_block = limits.of_call(chunk_lines(part, pieces))
        sizes.append(Size(part, blocks * len(program.groups), of_block))
    element = element_of(torch.float32)
    return Plan(
        program,
        generate(program, groups, layout, element),
        layout,
        tuple(sizes),
        instances,
        shared_bytes(program),
        works_in_place(program, groups),
    )


def _parts(program: ir.Program, groups: tuple[GroupRuns, ...], stride: int, most_lines: int) -> list[int]:
    """Return shard sizes in bytes that cover the cases of a kernel.

    These are: one element; missing chunks; partial lines, unevenly distributed over threads; several lines for a
    thread; several pieces of a loop, so that stages wrap around.

    Args:
        program, groups: Program, and its runs.
        stride: Threads of all instances.
        most_lines: Maximum lines of all ranks in one call.
    """
    outer = outer_parts(program.operation, program.world)
    pieces = max((buffer.parts for buffer in program.buffers), default=outer) // outer
    loops = [step for group in groups for step in group.steps if isinstance(step, LoopRuns)]
    piece = stride * max((batch_of(loop) for loop in loops), default=1)
    stages = max((buffer.stages for buffer in program.buffers), default=1)
    elements_of_line = LINE_BYTES // ELEMENT_BYTES
    lines = [stride // 2 + 1, piece + stride // 2 + 1]
    lines.append(piece * max(stages, *(loop.lag for loop in loops)) + 1 if loops else _LINES_OF_A_THREAD * stride + 1)
    # The last line of a shard has one element.
    elements = {1, (pieces - 1) * elements_of_line + 1, *(n * pieces * elements_of_line - 3 for n in lines)}
    ordered = sorted(elements)
    fitting = [n for n in ordered if _lines_of_call(program, n) <= most_lines]
    return [n * ELEMENT_BYTES for n in (fitting if len(fitting) >= 3 else ordered[:3])]


def _lines_of_call(program: ir.Program, elements: int) -> int:
    """Return the lines of the messages of all ranks."""
    outer = outer_parts(program.operation, program.world)
    return -(-elements * ELEMENT_BYTES // LINE_BYTES) * outer * program.world


def schedules_for(program: ir.Program) -> int:
    """Return the number of schedules: fewer for larger programs, so that each program takes some seconds.

    This loses no coverage. A schedule of a large program makes more memory accesses, each of which may be delayed or
    reordered. Equal work therefore finds an error about as often, in many short or in few long schedules.
    """
    return max(_FEWEST, min(_MOST, _WORK // max(1, _work(program))))


def _work(program: ir.Program) -> int:
    """Return the work of one schedule: operations of all ranks. A signal or wait has weight ``world``, because it
    transfers all that the other rank has seen."""
    work = 0
    for group in program.groups:
        for step in group.steps:
            ops = step.body if isinstance(step, ir.Loop) else (step,)
            for op in ops:
                ranks = program.world if op.only is None else len(op.only)
                weight = program.world if isinstance(op, ir.Signal | ir.Wait) else 1
                work += ranks * weight * (_PIECES if isinstance(step, ir.Loop) else 1)
    return work
