"""Which shapes of LL the tuner measures: none twice, none that cannot be good, and all the others."""

from __future__ import annotations

import pytest

from llm_comm import _core, registry
from llm_comm.planning.tables import ALL_REDUCE

LINE = 16
BF16 = tuple(registry.data_types()).index("bf16")
ALGORITHMS = tuple(a for a in registry.operations()[ALL_REDUCE].algorithms if a.protocol == "LL")
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=[a.name for a in ALGORITHMS])
MOST_ROUNDS = 8
MOST_ROUNDS_AHEAD = 32


def limits_of(sm_count: int) -> _core.Limits:
    return _core.Limits(slot_bytes=1 << 32, sm_count=sm_count, max_cluster=16, compute_capability=90)


def problem_of(lines: int, world: int) -> _core.Problem:
    return _core.Problem(count=lines * LINE // 2, row=0, data_type=BF16, world_size=world, parameters=())


def tiles_of(algorithm: registry.Algorithm, lines: int, world: int, tile_lines: int) -> int:
    """That the blocks of a launch walk over: of two-shot, those of a slice."""
    walked = lines if algorithm.name == "one_shot" else -(-lines // world)
    return -(-walked // tile_lines)


@every_algorithm
@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("sm_count", [4, 132])
def test_candidates(algorithm: registry.Algorithm, world: int, sm_count: int) -> None:
    limits = limits_of(sm_count)
    for lines in (1, 7, 64, 1000, 4096, 30_000):
        problem = problem_of(lines, world)
        if algorithm.name == "one_shot" and lines * LINE * (world - 1) > 4 << 20:
            assert _core.candidates(algorithm.number, problem, limits) == []
            continue
        grids = set()
        for choice in _core.candidates(algorithm.number, problem, limits):
            grid = _core.shape(algorithm.number, problem, choice, limits).whole
            assert (grid.blocks, choice.tile_lines, choice.depth) not in grids, "measured twice"
            grids.add((grid.blocks, choice.tile_lines, choice.depth))
            rounds = -(-tiles_of(algorithm, lines, world, choice.tile_lines) // choice.blocks)
            assert rounds <= (MOST_ROUNDS_AHEAD if choice.depth else MOST_ROUNDS)
            assert rounds > 1 or choice.depth == 0, "nothing to send ahead"
            assert choice.tile_lines * world <= 512
        assert grids


@every_algorithm
@pytest.mark.parametrize(("rounds", "depths"), [(1, {0}), (2, {0, 1}), (8, {0, 1}), (9, {1}), (32, {1}), (33, set())])
def test_rounds_of_the_smallest_grid(algorithm: registry.Algorithm, rounds: int, depths: set[int]) -> None:
    """With a block for every multiprocessor."""
    sm_count, world, tile_lines = 4, 2, 8
    lines = rounds * sm_count * tile_lines * (1 if algorithm.name == "one_shot" else world)
    found = _core.candidates(algorithm.number, problem_of(lines, world), limits_of(sm_count))
    assert {c.depth for c in found if (c.blocks, c.tile_lines) == (sm_count, tile_lines)} == depths


def test_one_shot_up_to_4_mib() -> None:
    """That a rank sends."""
    (one_shot,) = (a for a in ALGORITHMS if a.name == "one_shot")
    lines = (4 << 20) // LINE
    assert _core.candidates(one_shot.number, problem_of(lines, 2), limits_of(132))
    assert _core.candidates(one_shot.number, problem_of(lines + 1, 2), limits_of(132)) == []
    assert _core.candidates(one_shot.number, problem_of(lines // 2 + 1, 3), limits_of(132)) == []
