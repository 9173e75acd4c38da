"""Reduce-scatter by packets: for small messages."""

from __future__ import annotations

from llm_comm import dsl


@dsl.program("reduce_scatter")
def reduce_scatter_ll(p: dsl.Builder) -> None:
    """Every rank sends each other one its part, and adds up what comes (LL)."""
    x, y = p.input.chunks(p.world), p.output.chunks(1)
    received = p.packets(p.world, like=x)  # by the rank they come from
    for peer in p.peers:
        p.put_packets(x[peer], peer, received[p.rank])
    total = p.sum({p.rank: p.load(x[p.rank]), **{peer: p.read_packets(received[peer]) for peer in p.peers}})
    p.store(total, y[0])
