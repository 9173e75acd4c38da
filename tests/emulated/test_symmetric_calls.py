"""Calls of a communicator whose tensors are symmetric, or are not: what runs, and what comes out."""

from __future__ import annotations

import pytest
import torch
from harness import RankPool, make_communicator, unnamed
from reference import assert_is_sum, contributions
from shards_reference import assert_same_bits, drawn_bits

from llm_comm import Communicator, MismatchError
from llm_comm.planning.tables import ALL_GATHER, ALL_REDUCE, Row

FAULTY_RANK = 1
WORLDS = [2, 3, 5]
#: How calls of an algorithm are named, and a row of a table that has it run.
GATHERS = {
    "all-gather of symmetric tensors by push (HB)": Row(1 << 30, ALL_GATHER, "direct_push_hb", "HB", 3, tile_lines=16),
    "all-gather of symmetric tensors by copy engines": Row(
        1 << 30, ALL_GATHER, "direct_port", "Port", 3, tile_lines=16
    ),
    "all-gather of symmetric tensors by copies in the stream": Row(1 << 30, ALL_GATHER, "direct_ce", "CE"),
}
COPIED_SUMS = Row(1 << 30, ALL_REDUCE, "two_shot_port", "Port", blocks=3, tile_lines=16, depth=2)
SUMS = {
    "two-shot all-reduce with copy engines": COPIED_SUMS,
    "two-shot all-reduce with copies in the stream": COPIED_SUMS._replace(algorithm="two_shot_ce", protocol="CE"),
}


def last_call(comm: Communicator) -> str:
    return comm._handle.core().last_call().operation


# ---- Sums ----------------------------------------------------------------------------------------------------------


def sum_mixed(world: int) -> None:
    """Sums over symmetric tensors, ordinary ones and both, in and out of place, before and after the heap grows."""
    with make_communicator() as comm:
        for count in (8, 1000, 4097, 60_000):
            for dtype in (torch.bfloat16, torch.float32):
                inputs = contributions(world, count, dtype, seed=count)
                mine = inputs[comm.rank]
                x, out = comm.empty(count, dtype), comm.empty(count, dtype)
                x.copy_(mine)
                what = f"{count} {dtype}"
                assert_is_sum(comm.all_reduce(x), inputs, f"{what}, new output")
                assert_is_sum(comm.all_reduce(mine, out=out), inputs, f"{what}, ordinary input")
                out.zero_()
                assert comm.all_reduce(x, out=out) is out
                assert_is_sum(out, inputs, f"{what}, both symmetric")
                is_direct = x.nbytes % 16 == 0
                assert last_call(comm).startswith("two-shot all-reduce of symmetric") == is_direct, what
                assert comm.plan(mine).symmetric == ("two_shot_pull_hb" if is_direct else "")
                ordinary = torch.empty_like(mine)
                assert_is_sum(comm.all_reduce(x, out=ordinary), inputs, f"{what}, ordinary output")
                assert torch.equal(x, mine), "the input is left alone"
                assert_is_sum(comm.all_reduce(x, out=x), inputs, f"{what}, in place")
                assert last_call(comm).startswith("two-shot all-reduce of symmetric") == is_direct, what


def one_without_a_symmetric_tensor() -> str:
    with make_communicator() as comm:
        x = comm.empty(64, torch.float32).fill_(1)
        y = torch.ones(64) if comm.rank == FAULTY_RANK else x
        with pytest.raises(MismatchError) as error:
            comm.all_reduce(y, out=y)
        return unnamed(str(error.value))


@pytest.mark.parametrize("world", WORLDS)
def test_another_kind_of_tensor_on_one_rank(ranks: RankPool, world: int) -> None:
    """Ranks that choose different algorithms for it say so."""
    for text in ranks.run(world, one_without_a_symmetric_tensor):
        assert "two-shot all-reduce of symmetric tensors by pull (HB) of 64 fp32" in text
        assert f"rank {FAULTY_RANK}: one-shot all-reduce of 64 fp32" in text


