"""Tuning tables: their files, those that are shipped, and those of devices without one."""

from __future__ import annotations

import itertools
import logging
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from reference import ALGORITHMS
from tables import core_of, fused_row, general_table, limits_of, plain_row, write_fused_table, write_table

from llm_comm import Config, ConfigError, registry
from llm_comm.integrations import descriptions, engine_config
from llm_comm.planning import catalogue, selection
from llm_comm.planning.catalogue import load_table, table_text
from llm_comm.planning.plan import Problem
from llm_comm.planning.tables import (
    ALL_GATHER,
    ALL_REDUCE,
    FUSED,
    REDUCE_SCATTER,
    Origin,
    Row,
    RunnerUp,
    TuningTable,
    by_operation,
)

WORLDS = range(2, 9)
CONFIG = Config.load({})
REPOSITORY = Path(__file__).parents[2]
SHIPPED = {shipped.table.name: shipped for shipped in catalogue.shipped_tables()}
ROWS = (
    plain_row(256, "two_shot", 1, 4, 2),
    plain_row(4096, "one_shot", 3, 8, 0),
    fused_row(4096, "two_shot", 64, 128, 4, 2),
    fused_row(65536, "one_shot", 128, 256, 8, 0),
)
PLAIN, FUSED_ROWS = ROWS[:2], ROWS[2:]


def find(device: str, world: int, sm_count: int, config: Config) -> TuningTable:
    """What is chosen by, wherever it was found."""
    return catalogue.find_table(device, world, sm_count, config)._replace(origin=Origin())


def test_table_from_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_table(tmp_path / "mine.yaml", list(ROWS), device="NVIDIA X", world_size=4, max_message_bytes=99)
    table = TuningTable("mine.yaml", {ALL_REDUCE: PLAIN, FUSED: FUSED_ROWS}, 99)
    assert load_table(path)[:3] == ("NVIDIA X", 4, table)
    config = Config.load({}, table=str(path))
    assert find("NVIDIA X", 4, 1, config) == table
    assert not caplog.records
    assert find("any", 2, 1, config) == table
    assert "mine.yaml was measured on 4 ranks of NVIDIA X, not on 2 of any" in caplog.text


GOOD = plain_row(256, "one_shot", 4, 8, 0)
FUSED_GOOD = FUSED_ROWS[0]


ENTRY = GOOD.entry()

