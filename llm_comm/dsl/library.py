"""Library of DSL programs, to use as they are or as examples.

Programs with packets (LL) are for small messages, those with plain memory and signals (HB) for large ones.
"""

from __future__ import annotations

from llm_comm import dsl

#: Pieces of a chunk that a peer's memory holds at once, in loops.
_STAGES = 3
#: Semaphores: data has arrived; data has been read; the output may be written by peers.
_SENT, _READ, _FREE = 0, 1, 1
#: Semaphores: operands of sums have arrived; sums have arrived.
_SCATTERED, _GATHERED = 0, 1


@dsl.program("all_reduce")
def one_shot_ll(p: dsl.Builder) -> None:
    """Each rank sends its whole input to all others and sums what it receives (1PA, LL).

    Calls cannot overlap: a result needs packets of all ranks, so a rank that has it knows that all have begun the call.
    """
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = p.packets(p.world, like=x)  # by sender
    for peer in p.peers:
        p.put_packets(x[0], peer, received[p.rank])
    p.store(p.sum({p.rank: p.load(x[0]), **{peer: p.read_packets(received[peer]) for peer in p.peers}}), y[0])


@dsl.program("all_reduce")
def one_shot_hb(p: dsl.Builder) -> None:
    """Each rank sends its whole input to all others in pieces, and sums the piece before (1PA, HB)."""
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = p.scratch(p.world, like=x, stages=_STAGES)  # by sender
    with p.loop():
        with p.behind(_STAGES):  # the stage of this piece has been read
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
    """Each rank sums one slice of all inputs, and sends the sum to all others (2PA, LL)."""
    x, y = p.input.chunks(p.world), p.output.chunks(p.world)  # a slice for each rank
    scattered, gathered = p.packets(p.world, like=x), p.packets(p.world, like=x)  # by sender
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
    """Each rank sums one slice of all inputs, and sends the sum to all others, in pieces (2PA, HB).

    The signals also acknowledge reads. S1: a rank scatters piece t after it has received the sums of piece t - 3, for
    which peers have read the same place. S2: a rank sends its sum of piece t after the peer's _SCATTERED signal for
    piece t. The peer gives that signal after it has stored the sums of piece t - 3 from the same place.
    """
    x, y = p.input.chunks(p.world), p.output.chunks(p.world)  # a slice for each rank
    scattered = p.scratch(p.world, like=x, stages=_STAGES)
    gathered = p.scratch(p.world, like=x, stages=_STAGES)
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
    """Slices go around the ring twice: first each rank adds its own input, then the sums reach all ranks (LL).

    Each rank sends to one peer only. A slice is summed in ring order and rounded at each rank. The result is
    equal on all ranks, but differs bitwise from that of the other programs.
    """
    x, y = p.input.chunks(p.world), p.output.chunks(p.world)
    partial, final = p.packets(p.world, like=x), p.packets(p.world, like=x)  # by step
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
    """Each node sums its slices, pairs of ranks add the sums of both nodes, and each node gathers them (LL).

    The first half of the ranks is one node, the second half the other. The sum of a node is rounded. The result is
    therefore equal on all ranks, but differs bitwise from a single sum over all ranks.

    Raises:
        ValueError: The world size is odd.
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
    """Each rank sends its input to all others (LL)."""
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = p.packets(p.world, like=x)  # by sender
    for peer in p.peers:
        p.put_packets(x[0], peer, received[p.rank])
    p.copy(x[0], y[p.rank])
    for peer in p.peers:
        p.store(p.read_packets(received[peer]), y[peer])


@dsl.program("all_gather")
def all_gather_hb(p: dsl.Builder) -> None:
    """Each rank stores its input to the outputs of all others, which must be in symmetric memory (HB).

    The caller may use its output until its rank has begun the call. Each rank therefore signals its begin (_FREE).
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
    """Each rank sends every peer its shard, and sums what it receives (LL)."""
    x, y = p.input.chunks(p.world), p.output.chunks(1)
    received = p.packets(p.world, like=x)  # by sender
    for peer in p.peers:
        p.put_packets(x[peer], peer, received[p.rank])
    total = p.sum({p.rank: p.load(x[p.rank]), **{peer: p.read_packets(received[peer]) for peer in p.peers}})
    p.store(total, y[0])


@dsl.program("all_to_all")
def all_to_all_ll(p: dsl.Builder) -> None:
    """Each rank sends every peer one shard of its input (LL)."""
    x, y = p.input.chunks(p.world), p.output.chunks(p.world)
    received = p.packets(p.world, like=x)  # by sender
    for peer in p.peers:
        p.put_packets(x[peer], peer, received[p.rank])
    p.copy(x[p.rank], y[p.rank])
    for peer in p.peers:
        p.store(p.read_packets(received[peer]), y[peer])


@dsl.program("broadcast")
def broadcast_ll(p: dsl.Builder) -> None:
    """The root sends its input to all others (LL).

    No result depends on ranks that only receive. All ranks therefore signal their begin. Otherwise the root could be
    several calls ahead of a slow rank, and overwrite packets that the rank has not read.
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


#: All programs of the library.
PROGRAMS: tuple[dsl.ProgramDefinition, ...] = (
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
