"""Which fused kernel runs: plans that follow the table, and that the core accepts."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tables import core_of, write_fused_table

from llm_comm import Config, ConfigError, FusedPlan, _core
from llm_comm.planning import selection
from llm_comm.planning.fused_selection import (
    CHUNK_LINES,
    MAX_HIDDEN,
    MAX_LOOP_THREADS,
    MAX_TWO_SHOT_THREADS,
    DeviceLimits,
    derive_fused_rows,
    resident_clusters,
    select_fused,
)
from llm_comm.planning.selection import ALGORITHMS, FusedRow, TuningRow, TuningTable

WORLDS = range(2, 9)
LIMITS = DeviceLimits(max_cluster=16, sm_count=132)
PLAIN = (TuningRow(4096, "one_shot", 3, 8, 0), TuningRow(65536, "two_shot", 100, 16, 1))
ROWS = (FusedRow(4096, "two_shot", 64, 128, 4, 2), FusedRow(65536, "one_shot", 128, 256, 8, 0))
CONFIG = Config.load({})
TABLE = TuningTable("test table", PLAIN, 1 << 20, ROWS)


@pytest.mark.parametrize(("message_bytes", "row"), [(256, 0), (4096, 0), (4352, 1), (65536, 1), (1 << 20, 1)])
def test_row_by_message_bytes(message_bytes: int, row: int) -> None:
    plan = select_fused(message_bytes // 256, 128, 2, TABLE, CONFIG, LIMITS)
    assert (plan.algorithm, plan.depth) == (ROWS[row].algorithm, ROWS[row].depth)
    assert plan.reason == f"test table, fused, up to {ROWS[row].up_to} bytes"
    assert plan.message_bytes == message_bytes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_forced_algorithm(algorithm: str) -> None:
    plan = select_fused(3, 1024, 4, TABLE, Config.load({}, algorithm=algorithm), LIMITS)
    assert plan.algorithm == algorithm
    assert f"algorithm forced to {algorithm}" in plan.reason


def test_table_without_fused_rows() -> None:
    plan = select_fused(1, 1024, 4, TABLE._replace(fused=()), CONFIG, LIMITS)
    assert plan.algorithm == "one_shot"
    assert "not measured" in plan.reason
    assert [row.algorithm for row in derive_fused_rows(PLAIN)] == ["one_shot", "two_shot"]


@pytest.mark.parametrize(
    ("rows", "hidden", "world", "limit", "algorithm", "reason"),
    [
        (0, 64, 2, None, "none", "no rows"),
        (4, 64, 1, None, "declined", "one rank"),
        (4, 60, 2, None, "declined", "rows of 60 elements"),
        (4, 0, 2, None, "declined", "rows of 0 elements"),
        (1, MAX_HIDDEN + 8, 2, None, "declined", "multiple of 8 up to 16384"),
        (2, 64, 2, 255, "declined", "more than max_message_bytes=255"),
        (4097, 128, 2, 1 << 30, "declined", "more than max_fused_bytes=1048576 of test table"),
    ],
)
def test_nothing_to_launch(rows: int, hidden: int, world: int, limit: int | None, algorithm: str, reason: str) -> None:
    plan = select_fused(rows, hidden, world, TABLE, Config.load({}, max_message_bytes=limit), LIMITS)
    assert plan.algorithm == algorithm
    assert reason in plan.reason
    assert plan.blocks == plan.chunks == 0


def random_cases(number: int) -> Iterator[tuple[int, int, int, Config, FusedRow, DeviceLimits, FusedPlan]]:
    draw = random.Random(7)
    for _ in range(number):
        world = draw.choice(WORLDS)
        hidden = 8 * draw.choice([draw.randint(1, 2048), draw.choice([64, 360, 640, 1024, 2048])])
        row = FusedRow(
            1,
            draw.choice(ALGORITHMS),
            draw.randint(1, 1200),
            draw.randint(64, 1024),
            draw.choice([1, 2, 4, 8, 16]),
            draw.randrange(4),
        )
        limits = DeviceLimits(draw.choice([1, 8, 16]), draw.choice([4, 84, 132]))
        config = Config.load({}, workspace_bytes=(1 << 20) + draw.choice([0, 77, 31 << 20]))
        chunk = select_fused(1, hidden, world, one_row(row), config, limits).chunk_rows
        rows = draw.choice([1, draw.randint(1, 300), max(1, draw.randint(0, 2) * chunk + draw.randint(-1, 1))])
        yield rows, hidden, world, config, row, limits, select_fused(rows, hidden, world, one_row(row), config, limits)


def one_row(row: FusedRow) -> TuningTable:
    return TuningTable("one row", PLAIN, 1 << 40, (row,), 1 << 40)


def prepare(
    core: _core.Core, plan: FusedPlan, rows: int, hidden: int, data_type: int = 0, quantization: int = 0
) -> None:
    launch = _core.FusedPlan(
        algorithm=ALGORITHMS.index(plan.algorithm),
        blocks=plan.blocks,
        tile_lines=plan.tile_lines,
        cluster_blocks=plan.cluster,
        depth=plan.depth,
        chunk_rows=plan.chunk_rows,
    )
    operation = _core.AddRmsNorm(rows=rows, hidden=hidden, data_type=data_type, quantization=quantization, epsilon=1e-5)
    core.prepare_add_rms_norm(operation, launch)


def test_core_accepts_every_plan() -> None:
    for rows, hidden, world, config, *_, plan in random_cases(3000):
        prepare(core_of(world, config), plan, rows, hidden)


def test_plans_are_within_limits() -> None:
    for rows, hidden, world, _, row, limits, plan in random_cases(3000):
        lines = hidden // 8
        segment = -(-lines // (CHUNK_LINES * world)) * CHUNK_LINES
        span = lines if plan.algorithm == "one_shot" else segment
        launch_rows = min(rows, plan.chunk_rows)
        single = plan.blocks == plan.cluster * launch_rows and span <= plan.cluster * plan.tile_lines
        assert plan.tile_lines % CHUNK_LINES == 0
        assert plan.threads % 32 == 0
        assert 0 <= plan.threads - plan.tile_lines * world < 32
        most_threads = (
            {"one_shot": 1024, "two_shot": MAX_TWO_SHOT_THREADS}[plan.algorithm] if single else MAX_LOOP_THREADS
        )
        resident_threads = {"one_shot": 1024, "two_shot": 768}[plan.algorithm] if single else MAX_LOOP_THREADS
        assert plan.threads <= most_threads
        assert plan.cluster <= min(row.cluster, limits.max_cluster)
        assert plan.cluster & (plan.cluster - 1) == 0
        assert plan.blocks % plan.cluster == 0
        assert (plan.cluster - 1) * plan.tile_lines < span, "a block without a share of the row"
        assert plan.blocks <= max(row.blocks, plan.cluster)
        resident = resident_clusters(limits, plan.cluster, plan.threads, resident_threads)
        assert plan.blocks <= plan.cluster * max(resident, 1), "blocks that wait for others to end"
        assert (plan.chunks - 1) * plan.chunk_rows < rows <= plan.chunks * plan.chunk_rows


def test_chunks_fill_slots() -> None:
    for _, hidden, world, config, *_, plan in random_cases(500):
        lines = hidden // 8
        segment = -(-lines // (CHUNK_LINES * world)) * CHUNK_LINES
        row_lines = world * lines if plan.algorithm == "one_shot" else 2 * world * segment
        slot_lines = selection.slot_bytes(config) // selection.LINE_BYTES
        assert plan.chunk_rows * row_lines <= slot_lines < (plan.chunk_rows + 1) * row_lines


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world", [2, 8])
def test_core_refuses_a_plan_that_does_not_fit(world: int, algorithm: str) -> None:
    config = Config.load({}, workspace_bytes=1 << 20)
    rows, hidden = 1000, 1024
    row = FusedRow(1, algorithm, 16, 256, 2, 0)
    plan = select_fused(rows, hidden, world, one_row(row), config, LIMITS)
    core = core_of(world, config)
    for change, message in (
        ({"chunk_rows": plan.chunk_rows + 1}, "lower chunk_rows or raise workspace_bytes"),
        ({"chunk_rows": 0}, "must be positive"),
        ({"tile_lines": 0}, "multiple of 8"),
        ({"tile_lines": 12}, "multiple of 8"),
        ({"tile_lines": 1024}, "at most 1024"),
        ({"tile_lines": 1024 // world}, "no kernel"),  # more threads than a block that loops may have
        ({"cluster": 0}, "cluster_blocks is 0"),
        ({"cluster": 32}, "this device takes 1 to 16"),
        ({"blocks": 1}, "no kernel"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(core, dataclasses.replace(plan, **change), rows, hidden)
    for hidden_, data_type, quantization, message in (
        (1020, 0, 0, "multiple of 8 up to 16384"),
        (16392, 0, 0, "multiple of 8 up to 16384"),
        (1024, 2, 0, "no kernel"),
        (1024, 0, 3, "no quantization 3"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(core, plan, rows, hidden_, data_type, quantization)


GOOD = ROWS[0]
INVALID = {
    "algorithm": GOOD._replace(algorithm="ring"),
    "no blocks": GOOD._replace(blocks=0),
    "too many blocks": GOOD._replace(blocks=65536),
    "few threads": GOOD._replace(threads=32),
    "many threads": GOOD._replace(threads=1025),
    "cluster": GOOD._replace(cluster=3),
    "depth": GOOD._replace(depth=-1),
    "depth missing": GOOD._replace(depth=None),
    "up to nothing": GOOD._replace(up_to=0),
    "blocks a word": GOOD._replace(blocks="4"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_row(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tuning table .*table\.yaml"):
        selection.load_table(write_fused_table(tmp_path / "table.yaml", [INVALID[name]]))


def test_rows_from_a_file(tmp_path: Path) -> None:
    table = selection.load_table(write_fused_table(tmp_path / "table.yaml", list(ROWS)))[2]
    assert table.fused == ROWS
    assert table.fingerprint() != table._replace(fused=()).fingerprint()
    with pytest.raises(ConfigError, match="sorted by up_to"):
        selection.load_table(write_fused_table(tmp_path / "table.yaml", [GOOD, GOOD]))


@pytest.mark.parametrize("path", list(selection.shipped_tables()), ids=lambda path: path.name)
def test_shipped_table(path: Path) -> None:
    _, world, table = selection.load_table(path)
    assert table.fused
    for row in table.fused:
        for hidden in (2880, 4096, 8192):
            rows = max(1, min(row.up_to, table.max_fused_bytes) // (2 * hidden))
            prepare(core_of(world, CONFIG), select_fused(rows, hidden, world, table, CONFIG, LIMITS), rows, hidden)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("hidden", [1024, 2048, 2880, 4096, 5120, 8192])
@pytest.mark.parametrize("mib", [1, 0.5, 0.25])
def test_rows_of_a_decode_batch_take_a_cluster_each(world: int, hidden: int, mib: float) -> None:
    """On an H200, up to max_fused_bytes, no block walks over several rows: that takes about twice the time."""
    *_, table = selection.load_table(Path(__file__).parents[2] / "configs" / f"tune_h200_{world}.yaml")
    rows = int(mib * (1 << 20)) // (2 * hidden)
    plan = select_fused(rows, hidden, world, table, CONFIG, LIMITS)
    assert plan.blocks == plan.cluster * rows


def test_many_rows_share_fewer_blocks_each() -> None:
    row = FusedRow(1, "one_shot", 1056, 1024, 16, 0)

    def cluster(rows: int, row: FusedRow = row, hidden: int = 8192) -> int:
        table = one_row(row)._replace(fused_blocks=396)
        return select_fused(rows, hidden, 2, table, CONFIG, LIMITS).cluster

    assert [cluster(rows) for rows in (1, 24, 25, 49, 50)] == [16, 16, 8, 8, 4]
    assert cluster(50, row._replace(threads=128)) == 16, "blocks of more threads than the table allows"
    assert [cluster(rows, hidden=2880) for rows in (64, 128)] == [4, 4], "with 2, not all of 128 rows run at once"
    assert select_fused(50, 8192, 2, one_row(row), CONFIG, LIMITS).cluster == 16


def test_tables_limit_blocks() -> None:
    assert selection.general_table(4, 100).fused_blocks == 300
    tables = [selection.load_table(path)[2] for path in selection.shipped_tables()]
    assert {table.fused_blocks for table in tables} == {3 * 132}
