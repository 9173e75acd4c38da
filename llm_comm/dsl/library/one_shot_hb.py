"""All-reduce in one shot, by plain memory and signals."""

from __future__ import annotations

from llm_comm import dsl

#: Pieces of a chunk that lie in a peer's memory at a time.
_TURNS = 3
_SENT, _READ = 0, 1


@dsl.program("all_reduce")
def one_shot_hb(p: dsl.Builder) -> None:
    """Every rank sends its whole input to all others, piece by piece, and adds up what came a piece ago (1PA, HB)."""
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = p.scratch(p.world, like=x, turns=_TURNS)  # by the rank it comes from
    with p.loop():
        with p.behind(_TURNS):  # what lay where this turn's piece goes has been read
            for peer in p.peers:
                p.wait(peer, semaphore=_READ)
        for peer in p.peers:
            p.put(x[0], peer, received[p.rank])
        for peer in p.peers:
            p.signal(peer, semaphore=_SENT)
        with p.behind(1):
            for peer in p.peers:
                p.wait(peer, semaphore=_SENT)
            p.store(p.sum({p.rank: x[0], **{peer: received[peer] for peer in p.peers}}), y[0])
            for peer in p.peers:
                p.signal(peer, semaphore=_READ)
