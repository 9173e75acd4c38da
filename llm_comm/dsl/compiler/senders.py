"""Who sends the packets that a program reads, and who reads them."""

from __future__ import annotations

from llm_comm.dsl import ir
from llm_comm.dsl.ranks import Absolute, Rank, Relative


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
            if _index(op.target, sender, world) == _index(read.source, receiver, world):
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
            and _index(op.source, rank, world) == _index(read.source, rank, world)
            for op in reads
        )
        for rank in _running(read, world)
    )


def _running(op: ir.Op, world: int) -> list[int]:
    return [rank for rank in range(world) if op.only is None or rank in op.only]


def _index(chunk: ir.Chunk, rank: int, world: int) -> int:
    return chunk.index if isinstance(chunk.index, int) else chunk.index.on(rank, world)
