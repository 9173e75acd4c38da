"""Which fused kernel runs: plans that follow the table, and that the core accepts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reference import ALGORITHMS
from tables import core_of, fused_row, limits_of, plain_row

from llm_comm import Config, FusedPlan, Plan, _core, registry
from llm_comm.planning import selection
from llm_comm.planning.catalogue import load_table
from llm_comm.planning.plan import Problem
from llm_comm.planning.tables import ALL_REDUCE, FUSED, Row, TuningTable, by_operation

# Of the kernels (csrc/algorithms/all_reduce_add_rms_norm/operation.cuh).
CHUNK_LINES = 8
GROUP = 3
MAX_HIDDEN = 16384
MAX_TWO_SHOT_THREADS = 512
MAX_LOOP_THREADS = 512
WORLDS = range(2, 9)
PLAIN = (plain_row(4096, "one_shot", 3, 8, 0), plain_row(65536, "two_shot", 100, 16, 1))
ROWS = (fused_row(4096, "two_shot", 64, 128, 4, 2), fused_row(65536, "one_shot", 128, 256, 8, 0))
CONFIG = Config.load({})
LIMITS = limits_of(CONFIG)
TABLE = TuningTable("test table", by_operation((*PLAIN, *ROWS)), 1 << 20)
NUMBERS = {algorithm.name: algorithm.number for algorithm in registry.operations()[FUSED].algorithms}


def problem_of(rows: int, hidden: int, world: int, quantization: int = 0) -> Problem:
    return Problem(FUSED, rows * hidden, hidden, "bf16", world, (1e-5, quantization))


def select_fused(
    rows: int, hidden: int, world: int, table: TuningTable, config: Config, limits: _core.Limits | None = None
) -> Plan:
    return selection.select(problem_of(rows, hidden, world), table, config, limits or limits_of(config))


def test_plans_of_all_operations_are_of_one_kind() -> None:
    assert FusedPlan is Plan


@pytest.mark.parametrize(("message_bytes", "row"), [(256, 0), (4096, 0), (4352, 1), (65536, 1), (1 << 20, 1)])
def test_row_by_message_bytes(message_bytes: int, row: int) -> None:
    plan = select_fused(message_bytes // 256, 128, 2, TABLE, CONFIG, LIMITS)
    assert (plan.algorithm, plan.depth) == (ROWS[row].algorithm, ROWS[row].depth)
    assert plan.reason == f"test table, up to {ROWS[row].up_to} bytes"
    assert plan.message_bytes == message_bytes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_forced_algorithm(algorithm: str) -> None:
    plan = select_fused(3, 1024, 4, TABLE, Config.load({}, algorithm=algorithm), LIMITS)
    assert plan.algorithm == algorithm
    assert f"algorithm forced to {algorithm}" in plan.reason


def test_table_without_fused_rows() -> None:
    plan = select_fused(1, 1024, 4, TABLE._replace(rows={ALL_REDUCE: PLAIN}), CONFIG, LIMITS)
    assert plan.algorithm == "one_shot"
    assert "not measured" in plan.reason
    assert [row.algorithm for row in selection.derive_fused_rows(PLAIN)] == ["one_shot", "two_shot"]


def test_rows_that_are_derived() -> None:
    plain = (plain_row(4096, "one_shot", 3, 8, 0), plain_row(8192, "one_shot", 9, 8, 0))
    plain += (plain_row(65536, "two_shot", 1, 8, 0), plain_row(64 << 20, "two_shot", 1, 8, 0))
    assert selection.derive_fused_rows(plain) == (
        fused_row(8192, "one_shot", 1056, 1024, 16, 0),
        fused_row(1 << 20, "two_shot", 1056, 512, 8, 0),
        fused_row(64 << 20, "two_shot", 1056, 512, 4, 1),
    )
    assert selection.derive_fused_rows(()) == ()


def test_without_any_row_the_first_candidate_runs() -> None:
    plan = select_fused(1, 1024, 4, TABLE._replace(rows={}), CONFIG, LIMITS)
    assert (plan.algorithm, plan.cluster) == ("one_shot", 1)
    assert "the first candidate" in plan.reason


def test_a_row_that_fits_no_slot_is_declined() -> None:
    limits = _core.Limits(slot_bytes=1024, sm_count=132, max_cluster=16, compute_capability=90)
    for algorithm in ALGORITHMS:
        config = Config.load({}, algorithm=algorithm)
        plan = select_fused(3, 8192, 4, TABLE, config, limits)
        assert plan.algorithm == "declined"
        assert "a slot of 1024 bytes holds no part of the message: raise workspace_bytes" in plan.reason
        assert select_fused(3, 8, 2, TABLE, config, limits).algorithm == algorithm


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


@pytest.mark.parametrize(("norm", "algorithms"), [("engine", {"declined"}), ("llm_comm", set(ALGORITHMS))])
def test_norms_that_are_to_be_the_same_in_every_batch_are_fused_at_every_size(norm: str, algorithms: set[str]) -> None:
    config = Config.load({}, batch_invariant_norm=norm, max_message_bytes=1 << 60)
    plan = select_fused(1 << 20, 8192, 2, TABLE, config, LIMITS)
    assert plan.algorithm in algorithms
    # The option bounds tensors all the same.
    bounded = config.replace(max_message_bytes=255)
    assert "more than max_message_bytes=255" in select_fused(2, 64, 2, TABLE, bounded, LIMITS).reason


def random_cases(number: int) -> Iterator[tuple[int, int, int, Config, Row, _core.Limits, Plan]]:
    draw = random.Random(7)
    for _ in range(number):
        world = draw.choice(WORLDS)
        hidden = 8 * draw.choice([draw.randint(1, 2048), draw.choice([64, 360, 640, 1024, 2048])])
        row = fused_row(
            1,
            draw.choice(ALGORITHMS),
            draw.randint(1, 1200),
            draw.randint(64, 1024),
            draw.choice([1, 2, 4, 8, 16]),
            draw.randrange(4),
        )
        config = Config.load({}, workspace_bytes=(1 << 20) + draw.choice([0, 77, 31 << 20]))
        limits = limits_of(config, draw.choice([4, 84, 132]), draw.choice([1, 8, 16]), draw.choice([0, 80, 90, 100]))
        chunk = select_fused(1, hidden, world, one_row(row), config, limits).chunk_rows
        rows = draw.choice([1, draw.randint(1, 300), max(1, draw.randint(0, 2) * chunk + draw.randint(-1, 1))])
        yield rows, hidden, world, config, row, limits, select_fused(rows, hidden, world, one_row(row), config, limits)


def one_row(row: Row) -> TuningTable:
    return TuningTable("one row", by_operation([row]), 1 << 40, 1 << 40)


def test_core_accepts_every_plan() -> None:
    for rows, hidden, world, config, row, limits, _ in random_cases(3000):
        launches = selection.lay_out(problem_of(rows, hidden, world), one_row(row), config, limits).launches
        assert launches is not None
        core_of(world, config).prepare(*launches)


def test_groups_lie_in_one_tile() -> None:
    for rows, hidden, world, config, row, limits, _ in random_cases(2000):
        problem = problem_of(rows, -(-hidden // 128) * 128, world, GROUP)
        launches = selection.lay_out(problem, one_row(row), config, limits).launches
        assert launches is not None
        _, _, tiling = launches
        assert tiling.tile_lines % (2 * CHUNK_LINES) == 0
        core_of(world, config).prepare(*launches)


def resident_clusters(limits: _core.Limits, cluster: int, threads: int, resident_threads: int) -> int:
    """Clusters that run at once: of 18 multiprocessors that a GPC of an H100 has, 2 may be left over."""
    sms = limits.sm_count if cluster == 1 else limits.sm_count * 16 // 18
    return sms * (resident_threads // threads) // cluster


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
        # By the registers that its kernels take (docs/experiments/registers.md).
        two_shot_threads = 704 if limits.compute_capability >= 100 else 768
        resident_threads = (
            {"one_shot": 1024, "two_shot": two_shot_threads}[plan.algorithm] if single else MAX_LOOP_THREADS
        )
        assert plan.threads <= most_threads
        assert plan.cluster <= min(row.cluster, limits.max_cluster)
        assert plan.cluster & (plan.cluster - 1) == 0
        assert plan.blocks % plan.cluster == 0
        assert (plan.cluster - 1) * plan.tile_lines < span, "a block without a share of the row"
        assert plan.blocks <= max(row.blocks, plan.cluster)
        resident = resident_clusters(limits, plan.cluster, plan.threads, resident_threads)
        assert plan.blocks <= plan.cluster * max(resident, 1), "blocks that wait for others to end"
        assert (plan.chunks - 1) * plan.chunk_rows < rows <= plan.chunks * plan.chunk_rows


def test_blocks_that_run_at_once_by_the_registers_of_a_device() -> None:
    """Two-shot takes more of them a thread on sm_100: of 384 threads, one block a multiprocessor runs there."""
    row = fused_row(1, "two_shot", 1200, 512, 1, 0)
    for compute_capability, blocks in ((80, 200), (90, 200), (100, 132), (120, 132)):
        limits = limits_of(CONFIG, 132, 16, compute_capability)
        plan = select_fused(200, 3072, 8, one_row(row), CONFIG, limits)
        assert (plan.blocks, plan.threads) == (blocks, 384)


def test_a_block_that_gets_more_of_a_row_has_more_threads() -> None:
    """On a device whose clusters are smaller than those that the table has in mind."""
    row = fused_row(1, "one_shot", 1200, 128, 8, 0)
    for max_cluster, cluster, threads in ((16, 8, 64), (8, 8, 64), (4, 4, 128), (2, 2, 256), (1, 1, 512)):
        plan = select_fused(1, 2048, 2, one_row(row), CONFIG, limits_of(CONFIG, 132, max_cluster, 90))
        assert (plan.cluster, plan.threads) == (cluster, threads)


def test_chunks_fill_slots() -> None:
    for _, hidden, world, config, *_, plan in random_cases(500):
        lines = hidden // 8
        segment = -(-lines // (CHUNK_LINES * world)) * CHUNK_LINES
        row_lines = (world - 1) * lines if plan.algorithm == "one_shot" else (2 * world - 1) * segment
        slot_lines = _core.slot_bytes(config.workspace_bytes) // 16
        assert plan.chunk_rows * row_lines <= slot_lines < (plan.chunk_rows + 1) * row_lines


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world", [2, 8])
def test_core_refuses_a_plan_that_does_not_fit(world: int, algorithm: str) -> None:
    config = Config.load({}, workspace_bytes=1 << 20)
    rows, hidden = 1000, 1024
    row = fused_row(1, algorithm, 16, 256, 2, 0)
    plan = select_fused(rows, hidden, world, one_row(row), config)
    core = core_of(world, config)

    def prepare(hidden: int = hidden, data_type: int = 0, quantization: float = 0, **change: int) -> None:
        problem = _core.Problem(
            count=rows * hidden,
            row=hidden,
            data_type=data_type,
            world_size=world,
            parameters=(1e-5, quantization),
        )
        right = {name: getattr(plan, name) for name in ("blocks", "tile_lines", "cluster", "depth")}
        tiling = _core.Tiling(**{**right, "launch_units": plan.chunk_rows, **change})
        core.prepare(NUMBERS[algorithm], problem, tiling)

    prepare()
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"launch_units": plan.chunk_rows + 1}, "lower launch_units or raise workspace_bytes"),
        ({"launch_units": 0}, "holds no part of the message"),
        ({"tile_lines": 0}, "multiple of 8"),
        ({"tile_lines": 12}, "multiple of 8"),
        ({"tile_lines": 1024}, "at most (1024|512)"),
        # More threads than a block that loops, or one of two-shot, may have.
        ({"tile_lines": 1024 // world}, "cannot walk over rows|at most 512"),
        ({"cluster": 0}, "cluster is 0"),
        ({"cluster": 32}, "this device takes 1 to 16"),
        ({"blocks": 1}, "blocks is 1, less than a cluster of 2"),
        ({"hidden": 1020}, "multiple of 8 up to 16384"),
        ({"hidden": 16392}, "multiple of 8 up to 16384"),
        ({"data_type": 2}, "no kernels for fp32"),
        ({"quantization": 13}, "no quantization 13"),
        ({"quantization": 0.5}, "no quantization 0.5"),
        ({"quantization": 3, "hidden": 1032}, "rows of 1032 elements; FP8 by groups takes a multiple of 128"),
        ({"quantization": 3, "tile_lines": 24}, "multiple of 16"),
        ({"quantization": 9, "hidden": 1032}, "rows of 1032 elements; NVFP4 takes a multiple of 16"),
        ({"quantization": 11, "hidden": 1040}, "rows of 1040 elements; MXFP8 takes a multiple of 32"),
    )
    for change, message in changes:
        with pytest.raises(ValueError, match=message):
            prepare(**change)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("hidden", [1024, 2048, 2880, 4096, 5120, 8192])
@pytest.mark.parametrize("mib", [1, 0.5, 0.25])
def test_rows_of_a_decode_batch_take_a_cluster_each(world: int, hidden: int, mib: float) -> None:
    """On an H200, up to max_fused_bytes, no block walks over several rows: that takes about twice the time."""
    table = load_table(Path(__file__).parents[2] / "configs" / f"tune_h200_{world}.yaml").table
    rows = int(mib * (1 << 20)) // (2 * hidden)
    plan = select_fused(rows, hidden, world, table, CONFIG, LIMITS)
    assert plan.blocks == plan.cluster * rows


def test_many_rows_share_fewer_blocks_each() -> None:
    row = fused_row(1, "one_shot", 1056, 1024, 16, 0)

    def cluster(rows: int, row: Row = row, hidden: int = 8192) -> int:
        table = one_row(row)._replace(fused_blocks=396)
        return select_fused(rows, hidden, 2, table, CONFIG, LIMITS).cluster

    assert [cluster(rows) for rows in (1, 24, 25, 49, 50)] == [16, 16, 8, 8, 4]
    assert cluster(50, row._replace(threads=128)) == 16, "blocks of more threads than the table allows"
    assert [cluster(rows, hidden=2880) for rows in (64, 128)] == [4, 4], "with 2, not all of 128 rows run at once"
    assert select_fused(50, 8192, 2, one_row(row), CONFIG, LIMITS).cluster == 16