def choose_by_options(algorithm: str) -> str:
    with make_communicator(algorithm=algorithm) as comm:
        x = comm.empty(4096, torch.float32).fill_(1)
        assert comm.all_reduce(x, out=x).eq(comm.world_size).all()
        used = last_call(comm)
        ordinary = torch.ones(4096)
        assert comm.all_reduce(ordinary).eq(comm.world_size).all()
        return f"{used}; {comm.plan(ordinary).algorithm}"


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("auto", "two-shot all-reduce of symmetric tensors by pull (HB); two_shot"),
        ("two_shot_pull_hb", "two-shot all-reduce of symmetric tensors by pull (HB); two_shot"),
        ("one_shot", "one-shot all-reduce; one_shot"),
    ],
)
def test_a_forced_algorithm(ranks: RankPool, algorithm: str, expected: str) -> None:
    assert ranks.run(2, choose_by_options, algorithm) == [expected] * 2


@pytest.mark.parametrize("world", WORLDS)
def test_sums_of_symmetric_and_ordinary_tensors(ranks: RankPool, world: int) -> None:
    ranks.run(world, sum_mixed, world)


def sum_by_copy_engines(world: int, title: str) -> None:
    """Into symmetric outputs, of inputs of any kind, beside sums into ordinary ones."""
    with make_communicator() as comm:
        comm.use_table(comm.table.with_rows(SUMS[title], *comm.table.rows[ALL_REDUCE]))
        for count in (1, 8, 4097, 60_000):
            inputs = contributions(world, count, torch.bfloat16, seed=count)
            mine = inputs[comm.rank]
            symmetric, ordinary = comm.empty(count, torch.bfloat16), mine.clone()
            lines = -(-count * 2 // 16)
            by_copies = SUMS[title].protocol == "CE"  # where slices are whole, and not in place
            is_served = not by_copies or world == 2 or (world - 1) * -(-lines // world) * 16 <= count * 2
            for x, out in ((mine, symmetric), (symmetric, symmetric), (mine, ordinary)):
                x.copy_(mine)
                assert comm.all_reduce(x, out=out) is out
                assert_is_sum(out, inputs, f"{count} elements")
                is_due = out is symmetric and is_served and not (by_copies and x is out)
                assert (last_call(comm) == title) == is_due, f"{count} elements"


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("title", SUMS)
def test_sums_by_copy_engines(ranks: RankPool, world: int, title: str) -> None:
    ranks.run(world, sum_by_copy_engines, world, title)


# ---- All-gathers ---------------------------------------------------------------------------------------------------


def gather_into_symmetric(title: str) -> None:
    """Parts of no elements have no address. Beside gathers into ordinary outputs, which run otherwise."""
    with make_communicator() as comm:
        comm.use_table(comm.table.with_rows(GATHERS[title], *comm.table.rows[ALL_GATHER]))
        world, rank = comm.world_size, comm.rank
        for seed, sizes in enumerate(
            (
                (16,) * world,
                (0, *(48,) * (world - 1)),
                (*(0,) * (world - 1), 16),
                tuple(16 * (r % 3) for r in range(world)),
            )
        ):
            whole = drawn_bits((sum(sizes), 3), torch.int16, seed)
            x = whole[sum(sizes[:rank]) :][: sizes[rank]].clone()
            assert (x.data_ptr() == 0) == (sizes[rank] == 0)
            for out in (comm.empty(whole.shape, whole.dtype), torch.empty_like(whole)):
                for _ in range(2):
                    out.zero_()
                    assert comm.all_gather(x, 0, sizes, out) is out
                    assert_same_bits(out, whole, f"sizes {sizes}")
            assert last_call(comm) == "one-shot all-gather"
            symmetric = comm.empty(whole.shape, whole.dtype)
            comm.all_gather(x, 0, sizes, symmetric)
            assert last_call(comm) == title
            assert comm.plan_all_gather(x, 0, sizes).symmetric == GATHERS[title].algorithm
        assert comm.all_gather(x[:0], 0, (0,) * world, comm.empty((0, 3), x.dtype)).shape == (0, 3)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("title", GATHERS)
def test_gathers_into_symmetric_outputs(ranks: RankPool, world: int, title: str) -> None:
    ranks.run(world, gather_into_symmetric, title)
