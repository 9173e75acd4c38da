"""A program made concrete: what each group of each rank does, for a certain number of pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from llm_comm.dsl import ir
from llm_comm.dsl.errors import Fault, ProgramError
from llm_comm.dsl.ir import Buffer, Chunk, Location, Program, Space

#: Workspace buffers exist so many times; calls use them in turn.
COPIES = 2


class Place(NamedTuple):
    """Memory of a rank that holds a piece of a chunk. ``copy``: of the workspace; 0 of a tensor."""

    rank: int
    buffer: str
    chunk: int
    slot: int
    copy: int

    def __str__(self) -> str:
        return f"{self.buffer}[{self.chunk}]"


@dataclass(frozen=True)
class Act:
    """An operation as one rank runs it once.

    Attributes:
        op: The operation.
        pieces: That it treats; outside of a loop, all.
        loop: Number of the loop in its group; 0 outside of loops.
    """

    op: ir.Op
    pieces: tuple[int, ...]
    loop: int


class Trial:
    """What is run to check a program.

    Args:
        program: To be checked.
        pieces: In how many pieces loops treat each chunk.
    """

    def __init__(self, program: Program, pieces: int) -> None:
        self.program = program
        self.pieces = pieces
        self.buffers = {buffer.name: buffer for buffer in program.buffers}
        self.has_loops = bool(loops_of(program))
        self.actors = [(rank, group) for rank in range(program.world) for group in range(len(program.groups))]
        self.acts = [tuple(self._acts_of(rank, program.groups[group])) for rank, group in self.actors]

    def _acts_of(self, rank: int, group: ir.Group) -> Iterator[Act]:
        everything = tuple(range(self.pieces))
        for number, step in enumerate(group.steps, start=1):
            if isinstance(step, ir.Op):
                if step.runs_on(rank):
                    yield Act(step, everything, loop=0)
                continue
            lag = max((op.lag for op in step.body), default=0)
            for turn in range(self.pieces + lag):
                for op in step.body:
                    if op.runs_on(rank) and 0 <= turn - op.lag < self.pieces:
                        yield Act(op, (turn - op.lag,), loop=number)

    def places(self, act: Act, runs: int, owner: int, chunk: Chunk, call: int) -> list[tuple[int, Place]]:
        """The pieces that ``act``, run by rank ``runs``, uses of a chunk of rank ``owner``, and where they are."""
        buffer = chunk.buffer
        index = chunk.number_on(runs, self.program.world)
        if not 0 <= index < buffer.chunks:
            raise ProgramError(
                Fault.MISUSE,
                f"{chunk} on rank {runs} is chunk {index}, but {buffer.name} has chunks 0 to {buffer.chunks - 1}",
                act.op.where,
            )
        in_turns = act.loop > 0 and is_workspace(buffer)
        copy = call % COPIES if is_workspace(buffer) else 0
        return [
            (piece, Place(owner, buffer.name, index, piece % buffer.turns if in_turns else piece, copy))
            for piece in act.pieces
        ]

    def tensor_places(self, space: Space, rank: int) -> Iterator[tuple[int, int, Place]]:
        """(chunk, piece, place) of all of a rank's input or output."""
        for buffer in self.program.buffers:
            if buffer.space is space:
                for index in range(buffer.chunks):
                    for piece in range(self.pieces):
                        yield index, piece, Place(rank, buffer.name, index, piece, 0)


def trials(program: Program) -> Iterator[Trial]:
    """Those that tell about all numbers of pieces: the loops' turns are used up twice, and lags are longer and shorter
    than the number of pieces. Where one loop follows another, it finds the turns of the first in every position."""
    loops = loops_of(program)
    numbers = {1}
    if loops:
        turns = max(buffer.turns for buffer in program.buffers)
        lag = max(op.lag for loop in loops for op in loop.body)
        most = 2 * turns + lag + 1
        numbers = {1, 2, 3, most} if len(loops) == 1 else {1, 2, 3, *range(most, most + turns)}
    for pieces in sorted(numbers):
        yield Trial(program, pieces)


def loops_of(program: Program) -> list[ir.Loop]:
    return [step for group in program.groups for step in group.steps if isinstance(step, ir.Loop)]


def is_workspace(buffer: Buffer) -> bool:
    return not buffer.space.is_tensor


def at(where: Location) -> str:
    """A line as messages name it beside the one they point at."""
    return f"{where.file}:{where.line}"
