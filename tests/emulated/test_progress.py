"""Grids of more blocks than run at once, which start in any order: an emulated GPU promises no more than a real one.

``test_deterministic.py`` takes the protections out; the mutant "an emulated GPU says that all blocks run at once" shows
that calls end in ``PeerTimeout`` here without them.
"""

from __future__ import annotations

import pytest
import torch
from harness import RankPool, make_communicator
from reference import ALGORITHMS, assert_is_sum, contributions
from tables import plain_row

RESIDENT_THREADS = 1024  # Executor::kResidentThreads
CALLS = 12  # in each, every rank draws another order


def check_many_blocks(algorithm: str, depth: int) -> None:
    with make_communicator(timeout_s=20.0) as comm:
        comm.use_table(comm.table.with_rows(plain_row(1 << 30, algorithm, blocks=600, tile_lines=8, depth=depth)))
        count = 8 * 4 * 300 * comm.world_size  # lines of a tile, elements of a line, tiles of a slice
        plan = comm.plan(torch.empty(count))
        assert plan.blocks * plan.threads > 2 * RESIDENT_THREADS
        for seed in range(CALLS):
            inputs = contributions(comm.world_size, count, torch.float32, seed)
            assert_is_sum(comm.all_reduce(inputs[comm.rank].clone()), inputs, f"call {seed}")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("depth", [0, 1])
def test_more_blocks_than_run_at_once(ranks: RankPool, world: int, algorithm: str, depth: int) -> None:
    ranks.run(world, check_many_blocks, algorithm, depth)
