"""All-reduce in two shots, by plain memory and signals: for large messages."""

from __future__ import annotations

from llm_comm import dsl

#: Pieces of a chunk that lie in a peer's memory at a time.
_TURNS = 3
_SCATTERED, _GATHERED = 0, 1


@dsl.program("all_reduce")
def two_shot_hb(p: dsl.Builder) -> None:
    """Every rank adds up one slice of all ranks' inputs, and sends it to all others, piece by piece (2PA, HB).

    The signals acknowledge as well. A rank scatters piece t when it has waited for the sums of piece t - 3, which peers
    make of what lay there before; and it sends its sum of piece t behind the peer's signal for that piece, which the
    peer gives when it has stored the sums of piece t - 3.
    """
    x, y = p.input.chunks(p.world), p.output.chunks(p.world)  # a slice for each rank
    scattered = p.scratch(p.world, like=x, turns=_TURNS)
    gathered = p.scratch(p.world, like=x, turns=_TURNS)
    with p.loop():
        for peer in p.peers:
            p.put(x[peer], peer, scattered[p.rank])
        for peer in p.peers:
            p.signal(peer, semaphore=_SCATTERED)
        with p.behind(1):
            for peer in p.peers:
                p.wait(peer, semaphore=_SCATTERED)
            total = p.sum({p.rank: x[p.rank], **{peer: scattered[peer] for peer in p.peers}})
            for peer in p.peers:
                p.put(total, peer, gathered[p.rank])
            p.store(total, y[p.rank])
            for peer in p.peers:
                p.signal(peer, semaphore=_GATHERED)
        with p.behind(2):
            for peer in p.peers:
                p.wait(peer, semaphore=_GATHERED)
            for peer in p.peers:
                p.copy(gathered[peer], y[peer])
