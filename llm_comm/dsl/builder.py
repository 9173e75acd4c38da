"""Tracing of DSL programs: each method call of a ``Builder`` adds one operation.

Errors of a single operation are raised here, at the user's line. Errors between operations, such as races, are found by
``dsl.check``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from llm_comm.dsl import ir
from llm_comm.dsl.buffers import Chunks, Tensor
from llm_comm.dsl.errors import Fault, ProgramError, users_line
from llm_comm.dsl.ir import Absolute, Chunk, Location, Operation, Rank, Relative, Space, Value
from llm_comm.registry import why_not_a_name


@dataclass(frozen=True)
class _Made:
    """Properties of a value when it was made.

    Attributes:
        parts: Size of its chunk, as 1/parts of the message.
        only: Ranks that have the value; None: all.
        group: Group of blocks that has it.
        loop: Number of the loop it was made in; 0: outside of loops.
        lag: Argument of ``behind`` at that line.
        where: Line that made it.
    """

    parts: int
    only: frozenset[int] | None
    group: str
    loop: int
    lag: int
    where: Location


class Builder:
    """Recorder of a program: the argument of the user's function.

    Args:
        operation: Operation that the program implements.
        world: Number of ranks.
        root: Root of a broadcast.

    Attributes:
        world: Number of ranks.
        rank: Rank that runs the program.
        peers: All other ranks, beginning with rank + 1.
        ranks: All ranks, by number.
        root: Root of a broadcast.
        input: Input tensor of the caller, read-only.
        output: Output tensor of the caller.
    """

    def __init__(self, operation: Operation, world: int, root: int) -> None:
        self.world = world
        self.rank = Relative(0)
        self.peers = [Relative(offset) for offset in range(1, world)]
        self.ranks = [Absolute(rank) for rank in range(world)]
        self.root = Absolute(root)
        parted_input, parted_output = operation.has_parted_input, operation.has_parted_output
        self.input = Tensor(
            Space.INPUT, world if parted_output > parted_input else 1, world if parted_input else 1, self._chunks_of
        )
        self.output = Tensor(
            Space.OUTPUT, world if parted_input > parted_output else 1, world if parted_output else 1, self._chunks_of
        )
        self._all_chunks: list[Chunks] = []
        self._names: set[str] = set()
        self._steps: dict[str, list[ir.Op | ir.Loop]] = {}
        self._group: str | None = None
        self._only: frozenset[int] | None = None
        self._body: list[ir.Op] | None = None
        self._loops = 0
        self._lag = 0
        self._made: list[_Made] = []
        self._semaphores = 1
        self._used_in_loop: dict[str, bool] = {}
        self._parts_in_loops: tuple[int, Location] | None = None

    # ---- Memory of the workspace ---------------------------------------------------------------------------------

    def scratch(self, count: int, *, like: Chunks, stages: int = 1) -> Chunks:
        """Allocate plain workspace memory on every rank. Peers may access it.

        Args:
            count: Number of chunks.
            like: Buffer with chunks of the same size.
            stages: In loops: number of pieces that each chunk holds. Piece i uses position i modulo ``stages``.

        Raises:
            ProgramError: A number is not positive.
        """
        return self._workspace(Space.SCRATCH, count, like, stages)

    def packets(self, count: int, *, like: Chunks, stages: int = 1) -> Chunks:
        """Allocate workspace memory for packets, whose data carries its own readiness flag (LL).

        It is accessed by ``put_packets`` and ``read_packets``. Arguments and errors are those of ``scratch``.
        """
        return self._workspace(Space.PACKETS, count, like, stages)

    def _workspace(self, space: Space, count: int, like: Chunks, stages: int) -> Chunks:
        if count < 1 or stages < 1:
            raise _misuse(f"{count} chunk(s) in {stages} stage(s): both are at least 1")
        return self._chunks_of(ir.Buffer("", space, count, like.shape.parts, stages, is_symmetric=True))

    def _chunks_of(self, shape: ir.Buffer) -> Chunks:
        chunks = Chunks(shape, self._take_name, self._running, self.world)
        self._all_chunks.append(chunks)
        return chunks

    def _take_name(self, wanted: str) -> str:
        name, number = wanted, 1
        while name in self._names:
            number += 1
            name = f"{wanted}_{number}"
        self._names.add(name)
        return name

    # ---- Ranks and blocks ----------------------------------------------------------------------------------------

    @contextmanager
    def only(self, *ranks: Rank | int) -> Iterator[None]:
        """Restrict the following operations to some ranks: ``with p.only(p.root): ...``.

        Args:
            ranks: Rank numbers. Nested calls take the intersection.

        Raises:
            ProgramError: A rank does not exist, or no rank is left.
        """
        numbers = {self._absolute(rank) for rank in ranks}
        before = self._only
        only = frozenset(numbers) & self._running()
        if not only:
            raise _misuse("no rank runs what follows: name one at least that runs the lines around it")
        self._only = only
        try:
            yield
        finally:
            self._only = before

    @contextmanager
    def group(self, name: str) -> Iterator[None]:
        """Run the following operations in their own group of thread blocks, concurrently with other groups.

        Groups of a rank are not ordered relative to each other. Using a name again continues that group.

        Raises:
            ProgramError: The call is inside another group or a loop, or the name is not printable.
        """
        why = why_not_a_name(name)
        if why:
            raise _misuse(f"the name of a group {why}")
        if self._group is not None or self._body is not None:
            raise _misuse(f"group {name!r} begins inside of another group or of a loop: end that one first")
        self._group = name
        try:
            yield
        finally:
            self._group = None

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Loop over the pieces of chunks: each iteration processes one piece of each chunk.

        Raises:
            ProgramError: The call is inside another loop.
        """
        where = users_line()
        if self._body is not None:
            raise _misuse("a loop begins inside of another one: pieces are not cut any further")
        self._body = []
        self._loops += 1
        try:
            yield
            if self._body:
                self._add_step(ir.Loop(where, tuple(self._body)))
        finally:
            self._body = None

    @contextmanager
    def behind(self, pieces: int) -> Iterator[None]:
        """In a loop, delay the following operations by ``pieces`` pieces: iteration t processes piece t - ``pieces``.

        The operations thereby process data that earlier iterations have sent.

        Raises:
            ProgramError: Outside of a loop, inside another ``behind``, or ``pieces`` is not positive.
        """
        if self._body is None or self._lag or pieces < 1:
            raise _misuse(f"behind({pieces}): it stands in a loop, in no other `behind`, and is 1 at least")
        self._lag = pieces
        try:
            yield
        finally:
            self._lag = 0

    # ---- Data ----------------------------------------------------------------------------------------------------

    def load(self, source: Chunk) -> Value:
        """Load a chunk of this rank's plain memory."""
        self._use(source, "load", (Space.INPUT, Space.OUTPUT, Space.SCRATCH), peer=None)
        result = self._new_value(source)
        self._add(ir.Load(*self._here(), result, source))
        return result

    def get(self, peer: Rank, source: Chunk) -> Value:
        """Load a chunk of a peer's plain memory: scratch, or a symmetric tensor."""
        self._use(source, "get", (Space.INPUT, Space.OUTPUT, Space.SCRATCH), peer)
        result = self._new_value(source)
        self._add(ir.Get(*self._here(), result, self._peer(peer), source))
        return result

    def read_packets(self, source: Chunk) -> Value:
        """Wait for the packets of a chunk of this rank, read them, and reset the chunk to the sentinel."""
        self._use(source, "read_packets", (Space.PACKETS,), peer=None)
        result = self._new_value(source)
        self._add(ir.ReadPackets(*self._here(), result, source))
        return result

    def sum(self, operands: Mapping[Rank, Value | Chunk]) -> Value:
        """Sum in fp32 in rank order, rounded once.

        Args:
            operands: Values by the rank that each belongs to. Chunks are loaded first.

        Raises:
            ProgramError: There is no operand, chunk sizes differ, or two operands belong to one rank.
        """
        if not operands:
            raise _misuse("a sum of nothing: give an operand at least")
        labelled = [(self._rank(rank), self._value(value)) for rank, value in operands.items()]
        first = self._made[labelled[0][1].number]
        for label, value in labelled:
            made = self._made[value.number]
            if made.parts != first.parts:
                raise _misuse(
                    f"a sum of chunks of different size: the operand of {labelled[0][0]} is 1/{first.parts} of the "
                    f"message, that of {label} 1/{made.parts}: cut them alike"
                )
        for rank in self._running():
            numbers = [label.on(rank, self.world) for label, _ in labelled]
            twice = next((number for number in numbers if numbers.count(number) > 1), None)
            if twice is not None:
                raise _misuse(f"on rank {rank} two operands are labelled with rank {twice}: label each with its own")
        result = self._new_value(labelled[0][1])
        self._add(ir.Sum(*self._here(), result, tuple(labelled)))
        return result

    def store(self, value: Value | Chunk, target: Chunk) -> None:
        """Store to a chunk of this rank's plain memory."""
        self._use(target, "store", (Space.OUTPUT, Space.SCRATCH), peer=None)
        value = self._fitting(value, target)
        self._add(ir.Store(*self._here(), value, target))

    def copy(self, source: Chunk, target: Chunk) -> None:
        """Load a chunk of this rank and store it to another chunk."""
        self.store(self.load(source), target)

    def put(self, value: Value | Chunk, peer: Rank, target: Chunk) -> None:
        """Store to a chunk of a peer's plain memory: scratch, or a symmetric output. A signal must announce it to the
        peer."""
        self._use(target, "put", (Space.OUTPUT, Space.SCRATCH), peer)
        value = self._fitting(value, target)
        self._add(ir.Put(*self._here(), value, self._peer(peer), target))

    def put_packets(self, value: Value | Chunk, peer: Rank, target: Chunk) -> None:
        """Store packets to a chunk of a peer. Packets carry their own readiness flag and need no signal."""
        self._use(target, "put_packets", (Space.PACKETS,), peer)
        value = self._fitting(value, target)
        self._add(ir.PutPackets(*self._here(), value, self._peer(peer), target))

    def port_put(self, source: Chunk, peer: Rank, target: Chunk) -> None:
        """Let the proxy copy a chunk of this rank's plain memory to a peer, asynchronously.

        A signal through the port must announce the copy. The source must not change before ``flush``.
        """
        self._use(source, "port_put", (Space.INPUT, Space.OUTPUT, Space.SCRATCH), peer=None)
        self._use(target, "port_put", (Space.OUTPUT, Space.SCRATCH), peer)
        if source.buffer.parts != target.buffer.parts:
            raise _misuse(_of_two_sizes(f"{source}", source.buffer.parts, target))
        self._add(ir.PortPut(*self._here(), source, self._peer(peer), target))

    # ---- Order ---------------------------------------------------------------------------------------------------

    def signal(self, peer: Rank, *, semaphore: int = 0, through_port: bool = False) -> None:
        """Signal to a peer that all earlier puts of this group have arrived. Through the port: that its proxy's copies
        have."""
        self._take_semaphore(semaphore)
        self._add(ir.Signal(*self._here(), self._peer(peer), semaphore, through_port))

    def wait(self, peer: Rank, *, semaphore: int = 0, through_port: bool = False) -> None:
        """Wait for one more signal of a peer."""
        self._take_semaphore(semaphore)
        self._add(ir.Wait(*self._here(), self._peer(peer), semaphore, through_port))

    def flush(self, peer: Rank) -> None:
        """Wait until the proxy has read the sources of this group's ``port_put`` calls to a peer."""
        self._add(ir.Flush(*self._here(), self._peer(peer)))

    # ---- Result --------------------------------------------------------------------------------------------------

    def finish(self, name: str, operation: Operation, instances: int, where: Location) -> ir.Program:
        """Return the traced program.

        Raises:
            ProgramError: The program has no operation.
        """
        if not self._steps:
            raise ProgramError(Fault.MISUSE, f"program {name!r} has no operation", where)
        return ir.Program(
            name=name,
            operation=operation,
            world=self.world,
            buffers=tuple(chunks.buffer for chunks in self._all_chunks if chunks.buffer is not None),
            groups=tuple(ir.Group(group, tuple(steps)) for group, steps in self._steps.items()),
            instances=instances,
            semaphores=self._semaphores,
            where=where,
            root=self.root.rank,
        )

    # ---- Internals -----------------------------------------------------------------------------------------------

    def _running(self) -> frozenset[int]:
        return frozenset(range(self.world)) if self._only is None else self._only

    def _here(self) -> tuple[Location, frozenset[int] | None, int]:
        return users_line(), self._only, self._lag

    def _add(self, op: ir.Op) -> None:
        if self._body is not None:
            self._body.append(op)
        else:
            self._add_step(op)

    def _add_step(self, step: ir.Op | ir.Loop) -> None:
        self._steps.setdefault(self._group_name(), []).append(step)

    def _group_name(self) -> str:
        return "main" if self._group is None else self._group

    def _loop(self) -> int:
        """Number of the loop being traced; 0 outside of loops."""
        return 0 if self._body is None else self._loops

    def _new_value(self, like: Chunk | Value) -> Value:
        parts = like.buffer.parts if isinstance(like, Chunk) else self._made[like.number].parts
        made = _Made(parts, self._only, self._group_name(), self._loop(), self._lag, users_line())
        self._made.append(made)
        return Value(len(self._made) - 1)

    def _value(self, given: Value | Chunk) -> Value:
        """Return a value usable at this line. A chunk is loaded first."""
        if isinstance(given, Chunk):
            return self.load(given)
        if not isinstance(given, Value) or not 0 <= given.number < len(self._made):
            raise _misuse(f"{given!r} is no value of this program, nor a chunk")
        made = self._made[given.number]
        line = f"{made.where.file}:{made.where.line}"
        lacking = sorted(self._running() - (self._running() if made.only is None else made.only))
        if lacking:
            raise _misuse(f"rank(s) {lacking} have no such value: it is made under another `only`, at {line}")
        if made.group != self._group_name():
            raise _misuse(f"the value belongs to group {made.group!r} ({line}): pass it on through memory and a signal")
        if (made.loop, made.lag) != (self._loop(), self._lag):
            raise _misuse(
                f"the value is made in another loop, or under another `behind`, at {line}: it is another piece. "
                "Keep it in a chunk of scratch"
            )
        return given

    def _fitting(self, given: Value | Chunk, target: Chunk) -> Value:
        value = self._value(given)
        parts = self._made[value.number].parts
        if parts != target.buffer.parts:
            raise _misuse(_of_two_sizes("the value", parts, target))
        return value

    def _use(self, chunk: Chunk, call: str, spaces: tuple[Space, ...], peer: Rank | None) -> None:
        """Raise ProgramError if ``call`` cannot use the chunk. ``peer``: owner of the chunk, None for this rank."""
        if not isinstance(chunk, Chunk) or not any(chunk.buffer is chunks.buffer for chunks in self._all_chunks):
            raise _misuse(f"{call} takes a chunk of a buffer of this program, not {chunk!r}")
        buffer = chunk.buffer
        if buffer.space not in spaces:
            allowed = ", ".join(space.value for space in spaces)
            raise _misuse(f"{call} uses memory of kind {allowed}; {chunk} is of kind {buffer.space.value}")
        if peer is not None and not buffer.is_symmetric:
            raise _misuse(
                f"{chunk} of a peer: the {buffer.name} is not in symmetric memory, so no peer can use it: "
                f"cut it with chunks(..., symmetric=True), or use scratch"
            )
        self._use_stages(buffer)

    def _use_stages(self, buffer: ir.Buffer) -> None:
        in_loop = self._body is not None
        if buffer.stages > 1 and not in_loop:
            raise _misuse(f"{buffer.name} has {buffer.stages} stages, which only a loop uses")
        if not buffer.space.is_tensor and self._used_in_loop.setdefault(buffer.name, in_loop) != in_loop:
            raise _misuse(
                f"{buffer.name} is used both in a loop, where it holds pieces of chunks, and outside, where it holds "
                "whole chunks: take a buffer for each"
            )
        if in_loop:
            if self._parts_in_loops is None:
                self._parts_in_loops = buffer.parts, users_line()
            parts, first = self._parts_in_loops
            if parts != buffer.parts:
                raise _misuse(
                    f"chunks of {buffer.name} are 1/{buffer.parts} of the message, those at {first.file}:{first.line} "
                    f"1/{parts}: all loops of a program are over chunks of one size, so that their pieces are as many"
                )

    def _peer(self, peer: Rank) -> Rank:
        peer = self._rank(peer)
        for rank in sorted(self._running()):
            if peer.on(rank, self.world) == rank:
                raise _misuse(f"{peer} is rank {rank} itself where rank {rank} runs this line: name a peer")
        return peer

    def _rank(self, rank: Rank) -> Rank:
        if isinstance(rank, Relative):
            return Relative(rank.offset % self.world)
        if isinstance(rank, Absolute) and 0 <= rank.rank < self.world:
            return rank
        raise _misuse(f"{rank!r} is no rank of a world of {self.world}: p.rank + 1 or p.ranks[0] is one")

    def _absolute(self, rank: Rank | int) -> int:
        number = rank.rank if isinstance(rank, Absolute) else rank
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < self.world:
            raise _misuse(f"only({rank}): give numbers of ranks, 0 to {self.world - 1}, or p.ranks[number]")
        return number

    def _take_semaphore(self, number: int) -> None:
        if number < 0:
            raise _misuse(f"semaphore {number}: they are numbered from 0")
        self._semaphores = max(self._semaphores, number + 1)


def _misuse(message: str) -> ProgramError:
    return ProgramError(Fault.MISUSE, message, users_line())


def _of_two_sizes(what: str, parts: int, target: Chunk) -> str:
    return (
        f"{what} is 1/{parts} of the message, {target} 1/{target.buffer.parts}: chunks of one size fit each other. "
        "Cut the buffers alike"
    )
