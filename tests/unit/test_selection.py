"""Which kernel runs for a message: a pure function of sizes and tables, whose plans the core accepts."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tables import core_of, write_table

from llm_comm import Config, ConfigError, Plan, _core
from llm_comm.integrations import common
from llm_comm.planning import selection
from llm_comm.planning.selection import ALGORITHMS, TuningRow, TuningTable, select

WORLDS = range(2, 9)
ELEMENT_BYTES = {0: 2, 1: 2, 2: 4}  # by DataType of the core
CONFIG = Config.load({})
TABLE = TuningTable(
    "test table",
    (
        TuningRow(256, "two_shot", 1, 4, 2),
        TuningRow(4096, "one_shot", 3, 8, 0),
        TuningRow(65536, "two_shot", 100, 16, 1),
    ),
    1 << 20,
)
REPOSITORY = Path(__file__).parents[2]
SHIPPED = {path.name: path for path in selection.shipped_tables()}


def table_of(row: TuningRow, max_message_bytes: int = 1 << 40) -> TuningTable:
    return TuningTable("one row", (row,), max_message_bytes)


# ---- Look-up -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message_bytes", "row"),
    [(1, 0), (255, 0), (256, 0), (257, 1), (4096, 1), (4097, 2), (65536, 2), (65537, 2), (1 << 20, 2)],
)
@pytest.mark.parametrize("world", [2, 5])
def test_row_by_message_bytes(message_bytes: int, row: int, world: int) -> None:
    plan = select(message_bytes, 1, world, TABLE, CONFIG)
    expected = TABLE.rows[row]
    assert (plan.algorithm, plan.tile_lines, plan.depth) == (expected.algorithm, expected.tile_lines, expected.depth)
    assert plan.reason == f"test table, up to {expected.up_to} bytes"
    assert plan.protocol == "LL"


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_element_size_counts(element_bytes: int) -> None:
    at_boundary = 4096 // element_bytes
    assert select(at_boundary, element_bytes, 2, TABLE, CONFIG).algorithm == "one_shot"
    assert select(at_boundary + 1, element_bytes, 2, TABLE, CONFIG).algorithm == "two_shot"
    assert select(at_boundary, element_bytes, 2, TABLE, CONFIG).message_bytes == 4096


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_forced_algorithm(algorithm: str) -> None:
    for count in (10, 1000, 10_000):
        plan = select(count, 4, 4, TABLE, Config.load({}, algorithm=algorithm))
        assert plan.algorithm == algorithm
        assert f"algorithm forced to {algorithm}" in plan.reason


@pytest.mark.parametrize(("limit", "largest"), [(None, 1 << 20), (100, 100), (0, 0), (1 << 30, 1 << 30)], ids=str)
def test_largest_message(limit: int | None, largest: int) -> None:
    config = Config.load({}, max_message_bytes=limit)
    if largest:
        assert select(largest, 1, 2, TABLE, config).algorithm != "declined"
    plan = select(largest + 1, 1, 2, TABLE, config)
    assert plan == selection.declined(largest + 1, f"more than max_message_bytes={largest}")
    assert plan.algorithm == "declined"
    assert plan.chunks == plan.blocks == plan.threads == 0


@pytest.mark.parametrize(
    ("count", "world", "reason"), [(0, 4, "empty message"), (0, 1, "empty message"), (9, 1, "one rank")]
)
def test_nothing_to_exchange(count: int, world: int, reason: str) -> None:
    plan = select(count, 2, world, TABLE, Config.load({}, max_message_bytes=0))
    assert (plan.algorithm, plan.protocol, plan.message_bytes, plan.reason) == ("none", "none", 2 * count, reason)


def test_same_arguments_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else counts: not what was asked before, and not the environment."""
    first = select(5000, 2, 8, TABLE, CONFIG)
    for count in range(0, 10_000, 100):
        select(count, 4, 3, TABLE, Config.load({}, algorithm="one_shot"))
    monkeypatch.setenv("LLM_COMM_ALGORITHM", "one_shot")
    monkeypatch.setenv("LLM_COMM_MAX_MESSAGE_BYTES", "0")
    assert select(5000, 2, 8, TABLE, CONFIG) == first
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.blocks = 7  # type: ignore[misc]


