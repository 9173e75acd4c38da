"""Plan for the schedules of a program: its kernel, small grids, messages of several sizes, and how many schedules."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llm_comm.dsl import ir
from llm_comm.dsl.compiler.analysis import works_in_place
from llm_comm.dsl.compiler.grid import Limits
from llm_comm.dsl.compiler.layout import LINE_BYTES, Layout, batch_of, chunk_lines, lay_out, outer_parts
from llm_comm.dsl.compiler.runs import GroupRuns, LoopRuns, SignalRun, WaitRun, blocks_meet, runs_of
from llm_comm.dsl.compiler.source import generate, is_moved, shared_bytes
from llm_comm.dsl.compiler.text import element_of

#: Of a group: blocks have shares of a chunk.
_INSTANCES = 2
#: The same in a world of more ranks than ``_SMALL_WORLD``, where blocks signal: the emulator takes the longer for a
#: signal, the more memory has been written.
_INSTANCES_THAT_SIGNAL = 1
_SMALL_WORLD = 4
#: Of a block, at least: fewer threads, fewer steps of a schedule.
_THREADS = 4
#: More than an operation is behind another one in a thread's loop over lines.
_LINES_OF_A_THREAD = 4
#: fp32: the emulator's model of memory knows words of 4 bytes. Kernels for other types differ in conversions alone.
ELEMENT_BYTES = 4
#: Of all ranks in one call, and where blocks signal. Larger messages are left out where three smaller ones are there.
_MOST_LINES, _MOST_LINES_THAT_SIGNAL = 4096, 1280
#: Of all schedules of a program together.
_WORK = 50_000
_FEWEST, _MOST = 12, 200
#: Of a loop, in the messages of schedules.
_PIECES = 4


@dataclass(frozen=True)
class Size:
    """Of a message, and the grid for it.

    Attributes:
        part_bytes: Of a part of the message.
        blocks: Of all groups.
        threads: Of a block.
    """

    part_bytes: int
    blocks: int
    threads: int


@dataclass(frozen=True)
class Plan:
    """What schedules of a program run.

    Attributes:
        program: For one world.
        source: Of its kernel.
        layout: Of its workspace.
        sizes: Of the messages that calls are drawn from.
        instances: Blocks of a group.
        shared_bytes: Of a block.
        works_in_place: Whether the output may be the input.
    """

    program: ir.Program
    source: str
    layout: Layout
    sizes: tuple[Size, ...]
    instances: int
    shared_bytes: int
    works_in_place: bool


def plan_of(program: ir.Program) -> Plan:
    """The plan for a program.

    Raises:
        CompileError: There is no kernel for an operation of the program.
    """
    groups = runs_of(program)
    # Signals in a row are given by a thread each.
    talkers = [len(run.ops) for group in groups for run in group.runs() if isinstance(run, SignalRun | WaitRun)]
    instances = _INSTANCES_THAT_SIGNAL if talkers and program.world > _SMALL_WORLD else _INSTANCES
    threads = max([_THREADS, *talkers])
    limits = Limits(instances, instances, threads, threads, blocks_meet(groups))
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
    """Bytes of a part: one element; chunks that are not there; lines that are not full and not the same for each
    thread; several lines of a thread; several pieces of a loop, so that turns are used again.

    Args:
        program, groups: What it is about.
        stride: Threads of all instances.
        most_lines: Of all ranks in one call.
    """
    outer = outer_parts(program.operation, program.world)
    pieces = max((buffer.parts for buffer in program.buffers), default=outer) // outer
    loops = [step for group in groups for step in group.steps if isinstance(step, LoopRuns)]
    piece = stride * max((batch_of(loop) for loop in loops), default=1)
    turns = max((buffer.turns for buffer in program.buffers), default=1)
    elements_of_line = LINE_BYTES // ELEMENT_BYTES
    lines = [stride // 2 + 1, piece + stride // 2 + 1]
    lines.append(piece * max(turns, *(loop.lag for loop in loops)) + 1 if loops else _LINES_OF_A_THREAD * stride + 1)
    # The last line of a part has one element.
    elements = {1, (pieces - 1) * elements_of_line + 1, *(n * pieces * elements_of_line - 3 for n in lines)}
    ordered = sorted(elements)
    fitting = [n for n in ordered if _lines_of_call(program, n) <= most_lines]
    return [n * ELEMENT_BYTES for n in (fitting if len(fitting) >= 3 else ordered[:3])]


def _lines_of_call(program: ir.Program, elements: int) -> int:
    """Of the messages of all ranks."""
    outer = outer_parts(program.operation, program.world)
    return -(-elements * ELEMENT_BYTES // LINE_BYTES) * outer * program.world


def schedules_for(program: ir.Program) -> int:
    """Fewer, the larger a program is: each gets about the same work, which is some seconds.

    That is no loss: a schedule of a large program makes more accesses to memory, each of which may be delayed or
    overtaken, so the same work meets a mistake about as often, be it many short schedules or few long ones.
    """
    return max(_FEWEST, min(_MOST, _WORK // max(1, _work(program))))


def _work(program: ir.Program) -> int:
    """Of one schedule: operations of all ranks. A signal or a wait counts for each rank: it brings all that the other
    has seen."""
    work = 0
    for group in program.groups:
        for step in group.steps:
            ops = step.body if isinstance(step, ir.Loop) else (step,)
            for op in ops:
                ranks = program.world if op.only is None else len(op.only)
                weight = program.world if isinstance(op, ir.Signal | ir.Wait) else 1
                work += ranks * weight * (_PIECES if isinstance(step, ir.Loop) else 1)
    return work