#: Entries of rows, other entries of the file, and what the error says.
INVALID_TABLES: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "no rows": ([], {}, "no rows"),
    "unknown operation": (
        [{**ENTRY, "operation": "all_reduc"}],
        {},
        "row 1, .*: operation is 'all_reduc' \\(did you mean all_reduce\\?\\); valid: all_reduce, all_reduce_add_rms",
    ),
    "unknown algorithm": (
        [ENTRY, {**ENTRY, "algorithm": "oneshot"}],
        {},
        "row 2, .*: algorithm is 'oneshot' \\(did you mean one_shot\\?\\); valid: one_shot, two_shot",
    ),
    "unknown protocol": ([{**ENTRY, "protocol": "ll"}], {}, "row 1, .*: protocol is 'll'.*; valid: LL"),
    "algorithm a list": ([{**ENTRY, "algorithm": ["one_shot"]}], {}, "algorithm is"),
    "no blocks": ([{**ENTRY, "blocks": 0}], {}, "row 1, .*: blocks is 0; it must be 1 to 65535"),
    "too many blocks": ([{**ENTRY, "blocks": 65536}], {}, "blocks is 65536"),
    "blocks a word": ([{**ENTRY, "blocks": "4"}], {}, "blocks is '4'"),
    "blocks a fraction": ([{**ENTRY, "blocks": 4.5}], {}, "blocks is 4.5"),
    "blocks a truth": ([{**ENTRY, "blocks": True}], {}, "blocks is true"),
    "no tile": ([{**ENTRY, "tile_lines": 0}], {}, "tile_lines is 0"),
    "tile not a power of two": (
        [{**ENTRY, "tile_lines": 12}],
        {},
        "tile_lines is 12; it must be 1 to .*, a power of two",
    ),
    "tile a fraction": ([{**ENTRY, "tile_lines": 8.0}], {}, "tile_lines is 8.0"),
    "negative depth": ([{**ENTRY, "depth": -1}], {}, "depth is -1; it must be 0 to 65535"),
    "depth of all tiles and more": ([{**ENTRY, "depth": 65536}], {}, "depth is 65536"),
    "no depth": ([{**ENTRY, "depth": None}], {}, "depth is null"),
    "up to nothing": ([{**ENTRY, "up_to": 0}], {}, "up_to is 0"),
    "up to a word": ([{**ENTRY, "up_to": "all"}], {}, "up_to is 'all'"),
    "same size twice": ([ENTRY, dict(ENTRY)], {}, "sorted by up_to, in bytes; the one before says 256"),
    "falling sizes": ([{**ENTRY, "up_to": 512}, ENTRY], {}, "sorted by up_to, in bytes; the one before says 512"),
    "rows missing": ([ENTRY], {"rows": None}, "no rows"),
    "rows a mapping": ([ENTRY], {"rows": {"a": 1}}, "rows is .*; it must be a list"),
    "row a list": ([list(GOOD)], {}, "row 1, .*: it must be 'key: value' pairs"),
    "tunable of another": (
        [{**ENTRY, "threads": 7}],
        {},
        "no such key as threads; keys: operation, up_to, .* protocol, blocks, tile_lines, depth; optional: us, ru",
    ),
    "misspelt tunable": ([{**ENTRY, "block": 7}], {}, "no such key as block \\(did you mean blocks\\?\\)"),
    "tunable missing": (
        [{key: value for key, value in ENTRY.items() if key != "depth"}],
        {},
        "it lacks depth; keys: operation, .* blocks, tile_lines, depth",
    ),
    "no protocol": ([{key: value for key, value in ENTRY.items() if key != "protocol"}], {}, "it lacks protocol"),
    "limit a word": ([ENTRY], {"max_message_bytes": "much"}, "max_message_bytes is 'much'"),
    "negative limit": ([ENTRY], {"max_message_bytes": -1}, "max_message_bytes is -1"),
    "limit a fraction": ([ENTRY], {"max_fused_bytes": 1.5}, "max_fused_bytes is 1.5"),
    "large fused size a fraction": ([ENTRY], {"large_fused_bytes": 1.5}, "large_fused_bytes is 1.5"),
    "large fused size a text": ([ENTRY], {"large_fused_bytes": "24M"}, "large_fused_bytes is '24M'"),
    "large fused size without a value": ([ENTRY], {"large_fused_bytes": None}, "large_fused_bytes is null"),
    "limit without a value": ([ENTRY], {"fused_blocks": None}, "fused_blocks is null"),
    "no world": ([ENTRY], {"world_size": None}, "world_size is null"),
    "misspelt limit": ([ENTRY], {"max_fused_byte": 1}, "no such key as max_fused_byte"),
    "few threads": ([{**FUSED_GOOD.entry(), "threads": 32}], {}, "threads is 32; it must be 64 to 1024"),
    "many threads": ([{**FUSED_GOOD.entry(), "threads": 1025}], {}, "threads is 1025"),
    "odd cluster": ([{**FUSED_GOOD.entry(), "cluster": 3}], {}, "cluster is 3; it must be 1 to 16, a power of two"),
    "large cluster": ([{**FUSED_GOOD.entry(), "cluster": 32}], {}, "cluster is 32"),
    "a time in words": ([{**ENTRY, "us": "fast"}], {}, "row 1, .*: us is 'fast'; it must be a number of microseconds"),
    "no time": ([{**ENTRY, "us": None}], {}, "us is null"),
    "a time that is none": ([{**ENTRY, "us": float("nan")}], {}, "us is '.nan'"),
    "a time that is true": ([{**ENTRY, "us": True}], {}, "us is true"),
    "a time without end": ([{**ENTRY, "us": 10**12}], {}, "us is 1000"),
    "runner-up a word": ([{**ENTRY, "runner_up": "LL"}], {}, "runner_up is 'LL'; it must have algorithm, protocol, us"),
    "runner-up without a time": (
        [{**ENTRY, "runner_up": {"algorithm": "two_shot", "protocol": "LL"}}],
        {},
        "runner_up is .*; it must have algorithm, protocol, us",
    ),
    "runner-up that there is not": (
        [{**ENTRY, "runner_up": {"algorithm": "two_shot", "protocol": "LLL", "us": 1}}],
        {},
        "runner_up is 'two_shot LLL'.*; valid: one_shot LL, two_shot LL",
    ),
    "runner-up without end": (
        [{**ENTRY, "runner_up": {"algorithm": "two_shot", "protocol": "LL", "us": float("inf")}}],
        {},
        "us of runner_up is '.inf'",
    ),
    "tile of a fused row": ([{**FUSED_GOOD.entry(), "tile_lines": 8}], {}, "no such key as tile_lines"),
}


