"""All-gather on emulated GPUs: the bits of every rank's part, for any type, dimension, size, world and pointer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import RankPool, make_communicator
from shards_reference import (
    ANY_DTYPES,
    SHARD_ALGORITHMS,
    Division,
    assert_same_bits,
    assert_untouched_outside,
    divisions,
    drawn_bits,
    placed,
)

from llm_comm import Communicator

WORLDS = (2, 3, 5, 8)
some_worlds = pytest.mark.parametrize("world", WORLDS)


def sizes_of(division: Division) -> tuple[int, ...] | None:
    """As a caller may put it: nothing where all are alike."""
    return None if division.is_even else division.sizes


def gather(comm: Communicator, division: Division, dtype: torch.dtype, seed: int, algorithm: str) -> None:
    what = f"{algorithm}, {division} of {dtype}"
    whole = drawn_bits(division.shape, dtype, seed)
    x = division.part_of(whole, comm.rank).contiguous()
    before = x.clone()
    out = comm.all_gather(x, division.dim, sizes_of(division))
    assert_same_bits(out, whole, what)
    assert_same_bits(x, before, f"{what}: the input")
    plan = comm.plan_all_gather(x, division.dim, sizes_of(division))
    assert plan.algorithm == (algorithm if whole.numel() else "none")
    longest = max(torch.Size(division.shard_shape(rank)).numel() for rank in range(comm.world_size))
    assert plan.message_bytes == longest * dtype.itemsize


def gather_all_divisions() -> None:
    for algorithm in SHARD_ALGORITHMS:
        with make_communicator(algorithm=algorithm) as comm:
            for number, division in enumerate(divisions(comm.world_size)):
                gather(comm, division, ANY_DTYPES[number % len(ANY_DTYPES)], number, algorithm)


@some_worlds
def test_dimensions_and_sizes(ranks: RankPool, world: int) -> None:
    ranks.run(world, gather_all_divisions)


def gather_all_types() -> None:
    for algorithm in SHARD_ALGORITHMS:
        with make_communicator(algorithm=algorithm) as comm:
            world = comm.world_size
            for number, dtype in enumerate(ANY_DTYPES):
                uneven = tuple(3 * rank for rank in range(world))
                gather(comm, Division((13 * world,), 0, (13,) * world), dtype, number, algorithm)
                gather(comm, Division((4, sum(uneven), 3), 1, uneven), dtype, number, algorithm)


@some_worlds
def test_types(ranks: RankPool, world: int) -> None:
    ranks.run(world, gather_all_types)


def gather_sentinels() -> None:
    """Bits that look like a slot where nothing has arrived yet."""
    for algorithm in SHARD_ALGORITHMS:
        with make_communicator(algorithm=algorithm) as comm:
            for sender in range(comm.world_size):
                whole = drawn_bits((comm.world_size, 700), torch.uint8, sender)
                whole[sender] = 0xFF
                for _ in range(3):  # both slots are used again
                    out = comm.all_gather(whole[comm.rank : comm.rank + 1])
                    assert_same_bits(out, whole, f"{algorithm}, only ones from rank {sender}")


@some_worlds
def test_bits_that_look_like_an_empty_slot(ranks: RankPool, world: int) -> None:
    ranks.run(world, gather_sentinels)


def gather_unaligned(itemsize: int) -> None:
    dtype = {1: torch.bool, 2: torch.int16, 8: torch.int64}[itemsize]
    for algorithm in SHARD_ALGORITHMS:
        with make_communicator(algorithm=algorithm) as comm:
            world, rank = comm.world_size, comm.rank
            for division in (
                Division((49 * world,), 0, (49,) * world),
                Division((4, 16 * world), 1, (16,) * world),
                Division((3, world * 7 + 1), 1, (8,) + (7,) * (world - 1)),
            ):
                whole = drawn_bits(division.shape, dtype, 1)
                for step in range(16 // itemsize):
                    what = f"{algorithm}, {division}, step {step}"
                    x, _ = placed(division.part_of(whole, rank).contiguous(), (step + 3 * rank) % 16)
                    out, buffer = placed(torch.zeros_like(whole), (3 * step + rank) % 16)
                    assert comm.all_gather(x, division.dim, division.sizes, out) is out
                    assert_same_bits(out, whole, what)
                    assert_untouched_outside(buffer, out, what)


@pytest.mark.parametrize("itemsize", [1, 2, 8])
@pytest.mark.parametrize("world", [2, 5])
def test_pointers_unaligned_differently_on_every_rank(ranks: RankPool, world: int, itemsize: int) -> None:
    ranks.run(world, gather_unaligned, itemsize)


def gather_in_place() -> None:
    for algorithm in SHARD_ALGORITHMS:
        with make_communicator(algorithm=algorithm) as comm:
            world, rank = comm.world_size, comm.rank
            uneven = tuple((3 * r + 1) % 4 * 9 for r in range(world))
            only_one = tuple(21 * (r == world - 1) for r in range(world))
            for dtype, division, offset in (
                (torch.bfloat16, Division((world * 11,), 0, (11,) * world), 0),
                (torch.float8_e5m2, Division((world * 5000, 3), 0, (5000,) * world), 1),
                (torch.int64, Division((sum(uneven), 5), 0, uneven), 1),
                (torch.bool, Division((1, sum(uneven)), 1, uneven), 3),
                # All of it is one rank's, so that rows do not matter.
                (torch.float32, Division((6, sum(only_one)), -1, only_one), 0),
            ):
                what = f"{algorithm}, {division} of {dtype}"
                whole = drawn_bits(division.shape, dtype, 3)
                out, buffer = placed(whole, offset)
                x = division.part_of(out, rank)
                for other in range(world):
                    if other != rank:
                        raw_part = division.part_of(out, other)
                        raw_part.copy_(torch.zeros_like(raw_part))
                assert comm.all_gather(x, division.dim, division.sizes, out) is out
                assert_same_bits(out, whole, what)
                assert_untouched_outside(buffer, out, what)


@some_worlds
def test_in_place(ranks: RankPool, world: int) -> None:
    ranks.run(world, gather_in_place)


def gather_in_launches() -> None:
    """More than a slot holds, with parts that end in different launches."""
    with make_communicator(workspace_bytes=1 << 20, algorithm="one_shot") as comm:
        world = comm.world_size
        uneven = tuple(190_001 * rank for rank in range(world))
        for division in (
            Division((world * 200_003,), 0, (200_003,) * world),
            Division((3, sum(uneven)), 1, uneven),
        ):
            whole = drawn_bits(division.shape, torch.int16, 9)
            x = division.part_of(whole, comm.rank).contiguous()
            assert comm.plan_all_gather(x, division.dim, division.sizes).chunks > 1
            assert_same_bits(comm.all_gather(x, division.dim, division.sizes), whole, str(division))


@pytest.mark.parametrize("world", [2, 5])
def test_parts_larger_than_a_slot(ranks: RankPool, world: int) -> None:
    ranks.run(world, gather_in_launches)


def gather_alone() -> None:
    with make_communicator() as comm:
        x = drawn_bits((3, 4), torch.float8_e4m3fn, 1)
        plan = comm.plan_all_gather(x, 1)
        assert (plan.algorithm, plan.message_bytes, plan.reason) == ("none", 12, "one rank")
        for sizes in (None, [4]):
            out = comm.all_gather(x, 1, sizes)
            assert out.data_ptr() != x.data_ptr()
            assert_same_bits(out, x, "a copy")
        out = torch.zeros(12, dtype=x.dtype)
        assert comm.all_gather(x, out=out) is out
        assert_same_bits(out.view(3, 4), x, "a copy into out")
        assert comm.all_gather(x, out=x) is x
        assert comm.all_gather(x[:0], out=x[:0]).shape == (0, 4)
        assert not comm.accepts_all_gather(x, 1, [3])


def test_world_of_one_copies(ranks: RankPool) -> None:
    ranks.run(1, gather_alone)


def gather_by_the_table() -> None:
    """The emulated table has a row for either algorithm."""
    with make_communicator() as comm:
        for count, algorithm in ((8192, "one_shot"), (8193, "push_hb")):
            whole = drawn_bits((comm.world_size * count,), torch.uint8, count)
            x = whole[comm.rank * count :][:count]
            assert comm.plan_all_gather(x).algorithm == algorithm
            assert_same_bits(comm.all_gather(x), whole, algorithm)


def test_small_parts_by_one_shot_and_large_by_push(ranks: RankPool) -> None:
    ranks.run(3, gather_by_the_table)


def gather_by_another_table(path: Path) -> None:
    with make_communicator(table=str(path)) as comm:
        assert comm.plan_all_gather(torch.ones(10)).algorithm == "push_hb"
        assert comm.all_gather(torch.ones(10)).eq(1).all()
        comm.use_table(make_communicator().table)
        assert comm.plan_all_gather(torch.ones(10)).algorithm == "one_shot"
        assert comm.all_gather(torch.ones(10)).eq(1).all()
        assert comm._handle.core().last_call().operation == "one-shot all-gather"


def test_a_table_s_rows(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_text(
        "device: emulated\nworld_size: 2\nmax_message_bytes: 1000000\nrows:\n"
        "  - {operation: all_gather, up_to: 9, algorithm: push_hb, protocol: HB, blocks: 2, tile_lines: 8, depth: 2}\n",
        encoding="utf-8",
    )
    ranks.run(2, gather_by_another_table, path)
