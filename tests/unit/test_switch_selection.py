"""Rows that name algorithms by the NVLink switch: used where multicast is set up and their sums are admitted, else
passed over. Algorithms of the library stand in for such ones, so that every table, option and kernel is a real one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tables import limits_of, plain_row

from llm_comm import Config, ConfigError, Plan, registry
from llm_comm.integrations import descriptions
from llm_comm.planning import selection
from llm_comm.planning.catalogue import load_table, table_text
from llm_comm.planning.multicast import HOW_TO_GET_IT, NO_MULTICAST, Multicast, wish
from llm_comm.planning.plan import Problem
from llm_comm.planning.tables import ALL_REDUCE, FUSED, MulticastEntry, Row, TuningTable, by_operation

UP = Multicast(True, "test table was made with it on 2026-11-23")
SUMS = Row(65536, ALL_REDUCE, "two_shot_hb", "HB", blocks=4, tile_lines=64, depth=2)
STORES = SUMS._replace(algorithm="one_shot_hb")
PLAIN = plain_row(65536, "two_shot", 8, 16, 1)
SMALL = plain_row(1024, "one_shot", 3, 8, 0)
ENTRY = MulticastEntry("NVIDIA H200", "CUDA 13.0", 8, "2026-11-23")
TABLE = TuningTable("test table", by_operation([SMALL, SUMS, STORES, PLAIN]), 1 << 20, multicast=ENTRY)
CONFIG = Config.load({})


@pytest.fixture(autouse=True)
def by_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """``two_shot_hb`` sums in the switch, and ``one_shot_hb`` stores by it."""
    known = registry.operations()
    flags = {"two_shot_hb": {"uses_multimem": True, "sums_in_switch": True}, "one_shot_hb": {"uses_multimem": True}}
    all_reduce = known[ALL_REDUCE]
    changed = tuple(a._replace(**flags.get(a.name, {})) for a in all_reduce.algorithms)
    found = {**known, ALL_REDUCE: all_reduce._replace(algorithms=changed)}
    monkeypatch.setattr(registry, "operations", lambda: found)


@pytest.fixture
def differing(by_switch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """``one_shot_hb`` also gives ranks other bits."""
    known = registry.operations()
    algorithms = tuple(a._replace(ranks_may_differ=a.name == "one_shot_hb") for a in known[ALL_REDUCE].algorithms)
    found = {**known, ALL_REDUCE: known[ALL_REDUCE]._replace(algorithms=algorithms)}
    monkeypatch.setattr(registry, "operations", lambda: found)


def plan(message_bytes: int, multicast: Multicast = UP, table: TuningTable = TABLE, **options: object) -> Plan:
    config = Config.load({}, **options)
    problem = Problem(ALL_REDUCE, message_bytes // 2, 0, "bf16", 4)
    return selection.select(problem, table, config, limits_of(config), multicast)


@pytest.mark.parametrize(
    ("multicast", "options", "algorithm"),
    [
        (UP, {"sum": "any"}, "two_shot_hb"),
        (UP, {}, "one_shot_hb"),
        (UP, {"sum": "any", "deterministic": True}, "one_shot_hb"),
        (NO_MULTICAST, {"sum": "any"}, "two_shot"),
        (NO_MULTICAST, {}, "two_shot"),
    ],
)
@pytest.mark.parametrize("message_bytes", [2048, 65536, 131072])
def test_the_first_row_that_can_be_used(
    multicast: Multicast, options: dict[str, object], algorithm: str, message_bytes: int
) -> None:
    """Also for messages larger than all rows."""
    found = plan(message_bytes, multicast, **options)
    assert found.algorithm == algorithm
    assert found.reason == "test table, up to 65536 bytes"
    assert plan(512, multicast, **options).algorithm == "one_shot"


def test_a_row_that_is_passed_over_leaves_the_next_larger_one() -> None:
    rows = [SMALL, SUMS._replace(up_to=8192), PLAIN]
    table = TABLE._replace(rows=by_operation(rows))
    assert plan(4096, UP, table, sum="any").algorithm == "two_shot_hb"
    assert plan(4096, UP, table).reason == "test table, up to 65536 bytes"


def test_nothing_chooses_them_where_there_is_no_row() -> None:
    """By the first candidate, that is."""
    for multicast in (UP, NO_MULTICAST):
        found = plan(4096, multicast, TABLE._replace(rows={}), sum="any")
        assert found.algorithm in ("one_shot", "two_shot")


def test_rows_of_fused_operations_are_not_derived_from_them() -> None:
    """But from what runs at that size without multicast."""
    rows = (
        Row(65_536, ALL_REDUCE, "two_shot_hb", "HB", blocks=4, tile_lines=32, depth=2),
        Row(65_536, ALL_REDUCE, "one_shot", "LL", blocks=4, tile_lines=8),
    )
    problem = Problem(FUSED, 4 * 512, 512, "bf16", 4, (1e-5, 0.0))
    config = Config.load({}, sum="any")
    found = selection.select(problem, TABLE._replace(rows={ALL_REDUCE: rows}), config, limits_of(config), UP)
    assert (found.algorithm, found.reason) == (
        "one_shot",
        "test table, up to 65536 bytes (derived from all_reduce, not measured)",
    )


@pytest.mark.parametrize(
    ("multicast", "options", "why"),
    [
        (NO_MULTICAST, {"sum": "any"}, "NVLink multicast is off: it has not been set up"),
        (UP, {}, "its sums are made in the switch, and sum is 'rank_order' (default)"),
        (
            UP,
            {"sum": "any", "deterministic": True},
            "its sums are made in the switch, and deterministic is on (Python)",
        ),
    ],
)
def test_a_forced_algorithm_that_cannot_be_used_is_told(
    multicast: Multicast, options: dict[str, object], why: str
) -> None:
    found = plan(4096, multicast, algorithm="two_shot_hb", **options)
    assert found.algorithm == ("one_shot_hb" if multicast.is_up else "two_shot")
    assert found.reason == f"test table, up to 65536 bytes; algorithm two_shot_hb cannot be used: {why}"


def test_a_forced_algorithm_needs_no_row() -> None:
    found = plan(4096, UP, TABLE._replace(rows=by_operation([PLAIN])), algorithm="two_shot_hb", sum="any")
    assert found.algorithm == "two_shot_hb"
    assert "algorithm forced to two_shot_hb" in found.reason


def test_other_bits_on_other_ranks_only_by_option(differing: None) -> None:
    assert plan(4096).algorithm == "two_shot"
    assert plan(4096, algorithm="one_shot_hb").algorithm == "one_shot_hb"


def test_start_lines_say_what_is_used() -> None:
    for multicast, sum_, words in (
        (UP, "any", "one_shot to 1 KiB, two_shot_hb to 1 MiB, then the engine"),
        (UP, "rank_order", "one_shot to 1 KiB, one_shot_hb to 1 MiB, then the engine"),
        (NO_MULTICAST, "any", "one_shot to 1 KiB, two_shot to 1 MiB, then the engine"),
    ):
        config = Config.load({}, sum=sum_)
        assert descriptions.describe_plans(TABLE, config, "the engine", multicast) == words
    assert UP.describe(Config.load({}, sum="any")).startswith("sums in any order; NVLink multicast is on: test table")
    assert UP.describe(CONFIG).startswith("sums in rank order; NVLink multicast is on")
    off = NO_MULTICAST.describe(Config.load({}, sum="any"))
    assert off == "sums in rank order; NVLink multicast is off: it has not been set up"


# ---- Tables --------------------------------------------------------------------------------------------------------


#: Of algorithms that are by the switch without a fixture: the core reads files.
SWITCHED = PLAIN._replace(algorithm="two_shot_switch")
REDUCED = SUMS._replace(algorithm="two_shot_ld_reduce", protocol="Switch")


def write(folder: Path, table: TuningTable, **changes: str) -> Path:
    text = table_text("NVIDIA H200", 8, table, {"date": "2026-11-23"})
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path = folder / "test table"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_has_all_of_it(tmp_path: Path) -> None:
    table = TABLE._replace(rows=by_operation([SMALL, REDUCED, SWITCHED, PLAIN]))
    assert load_table(write(tmp_path, table)).table == table
    assert load_table(write(tmp_path, table._replace(multicast=None))).table.multicast is None
    assert TABLE.digest() != TABLE._replace(multicast=None).digest()


@pytest.mark.parametrize("rows", [[PLAIN, REDUCED], [PLAIN, PLAIN], [SWITCHED, PLAIN, PLAIN]])
def test_rows_of_one_size_need_one_that_may_be_passed_over(rows: list[Row], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be sorted by up_to"):
        load_table(write(tmp_path, TABLE._replace(rows=by_operation(rows))))


@pytest.mark.parametrize(
    ("old", "new"), [("  driver: CUDA 13.0\n", ""), ("  world_size: 8", "  world_size: many"), ("  date:", "  day:")]
)
def test_an_entry_that_is_not_whole_is_refused(old: str, new: str, tmp_path: Path) -> None:
    path = write(tmp_path, TABLE._replace(rows=by_operation([PLAIN])), **{old: new})
    with pytest.raises(ConfigError, match=r"line \d+: (world_size of )?multicast is"):
        load_table(path)


# ---- Who wants it --------------------------------------------------------------------------------------------------


def wanted(
    environ: dict[str, str], table: TuningTable = TABLE, driver: str = "CUDA 13.0", **options: object
) -> Multicast:
    return wish(Config.load({}, **options), table, "NVIDIA H200", driver, 8, environ)


def test_it_is_wanted_where_the_table_was_made_with_it() -> None:
    assert wanted({}) == Multicast(True, "test table was made with it on 2026-11-23")
    other = wanted({}, driver="CUDA 13.1")
    assert other == (False, f"test table was made with it on driver CUDA 13.0, not CUDA 13.1; {HOW_TO_GET_IT}")
    without = wanted({}, TABLE._replace(multicast=None))
    expected = f"multicast is 'auto' (default), and test table was not made with it; {HOW_TO_GET_IT}"
    assert without == (False, expected)


def test_options_have_their_say() -> None:
    without = TABLE._replace(multicast=None)
    assert wanted({}, without, multicast="1") == (True, "multicast is '1' (Python)")
    assert wanted({}, multicast="0") == (False, "multicast is '0' (Python)")
    assert wish(Config.load({}, multicast="1"), TABLE, "NVIDIA H200", "CUDA 13.0", 1, {}).is_up is False
    assert wanted({}, multicast="1", share_gpu=True) == (False, "share_gpu is on: a multicast object takes a GPU once")
    emulated = Config.load({}, multicast="1", share_gpu=True)
    assert wish(emulated, TABLE, "emulated", "emulated", 4, {}).is_up


@pytest.mark.parametrize("option", ["auto", "1"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LLM_COMM_MULTICAST", "0"),
        ("NCCL_NVLS_ENABLE", "0"),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
        ("NVSHMEM_DISABLE_NVLS", "1"),
    ],
)
def test_a_variable_outweighs_table_and_option(name: str, value: str, option: str) -> None:
    assert wanted({name: value}, multicast=option) == (False, f"{name}={value}")
