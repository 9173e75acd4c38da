"""Trial: the concrete operations of each group of each rank, for one number of pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from llm_comm.dsl import ir
from llm_comm.dsl.errors import Fault, ProgramError
from llm_comm.dsl.ir import Buffer, Chunk, Location, Program, Space

#: Copies of each workspace buffer. Consecutive calls alternate between them.
COPIES = 2


class Address(NamedTuple):
    """Memory of a rank for a piece of a chunk. ``copy``: copy of the workspace; 0 for tensors."""

    rank: int
    buffer: str
    chunk: int
    slot: int
    copy: int

    def __str__(self) -> str:
        return f"{self.buffer}[{self.chunk}]"


@dataclass(frozen=True)
class Act:
    """One execution of an operation by a rank.

    Attributes:
        op: Operation.
        pieces: Pieces that it processes; outside of loops, all.
        loop: Number of the loop in its group; 0 outside of loops.
    """

    op: ir.Op
    pieces: tuple[int, ...]
    loop: int


class Trial:
    """Concrete execution to check a program with.

    Args:
        program: Program to check.
        pieces: Number of pieces of each chunk in loops.
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
            for iteration in range(self.pieces + lag):
                for op in step.body:
                    if op.runs_on(rank) and 0 <= iteration - op.lag < self.pieces:
                        yield Act(op, (iteration - op.lag,), loop=number)

    def addresses(self, act: Act, runs: int, owner: int, chunk: Chunk, call: int) -> list[tuple[int, Address]]:
        """Return (piece, address) of a chunk of rank ``owner`` for ``act`` as run by rank ``runs``."""
        buffer = chunk.buffer
        index = chunk.number_on(runs, self.program.world)
        if not 0 <= index < buffer.chunks:
            raise ProgramError(
                Fault.MISUSE,
                f"{chunk} on rank {runs} is chunk {index}, but {buffer.name} has chunks 0 to {buffer.chunks - 1}",
                act.op.where,
            )
        in_stages = act.loop > 0 and is_workspace(buffer)
        copy = call % COPIES if is_workspace(buffer) else 0
        return [
            (piece, Address(owner, buffer.name, index, piece % buffer.stages if in_stages else piece, copy))
            for piece in act.pieces
        ]

    def tensor_addresses(self, space: Space, rank: int) -> Iterator[tuple[int, int, Address]]:
        """Yield (chunk, piece, address) for all of a rank's input or output."""
        for buffer in self.program.buffers:
            if buffer.space is space:
                for index in range(buffer.chunks):
                    for piece in range(self.pieces):
                        yield index, piece, Address(rank, buffer.name, index, piece, 0)


def trials(program: Program) -> Iterator[Trial]:
    """Yield trials with numbers of pieces that together represent all numbers.

    The stages of buffers wrap around twice, and lags are both longer and shorter than the number of pieces. If one loop
    follows another, the second finds the stages of the first in every position.
    """
    loops = loops_of(program)
    numbers = {1}
    if loops:
        stages = max(buffer.stages for buffer in program.buffers)
        lag = max(op.lag for loop in loops for op in loop.body)
        most = 2 * stages + lag + 1
        numbers = {1, 2, 3, most} if len(loops) == 1 else {1, 2, 3, *range(most, most + stages)}
    for pieces in sorted(numbers):
        yield Trial(program, pieces)


def loops_of(program: Program) -> list[ir.Loop]:
    """Return the loops of all groups of a program."""
    return [step for group in program.groups for step in group.steps if isinstance(step, ir.Loop)]


def is_workspace(buffer: Buffer) -> bool:
    """Return whether a buffer is in the workspace, not a tensor of the caller."""
    return not buffer.space.is_tensor


def at(where: Location) -> str:
    """Format a line for a message about another line."""
    return f"{where.file}:{where.line}"
