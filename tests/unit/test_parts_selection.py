"""Plans of all-gather and reduce-scatter: by the bytes of the largest shard, within limits on the whole tensor."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from tables import core_of, emulated_table, general_table, limits_of

from llm_comm import Config, Plan, _core, registry
from llm_comm.options import MIB
from llm_comm.planning import selection
from llm_comm.planning.catalogue import shipped_tables
from llm_comm.planning.plan import Problem
from llm_comm.planning.tables import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    ALL_TO_ALL_V,
    REDUCE_SCATTER,
    Row,
    TuningTable,
    by_operation,
    row_of_fields,
)

BOTH = (ALL_GATHER, REDUCE_SCATTER)
both = pytest.mark.parametrize("operation", BOTH)
CONFIG = Config.load({})
ROWS = tuple(
    row
    for operation in BOTH
    for row in (
        Row(256, operation, "push_hb", "HB", blocks=3, tile_lines=8, depth=2),
        Row(4096, operation, "one_shot", "LL", blocks=7, tile_lines=16),
        Row(65536, operation, "push_hb", "HB", blocks=9, tile_lines=32, depth=2),
    )
)
TABLE = TuningTable("test table", by_operation(ROWS), 1 << 20)


def problem_of(operation: str, sizes: list[int], rows: int = 1) -> Problem:
    """In elements of a byte, or of bf16."""
    data_type = "bf16" if operation == REDUCE_SCATTER else "byte"
    parameters = (float(rows), *map(float, sizes), *[0.0] * (8 - len(sizes)))
    return Problem(operation, rows * max(sizes), 0, data_type, len(sizes), parameters)


def select(problem: Problem, table: TuningTable = TABLE, config: Config = CONFIG) -> Plan:
    return selection.select(problem, table, config, limits_of(config))


def test_which_operations_have_parts() -> None:
    known = registry.operations()
    assert {name for name, operation in known.items() if operation.has_shards} == {*BOTH, ALL_TO_ALL}
    assert {name for name, operation in known.items() if operation.bounds_parts} == {ALL_TO_ALL_V}


@pytest.mark.parametrize("world", [2, 8])
def test_parts_of_any_sizes_take_the_rows_of_equal_ones(world: int) -> None:
    """By the largest part that is possible, unless the table has rows of their own."""
    for table in tables():
        for shift in range(1, 26):
            part_bytes = min(1 << shift, table.max_message_bytes)
            plan = select(Problem(ALL_TO_ALL_V, part_bytes, 0, "byte", world, (2.0, 1.0)), table)
            equal = select(problem_of(ALL_TO_ALL, [part_bytes] * world), table)
            assert (plan.algorithm, plan.tile_lines, plan.reason) == (equal.algorithm, equal.tile_lines, equal.reason)
            assert plan.message_bytes == part_bytes
    row = Row(1, ALL_TO_ALL_V, "push_hb", "HB", blocks=2, tile_lines=5, depth=3)
    problem = Problem(ALL_TO_ALL_V, 10, 0, "byte", world, (1.0, 0.0))
    assert select(problem, emulated_table().with_rows(row)).depth == 3


def test_the_limit_of_the_option_counts_parts_as_the_largest_ones() -> None:
    config = CONFIG.replace(max_message_bytes=1 << 20)
    for part_bytes, is_served in ((1 << 18, True), ((1 << 18) + 4, False)):
        plan = select(Problem(ALL_TO_ALL_V, part_bytes, 0, "byte", 4, (4.0, 0.0)), config=config)
        assert (plan.algorithm != "declined") == is_served
    assert plan.reason == f"the whole tensor has {(1 << 20) + 16} bytes, more than max_message_bytes=1048576"


@both
@pytest.mark.parametrize(
    ("part_bytes", "row"), [(2, 0), (256, 0), (258, 1), (4096, 1), (4098, 2), (65536, 2), (65538, 2), (200_000, 2)]
)
def test_row_by_the_largest_part(operation: str, part_bytes: int, row: int) -> None:
    scale = 1 if operation == ALL_GATHER else 2
    expected = ROWS[row]
    longest = part_bytes // scale
    for sizes in ([longest] * 3, [0, longest, 1], [longest, 0, 0, 0, 0, 0, 0, 0]):
        plan = select(problem_of(operation, sizes))
        assert (plan.algorithm, plan.protocol, plan.depth) == (expected.algorithm, expected.protocol, expected.depth)
        assert plan.reason == f"test table, up to {expected.up_to} bytes a rank"
        assert plan.message_bytes == part_bytes
    if longest % 2 == 0:
        assert select(problem_of(operation, [longest // 2, 0], rows=2)).message_bytes == part_bytes


@both
def test_the_limit_of_the_option_is_one_of_the_whole_tensor(operation: str) -> None:
    scale = 1 if operation == ALL_GATHER else 2
    largest = (1 << 20) // scale
    config = CONFIG.replace(max_message_bytes=1 << 20)
    for sizes, rows in (([largest // 4] * 4, 1), ([largest - 5, 5], 1), ([largest // 64, largest // 64], 32)):
        assert select(problem_of(operation, sizes, rows), config=config).algorithm != "declined"
        sizes[1] += 1
        plan = select(problem_of(operation, sizes, rows), config=config)
        nbytes = (largest + rows) * scale
        assert plan.algorithm == "declined"
        assert plan.reason == f"the whole tensor has {nbytes} bytes, more than max_message_bytes=1048576"


@both
def test_the_limit_of_a_table_is_one_of_the_largest_part(operation: str) -> None:
    largest = (1 << 20) // (1 if operation == ALL_GATHER else 2)
    for sizes in ([largest] * 4, [largest, 0], [1, largest, 5]):
        assert select(problem_of(operation, sizes)).algorithm != "declined"
        sizes[sizes.index(largest)] += 2
        plan = select(problem_of(operation, sizes))
        assert plan.algorithm == "declined"
        nbytes = (1 << 20) + (2 if operation == ALL_GATHER else 4)
        assert plan.reason == f"the largest shard has {nbytes} bytes, more than max_message_bytes=1048576"


@both
def test_nothing_to_exchange(operation: str) -> None:
    for sizes, rows in (([0, 0], 1), ([5, 5], 0)):
        plan = select(problem_of(operation, sizes, rows), config=CONFIG.replace(max_message_bytes=0))
        assert (plan.algorithm, plan.reason) == ("none", "empty message")


# ---- Where nothing has been measured ---------------------------------------------------------------------------------


def tables() -> Iterator[TuningTable]:
    yield from (shipped.table for shipped in shipped_tables())
    yield from (general_table(4, 132), emulated_table(), TuningTable("nothing", {}, 64 * MIB))


@pytest.mark.parametrize("operation", [*BOTH, ALL_TO_ALL])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_table_has_an_algorithm_for_every_size(operation: str, world: int) -> None:
    for table in tables():
        for shift in range(1, 26):
            part_bytes = 1 << shift
            if part_bytes > table.max_message_bytes:
                continue
            plan = select(
                problem_of(operation, [part_bytes // 2 if operation == REDUCE_SCATTER else part_bytes] * world), table
            )
            assert "first candidate" not in plan.reason
            assert plan.message_bytes == part_bytes
            if operation not in table.rows:
                assert plan.algorithm == ("one_shot" if part_bytes <= 4 * MIB else "push_hb"), plan
                assert plan.reason.endswith("bytes a rank (general rows, not measured)")


@both
def test_rows_that_are_in_a_table_win(operation: str) -> None:
    row = Row(1, operation, "push_hb", "HB", blocks=2, tile_lines=5, depth=3)
    plan = select(problem_of(operation, [10, 10]), general_table(2, 132).with_rows(row))
    assert (plan.algorithm, plan.depth, plan.reason) == ("push_hb", 3, "general table, up to 1 bytes a rank")


def test_general_rows_are_valid() -> None:
    for operation in (*BOTH, ALL_TO_ALL):
        for sm_count in (0, 1, 108, 148):
            rows = [row_of_fields(fields) for fields in _core.rows_of_shards(operation, sm_count)]
            assert [row.up_to for row in rows] == sorted(row.up_to for row in rows)
            for row in rows:
                algorithm = registry.operations()[operation].find(row.algorithm, row.protocol)
                assert algorithm is not None
                for name, value in row.tunables().items():
                    assert algorithm.ranges[name].takes(value)


# ---- A forced algorithm ----------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("algorithm", ["one_shot", "push_hb"])
def test_a_forced_algorithm_at_every_size(operation: str, algorithm: str) -> None:
    for table in (TABLE, general_table(2, 132), emulated_table()):
        for part in (2, 1000, 10_000, 100_000):
            plan = select(problem_of(operation, [part, part]), table, CONFIG.replace(algorithm=algorithm))
            assert plan.algorithm == algorithm
            assert plan.reason.endswith(f"algorithm forced to {algorithm}")


@both
def test_a_forced_algorithm_takes_the_table_s_row_for_it(operation: str) -> None:
    config = CONFIG.replace(algorithm="push_hb")
    scale = 1 if operation == ALL_GATHER else 2
    for part_bytes, row in ((200, 0), (300, 2), (4096, 2), (1 << 17, 2)):
        plan = select(problem_of(operation, [part_bytes // scale, 0]), config=config)
        assert (plan.depth, plan.tile_lines) == (ROWS[row].depth, ROWS[row].tile_lines)
        assert f"up to {ROWS[row].up_to} bytes a rank" in plan.reason


@both
def test_an_operation_without_the_forced_algorithm_goes_by_its_table(operation: str) -> None:
    plan = select(problem_of(operation, [1000, 1000]), config=CONFIG.replace(algorithm="two_shot"))
    assert (plan.algorithm, plan.tile_lines) == ("one_shot", 16)
    assert f"{operation} has no algorithm two_shot for " in plan.reason
    plain = Problem(ALL_REDUCE, 1000, 0, "bf16", 2)
    table = emulated_table()
    assert select(plain, table, CONFIG.replace(algorithm="push_hb")).algorithm == "one_shot"


# ---- What the core says ----------------------------------------------------------------------------------------------


@both
def test_core_accepts_every_plan(operation: str) -> None:
    draw = random.Random(operation)
    planned = 0
    for _ in range(1000):
        world = draw.randint(2, 8)
        config = CONFIG.replace(workspace_bytes=(1 << 20) + draw.choice([0, draw.randrange(1 << 26)]))
        most = draw.choice([9, 3000, 1 << 20])
        sizes = [draw.choice([0, draw.randint(0, most)]) for _ in range(world)]
        problem = problem_of(operation, sizes, draw.choice([1, 1, draw.randint(1, 20)]))
        choice: Row = draw.choice(ROWS)._replace(
            operation=operation, up_to=1, blocks=draw.randint(1, 300), tile_lines=1 << draw.randrange(11)
        )
        table = draw.choice([TuningTable("one row", by_operation([choice]), 1 << 40), general_table(world, 132)])
        layout = selection.lay_out(problem, table, config, limits_of(config))
        if layout.launches is not None:
            planned += 1
            core_of(world, config).prepare(*layout.launches)
            plan = layout.plan
            assert (plan.chunks - 1) * plan.chunk_elements < problem.count <= plan.chunks * plan.chunk_elements
    assert planned > 400


def test_core_refuses_sizes_that_describe_no_parts() -> None:
    for rows, sizes, count, message in (
        (1.0, [4.0, 5.0], 4, "count is 4; the largest shard has 5 elements"),
        (0.0, [4.0, 5.0], 5, "rows is 0.000000; it must be a whole number above 0"),
        (1.0, [4.5, 5.0], 5, "size_0 is 4.5"),
        (1.0, [4.0, -5.0], 4, "size_1 is -5"),
        (1.0, [4.0, 5.0, 6.0], 6, "size_2 is of no rank"),
    ):
        parameters = (rows, *sizes, *[0.0] * (8 - len(sizes)))
        plan = select(Problem(ALL_GATHER, count, 0, "byte", 2, parameters))
        assert plan.algorithm == "declined"
        assert message in plan.reason


def test_a_workspace_without_staging_declines_what_needs_it() -> None:
    limits = _core.Limits(slot_bytes=1 << 20, sm_count=132, max_cluster=16, compute_capability=90)
    config = CONFIG.replace(algorithm="push_hb")
    plan = selection.select(problem_of(ALL_GATHER, [9, 9]), TABLE, config, limits)
    assert plan.algorithm == "declined"
    assert "bytes of staging memory: lower blocks or depth, or raise workspace_bytes" in plan.reason
