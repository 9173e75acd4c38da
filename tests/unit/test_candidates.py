"""Which shapes the tuner measures: of LL none twice, none that cannot be good, and all the others; of every algorithm
none that a table or the core refuses."""

from __future__ import annotations

import pytest

from llm_comm import _core, registry
from llm_comm.config import Config
from llm_comm.planning.tables import ALL_REDUCE, MOE_COMBINE, MOE_DISPATCH

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
@pytest.mark.parametrize("world", [2, 3, 8, 9, 16])
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


def any_problem(algorithm: registry.Algorithm, elements: int, world: int = 2) -> _core.Problem:
    """So many elements, in rows of 1024 where an operation works by rows, or in a part of one row on each rank. Tokens
    with experts are 128 at most."""
    is_routed = algorithm.operation in (MOE_DISPATCH, MOE_COMBINE)
    operation = registry.operations()[algorithm.operation]
    parameters: tuple[float, ...] = ()
    if operation.row_multiple != 0:
        parameters = (4 * world, 8) if is_routed else (1e-5, 0)
    elif operation.has_shards:
        parameters = (1, *[elements] * world)
    elif operation.bounds_parts:
        parameters = (16, 0)
    return _core.Problem(
        count=min(elements, 128 * 1024) if is_routed else elements,
        row=1024 if operation.row_multiple != 0 else 0,
        data_type=tuple(registry.data_types()).index(algorithm.data_types[0]),
        world_size=world,
        parameters=parameters,
    )


def choices_of(algorithm: registry.Algorithm, problem: _core.Problem, sm_count: int) -> list[_core.TuningParameters]:
    """Candidates, each within the bounds of a table's rows, and with a shape."""
    limits = _core.Limits(
        slot_bytes=1 << 28, sm_count=sm_count, max_cluster=16, compute_capability=100, staging_bytes=1 << 30
    )
    found = _core.candidates(algorithm.number, problem, limits)
    for choice in found:
        for name, bounds in algorithm.ranges.items():
            value = getattr(choice, name)
            assert bounds.takes(value), f"{algorithm.name}: {name} is {value}, not {bounds}"
        _core.shape(algorithm.number, problem, choice, limits)
    return found


@pytest.mark.parametrize("sm_count", [0, 1, 148, 160, 192, 224])
def test_candidates_of_any_device_can_be_launched(sm_count: int) -> None:
    """None is lost: a GPU with more multiprocessors has as many as one with 132."""
    for operation in registry.operations().values():
        for algorithm in operation.algorithms:
            for elements in (1 << 12, 1 << 20, 1 << 25):
                problem = any_problem(algorithm, elements)
                found = choices_of(algorithm, problem, sm_count)
                if algorithm.protocol == "HB" and sm_count > 132:
                    assert len(found) == len(choices_of(algorithm, problem, 132)), f"{operation.name}/{algorithm.name}"


@pytest.mark.parametrize("world", [8, 9, 12, 16])
@pytest.mark.parametrize("sm_count", [58, 108, 132, 148, 192])
def test_many_ranks_have_candidates_in_chunks(world: int, sm_count: int) -> None:
    """All of them share the staging memory of the default workspace."""
    workspace = Config.load({}).workspace_bytes
    limits = _core.Limits(
        slot_bytes=_core.slot_bytes(workspace),
        sm_count=sm_count,
        max_cluster=16,
        compute_capability=90,
        staging_bytes=_core.staging_bytes(workspace),
    )
    for operation in registry.operations().values():
        for algorithm in operation.algorithms:
            if algorithm.protocol != "HB" or algorithm.uses_multimem:
                continue
            problem = any_problem(algorithm, 1 << 25, world)
            found = _core.candidates(algorithm.number, problem, limits)
            assert found, f"{operation.name}/{algorithm.name}"
            for choice in found:
                _core.shape(algorithm.number, problem, choice, limits)


def test_a_problem_that_nobody_can_solve_has_no_candidates() -> None:
    """Rather than a division by what is 0."""
    for algorithm in (a for operation in registry.operations().values() for a in operation.algorithms):
        for world in (0, 1):
            with pytest.raises(ValueError, match=f"a world of {world}; it takes 2 to 16"):
                _core.candidates(algorithm.number, problem_of(1 << 20, world), limits_of(132))


@every_algorithm
@pytest.mark.parametrize("wrong", [{"tile_lines": 0}, {"blocks": 0}])
def test_a_choice_of_nothing_is_an_error(algorithm: registry.Algorithm, wrong: dict[str, int]) -> None:
    """Of a message that takes several launches, which are cut to whole tiles."""
    choice = _core.TuningParameters(**{"blocks": 4, "tile_lines": 8, **wrong})
    limits = _core.Limits(slot_bytes=1 << 10, sm_count=4, max_cluster=16, compute_capability=90)
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is 0; it must be 1 to "):
        _core.shape(algorithm.number, problem_of(1 << 12, 2), choice, limits)
