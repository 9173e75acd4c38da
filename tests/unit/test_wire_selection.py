"""Which messages option ``wire`` quantizes: by size, type, algorithm and memory, and by which rows of a table."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from tables import limits_of, plain_row, write_table

from llm_comm import Config, ConfigError, registry
from llm_comm.bench import tune
from llm_comm.bench.tune_subjects import candidates, subjects_of
from llm_comm.config import EngineOptions
from llm_comm.integrations import descriptions, engine_config
from llm_comm.options import MIB
from llm_comm.planning import selection
from llm_comm.planning.catalogue import load_table, table_text
from llm_comm.planning.plan import Plan, Problem
from llm_comm.planning.planner import Planner
from llm_comm.planning.programs import PROTOCOL, with_program
from llm_comm.planning.tables import (
    ALL_GATHER,
    ALL_REDUCE,
    FUSED,
    REDUCE_SCATTER,
    Row,
    TuningTable,
    by_operation,
    of_programs,
    of_wire,
)
from llm_comm.runtime.statistics import Calls, StatisticsCollector

CONFIG = Config.load({})
#: Smallest quantized message, by default.
SMALLEST = CONFIG.wire_min_bytes
ALGORITHMS = {"fp8": "two_shot_fp8_hb", "int8": "two_shot_int8_hb"}
EXACT = plain_row(64 * MIB, "two_shot", 4, 16, 1)
ROWS = tuple(
    Row(up_to, ALL_REDUCE, algorithm, "HB", blocks=blocks, tile_lines=tile_lines, depth=2)
    for algorithm in ALGORITHMS.values()
    for up_to, blocks, tile_lines in ((2 * SMALLEST, 5, 64), (64 * MIB, 7, 128))
)
TABLE = TuningTable("test", by_operation([EXACT, *ROWS]), 64 * MIB, min_symmetric_bytes=0)
NO_ROWS = TuningTable("exact rows", by_operation([EXACT]), 64 * MIB, min_symmetric_bytes=0)
FUSED_PARAMETERS = (1e-5, 0.0, 0.0)
WIRES = pytest.mark.parametrize("wire", ALGORITHMS)


def planner(config: Config, table: TuningTable = TABLE, world: int = 4) -> Planner:
    found = Planner(world, table, config, limits_of(config))
    found.has_symmetric = True
    return found


def plan_of(
    nbytes: int, table: TuningTable = TABLE, data_type: str = "bf16", world: int = 4, **options: object
) -> Plan:
    config = Config.load({}, **options)
    count = nbytes // registry.data_types()[data_type]
    return planner(config, table, world).lay_out(ALL_REDUCE, count, 0, data_type).plan


# ---- Which messages ------------------------------------------------------------------------------------------------


@WIRES
@pytest.mark.parametrize("data_type", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("options", "smallest"), [({}, SMALLEST), ({"wire_min_bytes": 4096}, 4096)])
def test_large_messages_are_quantized(wire: str, data_type: str, options: dict[str, int], smallest: int) -> None:
    for nbytes, algorithm in ((smallest - 4, "two_shot"), (smallest, ALGORITHMS[wire]), (64 * MIB, ALGORITHMS[wire])):
        plan = plan_of(nbytes, data_type=data_type, wire=wire, **options)
        assert plan.algorithm == algorithm
        assert (f"wire {wire}" in plan.reason) == (algorithm != "two_shot")
    assert plan_of(64 * MIB, data_type=data_type, **options).algorithm == "two_shot"


@WIRES
@pytest.mark.parametrize(
    ("options", "largest"),
    [
        ({}, selection.MAX_WIRE_BYTES),
        ({"max_message_bytes": 64 * MIB}, 64 * MIB),
        # Messages above the table's limit are all quantized, or all left to the engine.
        ({"wire_min_bytes": 32 * MIB}, 16 * MIB),
        ({"wire_min_bytes": 16 * MIB}, selection.MAX_WIRE_BYTES),
        ({"algorithm": "two_shot"}, 16 * MIB),
    ],
)
def test_a_limit_of_exact_messages_is_none_of_quantized_ones(
    wire: str, options: dict[str, object], largest: int
) -> None:
    table = NO_ROWS._replace(max_message_bytes=16 * MIB)
    assert selection.message_limit(ALL_REDUCE, table, Config.load({}, wire=wire, **options)) == largest
    served = plan_of(largest, table, wire=wire, **options)
    assert served.algorithm == ("two_shot" if largest == 16 * MIB else ALGORITHMS[wire])
    why = plan_of(largest + 2, table, wire=wire, **options).reason
    assert why == f"more than max_message_bytes={largest}"
    for other in (FUSED, ALL_GATHER):
        exact = Config.load({}, **options)
        expected = selection.message_limit(other, table, exact)
        assert selection.message_limit(other, table, exact.replace(wire=wire)) == expected


def test_a_forced_program_leaves_sums_exact() -> None:
    table = NO_ROWS._replace(max_message_bytes=16 * MIB)
    options = {"wire": "fp8", "dsl": "llm_comm.dsl.library:one_shot_ll", "algorithm": "dsl:one_shot_ll"}
    assert plan_of(16 * MIB, table, **options).algorithm == "two_shot"
    assert plan_of(16 * MIB + 2, table, **options).algorithm == "declined"
    assert selection.message_limit(ALL_REDUCE, table, Config.load({}, **options)) == 16 * MIB


@pytest.mark.parametrize("options", [{}, {"wire_min_bytes": 32 * MIB}, {"max_message_bytes": 64 * MIB}])
@pytest.mark.parametrize("limit", [0, 4 * MIB, 16 * MIB, 512 * MIB])
def test_what_is_within_the_limit_is_served(limit: int, options: dict[str, int]) -> None:
    """torch.compile asks for the limit alone (``AllReduce.takes``)."""
    config = Config.load({}, wire="fp8", **options)
    of_config = planner(config, NO_ROWS._replace(max_message_bytes=limit))
    for nbytes in (2, 4 * MIB, 16 * MIB, 16 * MIB + 2, 48 * MIB, 64 * MIB, 64 * MIB + 2, 256 * MIB, 256 * MIB + 2):
        plan = of_config.lay_out(ALL_REDUCE, nbytes // 2, 0, "bf16").plan
        assert (plan.algorithm == "declined") == (nbytes > of_config.message_limit(ALL_REDUCE)), f"{nbytes}: {plan}"


@WIRES
def test_other_operations_are_exact(wire: str) -> None:
    """The table has no rows for quantized fused messages (``test_large_fused_messages_are_quantized_to_fp8``)."""
    config = CONFIG.replace(wire=wire, wire_min_bytes=0)
    by_rows = planner(config, world=2).lay_out(FUSED, 64 * 512, 512, "bf16", FUSED_PARAMETERS)
    gather = planner(config, world=2).lay_out(ALL_GATHER, 4 * MIB, 0, "byte", (1.0, 4.0 * MIB, 4.0 * MIB))
    for layout, like in ((by_rows, FUSED), (gather, ALL_GATHER)):
        assert layout.plan.operation == like
        assert layout.plan.algorithm not in ALGORITHMS.values()
        assert layout.saved_share == 0


def test_large_fused_messages_are_quantized_to_fp8() -> None:
    config = CONFIG.replace(wire="fp8", wire_min_bytes=MIB)
    row = Row(64 * MIB, FUSED, "two_shot_fp8_hb", "HB", blocks=4, tile_lines=64, depth=2)
    table = TABLE.with_rows(row)._replace(max_fused_bytes=4 * MIB)
    for nbytes, wire in ((MIB - 1024, ""), (MIB, "fp8"), (4 * MIB, "fp8")):
        layout = planner(config, table, 2).lay_out(FUSED, nbytes // 2, 512, "bf16", FUSED_PARAMETERS)
        assert (layout.plan.algorithm == ALGORITHMS["fp8"]) == bool(wire), layout.plan
        assert layout.saved_share == pytest.approx(1 - 1.0625 / 2 if wire else 0.0)
    layout = planner(CONFIG, table, 2).lay_out(FUSED, 2 * MIB, 512, "bf16", FUSED_PARAMETERS)
    assert layout.plan.algorithm not in ALGORITHMS.values()


@pytest.mark.parametrize("operation", [ALL_GATHER, REDUCE_SCATTER])
@pytest.mark.parametrize(("data_type", "share"), [("bf16", 1 - 1.0625 / 2), ("fp32", 1 - 1.0625 / 4)])
def test_large_shards_of_numbers_are_quantized_to_fp8(operation: str, data_type: str, share: float) -> None:
    """The size is that of the whole tensor: the other shards have a half of the largest one."""
    itemsize = registry.data_types()[data_type]
    row = Row(64 * MIB, operation, "push_fp8_hb", "HB", blocks=5, tile_lines=64, depth=2)
    for table, blocks in ((NO_ROWS, None), (TABLE.with_rows(row), 5)):
        config = CONFIG.replace(wire="fp8")
        count = SMALLEST // itemsize // 2
        parameters = (1.0, float(count), count / 2, count / 2)
        problem = Problem(operation, count, 0, data_type, 3, parameters)
        layout = planner(config, table, 3).lay_out(operation, count, 0, data_type, parameters)
        assert layout.plan.algorithm == "push_fp8_hb", layout.plan
        assert layout.saved_share == pytest.approx(share)
        assert blocks in (None, layout.plan.blocks)
        assert selection.wire_of(problem, config) == "fp8"
        smaller = Problem(operation, count, 0, data_type, 3, (1.0, float(count), count / 2, count / 2 - 1))
        for exact, of_config in ((problem, CONFIG.replace(wire="int8")), (problem, CONFIG), (smaller, config)):
            assert selection.wire_of(exact, of_config) == ""
            plan = planner(of_config, table, 3).lay_out(operation, count, 0, data_type, exact.parameters).plan
            assert plan.algorithm != "push_fp8_hb"
            # An exact all-gather moves bytes.
            assert (plan.reason == f"{operation} has no kernels for {data_type}") == (operation == ALL_GATHER)


@WIRES
def test_memory_of_the_tensors_makes_no_difference(wire: str) -> None:
    assert plan_of(SMALLEST, wire=wire).symmetric == ""
    assert plan_of(SMALLEST - 16, wire=wire).symmetric != ""
    assert plan_of(SMALLEST).symmetric != ""
    forced = plan_of(SMALLEST, wire=wire, algorithm="two_shot_pull_hb")
    assert (forced.algorithm, forced.symmetric) == ("two_shot", "two_shot_pull_hb")


@WIRES
@pytest.mark.parametrize("nbytes", [2, 14, 4098, MIB - 2, 64 * MIB])
@pytest.mark.parametrize("workspace", [MIB, 64 * MIB])
def test_every_size_has_a_shape(wire: str, nbytes: int, workspace: int) -> None:
    for world in (2, 3, 8):
        options = {"wire": wire, "wire_min_bytes": 0, "workspace_bytes": workspace}
        plan = plan_of(nbytes, NO_ROWS, world=world, **options)
        assert plan.algorithm == ALGORITHMS[wire], plan.reason
        assert plan.reason == f"exact rows has no row for all_reduce: the first candidate; wire {wire}"


# ---- Forced algorithms ---------------------------------------------------------------------------------------------


@WIRES
def test_a_forced_algorithm_decides_at_every_size(wire: str) -> None:
    for nbytes in (2, SMALLEST, 4 * SMALLEST):
        forced = plan_of(nbytes, wire=wire, algorithm=ALGORITHMS[wire])
        assert (forced.algorithm, forced.symmetric) == (ALGORITHMS[wire], "")
        assert plan_of(nbytes, wire=wire, algorithm="one_shot").algorithm == "one_shot"
        of_gathers = plan_of(nbytes, wire=wire, algorithm="direct_push_hb")
        assert of_gathers.algorithm == ("two_shot" if nbytes < SMALLEST else ALGORITHMS[wire])


@pytest.mark.parametrize("wire", ["none", "int8"])
def test_a_forced_algorithm_of_another_wire(wire: str) -> None:
    plan = plan_of(SMALLEST, algorithm="two_shot_fp8_hb", wire=wire)
    assert plan.algorithm == "two_shot"
    assert plan.reason.endswith(f"; algorithm two_shot_fp8_hb cannot be used: option wire is '{wire}' (Python)")
    assert plan_of(SMALLEST, algorithm="two_shot_fp8_hb").reason.endswith(
        "cannot be used: option wire is 'none' (default)"
    )


@WIRES
def test_max_blocks(wire: str) -> None:
    table = TABLE._replace(rows=by_operation([row._replace(blocks=64) for row in (EXACT, *ROWS)]))
    for tuned in (table, NO_ROWS):
        few = plan_of(32 * MIB, tuned, wire=wire, max_blocks=8)
        assert (few.algorithm, few.blocks) == (ALGORITHMS[wire], 8)
    assert plan_of(32 * MIB, table, max_blocks=8).algorithm == "two_shot_hb"


# ---- Rows ----------------------------------------------------------------------------------------------------------


@WIRES
def test_rows_stand_apart(wire: str) -> None:
    assert set(TABLE.rows) == {ALL_REDUCE, of_wire(ALL_REDUCE, "fp8"), of_wire(ALL_REDUCE, "int8")}
    assert TABLE.rows[ALL_REDUCE] == (EXACT,)
    for nbytes, row in ((SMALLEST, 0), (2 * SMALLEST, 0), (2 * SMALLEST + 2, 1), (64 * MIB, 1)):
        plan, expected = plan_of(nbytes, wire=wire), ROWS[row]
        assert (plan.blocks, plan.tile_lines) == (expected.blocks, expected.tile_lines)
        assert plan.reason == f"test, up to {expected.up_to} bytes; wire {wire}"


def test_rows_for_quantized_messages_alone_leave_exact_ones_as_without_rows() -> None:
    table = TuningTable("test", by_operation(ROWS), 64 * MIB)
    for nbytes in (4096, SMALLEST):
        assert plan_of(nbytes, table).algorithm == plan_of(nbytes, table._replace(rows={})).algorithm


def test_new_rows_replace_their_own_kind() -> None:
    program = Row(MIB, ALL_REDUCE, "dsl:mine", PROTOCOL)
    table = TABLE._replace(rows={**TABLE.rows, of_programs(ALL_REDUCE): (program,)})
    changed = table.with_rows(ROWS[0]._replace(depth=3))
    assert changed.rows[of_programs(ALL_REDUCE)] == (program,)
    assert changed.rows[ALL_REDUCE] == (EXACT,)
    assert changed.rows[of_wire(ALL_REDUCE, "fp8")] == (ROWS[0]._replace(depth=3),)
    assert changed.rows[of_wire(ALL_REDUCE, "int8")] == ROWS[2:]


def test_table_files(tmp_path: Path) -> None:
    """Rows of one kind are sorted by size; the kinds may stand in any order."""
    table = load_table(write_table(tmp_path / "table.yaml", [*ROWS[2:], EXACT, *ROWS[:2]])).table
    assert table.rows == TABLE.rows
    again = tmp_path / "again.yaml"
    again.write_text(table_text("test device", 8, table, {}), encoding="utf-8")
    assert load_table(again).table.rows == TABLE.rows
    with pytest.raises(ConfigError, match="rows of all_reduce with wire fp8 must be sorted by up_to"):
        load_table(write_table(tmp_path / "unsorted.yaml", [EXACT, *reversed(ROWS[:2])]))


@pytest.mark.parametrize("options", [{}, {"wire": "fp8"}])
def test_a_row_of_a_program_serves_exact_messages(options: dict[str, str]) -> None:
    config = Config.load({}, **options)
    table = TABLE._replace(
        rows={**TABLE.rows, of_programs(ALL_REDUCE): (Row(64 * MIB, ALL_REDUCE, "dsl:x", PROTOCOL),)}
    )
    problem = Problem(ALL_REDUCE, SMALLEST, 0, "bf16", 4)

    class Nothing:
        operation, max_bytes, data_types = ALL_REDUCE, 0, ("bf16",)

    layout = selection.lay_out(problem, table, config, limits_of(config))
    found = with_program(layout, problem, table, config, {"dsl:x": Nothing()})  # type: ignore[dict-item]
    assert (found == layout) == bool(options)


# ---- Measurements --------------------------------------------------------------------------------------------------


def test_tune_measures_quantized_messages_if_asked() -> None:
    limits = limits_of(CONFIG)
    (subject,) = subjects_of(["all-reduce"], 8192, 8 * MIB, 4, config=CONFIG.replace(wire="fp8"))
    assert subject.key == of_wire(ALL_REDUCE, "fp8")
    assert list(subject.sizes(SMALLEST // 2, 4 * SMALLEST)) == [n * SMALLEST // 2 for n in (2, 3, 4, 6, 8)]
    problem = subject.problem(SMALLEST, 4)
    assert {row.algorithm for row in candidates(problem, limits, wire=subject.wire)} == {"two_shot_fp8_hb"}
    for exact in subjects_of(["all-reduce"], 8192, 8 * MIB, 4, config=CONFIG):
        found = {row.algorithm for row in candidates(problem, limits, exact.is_symmetric, wire=exact.wire)}
        assert found
        assert not found & set(ALGORITHMS.values())


@pytest.mark.parametrize("name", ["all-gather", "reduce-scatter"])
def test_tune_measures_quantized_shards_if_asked(name: str) -> None:
    limits = limits_of(CONFIG)
    (subject,) = subjects_of([name], 8192, 8 * MIB, 4, config=CONFIG.replace(wire="fp8"))
    assert subject.key == of_wire(name.replace("-", "_"), "fp8")
    assert list(subject.sizes(SMALLEST // 8, SMALLEST)) == [n * SMALLEST // 8 for n in (2, 3, 4, 6, 8)]
    problem = subject.problem(SMALLEST // 4, 4)
    assert {row.algorithm for row in candidates(problem, limits, wire=subject.wire)} == {"push_fp8_hb"}
    for exact in subjects_of([name], 8192, 8 * MIB, 4, config=CONFIG.replace(wire="int8")):
        found = {row.algorithm for row in candidates(exact.problem(SMALLEST, 4), limits, exact.is_symmetric)}
        assert found
        assert "push_fp8_hb" not in found


def test_tune_says_that_no_message_is_quantized() -> None:
    args = SimpleNamespace(operations=["all-reduce"], min=1024, max=SMALLEST - 2)
    tune.check_options(args, CONFIG)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"measured where it is quantized, from 8M on"):
        tune.check_options(args, CONFIG.replace(wire="fp8"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("data_type", "share"), [("bf16", 1 - 1.0625 / 2), ("fp32", 1 - 1.0625 / 4)])
def test_bytes_saved(data_type: str, share: float) -> None:
    config = CONFIG.replace(wire="fp8")
    problem = Problem(ALL_REDUCE, SMALLEST, 0, data_type, 4)
    layout = selection.lay_out(problem, TABLE, config, limits_of(config))
    assert layout.saved_share == pytest.approx(1.5 * share)
    assert selection.lay_out(problem, TABLE, CONFIG, limits_of(config)).saved_share == 0.0


def test_saved_bytes_are_counted_for_each_type() -> None:
    statistics = StatisticsCollector()
    for share, calls in ((0.75, 2), (0.5, 1), (0.0, 4)):
        counter = statistics.counter(ALL_REDUCE, 1024, "two_shot_fp8_hb", "HB", share)
        for _ in range(calls):
            counter.add()
    assert statistics.calls() == (Calls(ALL_REDUCE, "two_shot_fp8_hb", "HB", 1024, 7, 7168, 0, 0),)
    assert statistics.bytes_saved() == 2 * 768 + 512


# ---- Engines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ""),
        ({"wire": "fp8"}, "; all-reduces and reduce-scatters from 8 MiB to 16 MiB are quantized (fp8): lossy"),
        (
            {"wire": "int8", "wire_min_bytes": 64 << 10},
            "; all-reduces from 64 KiB to 16 MiB are quantized (int8): lossy",
        ),
        ({"wire": "int8", "wire_min_bytes": 0}, "; all-reduces to 16 MiB are quantized (int8): lossy"),
        ({"wire": "int8", "algorithm": "two_shot_int8_hb"}, "; all-reduces to 16 MiB are quantized (int8): lossy"),
        ({"wire": "int8", "algorithm": "two_shot"}, ""),
        ({"algorithm": "two_shot_int8_hb"}, ""),
        ({"wire": "fp8", "wire_min_bytes": 32 << 20}, ""),  # larger messages are the engine's
        ({"wire": "fp8", "dsl": "llm_comm.dsl.library:one_shot_ll", "algorithm": "dsl:one_shot_ll"}, ""),
    ],
)
def test_the_start_line_says_that_sums_are_lossy(options: dict[str, object], words: str) -> None:
    assert descriptions.describe_wire(Config.load({}, **options), 16 << 20) == words


def test_the_start_line_of_a_group_that_only_gathers() -> None:
    operations = (REDUCE_SCATTER, ALL_GATHER)
    config = CONFIG.replace(wire="fp8")
    words = "; reduce-scatters and all-gathers that permit it from 8 MiB to 16 MiB are quantized (fp8): lossy"
    assert descriptions.describe_wire(config, 16 * MIB, operations) == words
    assert descriptions.describe_wire(config.replace(wire="int8"), 16 * MIB, operations) == ""
    assert descriptions.describe_wire(config, 4 * MIB, operations) == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "two_shot to 16 MiB, then vLLM"),
        ({"wire": "fp8"}, "two_shot to 8 MiB, two_shot_fp8_hb to 256 MiB, then vLLM"),
        ({"wire": "fp8", "max_message_bytes": 12 << 20}, "two_shot to 8 MiB, two_shot_fp8_hb to 12 MiB, then vLLM"),
        ({"wire": "fp8", "wire_min_bytes": 32 << 20}, "two_shot to 16 MiB, then vLLM"),
        ({"wire": "int8", "wire_min_bytes": 0}, "two_shot_int8_hb to 256 MiB, then vLLM"),
        ({"wire": "int8", "algorithm": "two_shot_int8_hb"}, "two_shot_int8_hb to 256 MiB, then vLLM"),
    ],
)
def test_the_start_line_says_who_adds(options: dict[str, object], words: str) -> None:
    table = NO_ROWS._replace(max_message_bytes=16 * MIB)
    assert descriptions.describe_plans(table, Config.load({}, **options), "vLLM") == words


def test_a_batch_invariant_mode_is_an_error() -> None:
    log = logging.getLogger("an engine")
    config = EngineOptions.load({"LLM_COMM_WIRE": "fp8"})
    assert engine_config.for_batch_invariance(config, "MODE", False, log) is config
    with pytest.raises(ConfigError, match=r"option wire is 'fp8' \(LLM_COMM_WIRE\), and MODE is on: quantized sums of"):
        engine_config.for_batch_invariance(config, "MODE", True, log)