def content_of(entries: list[Any], **fields: Any) -> dict[str, Any]:
    return {"device": "test device", "world_size": 8, "max_message_bytes": 64 << 20, "rows": entries, **fields}


@pytest.mark.parametrize("name", INVALID_TABLES)
def test_invalid_table(name: str, tmp_path: Path) -> None:
    entries, fields, message = INVALID_TABLES[name]
    path = tmp_path / "table.yaml"
    path.write_text(yaml.safe_dump(content_of(entries, **fields)))
    with pytest.raises(ConfigError, match=rf"tuning table .*table\.yaml: (?s:.*){message}"):
        load_table(path)


@pytest.mark.parametrize("good", [GOOD, FUSED_GOOD], ids=lambda row: row.operation)
def test_a_tunable_may_be_its_least_and_its_most_and_nothing_beyond(good: Row, tmp_path: Path) -> None:
    algorithm = registry.operations()[good.operation].find(good.algorithm, good.protocol)
    assert algorithm is not None
    for name, (least, most, _) in algorithm.ranges.items():
        for value, is_valid in ((least, True), (most, True), (least - 1, False), (most + 1, False)):
            path = tmp_path / "table.yaml"
            path.write_text(yaml.safe_dump(content_of([{**good.entry(), name: value}])))
            if is_valid:
                assert getattr(load_table(path).table.rows[good.operation][0], name) == value
                continue
            with pytest.raises(ConfigError, match=f"{name} is {value}; it must be {least} to {most}"):
                load_table(path)


def test_a_key_that_is_missing_or_misspelt_is_named(tmp_path: Path) -> None:
    path = write_table(tmp_path / "table.yaml", [GOOD], fused_block=1)
    with pytest.raises(
        ConfigError, match=r"no such key as fused_block \(did you mean fused_blocks\?\); keys: device, "
    ):
        load_table(path)
    path.write_text("device: x\nrows: []\n")
    with pytest.raises(ConfigError, match="it lacks world_size, max_message_bytes; keys: "):
        load_table(path)


@pytest.mark.parametrize("content", [b"", b"word", b"a: [", b"\xff", b"[]"])
def test_file_that_is_no_table(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"tuning table .*table\.yaml"):
        load_table(path)


def test_missing_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.yaml"):
        catalogue.find_table("any", 2, 1, Config.load({}, table=str(tmp_path / "no.yaml")))


