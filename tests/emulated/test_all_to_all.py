"""All-to-all on emulated GPUs: the bits that every rank has for this one, for any type, size, world and pointer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness import RankPool, make_communicator
from nodes_cases import Layout
from nodes_cases import make as make_over_nodes
from shards_reference import (
    ANY_DTYPES,
    SHARD_ALGORITHMS,
    assert_same_bits,
    assert_untouched_outside,
    drawn_bits,
    placed,
)

from llm_comm import Communicator, UnsupportedInputError

some_worlds = pytest.mark.parametrize("world", [2, 3, 5, 8])
#: First dimension of a part, and the dimensions after it. Around lines and tiles, and more than a tile.
SHAPES = ((1,), (3,), (16,), (130,), (1, 5), (7, 3), (16, 16), (2, 3, 64), (2100, 8))


def sent(comm: Communicator, rank: int, part: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """What a rank has for all ranks."""
    return drawn_bits((comm.world_size * part[0], *part[1:]), dtype, 100 * seed + rank)


def expected(comm: Communicator, part: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    parts = [sent(comm, rank, part, dtype, seed).chunk(comm.world_size)[comm.rank] for rank in range(comm.world_size)]
    return torch.cat(parts)


def exchange_shapes_and_types() -> None:
    for algorithm in SHARD_ALGORITHMS:
        with make_communicator(algorithm=algorithm) as comm:
            cases = [(part, ANY_DTYPES[n % len(ANY_DTYPES)]) for n, part in enumerate(SHAPES)]
            cases += [((13,), dtype) for dtype in ANY_DTYPES]
            for seed, (part, dtype) in enumerate(cases):
                what = f"{algorithm}, {part} of {dtype}"
                x = sent(comm, comm.rank, part, dtype, seed)
                before = x.clone()
                out = comm.all_to_all(x)
                assert out.shape == x.shape
                assert_same_bits(out, expected(comm, part, dtype, seed), what)
                assert_same_bits(x, before, f"{what}: the input")
                plan = comm.plan_all_to_all(x)
                assert plan.algorithm == algorithm
                assert plan.message_bytes == x.nbytes // comm.world_size


@some_worlds
def test_shapes_and_types(ranks: RankPool, world: int) -> None:
    ranks.run(world, exchange_shapes_and_types)


def exchange_sentinels() -> None:
    """Bits that look like a slot where nothing has arrived yet."""
    for algorithm in SHARD_ALGORITHMS:
        with make_communicator(algorithm=algorithm) as comm:
            for sender in range(comm.world_size):
                parts = torch.zeros(comm.world_size, 700, dtype=torch.uint8)
                for _ in range(3):  # both slots are used again
                    x = torch.full_like(parts, 0xFF if comm.rank == sender else comm.rank)
                    out = comm.all_to_all(x)
                    for rank in range(comm.world_size):
                        assert out[rank].eq(0xFF if rank == sender else rank).all(), f"{algorithm}, from {rank}"


@some_worlds
def test_bits_that_look_like_an_empty_slot(ranks: RankPool, world: int) -> None:
    ranks.run(world, exchange_sentinels)


def exchange_unaligned() -> None:
    for algorithm in SHARD_ALGORITHMS:
        with make_communicator(algorithm=algorithm) as comm:
            rank = comm.rank
            for dtype in (torch.bool, torch.int16, torch.int64):
                for step in range(16 // dtype.itemsize):
                    what = f"{algorithm}, {dtype}, step {step}"
                    part = (49 + 7 * (step % 2),)
                    x, _ = placed(sent(comm, rank, part, dtype, step), (step + 3 * rank) % 16)
                    out, buffer = placed(torch.zeros_like(x), (3 * step + rank) % 16)
                    assert comm.all_to_all(x, out=out) is out
                    assert_same_bits(out, expected(comm, part, dtype, step), what)
                    assert_untouched_outside(buffer, out, what)


@pytest.mark.parametrize("world", [2, 5])
def test_pointers_unaligned_differently_on_every_rank(ranks: RankPool, world: int) -> None:
    ranks.run(world, exchange_unaligned)


def exchange_in_place() -> None:
    for algorithm in SHARD_ALGORITHMS:
        with make_communicator(algorithm=algorithm) as comm:
            for seed, (part, offset) in enumerate((((130,), 0), ((49,), 1), ((2100, 8), 0), ((5000, 3), 3))):
                for dtype in (torch.bool, torch.int16, torch.float32):
                    what = f"{algorithm}, {part} of {dtype}"
                    x, buffer = placed(sent(comm, comm.rank, part, dtype, seed), offset)
                    assert comm.all_to_all(x, out=x) is x
                    assert_same_bits(x, expected(comm, part, dtype, seed), what)
                    assert_untouched_outside(buffer, x, what)


@some_worlds
def test_in_place(ranks: RankPool, world: int) -> None:
    ranks.run(world, exchange_in_place)


def exchange_in_launches() -> None:
    """More than a slot holds."""
    with make_communicator(workspace_bytes=1 << 20, algorithm="one_shot") as comm:
        part = (200_003,)
        x = sent(comm, comm.rank, part, torch.int16, 9)
        assert comm.plan_all_to_all(x).chunks > 1
        assert_same_bits(comm.all_to_all(x), expected(comm, part, torch.int16, 9), "in launches")
        x, buffer = placed(x, 5)
        assert_same_bits(comm.all_to_all(x, out=x), expected(comm, part, torch.int16, 9), "in launches, in place")
        assert_untouched_outside(buffer, x, "in launches, in place")


@pytest.mark.parametrize("world", [2, 5])
def test_parts_larger_than_a_slot(ranks: RankPool, world: int) -> None:
    ranks.run(world, exchange_in_launches)


def exchange_by_the_table() -> None:
    """The emulated table has a row for either algorithm."""
    with make_communicator() as comm:
        for count, algorithm in ((8192, "one_shot"), (8193, "push_hb")):
            x = sent(comm, comm.rank, (count,), torch.uint8, count)
            assert comm.plan_all_to_all(x).algorithm == algorithm
            assert_same_bits(comm.all_to_all(x), expected(comm, (count,), torch.uint8, count), algorithm)


def test_small_parts_by_one_shot_and_large_by_push(ranks: RankPool) -> None:
    ranks.run(3, exchange_by_the_table)


def exchange_arrays() -> None:
    with make_communicator() as comm:
        x = sent(comm, comm.rank, (4, 3), torch.float32, 1).numpy()
        wanted = expected(comm, (4, 3), torch.float32, 1)
        result = comm.all_to_all(x)
        assert isinstance(result, np.ndarray)
        assert_same_bits(torch.from_numpy(result), wanted, "a new array")
        assert_same_bits(torch.from_numpy(comm.try_all_to_all(x)), wanted, "a new array, if it is accepted")
        out = np.zeros_like(x)
        assert comm.all_to_all(x, out=out) is out
        assert_same_bits(torch.from_numpy(out), wanted, "an array as out")


def test_arrays(ranks: RankPool) -> None:
    ranks.run(3, exchange_arrays)


def exchange_compiled() -> None:
    with make_communicator() as comm:

        @torch.compile(fullgraph=True, backend="aot_eager")
        def compiled(x: torch.Tensor) -> torch.Tensor:
            return comm.all_to_all(x + 1) * 2 if comm.accepts_all_to_all(x) else x

        for count in (6, 12, 9):
            of_ranks = [torch.arange(float(count)) + 100 * rank for rank in range(3)]
            wanted = torch.cat([(of_rank + 1).chunk(3)[comm.rank] for of_rank in of_ranks]) * 2
            assert torch.equal(compiled(of_ranks[comm.rank]), wanted)
        assert torch.equal(compiled(torch.ones(4)), torch.ones(4)), "4 elements have no parts for 3 ranks"


def test_compiled(ranks: RankPool) -> None:
    ranks.run(3, exchange_compiled)


def refuse() -> None:
    with make_communicator() as comm:
        for x, out, words in (
            (torch.ones(7), None, "x has 7 along dim 0, of which 3 ranks cannot have equal shards"),
            (torch.ones(()), None, "x has 0 dimensions"),
            (torch.ones(6, 2).t().contiguous().t(), None, "contiguous"),
            (torch.ones(6), torch.ones(5), "out"),
            (torch.ones(6), torch.ones(6, dtype=torch.int32), "out"),
            (torch.ones(6, requires_grad=True), None, "requires grad"),
        ):
            with pytest.raises(UnsupportedInputError, match="all_to_all: ") as caught:
                comm.all_to_all(x, out=out)
            assert words in str(caught.value), str(caught.value)
            if out is None:
                assert comm.try_all_to_all(x) is None
                assert not comm.accepts_all_to_all(x)
        memory = torch.ones(18)
        with pytest.raises(UnsupportedInputError, match="overlap"):
            comm.all_to_all(memory[:9], out=memory[3:12])
        with pytest.raises(UnsupportedInputError, match=r"call Communicator\.all_to_all"):
            comm.run("all_to_all", {"input": memory[:9], "output": memory[9:]})
        # Nothing is left over.
        assert comm.all_to_all(torch.full((3,), float(comm.rank))).tolist() == [0, 1, 2]


def test_what_is_refused(ranks: RankPool) -> None:
    ranks.run(3, refuse)


def exchange_nothing() -> None:
    with make_communicator() as comm:
        assert comm.all_to_all(torch.ones(0, 4)).shape == (0, 4)
        assert comm.plan_all_to_all(torch.ones(0, 4)).algorithm == "none"
        with pytest.raises(UnsupportedInputError, match="like the result"):
            comm.all_to_all(torch.ones(comm.world_size, 0), out=torch.ones(1))


def exchange_alone() -> None:
    with make_communicator() as comm:
        x = drawn_bits((3, 4), torch.float8_e4m3fn, 1)
        out = comm.all_to_all(x)
        assert out.data_ptr() != x.data_ptr()
        assert_same_bits(out, x, "a copy")


def test_nothing_to_send_and_a_world_of_one(ranks: RankPool) -> None:
    ranks.run(2, exchange_nothing)
    ranks.run(1, exchange_alone)


def decline_over_nodes() -> None:
    with make_over_nodes(Layout(2, 1)) as comm:
        assert not comm.accepts_all_to_all(torch.ones(4))
        assert comm.try_all_to_all(torch.ones(4)) is None
        assert comm.plan_all_to_all(torch.ones(4)).algorithm == "declined"
        with pytest.raises(UnsupportedInputError, match="within a node"):
            comm.all_to_all(torch.ones(4))


def test_ranks_on_several_nodes_decline(ranks: RankPool) -> None:
    ranks.run(2, decline_over_nodes)
