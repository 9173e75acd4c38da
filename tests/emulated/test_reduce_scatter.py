"""Reduce-scatter on emulated GPUs: bitwise this rank's part of the promised sum, which all-reduce returns whole."""

from __future__ import annotations

import pytest
import torch
from harness import RankPool, make_communicator
from reference import (
    DTYPES,
    assert_bitwise_equal,
    contributions,
    from_bits,
    rank_order_sum,
    special_patterns,
)
from shards_reference import (
    SHARD_ALGORITHMS,
    Division,
    assert_same_bits,
    assert_untouched_outside,
    divisions,
    placed,
)

from llm_comm import Communicator

WORLDS = (2, 3, 5, 8)
some_worlds = pytest.mark.parametrize("world", WORLDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def inputs_of(division: Division, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    count = torch.Size(division.shape).numel()
    return [t.view(division.shape) for t in contributions(len(division.sizes), count, dtype, seed)]


def scatter(comm: Communicator, division: Division, dtype: torch.dtype, seed: int, algorithm: str) -> None:
    what = f"{algorithm}, {division} of {dtype}"
    sizes = None if division.is_even else list(division.sizes)
    inputs = inputs_of(division, dtype, seed)
    x = inputs[comm.rank].clone()
    out = comm.reduce_scatter(x, division.dim, sizes)
    expected = division.part_of(rank_order_sum(inputs), comm.rank)
    assert_bitwise_equal(out, expected, what)
    assert_bitwise_equal(x, inputs[comm.rank], f"{what}: the input")
    assert out.is_contiguous()
    assert_bitwise_equal(out, division.part_of(comm.all_reduce(x), comm.rank), f"{what}: all_reduce")
    plan = comm.plan_reduce_scatter(x, division.dim, sizes)
    assert plan.algorithm == (algorithm if x.numel() else "none")


def scatter_all_divisions() -> None:
    for algorithm in SHARD_ALGORITHMS:
        with make_communicator(algorithm=algorithm) as comm:
            for number, division in enumerate(divisions(comm.world_size)):
                scatter(comm, division, DTYPES[number % len(DTYPES)], number, algorithm)


@some_worlds
def test_dimensions_and_sizes(ranks: RankPool, world: int) -> None:
    ranks.run(world, scatter_all_divisions)


def scatter_special_values(dtype: torch.dtype) -> None:
    """Every pair of special patterns on ranks 0 and 1."""
    patterns = special_patterns(dtype)
    first, second = torch.cartesian_prod(patterns, patterns).unbind(1)
    for algorithm in SHARD_ALGORITHMS:
        with make_communicator(algorithm=algorithm) as comm:
            world = comm.world_size
            bits_of = [
                first,
                second,
                *(patterns[(torch.arange(len(first)) * 7 + r) % len(patterns)] for r in range(2, 8)),
            ]
            inputs = [from_bits(bits_of[rank], dtype).repeat(world) for rank in range(world)]
            for _ in range(3):  # both slots are used again
                out = comm.reduce_scatter(inputs[comm.rank])
                expected = rank_order_sum(inputs).chunk(world)[comm.rank]
                assert_bitwise_equal(out, expected, f"{algorithm}, special values")


@every_dtype
@some_worlds
def test_special_values(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    ranks.run(world, scatter_special_values, dtype)


def scatter_unaligned(dtype: torch.dtype) -> None:
    for algorithm in SHARD_ALGORITHMS:
        with make_communicator(algorithm=algorithm) as comm:
            world, rank = comm.world_size, comm.rank
            for division in (
                Division((world * 49,), 0, (49,) * world),
                Division((4, 16 * world), 1, (16,) * world),
                Division((3, world * 7 + 1), 1, (8,) + (7,) * (world - 1)),
            ):
                inputs = inputs_of(division, dtype, 2)
                expected = division.part_of(rank_order_sum(inputs), rank).contiguous()
                for step in range(8):
                    what = f"{algorithm}, {division} of {dtype}, step {step}"
                    x, _ = placed(inputs[rank], (step + 3 * rank) % 8)
                    out, buffer = placed(torch.zeros_like(expected), (3 * step + rank) % 8)
                    assert comm.reduce_scatter(x, division.dim, division.sizes, out) is out
                    assert_same_bits(out, expected, what)
                    assert_untouched_outside(buffer, out, what)


@every_dtype
@pytest.mark.parametrize("world", [2, 5])
def test_pointers_unaligned_differently_on_every_rank(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    ranks.run(world, scatter_unaligned, dtype)


def scatter_in_place(dtype: torch.dtype) -> None:
    for algorithm in SHARD_ALGORITHMS:
        with make_communicator(algorithm=algorithm) as comm:
            world, rank = comm.world_size, comm.rank
            uneven = tuple((3 * r + 1) % 4 * 9 for r in range(world))
            only_one = tuple(21 * (r == world - 1) for r in range(world))
            for division, offset in (
                (Division((world * 11,), 0, (11,) * world), 0),
                (Division((world * 3000, 3), 0, (3000,) * world), 1),
                (Division((sum(uneven), 5), 0, uneven), 0),
                (Division((1, sum(uneven)), 1, uneven), 3),
                (Division((6, sum(only_one)), -1, only_one), 0),
            ):
                what = f"{algorithm}, {division} of {dtype}"
                inputs = inputs_of(division, dtype, 4)
                x, buffer = placed(inputs[rank], offset)
                out = division.part_of(x, rank)
                assert comm.reduce_scatter(x, division.dim, division.sizes, out) is out
                total = rank_order_sum(inputs)
                assert_same_bits(out, division.part_of(total, rank), what)
                assert_untouched_outside(buffer, x, what)
                for other in range(world):
                    if other != rank:
                        kept = division.part_of(inputs[rank], other)
                        assert_same_bits(division.part_of(x, other), kept, f"{what}: the part of rank {other}")


@every_dtype
@some_worlds
def test_in_place(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    ranks.run(world, scatter_in_place, dtype)


def scatter_in_launches() -> None:
    """More than a slot holds, in place, with parts that end in different launches."""
    with make_communicator(workspace_bytes=1 << 20, algorithm="one_shot") as comm:
        world, rank = comm.world_size, comm.rank
        uneven = tuple(190_001 * r for r in range(world))
        for division in (Division((world * 200_003,), 0, (200_003,) * world), Division((sum(uneven),), 0, uneven)):
            inputs = inputs_of(division, torch.bfloat16, 9)
            expected = division.part_of(rank_order_sum(inputs), rank).clone()
            x = inputs[rank].clone()
            assert comm.plan_reduce_scatter(x, division.dim, division.sizes).chunks > 1
            out = division.part_of(x, rank)
            assert_same_bits(comm.reduce_scatter(x, 0, division.sizes, out), expected, str(division))
        rows = Division((3, sum(uneven)), 1, uneven)
        inputs = inputs_of(rows, torch.bfloat16, 10)
        out = comm.reduce_scatter(inputs[rank], 1, uneven)
        assert_same_bits(out, rows.part_of(rank_order_sum(inputs), rank), str(rows))


@pytest.mark.parametrize("world", [2, 3])
def test_parts_larger_than_a_slot(ranks: RankPool, world: int) -> None:
    ranks.run(world, scatter_in_launches)


def scatter_alone() -> None:
    with make_communicator() as comm:
        x = torch.arange(12.0).view(3, 4)
        assert comm.plan_reduce_scatter(x, 1).algorithm == "none"
        for sizes in (None, [4]):
            out = comm.reduce_scatter(x, 1, sizes)
            assert out.data_ptr() != x.data_ptr()
            assert_same_bits(out, x, "a copy")
        assert comm.reduce_scatter(x, out=x) is x
        assert not comm.accepts_reduce_scatter(x, 1, [3])


def test_world_of_one_copies(ranks: RankPool) -> None:
    ranks.run(1, scatter_alone)


def scatter_by_the_table() -> None:
    with make_communicator() as comm:
        for count, algorithm in ((2048, "one_shot"), (2049, "push_hb")):
            x = torch.ones(comm.world_size * count)
            assert comm.plan_reduce_scatter(x).algorithm == algorithm
            assert comm.reduce_scatter(x).eq(comm.world_size).all()


def test_small_parts_by_one_shot_and_large_by_push(ranks: RankPool) -> None:
    ranks.run(3, scatter_by_the_table)
