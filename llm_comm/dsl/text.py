"""A program as text: what its tracing has made of it."""

from __future__ import annotations

from collections.abc import Iterator

from llm_comm.dsl import ir
from llm_comm.dsl.ranks import Rank
from llm_comm.runtime.comparison import digest_of


def describe(program: ir.Program) -> str:
    """The buffers and operations of a program, one a line.

    ``%3`` is a value, ``rank`` the rank that runs the line, ``behind 1`` in a loop that the line is a piece behind.
    """
    return "\n".join(_lines(program))


def digest(program: ir.Program) -> str:
    """Digest of a program's operations, for comparison between ranks. The path of its file is left out: it may differ
    between ranks."""
    head, _, *lines = describe(program).splitlines()
    content = "\n".join((head, *lines, f"{program.instances} instances, {program.semaphores} semaphores"))
    return digest_of(content)


def describe_op(op: ir.Op) -> str:
    """An operation, without who runs it."""
    if isinstance(op, ir.Load):
        return f"{op.result} = load {op.source}"
    if isinstance(op, ir.Get):
        return f"{op.result} = get {op.source} of {_peer(op.peer)}"
    if isinstance(op, ir.ReadPackets):
        return f"{op.result} = read_packets {op.source}"
    if isinstance(op, ir.Sum):
        return f"{op.result} = sum {', '.join(f'{value} of {_peer(rank)}' for rank, value in op.operands)}"
    if isinstance(op, ir.Store):
        return f"store {op.value} to {op.target}"
    if isinstance(op, ir.Put):
        return f"put {op.value} to {op.target} of {_peer(op.peer)}"
    if isinstance(op, ir.PutPackets):
        return f"put_packets {op.value} to {op.target} of {_peer(op.peer)}"
    if isinstance(op, ir.PortPut):
        return f"port_put {op.source} to {op.target} of {_peer(op.peer)}"
    if isinstance(op, ir.Flush):
        return f"flush to {_peer(op.peer)}"
    assert isinstance(op, ir.Signal | ir.Wait)
    port = " through the port" if op.through_port else ""
    if isinstance(op, ir.Signal):
        return f"signal {_peer(op.peer)}, semaphore {op.semaphore}{port}"
    return f"wait for {_peer(op.peer)}, semaphore {op.semaphore}{port}"


def _lines(program: ir.Program) -> Iterator[str]:
    root = f", root {program.root}" if program.operation is ir.Operation.BROADCAST else ""
    yield f"program {program.name}: {program.operation.value} in a world of {program.world}{root}"
    yield f"  {program.where.file}:{program.where.line}"
    for buffer in program.buffers:
        yield f"  {_buffer(buffer)}"
    for group in program.groups:
        yield f"group {group.name}:"
        for step in group.steps:
            if isinstance(step, ir.Loop):
                yield "  loop over pieces:"
                yield from (f"    {_op(op)}" for op in step.body)
            else:
                yield f"  {_op(step)}"


def _buffer(buffer: ir.Buffer) -> str:
    kind = "" if buffer.name == buffer.space.value else f"{buffer.space.value}, "
    turns = f", {buffer.turns} turns" if buffer.turns > 1 else ""
    symmetric = ", symmetric" if buffer.is_symmetric and buffer.space.is_tensor else ""
    chunks = "1 chunk" if buffer.chunks == 1 else f"{buffer.chunks} chunks"
    return f"{buffer.name}: {kind}{chunks}, each 1/{buffer.parts} of the message{turns}{symmetric}"


def _op(op: ir.Op) -> str:
    only = "" if op.only is None else f"only {', '.join(map(str, sorted(op.only)))}: "
    behind = f"behind {op.lag}: " if op.lag else ""
    return f"{behind}{only}{describe_op(op)}"


def _peer(rank: Rank) -> str:
    return f"rank {rank}" if str(rank).isdigit() else str(rank)
