"""Runs: a program's steps, cut at the points where a block must synchronize.

Within a run, a thread carries each of its lines through all operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llm_comm.dsl import ir
from llm_comm.dsl.errors import CompileError

#: Operations that threads of a block perform on the data of chunks.
DataOp = ir.Load | ir.Get | ir.ReadPackets | ir.Sum | ir.Store | ir.Put | ir.PutPackets


@dataclass(frozen=True)
class DataRun:
    """Consecutive operations on chunks of one size and on the same piece."""

    ops: tuple[DataOp, ...]
    parts: int

    @property
    def only(self) -> frozenset[int] | None:
        """Ranks that run all operations of the run; None if all ranks run some."""
        only = self.ops[0].only
        return only if all(op.only == only for op in self.ops) else None

    @property
    def lag(self) -> int:
        """Lag of the run in iterations, equal for all of its operations."""
        return self.ops[0].lag


@dataclass(frozen=True)
class SignalRun:
    """Signals between two barriers of the block, each sent by its own thread."""

    ops: tuple[ir.Signal, ...]


@dataclass(frozen=True)
class WaitRun:
    """Waits before a barrier of the block, each performed by its own thread."""

    ops: tuple[ir.Wait, ...]


#: Operations that a proxy performs, or that order its work.
PortOp = ir.PortPut | ir.Signal | ir.Wait | ir.Flush


@dataclass(frozen=True)
class PortRun:
    """Port operations between two barriers of the block, performed in order by one thread."""

    ops: tuple[PortOp, ...]


Run = DataRun | SignalRun | WaitRun | PortRun


@dataclass(frozen=True)
class LoopRuns:
    """Runs of a loop's body."""

    runs: tuple[Run, ...]
    parts: int

    @property
    def lag(self) -> int:
        """Largest lag of the operations."""
        return max(op.lag for run in self.runs for op in run.ops)


@dataclass(frozen=True)
class GroupRuns:
    """Steps of a group of blocks."""

    name: str
    steps: tuple[Run | LoopRuns, ...]

    def runs(self) -> Iterator[Run]:
        """Yield all runs, including those of loops."""
        for step in self.steps:
            yield from step.runs if isinstance(step, LoopRuns) else (step,)


#: Maximum signals or waits of one run, a thread for each.
MAX_TALKERS = 8


def runs_of(program: ir.Program) -> tuple[GroupRuns, ...]:
    """Cut the groups of a program into runs.

    Raises:
        CompileError: A value would have to stay in a register across a synchronization. Also for a loop without chunks
            or with chunks of several sizes, and for two groups that share an end of a semaphore.
    """
    check_owners(program)
    groups = []
    for group in program.groups:
        steps: list[Run | LoopRuns] = []
        straight: list[ir.Op] = []
        for step in group.steps:
            if isinstance(step, ir.Loop):
                steps += _cut_by_ranks(_cut(straight))
                straight = []
                steps.append(_loop(step))
            else:
                straight.append(step)
        steps += _cut_by_ranks(_cut(straight))
        groups.append(GroupRuns(group.name, tuple(steps)))
    return tuple(_with_values(group) for group in groups)


def _loop(loop: ir.Loop) -> LoopRuns:
    runs = _cut(loop.body)
    sizes = {run.parts for run in runs if isinstance(run, DataRun)}
    sizes |= {op.source.buffer.parts for run in runs for op in run.ops if isinstance(op, ir.PortPut)}
    if len(sizes) > 1:
        raise CompileError(
            loop.where, f"a loop has chunks of several sizes (parts {sorted(sizes)}); cut all its buffers alike"
        )
    if not sizes:
        raise CompileError(loop.where, "a loop moves no data, so nothing says how many pieces it has")
    return LoopRuns(tuple(runs), sizes.pop())


