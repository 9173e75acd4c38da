"""Properties of a program that its kernel needs: whether it works in place, who sends packets, and who reads them."""

from __future__ import annotations

from llm_comm.dsl import ir
from llm_comm.dsl.compiler.runs import DataRun, GroupRuns, uses_ports
from llm_comm.dsl.ir import Absolute, Rank, Relative


def works_in_place(program: ir.Program, groups: tuple[GroupRuns, ...]) -> bool:
    """Whether the output may be the input: every element of it is loaded before anything is stored in its place."""
    operation = program.operation
    is_parted = operation.has_parted_input or operation.has_parted_output
    return not is_parted and _loads_before_it_stores(program, groups)


def works_in_part(program: ir.Program, groups: tuple[GroupRuns, ...]) -> bool:
    """The same of a program of parts: of an input that is this rank's part of the output, or an output that is this
    rank's part of the input. A line of the one is a line of the other."""
    operation = program.operation
    return operation.has_parted_input != operation.has_parted_output and _loads_before_it_stores(program, groups)


def _loads_before_it_stores(program: ir.Program, groups: tuple[GroupRuns, ...]) -> bool:
    """Whether a line is loaded before anything is stored in its place.

    In one run a thread loads a batch of lines before it stores that batch, and no other thread has these lines. So what
    counts is that no piece comes to a run that loads the input when it has been in another one that stores to the
    output. Peers, other groups, and proxies keep to no such order.
    """
    if len(groups) > 1 or uses_ports(groups):
        return False
    tensors = [buffer for buffer in program.buffers if buffer.space.is_tensor]
    if any(buffer.is_symmetric for buffer in tensors):
        return False
    if len({buffer.parts for buffer in tensors}) > 1:
        return False  # a line of one is no line of the other
    # When a piece of a chunk gets to a run: the number of the step, turns that it is behind, number of the run.
    loads, stores = [], []
    for number, step in enumerate(groups[0].steps):
        for i, run in enumerate(getattr(step, "runs", (step,))):
            if isinstance(run, DataRun):
                loads += [(number, run.lag, i)] if _loads(run) else []
                stores += [(number, run.lag, i)] if _stores(run) else []
    return not loads or not stores or max(loads) <= min(stores)


def _loads(run: DataRun) -> bool:
    return any(isinstance(op, ir.Load) and op.source.buffer.space is ir.Space.INPUT for op in run.ops)


def _stores(run: DataRun) -> bool:
    return any(isinstance(op, ir.Store) and op.target.buffer.space is ir.Space.OUTPUT for op in run.ops)


def sender_of(program: ir.Program, read: ir.ReadPackets) -> Rank:
    """Whom an error names when packets do not come: the rank whose packets go to that chunk.

    Where it is another one on each rank, and no rule of the IR's ranks says which, it is the rank behind this one.
    """
    world = program.world
    senders: dict[int, int] = {}
    for op in program.ops():
        if not isinstance(op, ir.PutPackets) or op.target.buffer != read.source.buffer:
            continue
        for sender in _running(op, world):
            receiver = op.peer.on(sender, world)
            if op.target.number_on(sender, world) == read.source.number_on(receiver, world):
                senders.setdefault(receiver, sender)
    receivers = [rank for rank in _running(read, world) if rank in senders]
    offsets = {(senders[rank] - rank) % world for rank in receivers}
    if len(offsets) == 1:
        return Relative(offsets.pop())
    numbers = {senders[rank] for rank in receivers}
    return Absolute(numbers.pop()) if len(numbers) == 1 else Relative(1)


def readers_of(program: ir.Program, read: ir.ReadPackets) -> int:
    """How many operations read packets of that chunk, on the rank where they are most."""
    world = program.world
    reads = [op for op in program.ops() if isinstance(op, ir.ReadPackets)]
    return max(
        sum(
            op.source.buffer == read.source.buffer
            and rank in _running(op, world)
            and op.source.number_on(rank, world) == read.source.number_on(rank, world)
            for op in reads
        )
        for rank in _running(read, world)
    )


def _running(op: ir.Op, world: int) -> list[int]:
    return [rank for rank in range(world) if op.runs_on(rank)]
