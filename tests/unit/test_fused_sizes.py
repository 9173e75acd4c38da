"""Sizes of messages that are fused with norms: by table and options, in plans, and in vLLM's compiled graphs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tables import limits_of

from llm_comm import Config, Plan
from llm_comm.integrations.vllm import compiled_graphs
from llm_comm.options import MIB
from llm_comm.planning import selection
from llm_comm.planning.plan import Problem
from llm_comm.planning.planner import Planner
from llm_comm.planning.selection import MAX_WIRE_BYTES, Sizes, fused_sizes, is_within
from llm_comm.planning.tables import ALL_REDUCE, FUSED, Row, TuningTable, by_operation

HIDDEN = 4096
TOKEN_BYTES = 2 * HIDDEN
LARGE = Row(1 << 30, FUSED, "two_shot_hb", "HB", blocks=132, tile_lines=512, depth=2)
QUANTIZED = LARGE._replace(algorithm="two_shot_fp8_hb")
NO_LARGE = TuningTable("test", by_operation([LARGE, QUANTIZED]), 64 * MIB, max_fused_bytes=MIB)
TABLE = NO_LARGE._replace(large_fused_bytes=24 * MIB)
EXACT = TABLE._replace(rows=by_operation([LARGE]))


def sizes_of(table: TuningTable, **options: object) -> tuple[Sizes, ...]:
    return fused_sizes(table, Config.load({}, **options))


def plan_of(nbytes: int, table: TuningTable = TABLE, **options: object) -> Plan:
    config = Config.load({}, **options)
    return Planner(2, table, config, limits_of(config)).lay_out(FUSED, nbytes // 2, HIDDEN, "bf16", (1e-5, 0, 0)).plan


@pytest.mark.parametrize(
    ("table", "options", "expected"),
    [
        (NO_LARGE, {}, [(0, MIB)]),
        (NO_LARGE, {"max_message_bytes": 4096}, [(0, 4096)]),
        (TABLE, {}, [(0, MIB), (24 * MIB, 64 * MIB)]),
        (TABLE, {"max_message_bytes": 1 << 30}, [(0, MIB), (24 * MIB, 1 << 30)]),
        (TABLE, {"max_message_bytes": 24 * MIB}, [(0, MIB), (24 * MIB, 24 * MIB)]),
        (TABLE, {"max_message_bytes": 24 * MIB - 1}, [(0, MIB)]),
        (TABLE, {"max_message_bytes": 4096}, [(0, 4096)]),
        (TABLE._replace(large_fused_bytes=MIB + 2), {}, [(0, MIB), (MIB + 2, 64 * MIB)]),
        (TABLE._replace(large_fused_bytes=MIB + 1), {}, [(0, 64 * MIB)]),
        (TABLE._replace(large_fused_bytes=4096), {}, [(0, 64 * MIB)]),
        (TABLE._replace(large_fused_bytes=0), {}, [(0, 64 * MIB)]),
        # The table has a row for fp8. Quantized messages have the limit of quantized all-reduces.
        (TABLE, {"wire": "fp8"}, [(0, MIB), (24 * MIB, MAX_WIRE_BYTES)]),
        (TABLE, {"wire": "fp8", "max_message_bytes": 32 * MIB}, [(0, MIB), (24 * MIB, 32 * MIB)]),
        (TABLE, {"wire": "fp8", "wire_min_bytes": 128 * MIB}, [(0, MIB), (24 * MIB, 64 * MIB)]),
        (TABLE, {"wire": "fp8", "algorithm": "two_shot_hb"}, [(0, MIB), (24 * MIB, 64 * MIB)]),
        (TABLE._replace(large_fused_bytes=MIB), {"wire": "fp8"}, [(0, MAX_WIRE_BYTES)]),
        (EXACT, {"wire": "fp8"}, [(0, MIB)]),
        (EXACT, {"wire": "fp8", "algorithm": "two_shot_fp8_hb"}, [(0, MIB), (24 * MIB, MAX_WIRE_BYTES)]),
        # No fused kernel quantizes to int8. Messages of at most max_fused_bytes are exact.
        (TABLE, {"wire": "int8"}, [(0, MIB)]),
        (TABLE, {"wire": "int8", "wire_min_bytes": 24 * MIB}, [(0, MIB)]),
        (TABLE, {"wire": "int8", "wire_min_bytes": 32 * MIB}, [(0, MIB), (24 * MIB, 32 * MIB - 1)]),
        (TABLE, {"wire": "int8", "wire_min_bytes": 128 * MIB}, [(0, MIB), (24 * MIB, 64 * MIB)]),
        (TABLE._replace(large_fused_bytes=MIB), {"wire": "int8"}, [(0, 8 * MIB - 1)]),
        (TABLE._replace(large_fused_bytes=MIB), {"wire": "int8", "wire_min_bytes": 0}, [(0, MIB)]),
        (NO_LARGE, {"wire": "int8", "wire_min_bytes": 0}, [(0, MIB)]),
        # All norms are llm_comm's.
        (TABLE, {"batch_invariant_norm": "llm_comm"}, [(0, 64 * MIB)]),
        (NO_LARGE, {"batch_invariant_norm": "llm_comm"}, [(0, 64 * MIB)]),
    ],
)
def test_sizes(table: TuningTable, options: dict[str, object], expected: list[tuple[int, int]]) -> None:
    found = sizes_of(table, **options)
    assert list(found) == expected
    assert selection.message_limit(FUSED, table, Config.load({}, **options)) == expected[-1][1]


def test_a_size_is_within_ranges() -> None:
    ranges = (Sizes(0, 10), Sizes(20, 30))
    assert [size for size in range(40) if is_within(ranges, size)] == [*range(11), *range(20, 31)]
    assert not is_within((), 0)


# ---- Plans ---------------------------------------------------------------------------------------------------------


def test_messages_between_the_ranges_are_declined() -> None:
    for nbytes in (MIB + TOKEN_BYTES, 16 * MIB, 24 * MIB - TOKEN_BYTES):
        plan = plan_of(nbytes)
        assert plan.algorithm == "declined"
        limits = f"more than max_fused_bytes={MIB} and less than large_fused_bytes={24 * MIB}"
        assert plan.reason == f"{limits} of test: two kernels are as fast"
    for nbytes in (24 * MIB, 64 * MIB):
        plan = plan_of(nbytes)
        assert (plan.algorithm, plan.protocol, plan.depth) == ("two_shot_hb", "HB", 2), plan.reason
        # A row has 512 lines and each of the 2 ranks adds 512 lines of a tile.
        assert plan.tile_lines == 512
    assert plan_of(64 * MIB + TOKEN_BYTES).reason == f"more than max_message_bytes={64 * MIB}"


def test_without_large_messages_the_reason_has_one_limit() -> None:
    why = f"more than max_fused_bytes={MIB} of test: two kernels are as fast"
    assert plan_of(32 * MIB, NO_LARGE).reason == why


def test_large_fused_messages_are_quantized_as_all_reduces_are() -> None:
    assert plan_of(24 * MIB, wire="fp8").algorithm == "two_shot_fp8_hb"
    assert plan_of(128 * MIB, wire="fp8").algorithm == "two_shot_fp8_hb"
    assert plan_of(24 * MIB, wire="fp8", wire_min_bytes=32 * MIB).algorithm == "two_shot_hb"
    assert plan_of(24 * MIB, wire="int8", wire_min_bytes=32 * MIB).algorithm == "two_shot_hb"
    assert plan_of(32 * MIB, wire="int8", wire_min_bytes=32 * MIB).algorithm == "declined"
    declined = plan_of(24 * MIB, wire="int8")
    assert (declined.algorithm, declined.reason) == (
        "declined",
        "sums are quantized by wire=int8, and test has no fused row for it",
    )
    assert plan_of(24 * MIB, EXACT, wire="fp8").algorithm == "declined"
    assert plan_of(MIB, EXACT, wire="fp8", wire_min_bytes=0).algorithm == "two_shot_hb"


@pytest.mark.parametrize(
    "options", [{}, {"wire": "fp8"}, {"wire": "int8"}, {"wire": "int8", "wire_min_bytes": 32 * MIB}]
)
def test_what_is_fused_is_served(options: dict[str, object]) -> None:
    """torch.compile asks for the sizes alone (``Planner.fuses``)."""
    config = Config.load({}, **options)
    planner = Planner(2, TABLE, config, limits_of(config))
    assert planner.fused_sizes == fused_sizes(TABLE, config)
    limits = (MIB, 8 * MIB, 24 * MIB, 32 * MIB, 64 * MIB, 256 * MIB)
    for nbytes in (limit + more for limit in limits for more in (-TOKEN_BYTES, 0, TOKEN_BYTES)):
        plan = planner.lay_out(FUSED, nbytes // 2, HIDDEN, "bf16", (1e-5, 0, 0)).plan
        assert planner.fuses(nbytes) == (plan.algorithm != "declined"), f"{nbytes}: {plan}"


def test_a_fused_message_is_quantized_only_where_an_all_reduce_is() -> None:
    for options in ({"wire": "fp8"}, {"wire": "int8"}, {"wire": "fp8", "wire_min_bytes": 32 * MIB}):
        config = Config.load({}, **options)
        for nbytes in (TOKEN_BYTES, 24 * MIB, 32 * MIB, 64 * MIB):
            wires = [
                selection.wire_of(Problem(operation, nbytes // 2, row, "bf16", 2, parameters), config)
                for operation, row, parameters in ((ALL_REDUCE, 0, ()), (FUSED, HIDDEN, (1e-5, 0, 0)))
            ]
            assert wires[0] == wires[1] or (wires[1] == "" and config.wire == "int8")


# ---- vLLM ----------------------------------------------------------------------------------------------------------


def vllm_config(endpoints: list[int], has_model: bool = True) -> SimpleNamespace:
    model = SimpleNamespace(get_hidden_size=lambda: HIDDEN, dtype=torch.bfloat16) if has_model else None
    return SimpleNamespace(model_config=model, compilation_config=SimpleNamespace(compile_ranges_endpoints=endpoints))


@pytest.mark.parametrize(
    ("sizes", "linear", "endpoints", "expected"),
    [
        ([(0, MIB)], 0, [8192], [128]),
        ([(0, MIB)], 64, [8192], [64, 128]),
        # A batch of 3072 tokens has 24 MiB. Graphs are for up to 128, 129 to 3071 and 3072 to 8192 tokens.
        ([(0, MIB), (24 * MIB, 256 * MIB)], 0, [8192], [128, 3071]),
        ([(0, MIB), (24 * MIB, 256 * MIB)], 128, [8192], [128, 3071]),
        ([(0, MIB), (24 * MIB, 32 * MIB)], 0, [8192], [128, 3071, 4096]),
        ([(0, MIB), (24 * MIB - 2, 32 * MIB - 2)], 0, [8192], [128, 3071, 4095]),
        ([(0, MIB), (24 * MIB + 2, 32 * MIB + 2)], 0, [8192], [128, 3072, 4096]),
        ([(0, MIB), (24 * MIB, 256 * MIB)], 0, [2048], [128]),
        ([(0, MIB), (24 * MIB, 256 * MIB)], 0, [3071], [128]),
        ([(0, MIB), (24 * MIB, 256 * MIB)], 0, [3072], [128, 3071]),
        ([(0, TOKEN_BYTES), (24 * MIB, 256 * MIB)], 0, [8192], [3071]),
        ([(0, 64), (24 * MIB, 256 * MIB)], 0, [8192], [3071]),
        ([(0, 256 * MIB)], 0, [8192], []),
        ([(0, MIB)], 0, [], []),
    ],
)
def test_vllm_compiles_a_graph_for_each_range(
    sizes: list[tuple[int, int]], linear: int, endpoints: list[int], expected: list[int]
) -> None:
    ranges = [Sizes(*one) for one in sizes]
    assert compiled_graphs.new_endpoints(vllm_config(endpoints), ranges, linear) == expected


def test_without_a_model_vllm_has_no_graphs_by_size() -> None:
    ranges = sizes_of(TABLE)
    assert compiled_graphs.fused_tokens(vllm_config([8192], has_model=False), ranges) is None
    assert compiled_graphs.new_endpoints(vllm_config([8192], has_model=False), ranges, 0) == []
    assert compiled_graphs.are_fused(None, 1, 1 << 30)


def test_a_graph_is_fused_if_all_its_batches_are() -> None:
    tokens = compiled_graphs.fused_tokens(vllm_config([8192]), sizes_of(TABLE))
    assert tokens == [(0, 128), (3072, 8192)]
    for first, last, expected in (
        (1, 128, True),
        (1, 129, False),
        (129, 3071, False),
        (128, 3072, False),
        (3071, 8192, False),
        (3072, 8192, True),
        (3072, 8193, False),
        (1, 8192, False),
        (3072, 3072, True),
    ):
        assert compiled_graphs.are_fused(tokens, first, last) == expected, (first, last)


def test_graphs_of_other_sizes_have_another_key() -> None:
    keys = {
        compiled_graphs.value(sizes_of(table), 0, "")
        for table in (NO_LARGE, TABLE, TABLE._replace(large_fused_bytes=MIB), TABLE._replace(max_fused_bytes=2 * MIB))
    }
    assert len(keys) == 4
    assert compiled_graphs.value(sizes_of(TABLE), 0, "") == compiled_graphs.value(list(sizes_of(TABLE)), 0, "")
