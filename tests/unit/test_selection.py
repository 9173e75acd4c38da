"""Which algorithm runs for a message: a pure function of sizes and tables, whose plans the core accepts."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from reference import ALGORITHMS
from tables import core_of, emulated_table, general_table, limits_of, plain_row

from llm_comm import Config, Plan, _core, registry
from llm_comm.planning import selection
from llm_comm.planning.catalogue import shipped_tables
from llm_comm.planning.multicast import NO_MULTICAST, Multicast
from llm_comm.planning.plan import Problem, declined
from llm_comm.planning.planner import Planner
from llm_comm.planning.tables import ALL_REDUCE, Row, TuningTable, by_operation

WORLDS = range(2, 9)
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
LINE_BYTES = 16
MAX_THREADS = 1024  # of a block
CONFIG = Config.load({})
ROWS = (
    plain_row(256, "two_shot", 1, 4, 2),
    plain_row(4096, "one_shot", 3, 8, 0),
    plain_row(65536, "two_shot", 100, 16, 1),
)
TABLE = TuningTable("test table", by_operation(ROWS), 1 << 20)


def table_of(row: Row, max_message_bytes: int = 1 << 40) -> TuningTable:
    return TuningTable("one row", by_operation([row]), max_message_bytes)


def problem_of(count: int, data_type: str, world: int) -> Problem:
    return Problem(ALL_REDUCE, count, 0, data_type, world)


def select(count: int, data_type: str, world: int, table: TuningTable, config: Config) -> Plan:
    return selection.select(problem_of(count, data_type, world), table, config, limits_of(config))


# ---- Kernels of plans ----------------------------------------------------------------------------------------------

SHIPPED = tuple(found.table for found in shipped_tables())
NO_ROWS = TuningTable("no rows", {}, 1 << 30)
OF_PROGRAM = TuningTable("of a program", by_operation([Row(1 << 30, ALL_REDUCE, "dsl:ring_ll", "DSL")]), 1 << 30)
MULTICAST = Multicast(True, "a test")


def plans_of(planner: Planner) -> Iterator[selection.Layout]:
    for operation in registry.operations().values():
        row = 512 if operation.row_multiple else 0
        for data_type, element_bytes in registry.data_types().items():
            for nbytes in (16, 4096, 1 << 18, 1 << 20, 6 << 20, 64 << 20):
                count = max(row, nbytes // element_bytes)
                known = {"rows": 1.0, **{f"size_{rank}": float(count) for rank in range(planner.world_size)}}
                parameters = tuple(known.get(name, 0.0) for name in operation.parameters)
                yield planner.lay_out(operation.name, count, row, data_type, parameters)


@pytest.mark.parametrize("multicast", [NO_MULTICAST, MULTICAST], ids=["", "multicast"])
@pytest.mark.parametrize(
    "table", [TABLE, NO_ROWS, OF_PROGRAM, emulated_table(), *SHIPPED], ids=lambda table: table.name
)
def test_kernels_of_all_plans_are_loaded(table: TuningTable, multicast: Multicast) -> None:
    for algorithm in ("auto", *registry.algorithm_names(), "dsl:ring_ll"):
        for more in ({}, {"max_blocks": 8}, {"sum": "any"}, {"wire": "fp8"}, {"wire": "int8", "max_blocks": 8}):
            config = Config.load({}, algorithm=algorithm, **more)
            planner = Planner(8, table, config, limits_of(config), multicast)
            planner.has_symmetric = True
            loaded = planner.choosable()
            for layout in plans_of(planner):
                for launches in (layout.launches, layout.direct):
                    assert launches is None or launches[0] in loaded, layout.plan


@pytest.mark.parametrize("table", SHIPPED, ids=lambda of: of.name)
def test_kernels_that_no_plan_names_are_not_loaded(table: TuningTable) -> None:
    planner = Planner(8, table, CONFIG, limits_of(CONFIG))
    found = [a for operation in registry.operations().values() for a in operation.algorithms]
    optional = {a.number for a in found if a.uses_multimem or a.protocol == "Port" or a.name == "one_shot_hb" or a.wire}
    assert len(optional) == 17
    assert not optional.intersection(planner.choosable())


# ---- Look-up -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message_bytes", "row"),
    [(2, 0), (254, 0), (256, 0), (258, 1), (4096, 1), (4098, 2), (65536, 2), (65538, 2), (1 << 20, 2)],
)
@pytest.mark.parametrize("world", [2, 5])
def test_row_by_message_bytes(message_bytes: int, row: int, world: int) -> None:
    plan = select(message_bytes // 2, "bf16", world, TABLE, CONFIG)
    expected = ROWS[row]
    assert (plan.algorithm, plan.tile_lines, plan.depth) == (expected.algorithm, expected.tile_lines, expected.depth)
    assert plan.reason == f"test table, up to {expected.up_to} bytes"
    assert (plan.operation, plan.protocol) == (ALL_REDUCE, "LL")


@pytest.mark.parametrize("data_type", ELEMENT_BYTES)
def test_element_size_counts(data_type: str) -> None:
    at_boundary = 4096 // ELEMENT_BYTES[data_type]
    assert select(at_boundary, data_type, 2, TABLE, CONFIG).algorithm == "one_shot"
    assert select(at_boundary + 1, data_type, 2, TABLE, CONFIG).algorithm == "two_shot"
    assert select(at_boundary, data_type, 2, TABLE, CONFIG).message_bytes == 4096


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_forced_algorithm(algorithm: str) -> None:
    for count in (10, 1000, 10_000):
        plan = select(count, "fp32", 4, TABLE, Config.load({}, algorithm=algorithm))
        assert plan.algorithm == algorithm
        assert f"algorithm forced to {algorithm}" in plan.reason


@pytest.mark.parametrize("world", [2, 8])
def test_every_algorithm_can_be_forced_at_every_size(world: int) -> None:
    """Where it has a row of its own, where rows are of others, and where nothing proposes it as it is slow there."""
    known = registry.operations()[ALL_REDUCE].algorithms
    for table in (TABLE, general_table(world, 132), emulated_table()):
        for algorithm, wire in ((a.name, a.wire or "none") for a in known if not a.is_symmetric):
            for count in (1, 100, 50_000, 500_000):
                config = CONFIG.replace(algorithm=algorithm, sum="any", wire=wire)
                problem = problem_of(count, "bf16", world)
                plan = selection.select(problem, table, config, limits_of(config), Multicast(True, "as if"))
                assert plan.algorithm == algorithm, plan.reason
                assert plan.reason.endswith(f"; algorithm forced to {algorithm}")


@pytest.mark.parametrize(("limit", "largest"), [(None, 1 << 20), (100, 100), (0, 0), (1 << 30, 1 << 30)], ids=str)
def test_largest_message(limit: int | None, largest: int) -> None:
    config = Config.load({}, max_message_bytes=limit)
    if largest:
        assert select(largest // 2, "fp16", 2, TABLE, config).algorithm != "declined"
    plan = select(largest // 2 + 1, "fp16", 2, TABLE, config)
    assert plan == declined(ALL_REDUCE, largest + 2, f"more than max_message_bytes={largest}")
    assert plan.algorithm == "declined"
    assert plan.chunks == plan.blocks == plan.threads == 0


def test_nothing_to_exchange() -> None:
    plan = select(0, "bf16", 4, TABLE, Config.load({}, max_message_bytes=0))
    assert (plan.algorithm, plan.protocol, plan.message_bytes, plan.reason) == ("none", "none", 0, "empty message")


def test_one_rank_is_not_the_core_s() -> None:
    plan = select(9, "bf16", 1, TABLE, CONFIG)
    assert (plan.algorithm, plan.reason) == ("declined", "one rank: nothing to exchange")


def test_a_slot_that_holds_nothing_is_told() -> None:
    limits = _core.Limits(slot_bytes=0, sm_count=132, max_cluster=16, compute_capability=90)
    plan = selection.select(problem_of(9, "bf16", 4), TABLE, CONFIG, limits)
    assert plan.algorithm == "declined"
    assert "raise workspace_bytes" in plan.reason


# ---- Without a row, and with an algorithm that not every operation has ----------------------------------------------


def test_without_a_row_the_first_candidate_runs() -> None:
    table = TuningTable("nothing", {}, 1 << 30)
    for world in WORLDS:
        problem = problem_of(5000, "bf16", world)
        plan = selection.select(problem, table, CONFIG, limits_of(CONFIG))
        first, *_ = _core.candidates(0, problem.for_core(), limits_of(CONFIG))
        assert (plan.algorithm, plan.tile_lines, plan.depth) == ("one_shot", first.tile_lines, first.depth)
        assert plan.reason == "nothing has no row for all_reduce: the first candidate"
    two_shot = select(5000, "bf16", 4, table, CONFIG.replace(algorithm="two_shot"))
    assert two_shot.algorithm == "two_shot"
    assert two_shot.reason.endswith("the first candidate; algorithm forced to two_shot")
    assert select(1 << 21, "fp32", 8, table, CONFIG).algorithm == "two_shot", "one-shot is not worth it"
    assert select(1 << 28, "fp32", 8, table, CONFIG).protocol == "HB", "nor is LL, with ever so many launches"
    reason = select(1 << 28, "fp32", 8, table, CONFIG.replace(algorithm="one_shot")).reason
    assert "no algorithm of all_reduce has a shape" in reason


class MadeUp(NamedTuple):
    protocol: str
    tunables: tuple[str, ...] = ("blocks", "tile_lines", "depth")
    least_lines: int = 1
    most_blocks: int = 1 << 16


#: What another build might have: another algorithm of the same numbers, and others.
MADE_UP = {
    "hb_alike": MadeUp("HB"),
    "ring": MadeUp("HB", ("blocks",)),
    "ll_ring": MadeUp("LL", ("blocks",)),
    "few_blocks": MadeUp("LL", most_blocks=2),
    "wide_tiles": MadeUp("HB", least_lines=32),
    "ll_alike": MadeUp("LL"),
}


@pytest.fixture
def _more_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the all-reduce; the core takes them for its one-shot."""
    known = registry.operations()
    plain = known[ALL_REDUCE]
    one_shot = plain.algorithms[0]
    made_up = []
    for name, of in MADE_UP.items():
        ranges = {tunable: one_shot.ranges[tunable] for tunable in of.tunables}
        ranges["blocks"] = ranges["blocks"]._replace(most=of.most_blocks)
        if "tile_lines" in ranges:
            ranges["tile_lines"] = ranges["tile_lines"]._replace(least=of.least_lines)
        made_up.append(one_shot._replace(name=name, protocol=of.protocol, data_types=("bf16",), ranges=ranges))
    changed = {**known, ALL_REDUCE: plain._replace(algorithms=(*plain.algorithms, *made_up))}
    monkeypatch.setattr(registry, "operations", lambda: changed)


