"""Which lines of a program a failure of a schedule is about."""

from __future__ import annotations

from collections.abc import Iterator

from llm_comm.dsl import ir
from llm_comm.dsl.compiler.layout import LINE_BYTES, Layout, chunk_lines, outer_parts
from llm_comm.dsl.compiler.senders import sender_of
from llm_comm.dsl.ranks import Rank
from llm_comm.dsl.schedules.plan import ELEMENT_BYTES


def waits_for(program: ir.Program, rank: int, peer: int) -> list[ir.Location]:
    """Lines in which a rank waits for a peer."""
    world = program.world
    found = []
    for op in program.ops():
        if not _runs_on(op, rank):
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
    """Lines that write an element of a rank's output."""
    of_part = part_bytes // ELEMENT_BYTES
    part, line = element // of_part, element % of_part * ELEMENT_BYTES // LINE_BYTES
    found = []
    for op, chunk in _stores_to_outputs(program):
        buffer, index = chunk.buffer, chunk.index
        pieces = buffer.parts // outer_parts(program.operation, program.world)
        for sender in range(program.world):
            if not _runs_on(op, sender) or _receiver(op, sender, program.world) != rank:
                continue
            number = index if isinstance(index, int) else index.on(sender, program.world)
            at = (0, number) if pieces == buffer.chunks else divmod(number, pieces)
            if at == (part, line // chunk_lines(part_bytes, pieces)):
                found.append(op.where)
    return _once(found)


def readers_of_byte(program: ir.Program, layout: Layout, byte: int) -> list[ir.Location]:
    """Lines that read packets, and arm them again, of the buffer that has a byte of the workspace."""
    offset = (byte - layout.half_offset) % layout.half_bytes
    names = {name for name, place in layout.places.items() if place.offset <= offset}
    last = max(names, key=lambda name: layout.places[name].offset, default=None)
    reads = [op for op in program.ops() if isinstance(op, ir.ReadPackets) and op.source.buffer.name == last]
    return _once([op.where for op in reads])


def _stores_to_outputs(program: ir.Program) -> Iterator[tuple[ir.Op, ir.Chunk]]:
    for op in program.ops():
        if isinstance(op, ir.Store | ir.Put | ir.PortPut) and op.target.buffer.space is ir.Space.OUTPUT:
            yield op, op.target


def _receiver(op: ir.Op, sender: int, world: int) -> int:
    return op.peer.on(sender, world) if isinstance(op, ir.Put | ir.PortPut) else sender


def _runs_on(op: ir.Op, rank: int) -> bool:
    return op.only is None or rank in op.only


def _once(lines: list[ir.Location]) -> list[ir.Location]:
    return list(dict.fromkeys(lines))