def _cut(ops: Sequence[ir.Op]) -> list[Run]:
    runs: list[Run] = []
    sizes: dict[ir.Value, int] = {}
    data: list[tuple[DataOp, int]] = []

    def end_data() -> None:
        if data:
            runs.append(DataRun(tuple(op for op, _ in data), data[0][1]))
            data.clear()

    for op in ops:
        if isinstance(op, ir.PortPut | ir.Flush) or (isinstance(op, ir.Signal | ir.Wait) and op.through_port):
            end_data()
            last = runs[-1] if runs else None
            if isinstance(last, PortRun):
                runs[-1] = PortRun((*last.ops, op))
            else:
                runs.append(PortRun((op,)))
        elif isinstance(op, ir.Signal):
            end_data()
            last = runs[-1] if runs else None
            if isinstance(last, SignalRun) and _joins(last.ops, op):
                runs[-1] = SignalRun((*last.ops, op))
            else:
                runs.append(SignalRun((op,)))
        elif isinstance(op, ir.Wait):
            end_data()
            last = runs[-1] if runs else None
            if isinstance(last, WaitRun) and _joins(last.ops, op):
                runs[-1] = WaitRun((*last.ops, op))
            else:
                runs.append(WaitRun((op,)))
        else:
            assert isinstance(op, DataOp)
            parts = _parts(op, sizes)
            if data and (data[0][1] != parts or data[0][0].lag != op.lag):
                end_data()
            data.append((op, parts))
    end_data()
    return runs


def _cut_by_ranks(runs: Sequence[Run]) -> list[Run]:
    """Cut data runs where the set of ranks changes, so that a rank skips foreign operations at once."""
    cut: list[Run] = []
    for run in runs:
        if not isinstance(run, DataRun):
            cut.append(run)
            continue
        begin = 0
        for i in range(1, len(run.ops)):
            before, behind = run.ops[begin:i], run.ops[i:]
            if before[-1].only != behind[0].only and not _takes_from(before, behind):
                cut.append(DataRun(before, run.parts))
                begin = i
        cut.append(DataRun(run.ops[begin:], run.parts))
    return cut


def _takes_from(before: Sequence[DataOp], behind: Sequence[DataOp]) -> bool:
    """Return whether the second part uses values of the first. Loads of the input are not counted: they can be
    repeated."""
    made = {made_by(op) for op in before if not isinstance(op, ir.Load) or op.source.buffer.space is not ir.Space.INPUT}
    return any(value in made for op in behind for value in values_read(op))


def _joins(ops: Sequence[ir.Signal | ir.Wait], op: ir.Signal | ir.Wait) -> bool:
    """Return whether another thread may perform ``op`` in parallel with ``ops``.

    Not for signals of one semaphore to one peer, which are counted one by one. A relative and an absolute rank may be
    equal.
    """
    return len(ops) < MAX_TALKERS and all(
        other.semaphore != op.semaphore or (type(other.peer) is type(op.peer) and other.peer != op.peer)
        for other in ops
    )


def _parts(op: DataOp, sizes: dict[ir.Value, int]) -> int:
    """Return the chunk size of an operation, as parts of the message."""
    found = {sizes[value] for value in values_read(op) if value in sizes}
    chunk = chunk_of(op)
    if chunk is not None:
        found.add(chunk.buffer.parts)
    if len(found) != 1:
        raise CompileError(op.where, f"the operation has chunks of several sizes (parts {sorted(found)})")
    parts = found.pop()
    if isinstance(op, ir.Load | ir.Get | ir.ReadPackets | ir.Sum):
        sizes[op.result] = parts
    return parts


def blocks_synchronize(groups: Sequence[GroupRuns]) -> bool:
    """Return whether the threads of a block must synchronize: the program has loops, signals, waits or proxy copies."""
    return any(not isinstance(step, DataRun) for group in groups for step in group.steps)


def uses_ports(groups: Sequence[GroupRuns]) -> bool:
    """Return whether a proxy copies parts of chunks. A block's share of each chunk must then be contiguous."""
    return any(isinstance(run, PortRun) for group in groups for run in group.runs())


