"""Many calls in a row: nothing of one operation may reach another one, whatever their sizes, grids and groups."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, make_communicator, new_groups
from reference import ALGORITHMS, DTYPES, assert_bitwise_equal, assert_is_sum, contributions, rank_order_sum
from tables import STEP_BYTES, VARIANTS, plain_row, table_of_all_variants

from llm_comm import Communicator


def reduce_once(comm: Communicator, count: int, dtype: torch.dtype, seed: int) -> None:
    inputs = contributions(comm.world_size, count, dtype, seed)
    assert_is_sum(comm.all_reduce(inputs[comm.rank].clone()), inputs, f"call {seed}, {count} elements of {dtype}")


def check_every_variant(table: Path) -> None:
    with make_communicator(table=str(table)) as comm:
        per_step = STEP_BYTES // torch.bfloat16.itemsize
        seen = set()
        for number in range(len(VARIANTS)):
            for count in (number * per_step + 1, (number + 1) * per_step):
                plan = comm.plan(torch.empty(count, dtype=torch.bfloat16))
                seen.add((plan.algorithm, plan.depth, plan.tile_lines))
                reduce_once(comm, count, torch.bfloat16, seed=number)
        assert len(seen) == len({(algorithm, depth, tile) for algorithm, _, tile, depth in VARIANTS})


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_every_grid_tile_and_depth(ranks: RankPool, world: int, tmp_path: Path) -> None:
    ranks.run(world, check_every_variant, table_of_all_variants(tmp_path / "variants.yaml"))


def check_depth_of_many_tiles() -> None:
    """More than a block has: the largest depth that a row can have."""
    with make_communicator() as comm:
        for algorithm in ALGORITHMS:
            row = plain_row(1 << 30, algorithm, blocks=2, tile_lines=4, depth=65535)
            comm.use_table(comm.table.with_rows(row))
            plan = comm.plan(torch.empty(768))
            assert (plan.algorithm, plan.depth) == (algorithm, 65535)
            reduce_once(comm, 768, torch.float32, seed=1)
            title = algorithm.replace("_", "-")
            assert comm._handle.core().last_call().operation == f"{title} all-reduce"
            comm.use_table(comm.table.with_rows(row._replace(depth=65536)))
            plan = comm.plan(torch.empty(768))
            assert plan.algorithm == "declined"
            assert "depth is 65536; " in plan.reason, plan.reason


def test_a_depth_of_more_tiles_than_there_are(ranks: RankPool) -> None:
    ranks.run(3, check_depth_of_many_tiles)


def check_random_calls(table: Path, seed: int, calls: int) -> None:
    draw = random.Random(seed)  # the same on all ranks
    with make_communicator(table=str(table)) as comm:
        for call in range(calls):
            dtype = draw.choice(DTYPES)
            count = draw.randrange(draw.choice([2, 70, 600, 27_000]))
            inputs = contributions(comm.world_size, count, dtype, call)
            offset = draw.randrange(8) * comm.rank % 8
            x = torch.empty(count + offset, dtype=dtype)[offset:].copy_(inputs[comm.rank])
            out = comm.all_reduce(x, out=draw.choice([None, x]))
            assert_bitwise_equal(out, rank_order_sum(inputs), f"call {call}, {count} elements of {dtype}")


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("world", [2, 3, 7, 8])
def test_random_calls(ranks: RankPool, world: int, seed: int, tmp_path: Path) -> None:
    """Sizes, types, algorithms, grids and pointers change from one call to the next."""
    ranks.run(world, check_random_calls, table_of_all_variants(tmp_path / "variants.yaml"), seed, 250)


def check_ranks_out_of_step(algorithm: str, calls: int) -> None:
    """Every rank pauses at times of its own, so that the fast ones run ahead as far as they can."""
    pauses = random.Random(dist.get_rank())
    with make_communicator(algorithm=algorithm) as comm:
        inputs = [contributions(comm.world_size, 100, torch.float32, seed) for seed in range(4)]
        for call in range(calls):
            if pauses.random() < 0.1:
                torch.randn(200_000)
            chosen = inputs[call % 4]
            out = comm.all_reduce(chosen[comm.rank])
            assert_bitwise_equal(out, rank_order_sum(chosen), f"call {call}")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ranks_out_of_step(ranks: RankPool, algorithm: str) -> None:
    ranks.run(3, check_ranks_out_of_step, algorithm, 500)


# ---- Several communicators -----------------------------------------------------------------------------------------


def check_interleaved(calls: int) -> None:
    draw = random.Random(5)
    with make_communicator() as first, make_communicator(algorithm="two_shot") as second:
        for call in range(calls):
            comm = draw.choice([first, first, first, second])
            reduce_once(comm, draw.randrange(1, 3000), draw.choice(DTYPES), call)


@pytest.mark.parametrize("world", [2, 4])
def test_two_communicators_of_one_group(ranks: RankPool, world: int) -> None:
    ranks.run(world, check_interleaved, 200)


def check_overlapping(memberships: list[list[int]], calls: int) -> list[int]:
    """Returns how often this rank called each group's communicator."""
    groups = new_groups(memberships)
    mine = {
        number: make_communicator(group)
        for number, (members, group) in enumerate(zip(memberships, groups, strict=True))
        if dist.get_rank() in members
    }
    draw = random.Random(11)
    count = [0] * len(groups)
    for call in range(calls):
        chosen = draw.choices(range(len(groups)), weights=[5, 1, 2])[0]
        size = draw.randrange(1, 3000)
        if chosen in mine:
            reduce_once(mine[chosen], size, torch.bfloat16, call)
            count[chosen] += 1
    for comm in mine.values():
        comm.close()
    return count


def test_overlapping_groups_with_unequal_call_counts(ranks: RankPool) -> None:
    memberships = [[0, 1, 2], [1, 2, 3, 4], [0, 4]]
    counts = ranks.run(5, check_overlapping, memberships, 200)
    assert len({max(column) for column in zip(*counts, strict=True)}) == len(memberships)


def check_subgroup(size: int) -> tuple[int, int]:
    """Tensor parallel groups of ``size`` within WORLD, of which only the last makes a communicator."""
    world = dist.get_world_size()
    groups = new_groups(list(range(first, first + size)) for first in range(0, world, size))
    if dist.get_rank() < world - size:
        return -1, -1
    with make_communicator(groups[-1]) as comm:
        for call in range(5):
            reduce_once(comm, 500, torch.float16, call)
        return comm.rank, comm.world_size


def test_group_within_a_larger_world(ranks: RankPool) -> None:
    assert ranks.run(6, check_subgroup, 3) == [(-1, -1)] * 3 + [(0, 3), (1, 3), (2, 3)]
