"""Exploration: runs a program under seeded schedules, and finds the source lines that may have caused a failure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from llm_comm.dsl import ir
from llm_comm.dsl.compiler.analysis import sender_of
from llm_comm.dsl.compiler.layout import LINE_BYTES, Layout, chunk_lines, outer_parts
from llm_comm.dsl.errors import ScheduleError
from llm_comm.dsl.ir import Rank
from llm_comm.dsl.schedules.kernel import ExploredKernel, Failure, Outcome
from llm_comm.dsl.schedules.plan import ELEMENT_BYTES, Plan, plan_of, schedules_for

#: Maximum source lines that an error names.
_LINES_NAMED = 4
_SEEDS = 1 << 64


class Explored(NamedTuple):
    """Result of schedules that all passed.

    Attributes:
        schedules: Number of schedules.
        steps: Steps of the last schedule.
        fingerprint: Hash of the last schedule. It changes with every memory access, its order and its value.
    """

    schedules: int
    steps: int
    fingerprint: int


def explore(
    program: ir.Program,
    schedules: int | None = None,
    seed: int = 0,
    *,
    trace: str | os.PathLike[str] | None = None,
) -> Explored:
    """Run the kernel of a program on all ranks of its world under seeded schedules.

    docs/reference/dsl.md ("Schedules") describes them.

    All ranks are threads of one emulator. At each memory access it chooses which thread continues, and it delays and
    reorders stores as a GPU may. A schedule is determined by its seed, on any machine: ``explore(program, schedules=1,
    seed=error.seed)`` repeats a failure. ``dsl.check`` must have accepted the program.

    Args:
        program: Program for one world.
        schedules: Number of schedules, with seeds ``seed``, ``seed + 1``, ... None: by the size of the program.
        seed: First seed, from 0 on.
        trace: File to which every memory access is written.

    Raises:
        ScheduleError: A schedule failed; the error has its seed and step.
        CompileError: No kernel exists for an operation of the program.
        ValueError: A number is out of range.
        RuntimeError: There is no C++ compiler (``CXX``, or g++ by default), or it rejects the kernel.
        ConfigError: Another user could have put code into the directory of compiled kernels.
        OSError: The trace cannot be written.
    """
    if schedules is not None and not 1 <= schedules < 1 << 32:
        raise ValueError(f"schedules is {schedules}; there is 1 at least")
    count = schedules_for(program) if schedules is None else schedules
    if not 0 <= seed <= _SEEDS - count:
        raise ValueError(f"seed is {seed}; it is 0 at least, and all of them are below 2^64")
    file = None if trace is None else Path(trace)
    if file is not None:
        file.write_bytes(b"")  # reports an unwritable path here: the emulator has no such error
    return explore_plan(plan_of(program), count, seed, file)


def explore_plan(plan: Plan, schedules: int, seed: int, trace: Path | None = None) -> Explored:
    """Run schedules of a plan, see ``explore``."""
    outcome = ExploredKernel(plan).run(seed, schedules, trace)
    if outcome.failure != Failure.NONE:
        raise _error(plan, outcome)
    return Explored(outcome.schedules, outcome.steps, outcome.fingerprint)


def _error(plan: Plan, outcome: Outcome) -> ScheduleError:
    lines = _suspects(plan, outcome)
    others = ", ".join(str(line.line) for line in lines[1:_LINES_NAMED])
    return ScheduleError(
        f"program {plan.program.name!r} for {plan.program.world} ranks fails under schedule {outcome.seed} of the "
        f"deterministic emulator, at step {outcome.step}: {outcome.text.decode()}."
        + (f" It may be line {others} as well." if others else "")
        + f" dsl.explore(program, schedules=1, seed={outcome.seed}) runs it again",
        lines[0] if lines else plan.program.where,
        seed=outcome.seed,
        step=outcome.step,
        rank=outcome.rank,
    )


def _suspects(plan: Plan, outcome: Outcome) -> list[ir.Location]:
    program = plan.program
    if outcome.failure == Failure.WAIT:
        return waits_for(program, outcome.rank, outcome.peer)
    if outcome.failure == Failure.RESULT:
        return writers_of(program, outcome.rank, outcome.element, outcome.part_bytes)
    if outcome.failure == Failure.NOT_RESET:
        return readers_of_byte(program, plan.layout, outcome.element)
    return []


def waits_for(program: ir.Program, rank: int, peer: int) -> list[ir.Location]:
    """Return the lines in which a rank waits for a peer."""
    world = program.world
    found = []
    for op in program.ops():
        if not op.runs_on(rank):
            continue
        whom: Rank | None = None
        if isinstance(op, ir.Wait | ir.Flush):
            whom = op.peer
        elif isinstance(op, ir.ReadPackets):
            whom = sender_of(program, op)
        if whom is not None and whom.on(rank, world) == peer:
            found.append(op.where)
    return _once(found)


def writers_of(program: ir.Program, rank: int, element: int, part_bytes: int) -> list[ir.Location]:
    """Return the lines that write an element of a rank's output."""
    of_part = part_bytes // ELEMENT_BYTES
    part, line = element // of_part, element % of_part * ELEMENT_BYTES // LINE_BYTES
    found = []
    for op, chunk in _stores_to_outputs(program):
        buffer = chunk.buffer
        pieces = buffer.parts // outer_parts(program.operation, program.world)
        for sender in range(program.world):
            if not op.runs_on(sender) or _receiver(op, sender, program.world) != rank:
                continue
            number = chunk.number_on(sender, program.world)
            at = (0, number) if pieces == buffer.chunks else divmod(number, pieces)
            if at == (part, line // chunk_lines(part_bytes, pieces)):
                found.append(op.where)
    return _once(found)


def readers_of_byte(program: ir.Program, layout: Layout, byte: int) -> list[ir.Location]:
    """Return the lines that read packets of the buffer at a byte of the workspace, and should have reset it to the
    sentinel."""
    offset = (byte - layout.half_offset) % layout.half_bytes
    names = {name for name, one in layout.buffers.items() if one.offset <= offset}
    last = max(names, key=lambda name: layout.buffers[name].offset, default=None)
    reads = [op for op in program.ops() if isinstance(op, ir.ReadPackets) and op.source.buffer.name == last]
    return _once([op.where for op in reads])


def _stores_to_outputs(program: ir.Program) -> Iterator[tuple[ir.Op, ir.Chunk]]:
    for op in program.ops():
        if isinstance(op, ir.Store | ir.Put | ir.PortPut) and op.target.buffer.space is ir.Space.OUTPUT:
            yield op, op.target


def _receiver(op: ir.Op, sender: int, world: int) -> int:
    return op.peer.on(sender, world) if isinstance(op, ir.Put | ir.PortPut) else sender


def _once(lines: list[ir.Location]) -> list[ir.Location]:
    return list(dict.fromkeys(lines))
