"""The option that bounds how many multiprocessors a large operation takes."""

from __future__ import annotations

import pytest
from tables import limits_of

from llm_comm import Config, Plan, registry
from llm_comm.config import LARGE_BYTES
from llm_comm.planning import selection
from llm_comm.planning.catalogue import shipped_tables
from llm_comm.planning.plan import Problem
from llm_comm.planning.tables import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    ALL_TO_ALL_V,
    FUSED,
    MOE_COMBINE,
    MOE_DISPATCH,
    REDUCE_SCATTER,
    TuningTable,
)

CONFIG = Config.load({}, max_message_bytes=1 << 40)
TABLES = shipped_tables()
OPERATIONS = (ALL_REDUCE, FUSED, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, ALL_TO_ALL_V)


def problem_of(operation: str, nbytes: int, world: int) -> Problem:
    """Of so many bytes, which are a multiple of 16 KiB for each rank."""
    if operation == FUSED:
        return Problem(FUSED, nbytes // 2, 8192, "bf16", world, (1e-5, 0))
    if operation == ALL_REDUCE:
        return Problem(ALL_REDUCE, nbytes // 2, 0, "bf16", world)
    if operation == ALL_TO_ALL_V:
        return Problem(ALL_TO_ALL_V, nbytes // world, 0, "byte", world, (16.0, 0.0))
    moves = operation in (ALL_GATHER, ALL_TO_ALL)
    element_bytes = 1 if moves else 2
    part = nbytes // world // element_bytes
    parameters = (1.0, *[float(part)] * world, *[0.0] * (8 - world))
    return Problem(operation, part, 0, "byte" if moves else "bf16", world, parameters)


def layout_of(problem: Problem, table: TuningTable, config: Config) -> selection.Layout:
    limits = limits_of(config)
    return selection.with_direct(selection.lay_out(problem, table, config, limits), problem, table, config, limits)


@pytest.mark.parametrize(("world", "table"), [listed[1:3] for listed in TABLES], ids=lambda p: getattr(p, "name", ""))
@pytest.mark.parametrize("operation", OPERATIONS)
def test_large_operations_take_so_many_blocks_at_most(operation: str, world: int, table: TuningTable) -> None:
    more = 0
    for most in (8, 20, 64):
        config = CONFIG.replace(max_blocks=most)
        for nbytes in (LARGE_BYTES, 16 << 20, 256 << 20):
            problem = problem_of(operation, nbytes, world)
            free, bounded = layout_of(problem, table, CONFIG), layout_of(problem, table, config)
            assert (free.launches is None) == (bounded.launches is None), "the option declines nothing"
            if bounded.launches is None or free.launches is None:
                continue
            assert 1 <= bounded.plan.blocks <= most
            if free.plan.blocks <= most:
                assert bounded.plan == free.plan
                continue
            more += 1
            assert bounded.plan.reason == f"{free.plan.reason}; max_blocks={most}"
            assert bounded.plan.protocol == "HB", "HB needs fewer blocks than LL"
            assert (free.direct is None) == (bounded.direct is None)
            if bounded.direct is not None:
                assert 1 <= bounded.direct[2].blocks <= most
    assert more, "the option changes something"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_small_operations_are_not_bounded(operation: str) -> None:
    def plan_of(nbytes: int, config: Config) -> Plan:
        return layout_of(problem_of(operation, nbytes, 8), table, config).plan

    table = next(table for _, world, table, _ in TABLES if world == 8)
    below = LARGE_BYTES - (128 << 10)
    assert plan_of(below, CONFIG.replace(max_blocks=8)) == plan_of(below, CONFIG)
    assert plan_of(below, CONFIG).blocks > 8
    assert plan_of(LARGE_BYTES, CONFIG.replace(max_blocks=8)).blocks == 8


def test_every_operation_is_tried() -> None:
    # Tokens of experts go by LL alone, which takes more blocks.
    assert set(registry.operations()) == {*OPERATIONS, MOE_DISPATCH, MOE_COMBINE}


def test_a_forced_algorithm_stays() -> None:
    config = CONFIG.replace(max_blocks=16, algorithm="two_shot")
    plan = layout_of(problem_of(ALL_REDUCE, 64 << 20, 8), TABLES[-1].table, config).plan
    assert (plan.algorithm, plan.protocol, plan.blocks) == ("two_shot", "LL", 16)