# ---- Grids and chunks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("tile_lines", [1 << shift for shift in range(13)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_block_is_within_limits(world: int, tile_lines: int, algorithm: str) -> None:
    for count in (1, 1000, 1 << 20):
        plan = select(count, 2, world, table_of(TuningRow(1, algorithm, 64, tile_lines, 0)), CONFIG)
        assert plan.threads == plan.tile_lines * world <= selection.MAX_BLOCK_THREADS
        assert plan.tile_lines <= tile_lines
        assert plan.tile_lines & (plan.tile_lines - 1) == 0
        # Not smaller than it has to be.
        assert plan.tile_lines == tile_lines or 2 * plan.threads > selection.MAX_BLOCK_THREADS


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_block_without_a_tile(world: int, algorithm: str) -> None:
    blocks, tile_lines = 5, 4
    for count in (1, 63, 64, 65, 640, 5000):
        plan = select(count, 2, world, table_of(TuningRow(1, algorithm, blocks, tile_lines, 0)), CONFIG)
        lines = -(-count * 2 // 16)
        tiles = -(-(lines if algorithm == "one_shot" else -(-lines // world)) // tile_lines)
        assert plan.blocks == min(blocks, tiles)


def random_cases(number: int) -> Iterator[tuple[int, int, int, TuningTable, Config]]:
    """(count, data type, world, table, config), of which many lie at the edge of a chunk."""
    draw = random.Random(3)
    for _ in range(number):
        world, data_type = draw.choice(WORLDS), draw.choice(list(ELEMENT_BYTES))
        row = TuningRow(1, draw.choice(ALGORITHMS), draw.randint(1, 300), 1 << draw.randrange(11), draw.randrange(4))
        workspace = (1 << 20) + draw.choice([0, draw.randrange(1 << 20), draw.randrange(1 << 26)])
        config = Config.load({}, workspace_bytes=workspace)
        chunk = select(1, ELEMENT_BYTES[data_type], world, table_of(row), config).chunk_elements
        count = draw.choice([draw.randint(1, 1 << 24), max(1, chunk * draw.randint(0, 3) + draw.randint(-9, 9))])
        yield count, data_type, world, table_of(row), config


def launch_plan(plan: Plan) -> _core.LaunchPlan:
    return _core.LaunchPlan(
        algorithm=ALGORITHMS.index(plan.algorithm),
        blocks=plan.blocks,
        tile_lines_log2=plan.tile_lines.bit_length() - 1,
        depth=plan.depth,
        chunk_count=plan.chunk_elements,
    )


def test_chunks_cover_the_message() -> None:
    several = 0
    for count, data_type, world, table, config in random_cases(2000):
        element_bytes = ELEMENT_BYTES[data_type]
        plan = select(count, element_bytes, world, table, config)
        assert (plan.chunks - 1) * plan.chunk_elements < count <= plan.chunks * plan.chunk_elements
        # The pointers of later chunks are as aligned as the first.
        assert plan.chunk_elements * element_bytes % selection.LINE_BYTES == 0
        # No more launches than have to be, and none that is much shorter than the others.
        most = select(1, element_bytes, world, table, config).chunk_elements
        assert plan.chunks == -(-count // most)
        if plan.chunks > 1:
            several += 1
            unit = world * plan.tile_lines * selection.LINE_BYTES // element_bytes
            assert plan.chunks * (plan.chunk_elements - unit) < count
    assert several > 500


def test_one_launch_fills_a_slot() -> None:
    for _, data_type, world, table, config in random_cases(2000):
        element_bytes = ELEMENT_BYTES[data_type]
        plan = select(1, element_bytes, world, table, config)
        # With a line more a rank it would not fit.
        lines = plan.chunk_elements * element_bytes // selection.LINE_BYTES + world
        slot_lines = selection.slot_bytes(config) // selection.LINE_BYTES
        needed = world * lines if plan.algorithm == "one_shot" else 2 * world * -(-lines // world)
        assert needed > slot_lines


def test_launches_of_a_prefill() -> None:
    """4096 tokens of 8192 elements, and a quarter of them."""
    table = table_of(TuningRow(1, "two_shot", 528, 128, 1))
    for count, launches in ((1 << 25, 5), (1 << 23, 2)):
        plan = select(count, 2, 4, table, Config.load({}))
        assert plan.chunks == launches
        assert plan.chunk_elements * launches - count < launches * 4 * 128 * 8


def test_core_accepts_every_plan() -> None:
    """The core checks a plan against the slot and the limits of a launch, and throws."""
    for count, data_type, world, table, config in random_cases(2000):
        plan = select(count, ELEMENT_BYTES[data_type], world, table, config)
        core_of(world, config).prepare_all_reduce(count, data_type, launch_plan(plan))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_core_refuses_a_plan_that_does_not_fit(world: int, algorithm: str) -> None:
    config = Config.load({}, workspace_bytes=1 << 20)
    plan = select(1, 2, world, table_of(TuningRow(1, algorithm, 4, 16, 0)), config)  # its chunk is all that fits
    core = core_of(world, config)
    too_large = dataclasses.replace(plan, chunk_elements=plan.chunk_elements + 8 * world)
    for wrong, message in (
        (too_large, "lower chunk_count or raise workspace_bytes"),
        (dataclasses.replace(plan, tile_lines=1024), "no kernel"),
        (dataclasses.replace(plan, blocks=0), "no kernel"),
        (dataclasses.replace(plan, chunk_elements=0), "must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            core.prepare_all_reduce(1 << 24, 0, launch_plan(wrong))


@pytest.mark.parametrize("workspace", [1 << 20, (1 << 20) + 17, 64 << 20, (4 << 30) - 1])
def test_header_and_two_slots_fit_in_the_workspace(workspace: int) -> None:
    config = Config.load({}, workspace_bytes=workspace)
    assert selection.slot_bytes(config) % selection.LINE_BYTES == 0
    assert workspace - 2 * selection.LINE_BYTES < core_of(2, config).workspace_bytes() <= workspace


# ---- Tables --------------------------------------------------------------------------------------------------------


def test_table_from_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_table(tmp_path / "mine.yaml", list(TABLE.rows), device="NVIDIA X", world_size=4, max_message_bytes=99)
    assert selection.load_table(path) == ("NVIDIA X", 4, TuningTable("mine.yaml", TABLE.rows, 99))
    config = Config.load({}, table=str(path))
    assert selection.find_table("NVIDIA X", 4, 1, config).rows == TABLE.rows
    assert not caplog.records
    assert selection.find_table("any", 2, 1, config).rows == TABLE.rows
    assert "mine.yaml was measured on 4 ranks of NVIDIA X, not on 2 of any" in caplog.text


GOOD = TuningRow(256, "one_shot", 4, 8, 0)


INVALID_TABLES: dict[str, tuple[list[TuningRow], dict[str, Any]]] = {
    "no rows": ([], {}),
    "unknown algorithm": ([GOOD._replace(algorithm="ring")], {}),
    "no blocks": ([GOOD._replace(blocks=0)], {}),
    "too many blocks": ([GOOD._replace(blocks=65536)], {}),
    "blocks a word": ([GOOD._replace(blocks="4")], {}),
    "blocks a fraction": ([GOOD._replace(blocks=4.5)], {}),
    "no tile": ([GOOD._replace(tile_lines=0)], {}),
    "tile not a power of two": ([GOOD._replace(tile_lines=12)], {}),
    "tile a fraction": ([GOOD._replace(tile_lines=8.0)], {}),
    "negative depth": ([GOOD._replace(depth=-1)], {}),
    "depth of all tiles and more": ([GOOD._replace(depth=65536)], {}),
    "no depth": ([GOOD._replace(depth=None)], {}),
    "up to nothing": ([GOOD._replace(up_to=0)], {}),
    "up to a word": ([GOOD._replace(up_to="all")], {}),
    "same size twice": ([GOOD, GOOD], {}),
    "falling sizes": ([GOOD._replace(up_to=512), GOOD], {}),
    "rows missing": ([GOOD], {"all_reduce": None}),
    "row a list": ([GOOD], {"all_reduce": [list(GOOD)]}),
    "unknown column": ([GOOD], {"all_reduce": [{**GOOD._asdict(), "threads": 7}]}),
    "column missing": ([GOOD], {"all_reduce": [{"up_to": 256, "algorithm": "one_shot"}]}),
    "limit a word": ([GOOD], {"max_message_bytes": "much"}),
    "negative limit": ([GOOD], {"max_message_bytes": -1}),
    "limit a fraction": ([GOOD], {"max_fused_bytes": 1.5}),
    "limit without a value": ([GOOD], {"fused_blocks": None}),
    "no world": ([GOOD], {"world_size": None}),
    "misspelt limit": ([GOOD], {"max_fused_byte": 1}),
}


@pytest.mark.parametrize("name", INVALID_TABLES)
def test_invalid_table(name: str, tmp_path: Path) -> None:
    rows, fields = INVALID_TABLES[name]
    path = write_table(tmp_path / "table.yaml", rows, **fields)
    with pytest.raises(ConfigError, match=r"tuning table .*table\.yaml"):
        selection.load_table(path)


def test_a_key_that_is_missing_or_misspelt_is_named(tmp_path: Path) -> None:
    path = write_table(tmp_path / "table.yaml", [GOOD], fused_block=1)
    with pytest.raises(ConfigError, match=r"it has no such key as fused_block; keys: device, .* fused_blocks, "):
        selection.load_table(path)
    path.write_text("device: x\nall_reduce: []\n")
    with pytest.raises(ConfigError, match="it lacks world_size, max_message_bytes; keys: "):
        selection.load_table(path)


@pytest.mark.parametrize("content", [b"", b"word", b"a: [", b"\xff", b"[]"])
def test_file_that_is_no_table(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"tuning table .*table\.yaml"):
        selection.load_table(path)


def test_missing_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.yaml"):
        selection.find_table("any", 2, 1, Config.load({}, table=str(tmp_path / "no.yaml")))


def check_table(table: TuningTable, world: int) -> None:
    assert table.max_message_bytes > 0
    assert [row.up_to for row in table.rows] == sorted({row.up_to for row in table.rows})
    for row, element_bytes in itertools.product(table.rows, (2, 4)):
        for size in (1, row.up_to, row.up_to + element_bytes):
            plan = select(-(-size // element_bytes), element_bytes, world, table, CONFIG)
            if plan.algorithm != "declined":
                core_of(world, CONFIG).prepare_all_reduce(
                    -(-size // element_bytes), 0 if element_bytes == 2 else 2, launch_plan(plan)
                )


def test_all_tables_of_the_repository_are_shipped() -> None:
    assert set(SHIPPED) == {path.name for path in (REPOSITORY / "configs").glob("tune_*.yaml")}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_table(name: str) -> None:
    device, world, table = selection.load_table(SHIPPED[name])
    assert device
    assert world in WORLDS
    check_table(table, world)
    assert selection.find_table(device, world, 1, CONFIG) == table, "another table is for the same device and world"


@pytest.mark.parametrize("world", WORLDS)
def test_table_of_any_other_device(world: int) -> None:
    table = selection.find_table("a device that nobody tuned for", world, 132, CONFIG)
    assert table == selection.general_table(world, 132)
    check_table(table, world)


@pytest.mark.parametrize("world", WORLDS)
def test_table_of_the_emulator(world: int) -> None:
    table = selection.find_table("emulated", world, 1, CONFIG)
    assert {row.algorithm for row in table.rows} == set(ALGORITHMS)
    check_table(table, world)


@pytest.mark.parametrize("engine", ["vLLM", "SGLang"])
def test_the_log_line_in_the_documentation_is_that_of_the_table(engine: str) -> None:
    *_, table = selection.load_table(REPOSITORY / "configs" / "tune_h200_8.yaml")
    plans = common.describe_plans(table, CONFIG, f"{engine}'s own")
    assert f"all-reduce {plans} (tune_h200_8.yaml)" in (REPOSITORY / "docs" / f"{engine.lower()}.md").read_text()


def test_the_log_line_where_all_sizes_are_served() -> None:
    *_, table = selection.load_table(REPOSITORY / "configs" / "tune_h200_8.yaml")
    config = CONFIG.replace(max_message_bytes=common.EVERY_SIZE)
    assert common.describe_plans(table, config, "vLLM's own") == "one_shot to 48 KiB, two_shot at all other sizes"
    config = config.replace(algorithm="two_shot")
    assert common.describe_plans(table, config, "vLLM's own") == "two_shot at all sizes"
