"""Intermediate representation of a program: the operations of every rank, for one world size.

The unit is a *chunk*: a buffer is cut into equal chunks, of which the last may be shorter or empty. An operation on
data treats all elements of its chunks alike, one by one. A compiler may therefore let a thread carry its elements
through several operations. In a loop, an operation applies to the same piece of each of its chunks.

A value is the content of a chunk in registers. It has one definition and no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Operation(Enum):
    """Operation that a program implements."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"

    @property
    def has_parted_input(self) -> bool:
        """True if the input has a shard for each rank."""
        return self in (Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL)

    @property
    def has_parted_output(self) -> bool:
        """True if the output has a shard from each rank."""
        return self in (Operation.ALL_GATHER, Operation.ALL_TO_ALL)

    @property
    def adds_up(self) -> bool:
        """True if results are sums; false if they are bytes of the inputs."""
        return self in (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER)


class Space(Enum):
    """Location of a buffer."""

    INPUT = "input"  # tensor of the caller, read-only
    OUTPUT = "output"  # tensor of the caller
    SCRATCH = "scratch"  # plain workspace memory: puts are announced by a signal
    PACKETS = "packets"  # workspace memory for packets: data carries its own readiness flag (LL)

    @property
    def is_tensor(self) -> bool:
        """True for a tensor of the caller, false for workspace memory."""
        return self in (Space.INPUT, Space.OUTPUT)


@dataclass(frozen=True)
class Location:
    """Line of the user's program."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"

    def without_directory(self) -> str:
        """Format with the file name only, for readers who have the file in another directory."""
        return f"{Path(self.file).name}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Buffer:
    """Buffer of each rank.

    Attributes:
        name: Unique name.
        space: Location.
        chunks: Number of chunks.
        parts: Number of such chunks in the message of the operation. Buffers with equal ``parts`` have chunks of one
            size. An all-reduce in ``world`` slices has 8 in a world of 8.
        stages: For scratch in a loop: number of pieces that each chunk holds; 1 outside of loops.
        is_symmetric: In symmetric memory, so that peers may access it. True for all workspace buffers.
    """

    name: str
    space: Space
    chunks: int
    parts: int
    stages: int = 1
    is_symmetric: bool = False


@dataclass(frozen=True)
class Chunk:
    """Chunk of a buffer. ``index``: number of the chunk, or the rank with that number."""

    buffer: Buffer
    index: Rank | int

    def number_on(self, rank: int, world: int) -> int:
        """Return the number of the chunk on ``rank``."""
        return self.index if isinstance(self.index, int) else self.index.on(rank, world)

    def __str__(self) -> str:
        return f"{self.buffer.name}[{self.index}]"


@dataclass(frozen=True)
class Value:
    """Result of an operation. ``number`` is unique in a program."""

    number: int

    def __str__(self) -> str:
        return f"%{self.number}"


@dataclass(frozen=True)
class Op:
    """Base class of operations.

    Attributes:
        where: Line of the program.
        only: Ranks that run it; None: all.
        lag: In a loop: at iteration t it processes piece t - lag, and nothing if that piece does not exist.
    """

    where: Location
    only: frozenset[int] | None
    lag: int

    def runs_on(self, rank: int) -> bool:
        """Return whether ``rank`` runs the operation."""
        return self.only is None or rank in self.only


@dataclass(frozen=True)
class Load(Op):
    """Load a chunk of this rank."""

    result: Value
    source: Chunk


@dataclass(frozen=True)
class Get(Op):
    """Load a chunk of a peer's plain memory."""

    result: Value
    peer: Rank
    source: Chunk


@dataclass(frozen=True)
class ReadPackets(Op):
    """Wait for a chunk of packets in this rank's memory, read it, and reset it to the sentinel."""

    result: Value
    source: Chunk


@dataclass(frozen=True)
class Sum(Op):
    """Sum in fp32 in the order of the operands' ranks, rounded once to the dtype of the message."""

    result: Value
    operands: tuple[tuple[Rank, Value], ...]


