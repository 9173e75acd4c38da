"""Analysis of a program for its kernel: in-place operation, and senders and readers of packets."""

from __future__ import annotations

from llm_comm.dsl import ir
from llm_comm.dsl.compiler.runs import DataRun, GroupRuns, uses_ports
from llm_comm.dsl.ir import Absolute, Rank, Relative


def works_in_place(program: ir.Program, groups: tuple[GroupRuns, ...]) -> bool:
    """Return whether output and input may be one tensor: each element is loaded before its place is overwritten."""
    operation = program.operation
    is_parted = operation.has_parted_input or operation.has_parted_output
    return not is_parted and _loads_before_it_stores(program, groups)


def works_in_part(program: ir.Program, groups: tuple[GroupRuns, ...]) -> bool:
    """Return whether, for an operation with shards, input or output may be this rank's shard of the other tensor.

    A line of one tensor is then a line of the other.
    """
    operation = program.operation
    return operation.has_parted_input != operation.has_parted_output and _loads_before_it_stores(program, groups)


def _loads_before_it_stores(program: ir.Program, groups: tuple[GroupRuns, ...]) -> bool:
    """Return whether each line is loaded before its place is overwritten.

    Within a run, a thread loads a batch of lines before it stores that batch, and no other thread has these lines. The
    remaining condition is between runs: a piece must not reach a run that loads the input after a run that stores to
    the output. Peers, other groups and proxies keep no such order.
    """
    if len(groups) > 1 or uses_ports(groups):
        return False
    tensors = [buffer for buffer in program.buffers if buffer.space.is_tensor]
    if any(buffer.is_symmetric for buffer in tensors):
        return False
    if len({buffer.parts for buffer in tensors}) > 1:
        return False  # lines of the tensors do not coincide
    # Time at which a piece reaches a run: number of the step, lag in iterations, number of the run.
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
    """Return the rank to name in an error if packets do not arrive: the sender to that chunk.

    If the sender differs by rank and is neither one Relative nor one Absolute rank, return rank + 1.
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
    """Return how many operations read packets of that chunk, on the rank with the most."""
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