def forced(algorithm: str) -> Config:
    config = Config.load({})
    object.__setattr__(config, "algorithm", algorithm)  # of this build's registry it is none
    return config


@pytest.mark.usefixtures("_more_algorithms")
def test_a_forced_algorithm_takes_the_numbers_of_a_row_that_are_its_own() -> None:
    alike = select(1000, "bf16", 4, TABLE, forced("ll_alike"))
    assert (alike.algorithm, alike.protocol, alike.blocks, alike.tile_lines) == ("ll_alike", "LL", 3, 8)
    assert alike.reason == "test table, up to 4096 bytes; algorithm forced to ll_alike"
    for other in "hb_alike", "ll_ring", "few_blocks":  # of another protocol, with other tunables, with other bounds
        plan = select(1000, "bf16", 4, TABLE, forced(other))
        assert (plan.algorithm, plan.protocol) == (other, MADE_UP[other].protocol)
        reason = f"test table has no row for all_reduce: the first candidate; algorithm forced to {other}"
        assert plan.reason == reason


@pytest.mark.usefixtures("_more_algorithms")
def test_a_forced_algorithm_without_candidates_takes_the_row_as_far_as_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection._core, "candidates", lambda *_: [])
    plan = select(30_000, "bf16", 4, TABLE, forced("few_blocks"))
    assert (plan.blocks, plan.tile_lines, plan.depth) == (2, 16, 1)  # the row has 100 blocks
    assert plan.reason == "test table, up to 65536, as far as few_blocks takes it; algorithm forced to few_blocks"
    assert select(30_000, "bf16", 4, TABLE, forced("wide_tiles")).tile_lines == 32  # and 16 lines
    without_rows = select(1000, "bf16", 4, TuningTable("nothing", {}, 1 << 30), forced("few_blocks"))
    assert "no algorithm of all_reduce has a shape" in without_rows.reason


