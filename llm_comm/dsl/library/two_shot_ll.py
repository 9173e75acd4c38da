"""All-reduce in two shots, by packets: for small messages."""

from __future__ import annotations

from llm_comm import dsl


@dsl.program("all_reduce")
def two_shot_ll(p: dsl.Builder) -> None:
    """Every rank adds up one slice of all ranks' inputs, and sends it to all others (2PA, LL)."""
    x, y = p.input.chunks(p.world), p.output.chunks(p.world)  # a slice for each rank
    scattered, gathered = p.packets(p.world, like=x), p.packets(p.world, like=x)  # by the rank they come from
    for peer in p.peers:
        p.put_packets(x[peer], peer, scattered[p.rank])
    total = p.sum({p.rank: p.load(x[p.rank]), **{peer: p.read_packets(scattered[peer]) for peer in p.peers}})
    p.store(total, y[p.rank])
    for peer in p.peers:
        p.put_packets(total, peer, gathered[p.rank])
    for peer in p.peers:
        p.store(p.read_packets(gathered[peer]), y[peer])