def chunk_of(op: DataOp) -> ir.Chunk | None:
    """Return the chunk that an operation reads or writes; None for a sum."""
    if isinstance(op, ir.Load | ir.Get | ir.ReadPackets):
        return op.source
    if isinstance(op, ir.Store | ir.Put | ir.PutPackets):
        return op.target
    return None


def values_read(op: DataOp) -> tuple[ir.Value, ...]:
    """Return the values that an operation uses."""
    if isinstance(op, ir.Sum):
        return tuple(value for _, value in op.operands)
    if isinstance(op, ir.Store | ir.Put | ir.PutPackets):
        return (op.value,)
    return ()


def made_by(op: DataOp) -> ir.Value | None:
    """Return the value that an operation defines, or None."""
    return op.result if isinstance(op, ir.Load | ir.Get | ir.ReadPackets | ir.Sum) else None


def _with_values(group: GroupRuns) -> GroupRuns:
    """Add repeated loads, so that each value is defined in the run, or in the loop, that uses it. Only the input can be
    loaded again."""
    made = {
        made_by(op): (op, step)
        for step in group.steps
        for run in (step.runs if isinstance(step, LoopRuns) else (step,))
        if isinstance(run, DataRun)
        for op in run.ops
    }

    def complete(run: Run, step: Run | LoopRuns) -> Run:
        if not isinstance(run, DataRun):
            return run
        own = {made_by(op) for op in run.ops}
        again: dict[ir.Value, ir.Load] = {}
        for op in run.ops:
            for value in values_read(op):
                maker, where = made[value]
                is_carried = isinstance(step, LoopRuns) and where is step
                if value in own or value in again or is_carried:
                    continue
                if not isinstance(maker, ir.Load) or maker.source.buffer.space is not ir.Space.INPUT:
                    raise CompileError(
                        op.where,
                        f"the value {value}, made by `{maker.where}`, is used behind a signal or a wait, where no "
                        "register holds it: store it to scratch and load it again",
                    )
                again[value] = ir.Load(op.where, maker.only, run.lag, value, maker.source)
        return DataRun((*again.values(), *run.ops), run.parts)

    steps: list[Run | LoopRuns] = []
    for step in group.steps:
        if isinstance(step, LoopRuns):
            steps.append(LoopRuns(tuple(complete(run, step) for run in step.runs), step.parts))
        else:
            steps.append(complete(step, step))
    return GroupRuns(group.name, tuple(steps))


def carried_values(loop: LoopRuns) -> dict[ir.Value, int]:
    """Return the values that pass between runs of a loop, with the number of the run that defines each."""
    makers = {made_by(op): i for i, run in enumerate(loop.runs) if isinstance(run, DataRun) for op in run.ops}
    return {
        value: makers[value]
        for i, run in enumerate(loop.runs)
        if isinstance(run, DataRun)
        for op in run.ops
        for value in values_read(op)
        if makers[value] != i
    }


def check_owners(program: ir.Program) -> None:
    """Raise an error if two groups of a rank use the same end of a semaphore.

    Raises:
        CompileError: At the first such line of the second group.
    """
    owners: dict[tuple[type[ir.Op], bool, int, int, int], str] = {}
    for group in program.groups:
        for op in group.ops():
            if not isinstance(op, ir.Signal | ir.Wait):
                continue
            for rank in range(program.world) if op.only is None else sorted(op.only):
                end = (type(op), op.through_port, op.semaphore, rank, op.peer.on(rank, program.world))
                owner = owners.setdefault(end, group.name)
                if owner != group.name:
                    raise CompileError(
                        op.where,
                        f"groups {owner!r} and {group.name!r} of rank {rank} use semaphore {op.semaphore} with "
                        f"rank {end[-1]}; signals are counted by each group: give each a semaphore of its own",
                    )
