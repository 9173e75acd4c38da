"""Broadcast by packets: for small messages."""

from __future__ import annotations

from llm_comm import dsl


@dsl.program("broadcast")
def broadcast_ll(p: dsl.Builder) -> None:
    """The root sends its input to all others (LL).

    No result depends on the ranks that only receive. So all ranks signal that they have begun: otherwise the root could
    be some calls ahead of a slow one, and overwrite what that one has not read.
    """
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = p.packets(1, like=x)
    for peer in p.peers:
        p.signal(peer)
    with p.only(p.root):
        for peer in p.peers:
            p.put_packets(x[0], peer, received[0])
        p.copy(x[0], y[0])
    with p.only(*(rank for rank in p.ranks if rank != p.root)):
        p.store(p.read_packets(received[0]), y[0])
    for peer in p.peers:
        p.wait(peer)
