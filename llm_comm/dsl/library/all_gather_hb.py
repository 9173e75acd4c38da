"""All-gather straight into the outputs of all ranks."""

from __future__ import annotations

from llm_comm import dsl

_FREE, _SENT = 0, 1


@dsl.program("all_gather")
def all_gather_hb(p: dsl.Builder) -> None:
    """Every rank stores its input to the outputs of all others, which lie in symmetric memory (HB).

    A peer's output belongs to its caller until the peer has begun the call, so each rank says when it has.
    """
    x, y = p.input.chunks(1), p.output.chunks(p.world, symmetric=True)
    for peer in p.peers:
        p.signal(peer, semaphore=_FREE)
    p.copy(x[0], y[p.rank])
    for peer in p.peers:
        p.wait(peer, semaphore=_FREE)
    for peer in p.peers:
        p.put(x[0], peer, y[p.rank])
    for peer in p.peers:
        p.signal(peer, semaphore=_SENT)
    for peer in p.peers:
        p.wait(peer, semaphore=_SENT)
