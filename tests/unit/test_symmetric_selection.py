"""What runs where the tensors of a call are symmetric: by rows of the table that stand apart from the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from reference import ALGORITHMS
from tables import limits_of, plain_row, write_table

from llm_comm import Config, ConfigError, _core, registry
from llm_comm.options import MIB
from llm_comm.planning import selection
from llm_comm.planning.catalogue import load_table, table_text
from llm_comm.planning.plan import Plan, Problem
from llm_comm.planning.planner import Planner
from llm_comm.planning.tables import ALL_GATHER, ALL_REDUCE, Row, TuningTable, by_operation, of_symmetric

CONFIG = Config.load({})
PULL = "two_shot_pull_hb"
PORT = "two_shot_port"
STREAM = "two_shot_ce"
ORDINARY = plain_row(64 * MIB, "two_shot", 4, 16, 1)
SMALL = Row(4096, ALL_REDUCE, PULL, "HB", blocks=2, tile_lines=8)
COPIES = Row(64 * MIB, ALL_REDUCE, PORT, "Port", blocks=5, tile_lines=48, depth=3)
IN_STREAM = COPIES._replace(algorithm=STREAM, protocol="CE")
LARGE = Row(64 * MIB, ALL_REDUCE, PULL, "HB", blocks=9, tile_lines=64)
TABLE = TuningTable("test", by_operation([ORDINARY, SMALL, LARGE]), 64 * MIB, min_symmetric_bytes=0)


def plan_of(nbytes: int, table: TuningTable = TABLE, config: Config = CONFIG, has_symmetric: bool = True) -> Plan:
    return layout_of(nbytes, table, config, has_symmetric).plan


def layout_of(
    nbytes: int, table: TuningTable = TABLE, config: Config = CONFIG, has_symmetric: bool = True
) -> selection.Layout:
    planner = Planner(2, table, config, limits_of(config))
    planner.has_symmetric = has_symmetric
    layout = planner.lay_out(ALL_REDUCE, nbytes // 2, 0, "bf16")
    assert (layout.direct is not None) == (layout.plan.symmetric != "")
    return layout


def test_nothing_else_is_prepared_without_a_heap() -> None:
    assert plan_of(4096, has_symmetric=False).symmetric == ""
    assert plan_of(4096).symmetric == PULL


def test_rows_of_symmetric_tensors_stand_apart() -> None:
    assert set(TABLE.rows) == {ALL_REDUCE, of_symmetric(ALL_REDUCE)}
    plan = plan_of(4096)
    assert (plan.algorithm, plan.protocol, plan.depth) == ("two_shot", "LL", 1)
    assert TABLE.with_rows(ORDINARY._replace(depth=0)).rows[of_symmetric(ALL_REDUCE)] == (SMALL, LARGE)


@pytest.mark.parametrize(("nbytes", "tile_lines"), [(16, 8), (4096, 8), (4112, 64), (MIB, 64)])
def test_the_row_of_the_size(nbytes: int, tile_lines: int) -> None:
    direct = layout_of(nbytes).direct
    assert direct is not None
    number, _, tiling = direct
    assert number == next(a.number for a in registry.operations()[ALL_REDUCE].algorithms if a.name == PULL)
    assert (tiling.tile_lines, tiling.launch_units) == (tile_lines, nbytes // 2)


@pytest.mark.parametrize(("nbytes", "expected"), [(MIB - 16, ""), (MIB, PULL)])
def test_small_messages_run_as_any(nbytes: int, expected: str) -> None:
    table = TABLE._replace(min_symmetric_bytes=MIB)
    assert plan_of(nbytes, table).symmetric == expected
    assert plan_of(nbytes, TuningTable("no row", by_operation([ORDINARY]), 64 * MIB)).symmetric == expected


def test_small_is_not_the_same_for_all_operations(tmp_path: Path) -> None:
    least = {ALL_REDUCE: 4096, "all_gather": 7}
    path = write_table(tmp_path / "table.yaml", [LARGE, ORDINARY], min_symmetric_bytes=least)
    table = load_table(path).table
    assert plan_of(4096 - 16, table).symmetric == ""
    assert plan_of(4096, table).symmetric == PULL
    assert table.symmetric_from("all_gather") == 7
    assert table.symmetric_from("reduce_scatter") == MIB
    again = tmp_path / "again.yaml"
    again.write_text(table_text("test device", 8, table, {}), encoding="utf-8")
    assert load_table(again).table._replace(name=table.name) == table
    turned = write_table(tmp_path / "table.yaml", [LARGE, ORDINARY], min_symmetric_bytes=dict(reversed(least.items())))
    assert load_table(turned).table.digest() == table.digest()


@pytest.mark.parametrize(
    ("least", "why"),
    [
        ({"all_sum": 5}, r"min_symmetric_bytes names 'all_sum'; operations: all_reduce, "),
        ({ALL_REDUCE: -1}, r"min_symmetric_bytes of all_reduce is -1; it must be a whole number of at least 0"),
        ({ALL_REDUCE: "1M"}, r"min_symmetric_bytes of all_reduce is '1M'; it must be a whole number"),
        ([4], r"min_symmetric_bytes is \[4\]; it must be a whole number"),
    ],
)
def test_what_is_no_least_size(tmp_path: Path, least: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_table(write_table(tmp_path / "table.yaml", [LARGE, ORDINARY], min_symmetric_bytes=least))


@pytest.mark.parametrize("nbytes", [2, 14, 18, 4098])
def test_what_is_not_in_lines_runs_as_any(nbytes: int) -> None:
    assert plan_of(nbytes).symmetric == ""


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_forced_algorithm_is_forced_for_all_tensors(algorithm: str) -> None:
    plan = plan_of(4096, config=CONFIG.replace(algorithm=algorithm))
    assert (plan.algorithm, plan.symmetric) == (algorithm, "")


def test_an_algorithm_for_symmetric_tensors_is_forced_for_those_only() -> None:
    plan = plan_of(4096, config=CONFIG.replace(algorithm=PULL))
    assert (plan.algorithm, plan.symmetric) == ("two_shot", PULL)
    assert plan.reason.endswith(f"algorithm {PULL} is for symmetric tensors")


@pytest.mark.parametrize("algorithm", [PULL, PORT, STREAM])
@pytest.mark.parametrize("of_row", [PULL, PORT, STREAM])
def test_a_forced_algorithm_needs_no_row(algorithm: str, of_row: str) -> None:
    row = {PULL: LARGE, PORT: COPIES, STREAM: IN_STREAM}[of_row]
    table = TABLE._replace(rows=by_operation([ORDINARY, row]))
    direct = layout_of(MIB, table, CONFIG.replace(algorithm=algorithm)).direct
    assert direct is not None
    assert direct[0] == next(a.number for a in registry.operations()[ALL_REDUCE].algorithms if a.name == algorithm)
    assert (direct[2].tile_lines == row.tile_lines) == (algorithm == of_row)


def test_copy_engines_only_by_a_row() -> None:
    """They are no better than others for what has not been measured."""
    assert plan_of(MIB).symmetric == PULL
    for row in (COPIES, IN_STREAM):
        table = TABLE._replace(rows=by_operation([ORDINARY, row]))
        for nbytes in (16, 18, MIB, MIB + 2):
            assert plan_of(nbytes, table).symmetric == row.algorithm
    assert plan_of(MIB, TuningTable("no row", by_operation([ORDINARY]), 64 * MIB)).symmetric == PULL


@pytest.mark.parametrize(
    ("rows", "sizes", "expected"),
    [
        (1, (32, 32), "direct_port"),
        (1, (33, 5), "direct_port"),
        (1, (0, 5), "direct_port"),
        (2, (32, 32), "direct_push_hb"),  # which takes rows one by one
    ],
)
def test_copy_engines_gather_whole_parts(rows: int, sizes: tuple[int, ...], expected: str) -> None:
    row = Row(64 * MIB, ALL_GATHER, "direct_port", "Port", blocks=4, tile_lines=64)
    table = TABLE._replace(rows=by_operation([ORDINARY, row]))
    planner = Planner(2, table, CONFIG, limits_of(CONFIG))
    planner.has_symmetric = True
    layout = planner.lay_out(ALL_GATHER, rows * max(sizes), 0, "byte", tuple(map(float, (rows, *sizes))))
    assert layout.plan.symmetric == expected


@pytest.mark.parametrize("sizes", [(32, 32), (33, 5)])
def test_copies_in_the_stream_only_by_a_row(sizes: tuple[int, ...]) -> None:
    """Also where nothing else serves: they are no better than staging for what has not been measured."""
    row = Row(64 * MIB, ALL_GATHER, "direct_ce", "CE")
    for rows, expected in (
        ((ORDINARY, row), "direct_ce"),
        ((ORDINARY,), "direct_push_hb" if sizes == (32, 32) else ""),
    ):
        planner = Planner(2, TABLE._replace(rows=by_operation(rows)), CONFIG, limits_of(CONFIG))
        planner.has_symmetric = True
        layout = planner.lay_out(ALL_GATHER, max(sizes), 0, "byte", tuple(map(float, (1, *sizes))))
        assert layout.plan.symmetric == expected


def test_it_is_never_chosen_for_other_tensors() -> None:
    """Where a table has rows for symmetric tensors alone."""
    table = TuningTable("test", by_operation([LARGE]), 64 * MIB, min_symmetric_bytes=0)
    plan = plan_of(4096, table)
    assert (plan.algorithm, plan.symmetric) == ("one_shot", PULL)


def test_what_is_declined_is_declined() -> None:
    assert plan_of(128 * MIB).algorithm == "declined"
    assert plan_of(128 * MIB).symmetric == ""


def test_a_row_that_has_no_shape_is_left_out() -> None:
    """For want of staging memory."""
    problem = Problem(ALL_REDUCE, 1 << 15, 0, "bf16", 2)
    usual = selection.lay_out(problem, TABLE, CONFIG, limits_of(CONFIG))
    for staging_bytes, is_there in ((2 * 9 * 2 * 16, True), (2 * 9 * 2 * 16 - 16, False)):
        limits = _core.Limits(
            slot_bytes=1 << 20, sm_count=132, max_cluster=16, compute_capability=90, staging_bytes=staging_bytes
        )
        layout = selection.with_direct(usual, problem, TABLE, CONFIG, limits)
        assert (layout.direct is not None) == is_there


def test_table_files(tmp_path: Path) -> None:
    table = load_table(write_table(tmp_path / "table.yaml", [LARGE, ORDINARY], min_symmetric_bytes=5)).table
    assert table.rows == by_operation([LARGE, ORDINARY])
    assert table.min_symmetric_bytes == 5
    again = tmp_path / "again.yaml"
    again.write_text(table_text("test device", 8, table, {}), encoding="utf-8")
    assert load_table(again).table._replace(name=table.name) == table
    with pytest.raises(ConfigError, match="rows of all_reduce of symmetric tensors must be sorted by up_to"):
        load_table(write_table(tmp_path / "unsorted.yaml", [LARGE, ORDINARY, SMALL]))


def test_the_first_candidate_where_a_table_has_no_row() -> None:
    table = TuningTable("no row", by_operation([ORDINARY]), 64 * MIB, min_symmetric_bytes=0)
    problem = Problem(ALL_REDUCE, 1 << 20, 0, "bf16", 2)
    layout = selection.with_direct(
        selection.lay_out(problem, table, CONFIG, limits_of(CONFIG)), problem, table, CONFIG, limits_of(CONFIG)
    )
    assert layout.direct is not None
    assert layout.direct[2].tile_lines == 1024