@dataclass(frozen=True)
class Store(Op):
    """Store to a chunk of this rank."""

    value: Value
    target: Chunk


@dataclass(frozen=True)
class Put(Op):
    """Store to a chunk of a peer's plain memory, by threads of this rank."""

    value: Value
    peer: Rank
    target: Chunk


@dataclass(frozen=True)
class PutPackets(Op):
    """Store to a chunk of packets of a peer."""

    value: Value
    peer: Rank
    target: Chunk


@dataclass(frozen=True)
class PortPut(Op):
    """Let the proxy copy a chunk of this rank to a chunk of a peer, asynchronously."""

    source: Chunk
    peer: Rank
    target: Chunk


@dataclass(frozen=True)
class Signal(Op):
    """Add one to a semaphore of a peer, after this rank's earlier stores have arrived; through a port: after the
    proxy's copies have."""

    peer: Rank
    semaphore: int
    through_port: bool


@dataclass(frozen=True)
class Wait(Op):
    """Wait for one more signal of a peer."""

    peer: Rank
    semaphore: int
    through_port: bool


@dataclass(frozen=True)
class Flush(Op):
    """Wait until the proxy has read the sources of all requested copies to a peer."""

    peer: Rank


@dataclass(frozen=True)
class Loop:
    """Loop over the pieces of all chunks.

    Iterations 0, 1, ... run until the operation with the largest lag has processed the last piece. Within an iteration,
    operations run in the order of the program.
    """

    where: Location
    body: tuple[Op, ...]


@dataclass(frozen=True)
class Group:
    """Steps of a group of thread blocks, in order. Groups run concurrently."""

    name: str
    steps: tuple[Op | Loop, ...]

    def ops(self) -> Iterator[Op]:
        """Yield all operations, including those of loops."""
        for step in self.steps:
            yield from step.body if isinstance(step, Loop) else (step,)


@dataclass(frozen=True)
class Program:
    """Program for one world size.

    Attributes:
        name: Name of the program.
        operation: Operation that it implements.
        world: Number of ranks.
        buffers: Buffers in use.
        groups: Groups of thread blocks.
        instances: Number of equal shares of each chunk. One block of each group processes a share.
        semaphores: Semaphores of each pair of ranks, for memory channels and again for port channels.
        where: Line of the program's function.
        root: Root of a broadcast.
    """

    name: str
    operation: Operation
    world: int
    buffers: tuple[Buffer, ...]
    groups: tuple[Group, ...]
    instances: int
    semaphores: int
    where: Location
    root: int = 0

    @property
    def sums_in_rank_order(self) -> bool:
        """True if each sum has an operand of every rank, so that sums are those of the library: in rank order, rounded
        once."""
        return all(len(op.operands) == self.world for op in self.ops() if isinstance(op, Sum))

    def ops(self) -> Iterator[Op]:
        """Yield all operations, including those of loops."""
        for group in self.groups:
            yield from group.ops()


@dataclass(frozen=True)
class Relative:
    """Rank ``(rank + offset) % world``, relative to the rank that runs the program. Relative(0) is that rank.

    ``+`` and ``-`` with an integer shift it around the world.
    """

    offset: int

    def on(self, rank: int, world: int) -> int:
        """Return the number of this rank in a program that runs on ``rank``."""
        return (rank + self.offset) % world

    def __add__(self, steps: int) -> Relative:
        return Relative(self.offset + steps)

    def __sub__(self, steps: int) -> Relative:
        return Relative(self.offset - steps)

    def __str__(self) -> str:
        return "rank" if self.offset == 0 else f"rank{self.offset:+}"


@dataclass(frozen=True)
class Absolute:
    """Fixed rank, whichever rank runs the program."""

    rank: int

    def on(self, rank: int, world: int) -> int:
        """Return the number of this rank in a program that runs on ``rank``."""
        return self.rank

    def __str__(self) -> str:
        return str(self.rank)


#: Rank in a program for one world.
Rank = Relative | Absolute
