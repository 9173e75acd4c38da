"""All-reduce of two nodes, by packets: each byte crosses between the nodes once."""

from __future__ import annotations

from llm_comm import dsl


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
