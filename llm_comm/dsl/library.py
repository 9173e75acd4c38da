"""Programs that come with llm_comm: to use, and to begin with.

Packets (LL) are for small messages. Plain memory and signals (HB) are for large ones.
"""

from __future__ import annotations

from llm_comm import dsl

#: Pieces of a chunk that lie in a peer's memory at a time, in loops.
_TURNS = 3
#: Semaphores: of data that is there, of data that has been read, and of outputs that peers may store to.
_SENT, _READ, _FREE = 0, 1, 1
#: Semaphores of data for the sums, and of sums.
_SCATTERED, _GATHERED = 0, 1


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


@dsl.program("all_reduce")
def ring_ll(p: dsl.Builder) -> None:
    """Slices go around the ring twice: each rank adds its own to what comes, then the sums go to all (LL).

    Every rank sends to one peer only. A slice is added up in the order of the ring, by one rank at a time, and rounded
    at each: the result is the same on all ranks, but not that of the other programs to the last bit.
    """
    x, y = p.input.chunks(p.world), p.output.chunks(p.world)
    partial, final = p.packets(p.world, like=x), p.packets(p.world, like=x)  # by the step they come in
    behind, ahead, steps = p.rank - 1, p.rank + 1, p.world - 1
    p.put_packets(x[p.rank], ahead, partial[0])
    for step in range(1, steps):
        so_far = p.read_packets(partial[step - 1])
        p.put_packets(p.sum({behind: so_far, p.rank: x[p.rank - step]}), ahead, partial[step])
    done = p.sum({behind: p.read_packets(partial[steps - 1]), p.rank: x[p.rank - steps]})
    for step in range(steps):
        p.put_packets(done, ahead, final[step])
        p.store(done, y[p.rank - steps - step])
        done = p.read_packets(final[step])
    p.store(done, y[p.rank - steps - steps])


@dsl.program("all_reduce")
def hierarchical_ll(p: dsl.Builder) -> None:
    """Each node adds up its slices, pairs of ranks add up those of both nodes, and each node gathers them (LL).

    The first half of the ranks is one node, the second half the other. What a node has added up is rounded once more:
    the result is the same on all ranks, but not that of one sum over all to the last bit.

    Raises:
        ValueError: The world is odd.
    """
    size = p.world // 2
    if p.world % 2:
        raise ValueError(f"hierarchical_ll is for two nodes of equally many ranks, not for a world of {p.world}")
    x, y = p.input.chunks(size), p.output.chunks(size)  # a slice for each rank of a node
    scattered, gathered, crossed = p.packets(size, like=x), p.packets(size, like=x), p.packets(1, like=x)
    for rank in p.ranks:
        first, mine = rank.rank - rank.rank % size, rank.rank % size
        others = {i: p.ranks[first + i] for i in range(size) if i != mine}
        with p.only(rank):
            for i, peer in others.items():
                p.put_packets(x[i], peer, scattered[mine])
            of_node = p.sum({rank: x[mine], **{peer: p.read_packets(scattered[i]) for i, peer in others.items()}})
            p.put_packets(of_node, p.rank + size, crossed[0])
            total = p.sum({p.rank: of_node, p.rank + size: p.read_packets(crossed[0])})
            for peer in others.values():
                p.put_packets(total, peer, gathered[mine])
            p.store(total, y[mine])
            for i in others:
                p.store(p.read_packets(gathered[i]), y[i])


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


@dsl.program("reduce_scatter")
def reduce_scatter_ll(p: dsl.Builder) -> None:
    """Every rank sends each other one its part, and adds up what comes (LL)."""
    x, y = p.input.chunks(p.world), p.output.chunks(1)
    received = p.packets(p.world, like=x)  # by the rank they come from
    for peer in p.peers:
        p.put_packets(x[peer], peer, received[p.rank])
    total = p.sum({p.rank: p.load(x[p.rank]), **{peer: p.read_packets(received[peer]) for peer in p.peers}})
    p.store(total, y[0])


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


#: All of them.
PROGRAMS: tuple[dsl.ProgramText, ...] = (
    one_shot_ll,
    one_shot_hb,
    two_shot_ll,
    two_shot_hb,
    ring_ll,
    hierarchical_ll,
    all_gather_ll,
    all_gather_hb,
    reduce_scatter_ll,
    all_to_all_ll,
    broadcast_ll,
)
