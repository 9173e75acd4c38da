"""All-reduce around a ring, by packets."""

from __future__ import annotations

from llm_comm import dsl


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
