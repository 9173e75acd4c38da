"""All-gather by packets: for small messages."""

from __future__ import annotations

from llm_comm import dsl


@dsl.program("all_gather")
def all_gather_ll(p: dsl.Builder) -> None:
    """Every rank sends its input to all others (LL)."""
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = p.packets(p.world, like=x)  # by the rank they come from
    for peer in p.peers:
        p.put_packets(x[0], peer, received[p.rank])
    p.copy(x[0], y[p.rank])
    for peer in p.peers:
        p.store(p.read_packets(received[peer]), y[peer])
