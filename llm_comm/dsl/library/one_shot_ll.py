"""All-reduce in one shot, by packets: for the smallest messages."""

from __future__ import annotations

from llm_comm import dsl


@dsl.program("all_reduce")
def one_shot_ll(p: dsl.Builder) -> None:
    """Every rank sends its whole input to all others, and adds up what comes (1PA, LL).

    No two calls meet: the result is of packets of all ranks, so who has it knows that all have begun this call.
    """
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = p.packets(p.world, like=x)  # by the rank they come from
    for peer in p.peers:
        p.put_packets(x[0], peer, received[p.rank])
    p.store(p.sum({p.rank: p.load(x[0]), **{peer: p.read_packets(received[peer]) for peer in p.peers}}), y[0])