@pytest.mark.usefixtures("_more_algorithms")
def test_an_operation_without_the_forced_algorithm_goes_by_its_table() -> None:
    plan = select(1000, "fp32", 4, TABLE, forced("ring"))  # it has no kernels for fp32
    assert (plan.algorithm, plan.blocks) == ("one_shot", 3)
    assert plan.reason == "test table, up to 4096 bytes; all_reduce has no algorithm ring for fp32"


@pytest.mark.usefixtures("_more_algorithms")
def test_a_row_whose_algorithm_does_not_have_the_type() -> None:
    table = table_of(Row(1, ALL_REDUCE, "ring", "HB", blocks=7, tile_lines=8))
    assert select(1000, "bf16", 4, table, CONFIG).algorithm == "ring"
    assert select(1000, "fp32", 4, table, CONFIG).algorithm == "one_shot"


def test_same_arguments_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else counts: not what was asked before, and not the environment."""
    first = select(5000, "bf16", 8, TABLE, CONFIG)
    for count in range(0, 10_000, 100):
        select(count, "fp32", 3, TABLE, Config.load({}, algorithm="one_shot"))
    monkeypatch.setenv("LLM_COMM_ALGORITHM", "one_shot")
    monkeypatch.setenv("LLM_COMM_MAX_MESSAGE_BYTES", "0")
    assert select(5000, "bf16", 8, TABLE, CONFIG) == first
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.blocks = 7  # type: ignore[misc]


# ---- Grids and chunks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("tile_lines", [1 << shift for shift in range(13)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_block_is_within_limits(world: int, tile_lines: int, algorithm: str) -> None:
    for count in (1, 1000, 1 << 20):
        plan = select(count, "bf16", world, table_of(plain_row(1, algorithm, 64, tile_lines, 0)), CONFIG)
        # One-shot of two ranks has a thread for a line, all others one for each rank and line.
        threads_of_line = 1 if (algorithm, world) == ("one_shot", 2) else world
        assert plan.threads == plan.tile_lines * threads_of_line
        assert plan.tile_lines * world <= MAX_THREADS
        assert plan.tile_lines <= tile_lines
        assert plan.tile_lines & (plan.tile_lines - 1) == 0
        # Not smaller than it has to be.
        assert plan.tile_lines == tile_lines or 2 * plan.tile_lines * world > MAX_THREADS


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_block_without_a_tile(world: int, algorithm: str) -> None:
    blocks, tile_lines = 5, 4
    for count in (1, 63, 64, 65, 640, 5000):
        plan = select(count, "bf16", world, table_of(plain_row(1, algorithm, blocks, tile_lines, 0)), CONFIG)
        lines = -(-count * 2 // 16)
        tiles = -(-(lines if algorithm == "one_shot" else -(-lines // world)) // tile_lines)
        assert plan.blocks == min(blocks, tiles)


def random_cases(number: int) -> Iterator[tuple[int, str, int, TuningTable, Config]]:
    """(count, data type, world, table, config), of which many lie at the edge of a chunk."""
    draw = random.Random(3)
    for _ in range(number):
        world, data_type = draw.choice(WORLDS), draw.choice(list(ELEMENT_BYTES))
        row = plain_row(1, draw.choice(ALGORITHMS), draw.randint(1, 300), 1 << draw.randrange(11), draw.randrange(4))
        workspace = (1 << 20) + draw.choice([0, draw.randrange(1 << 20), draw.randrange(1 << 26)])
        config = Config.load({}, workspace_bytes=workspace)
        chunk = select(1, data_type, world, table_of(row), config).chunk_elements
        count = draw.choice([draw.randint(1, 1 << 24), max(1, chunk * draw.randint(0, 3) + draw.randint(-9, 9))])
        yield count, data_type, world, table_of(row), config


def prepare(count: int, data_type: str, world: int, table: TuningTable, config: Config) -> None:
    layout = selection.lay_out(problem_of(count, data_type, world), table, config, limits_of(config))
    if layout.launches is not None:
        core_of(world, config).prepare(*layout.launches)


def test_chunks_cover_the_message() -> None:
    several = 0
    for count, data_type, world, table, config in random_cases(2000):
        element_bytes = ELEMENT_BYTES[data_type]
        plan = select(count, data_type, world, table, config)
        assert (plan.chunks - 1) * plan.chunk_elements < count <= plan.chunks * plan.chunk_elements
        # The pointers of later chunks are as aligned as the first.
        assert plan.chunk_elements * element_bytes % LINE_BYTES == 0
        # No more launches than have to be, and none that is much shorter than the others.
        most = select(1, data_type, world, table, config).chunk_elements
        assert plan.chunks == -(-count // most)
        if plan.chunks > 1:
            several += 1
            unit = world * plan.tile_lines * LINE_BYTES // element_bytes
            assert plan.chunks * (plan.chunk_elements - unit) < count
    assert several > 500


def test_one_launch_fills_a_slot() -> None:
    for _, data_type, world, table, config in random_cases(2000):
        element_bytes = ELEMENT_BYTES[data_type]
        plan = select(1, data_type, world, table, config)
        # With a line more a rank it would not fit.
        lines = plan.chunk_elements * element_bytes // LINE_BYTES + world
        slot_lines = _core.slot_bytes(config.workspace_bytes) // LINE_BYTES
        needed = world * lines if plan.algorithm == "one_shot" else 2 * world * -(-lines // world)
        assert needed > slot_lines


def test_launches_of_a_prefill() -> None:
    """4096 tokens of 8192 elements, and a quarter of them."""
    table = table_of(plain_row(1, "two_shot", 528, 128, 1))
    for count, launches in ((1 << 25, 5), (1 << 23, 2)):
        plan = select(count, "bf16", 4, table, Config.load({}))
        assert plan.chunks == launches
        assert plan.chunk_elements * launches - count < launches * 4 * 128 * 8


def test_core_accepts_every_plan() -> None:
    """The core checks a plan against the slot and the limits of a launch, and throws."""
    for count, data_type, world, table, config in random_cases(2000):
        prepare(count, data_type, world, table, config)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_core_refuses_a_plan_that_does_not_fit(world: int, algorithm: str) -> None:
    config = Config.load({}, workspace_bytes=1 << 20)
    # Its launches are as large as they can be.
    most = select(1, "bf16", world, table_of(plain_row(1, algorithm, 4, 16, 0)), config).chunk_elements
    core = core_of(world, config)
    problem = problem_of(1 << 24, "bf16", world).for_core()
    right = {"blocks": 4, "tile_lines": 16, "cluster": 1, "depth": 0, "launch_units": most}
    core.prepare(ALGORITHMS.index(algorithm), problem, _core.Tiling(**right))
    for change, message in (
        ({"launch_units": most + 8 * world}, "lower launch_units or raise workspace_bytes"),
        ({"launch_units": 0}, "holds no part of the message"),
        ({"tile_lines": 1024}, "tile_lines is 1024"),
        ({"tile_lines": 12}, "power of two"),
        ({"tile_lines": 0}, "tile_lines is 0"),
        ({"blocks": 0}, "blocks is 0"),
        ({"blocks": 65536}, "blocks is 65536"),
    ):
        with pytest.raises(ValueError, match=message):
            core.prepare(ALGORITHMS.index(algorithm), problem, _core.Tiling(**{**right, **change}))


@pytest.mark.parametrize("workspace", [1 << 20, (1 << 20) + 17, 64 << 20, (4 << 30) - 1])
def test_header_and_two_slots_fit_in_the_workspace(workspace: int) -> None:
    config = Config.load({}, workspace_bytes=workspace)
    assert _core.slot_bytes(workspace) % LINE_BYTES == 0
    assert workspace - 2 * LINE_BYTES < core_of(2, config).workspace_bytes() <= workspace
