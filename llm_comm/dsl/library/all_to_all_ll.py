"""All-to-all by packets: for small messages."""

from __future__ import annotations

from llm_comm import dsl


@dsl.program("all_to_all")
def all_to_all_ll(p: dsl.Builder) -> None:
    """Every rank sends each other one a part of its input (LL)."""
    x, y = p.input.chunks(p.world), p.output.chunks(p.world)
    received = p.packets(p.world, like=x)  # by the rank they come from
    for peer in p.peers:
        p.put_packets(x[peer], peer, received[p.rank])
    p.copy(x[p.rank], y[p.rank])
    for peer in p.peers:
        p.store(p.read_packets(received[peer]), y[peer])