def check_table(table: TuningTable, world: int) -> None:
    """The core takes what is chosen at the bounds of every row."""
    assert table.max_message_bytes > 0
    for rows in table.rows.values():
        assert [row.up_to for row in rows] == sorted({row.up_to for row in rows})
    for row, data_type in itertools.product(table.rows[ALL_REDUCE], ("bf16", "fp32")):
        for size in (1, row.up_to, row.up_to + 4):
            prepare(Problem(ALL_REDUCE, -(-size // 4), 0, data_type, world), table)
    for row, hidden in itertools.product(table.rows.get(FUSED, ()), (2880, 4096, 8192)):
        rows_of_message = max(1, min(row.up_to, table.max_fused_bytes) // (2 * hidden))
        prepare(Problem(FUSED, rows_of_message * hidden, hidden, "bf16", world, (1e-5, 0)), table)
    for operation, unit in ((ALL_GATHER, 1), (REDUCE_SCATTER, 2)):
        for row in table.rows.get(operation, ()):
            part = max(1, row.up_to // unit)
            sizes = (1.0, *[float(part)] * world, *[0.0] * (8 - world))
            prepare(Problem(operation, part, 0, "byte" if unit == 1 else "bf16", world, sizes), table)


def prepare(problem: Problem, table: TuningTable) -> None:
    layout = selection.lay_out(problem, table, CONFIG, limits_of(CONFIG))
    if problem.message_bytes() <= table.max_message_bytes:
        assert layout.launches is not None, layout.plan.reason
        core_of(problem.world_size, CONFIG).prepare(*layout.launches)


def test_all_tables_of_the_repository_are_shipped() -> None:
    assert set(SHIPPED) == {path.name for path in (REPOSITORY / "configs").glob("tune_*.yaml")}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_table(name: str) -> None:
    device, world, table, _ = SHIPPED[name]
    assert load_table(REPOSITORY / "configs" / name) == SHIPPED[name]
    assert device
    assert world in WORLDS
    assert {ALL_REDUCE, FUSED} <= set(table.rows)
    check_table(table, world)
    assert find(device, world, 1, CONFIG) == table, "another table is for the same device and world"


@pytest.mark.parametrize("world", WORLDS)
def test_table_of_any_other_device(world: int) -> None:
    check_table(general_table(world, 132), world)


@pytest.mark.parametrize("world", WORLDS)
def test_one_shot_ends_where_its_copies_take_longer_than_a_hop(world: int) -> None:
    """It sends a copy of the message to every peer."""
    row = general_table(world, 132).rows[ALL_REDUCE][0]
    assert row.algorithm == "one_shot"
    assert row.up_to == 400 * 1024 // (world - 1)


@pytest.mark.parametrize(
    ("device", "world", "is_told"),
    [("test device", 8, False), ("test device", 4, True), ("other device", 8, True), ("other device", 4, True)],
)
def test_a_table_that_was_measured_elsewhere_is_used_and_that_is_told(
    device: str, world: int, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_table(tmp_path / "table.yaml", [*ROWS])
    with caplog.at_level(logging.WARNING, logger="llm_comm"):
        table = find(device, world, 132, CONFIG.replace(table=str(path)))
    assert table == load_table(path).table
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == is_told
    if is_told:
        measured = f"{path} was measured on 8 ranks of test device, not on {world} of {device}: sums are right"
        assert told[0].startswith(measured)


@pytest.mark.parametrize("world", WORLDS)
def test_table_of_the_emulator(world: int) -> None:
    table = catalogue.find_table("emulated", world, 1, CONFIG)
    for operation in (ALL_REDUCE, FUSED):
        assert {row.algorithm for row in table.rows[operation]} == set(ALGORITHMS)
    for operation in (ALL_GATHER, REDUCE_SCATTER):
        assert {row.algorithm for row in table.rows[operation]} == {"one_shot", "push_hb"}
    check_table(table, world)


def test_the_log_line_in_the_documentation_is_that_of_the_table() -> None:
    table = catalogue.find_table("NVIDIA H200", 8, 132, CONFIG)
    plans = descriptions.describe_plans(table, CONFIG, "vLLM's own")
    page = (REPOSITORY / "docs" / "engines" / "common.md").read_text(encoding="utf-8")
    assert f"all-reduce {plans} ({table.describe()})" in page


def test_the_log_line_where_all_sizes_are_served() -> None:
    table = SHIPPED["tune_h200_8.yaml"].table
    config = CONFIG.replace(max_message_bytes=engine_config.EVERY_SIZE)
    assert descriptions.describe_plans(table, config, "vLLM's own") == "one_shot to 48 KiB, two_shot at all other sizes"
    config = config.replace(algorithm="two_shot")
    assert descriptions.describe_plans(table, config, "vLLM's own") == "two_shot at all sizes"


def test_the_log_line_of_a_table_without_rows() -> None:
    config = CONFIG.replace(max_message_bytes=1 << 20)
    table = TuningTable("empty", {}, 1)
    assert descriptions.describe_plans(table, config, "vLLM's own") == "what no table chose to 1 MiB, then vLLM's own"


# ---- Files -----------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    table = TuningTable("table.yaml", by_operation(ROWS), 1 << 20, max_fused_bytes=123456, fused_blocks=77)
    path = tmp_path / "table.yaml"
    text = table_text("NVIDIA X", 4, table, {"date": "today"})
    path.write_text(text)
    assert load_table(path)[:3] == ("NVIDIA X", 4, table)
    lines = [line for line in text.splitlines() if line.startswith("  - ")]
    assert lines[0] == (
        "  - {operation: all_reduce, up_to: 256, algorithm: two_shot, protocol: LL, blocks: 1, tile_lines: 4, depth: 2}"
    )
    assert len(lines) == len(ROWS)


@pytest.mark.parametrize("large", [None, 0, 24 << 20])
def test_large_fused_messages_are_written_and_read_again(large: int | None, tmp_path: Path) -> None:
    table = TuningTable("table.yaml", by_operation(ROWS), 1 << 20, large_fused_bytes=large)
    path = tmp_path / "table.yaml"
    text = table_text("NVIDIA X", 4, table, {})
    path.write_text(text)
    assert text.splitlines().count(f"large_fused_bytes: {large}") == (large is not None)
    assert load_table(path).table == table
    assert load_table(write_table(path, list(ROWS))).table.large_fused_bytes is None


def test_figures_of_rows_are_kept_and_choose_nothing(tmp_path: Path) -> None:
    """Rows of one file may have them or not."""
    figured = GOOD._replace(us=2.25, runner_up=RunnerUp("two_shot", "LL", 3))
    other = FUSED_GOOD._replace(us=-0.5)
    table = TuningTable("table.yaml", by_operation([figured, other, FUSED_ROWS[1]]), 1 << 20)
    path = tmp_path / "table.yaml"
    text = table_text("NVIDIA X", 4, table, {})
    path.write_text(text)
    assert ", us: 2.25, runner_up: {algorithm: two_shot, protocol: LL, us: 3}}" in text
    assert load_table(path).table == table
    plain = TuningTable("table.yaml", by_operation([GOOD, FUSED_GOOD, FUSED_ROWS[1]]), 1 << 20)
    assert plain != table
    assert plain.digest() == table.digest()
    problem = Problem(ALL_REDUCE, 64, 0, "bf16", 4)
    assert selection.select(problem, plain, CONFIG, limits_of(CONFIG)) == selection.select(
        problem, table, CONFIG, limits_of(CONFIG)
    )


def test_what_is_said_twice_is_written_twice(tmp_path: Path) -> None:
    """As an alias, which PyYAML would make of it, it would not be read again."""
    twice = ["a"]
    path = tmp_path / "table.yaml"
    table = TuningTable("table.yaml", by_operation(ROWS), 1 << 20)
    path.write_text(table_text("NVIDIA X", 4, table, {"before": twice, "after": twice}))
    assert load_table(path)[:3] == ("NVIDIA X", 4, table)


WORDS = (
    *("it's", 'say "hi"', " leads", "trails ", "a: b", "#no comment", "x # y", "a\ttab", "sn\N{SNOWMAN}w"),
    *("word " * 30, "", "- dash", "{x, y}", "[", "123", "null", "true", "&a", "*a", "!t", "%", "a:b", "?", "\\"),
)


@pytest.mark.parametrize("style", [None, "'", '"'])
@pytest.mark.parametrize("flow", [False, True])
def test_words_are_what_yaml_takes_them_for(style: str | None, flow: bool, tmp_path: Path) -> None:
    """However PyYAML writes them: in lines or braces, with quotes or without."""
    measured = {f"key {number}": word for number, word in enumerate(WORDS)}
    words = yaml.dump(measured, default_style=style, default_flow_style=flow, width=1000, allow_unicode=True)
    path = tmp_path / "table.yaml"
    path.write_text(f"{yaml.safe_dump(content_of([ENTRY]))}measured:\n{textwrap.indent(words, '  ')}", encoding="utf-8")
    assert load_table(path).measured == measured


def test_digests_tell_tables_apart(tmp_path: Path) -> None:
    table = load_table(write_fused_table(tmp_path / "table.yaml", list(FUSED_ROWS))).table
    assert table.rows[FUSED] == FUSED_ROWS
    others = [
        table._replace(rows={ALL_REDUCE: table.rows[ALL_REDUCE]}),
        table.with_rows(FUSED_ROWS[0]),
        table._replace(max_fused_bytes=1),
        table._replace(large_fused_bytes=1 << 21),
        table._replace(fused_blocks=1),
        table._replace(name="other"),
    ]
    assert len({t.digest() for t in (table, *others)}) == 1 + len(others)
    assert table._replace(rows=dict(reversed(table.rows.items()))).digest() == table.digest()


def test_tables_limit_blocks() -> None:
    assert general_table(4, 100).fused_blocks == 300
    assert {shipped.table.fused_blocks for shipped in SHIPPED.values()} == {3 * 132}


def test_a_row_says_what_its_algorithm_names() -> None:
    assert FUSED_GOOD.tunables() == {"blocks": 64, "threads": 128, "cluster": 4, "depth": 2}
    assert Row(1, ALL_REDUCE, "ring", "LL", blocks=3).tunables() == {}
