"""What a program of the DSL describes: a list of operations that every rank runs, for a certain world.

The unit is a *chunk*: a buffer is cut into equal chunks, of which the last may be shorter, or empty. Every operation on
data treats all elements of its chunks alike, element by element. So a compiler may have a thread carry its elements
through several operations, and in a loop an operation means the same piece of each of its chunks.

Values are chunks on their way, in registers: a value has one definition, and no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Operation(Enum):
    """What a program computes, and how many chunks its buffers have for a world."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"

    @property
    def has_parted_input(self) -> bool:
        """Whether the input has a part for each rank."""
        return self in (Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL)

    @property
    def has_parted_output(self) -> bool:
        """Whether the output has a part of each rank."""
        return self in (Operation.ALL_GATHER, Operation.ALL_TO_ALL)

    @property
    def adds_up(self) -> bool:
        """Whether results are sums; else they are bytes of the inputs."""
        return self in (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER)


class Space(Enum):
    """Where a buffer lies."""

    INPUT = "input"  # the caller's tensor, which is only read
    OUTPUT = "output"  # the caller's tensor
    SCRATCH = "scratch"  # of the workspace, plain memory: what is put there is announced by a signal
    PACKETS = "packets"  # of the workspace, packets: data carries its own readiness (LL)

    @property
    def is_tensor(self) -> bool:
        """Whether it is the caller's; else it is of the workspace."""
        return self in (Space.INPUT, Space.OUTPUT)


@dataclass(frozen=True)
class Location:
    """A line of the user's program."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"

    def without_directory(self) -> str:
        """For what is shown to others, who have the file elsewhere."""
        return f"{Path(self.file).name}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Buffer:
    """A buffer that each rank has.

    Attributes:
        name: As the program prints it; unique.
        chunks: How many it is cut into.
        parts: For how many of its chunks the message of the operation is cut: of all buffers those with the same number
            have chunks of one size. An all-reduce in ``world`` slices has 8 in a world of 8.
        turns: Of scratch in a loop: pieces that each chunk holds in turn; 1 outside of loops.
        is_symmetric: Peers may read and write it: it lies in symmetric memory. So do all buffers of the workspace.
    """

    name: str
    space: Space
    chunks: int
    parts: int
    turns: int = 1
    is_symmetric: bool = False


@dataclass(frozen=True)
class Chunk:
    """A chunk of a buffer. ``index``: the number of a chunk, or the rank whose number it is."""

    buffer: Buffer
    index: Rank | int

    def number_on(self, rank: int, world: int) -> int:
        """The number of the chunk where ``rank`` runs the program."""
        return self.index if isinstance(self.index, int) else self.index.on(rank, world)

    def __str__(self) -> str:
        return f"{self.buffer.name}[{self.index}]"


@dataclass(frozen=True)
class Value:
    """What an operation has made of chunks; ``number`` is unique in a program."""

    number: int

    def __str__(self) -> str:
        return f"%{self.number}"


@dataclass(frozen=True)
class Op:
    """An operation. ``only``: the ranks that run it, None for all. ``lag``: in a loop, how many pieces it is behind: at
    turn t it treats piece t - lag, and nothing where there is no such piece."""

    where: Location
    only: frozenset[int] | None
    lag: int

    def runs_on(self, rank: int) -> bool:
        """Whether a rank runs it."""
        return self.only is None or rank in self.only


@dataclass(frozen=True)
class Load(Op):
    """Of a chunk of this rank."""

    result: Value
    source: Chunk


@dataclass(frozen=True)
class Get(Op):
    """Of a chunk of a peer's plain memory."""

    result: Value
    peer: Rank
    source: Chunk


@dataclass(frozen=True)
class ReadPackets(Op):
    """Waits for a chunk of packets in this rank's memory, and arms it again."""

    result: Value
    source: Chunk


@dataclass(frozen=True)
class Sum(Op):
    """In fp32 and in the order of the ranks that ``operands`` are of, rounded once to the type of the message."""

    result: Value
    operands: tuple[tuple[Rank, Value], ...]


@dataclass(frozen=True)
class Store(Op):
    """To a chunk of this rank."""

    value: Value
    target: Chunk


@dataclass(frozen=True)
class Put(Op):
    """To a chunk of a peer's plain memory, by stores of this rank's threads."""

    value: Value
    peer: Rank
    target: Chunk


@dataclass(frozen=True)
class PutPackets(Op):
    """To a chunk of packets of a peer."""

    value: Value
    peer: Rank
    target: Chunk


@dataclass(frozen=True)
class PortPut(Op):
    """Has the proxy copy a chunk of this rank's memory to a chunk of a peer, later."""

    source: Chunk
    peer: Rank
    target: Chunk


@dataclass(frozen=True)
class Signal(Op):
    """Adds one to a semaphore of a peer, behind what this rank has put there before: by stores, or, through a port, by
    the proxy."""

    peer: Rank
    semaphore: int
    through_port: bool


@dataclass(frozen=True)
class Wait(Op):
    """Waits for one more signal of a peer."""

    peer: Rank
    semaphore: int
    through_port: bool


@dataclass(frozen=True)
class Flush(Op):
    """Waits until what the proxy has been asked to put to a peer has left its source."""

    peer: Rank


@dataclass(frozen=True)
class Loop:
    """Over the pieces of all chunks, one after the other: its operations run for turn 0, 1, ... until the one that lags
    most has treated the last piece; in each turn in the order of the program."""

    where: Location
    body: tuple[Op, ...]


@dataclass(frozen=True)
class Group:
    """What a group of thread blocks runs, in this order. Groups run side by side."""

    name: str
    steps: tuple[Op | Loop, ...]

    def ops(self) -> Iterator[Op]:
        """All operations, those of loops too."""
        for step in self.steps:
            yield from step.body if isinstance(step, Loop) else (step,)


@dataclass(frozen=True)
class Program:
    """For one world.

    Attributes:
        instances: Into how many equal shares each chunk is cut, each of which a block (of each group) treats by itself.
        semaphores: Of each pair of ranks: of memory channels, and of port channels.
        root: Of a broadcast.
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
        """Whether each sum of a correct program is of all ranks at once: then it is made in their order and rounded
        once, as the library's own."""
        return all(len(op.operands) == self.world for op in self.ops() if isinstance(op, Sum))

    def ops(self) -> Iterator[Op]:
        """All operations, those of loops too."""
        for group in self.groups:
            yield from group.ops()


@dataclass(frozen=True)
class Relative:
    """The rank ``(rank + offset) % world`` for the rank that runs the program. Relative(0) is that rank itself.

    ``+`` and ``-`` of a whole number count on, around the world.
    """

    offset: int

    def on(self, rank: int, world: int) -> int:
        return (rank + self.offset) % world

    def __add__(self, steps: int) -> Relative:
        return Relative(self.offset + steps)

    def __sub__(self, steps: int) -> Relative:
        return Relative(self.offset - steps)

    def __str__(self) -> str:
        return "rank" if self.offset == 0 else f"rank{self.offset:+}"


@dataclass(frozen=True)
class Absolute:
    """The same rank, whoever runs the program."""

    rank: int

    def on(self, rank: int, world: int) -> int:
        return self.rank

    def __str__(self) -> str:
        return str(self.rank)


#: A rank of a program for a certain world.
Rank = Relative | Absolute
