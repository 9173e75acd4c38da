"""Tuning: what it refuses to measure, and what it writes where it did not measure."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tables import fused_row, limits_of, plain_row, write_table

from llm_comm.bench import choosing, timing, tune, tune_tables
from llm_comm.bench.choosing import Measured
from llm_comm.bench.measuring import count_candidates
from llm_comm.bench.tune_record import Record
from llm_comm.bench.tune_subjects import CollectiveSubject, FusedSubject, Subject, candidates, subjects_of
from llm_comm.cli import commands, launch
from llm_comm.config import Config
from llm_comm.errors import ConfigError, PeerTimeout
from llm_comm.planning.catalogue import load_table
from llm_comm.planning.multicast import NO_MULTICAST
from llm_comm.planning.plan import Problem, declined, without_kernel
from llm_comm.planning.selection import select
from llm_comm.planning.tables import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    FUSED,
    REDUCE_SCATTER,
    Row,
    RunnerUp,
    TuningTable,
    by_operation,
    of_symmetric,
    of_wire,
)

ROW = plain_row(4096, "one_shot", 8, 16, 0)
FUSED_ROW = fused_row(16384, "one_shot", 8, 128, 2, 0)
SHIPPED = TuningTable("shipped", by_operation([ROW, FUSED_ROW]), 8 << 20, max_fused_bytes=123456, fused_blocks=77)
CONFIG = Config.load({})
MEASURED = {"date": "today", "versions": {}, "options": {"method": "spaced"}, "complete": True}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was started on a machine of two GPUs."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", *(name for name in os.environ if name.startswith("LLM_COMM_"))):
        monkeypatch.delenv(name, raising=False)
    calls: list[Any] = []
    monkeypatch.setattr(launch, "place", lambda *_, **__: launch.Placement(2, on_gpu=True))
    monkeypatch.setattr(launch, "spawn", lambda *call: calls.append(call) or 0)
    return calls


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--hidden", "100"], "--hidden 100: rows of fused operations have a multiple of 8 elements, up to 16384"),
        (["--hidden", "16392"], "--hidden 16392: rows"),
        (["--max", "8K"], "--min 1K, --max 8K: no fused message lies between; they are rows of 16384 bytes"),
        (["--min", "96M", "--max", "128M"], "--min 96M, --max 128M: no fused message lies between"),
        (["--min", "2M", "--max", "1M", "--operations", "all-reduce"], "--min 2M, --max 1M: the largest"),
    ],
)
def test_options_that_cannot_work_are_refused_before_any_rank_starts(
    options: list[str], complaint: str, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["tune", *options]) == 2
    assert f"ConfigError: {complaint}" in capsys.readouterr().err
    assert not started


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--hidden", "100", "--operations", "all-reduce"],
        ["--hidden", "16384"],
        ["--min", "2", "--max", "2", "--operations", "all-reduce"],
    ],
)
def test_options_that_can_work_start_ranks(options: list[str], started: list[Any]) -> None:
    assert commands.main(["tune", *options]) == 0
    assert len(started) == 1


@pytest.mark.parametrize(("name", "value"), [("ALGORITHM", "two_shot"), ("MAX_MESSAGE_BYTES", "4096")])
def test_options_that_would_falsify_the_table_are_refused(
    name: str, value: str, started: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"LLM_COMM_{name}", value)
    assert commands.main(["tune"]) == 2
    assert f"(LLM_COMM_{name}), but tune measures every algorithm and size: unset it" in capsys.readouterr().err
    assert not started


# ---- Sizes at which nothing can be measured ------------------------------------------------------------------------


class DecliningComm(SimpleNamespace):
    """A communicator of two ranks on an imagined GPU; what it is asked to run, it refuses."""

    rank, world_size, device, table, limits = 1, 2, torch.device("cpu"), SHIPPED, limits_of(CONFIG)
    config, multicast, programs = CONFIG, NO_MULTICAST, MappingProxyType({})

    def use_table(self, table: TuningTable) -> None: ...

    def plan(self, x: torch.Tensor) -> Any:
        return declined(ALL_REDUCE, x.nbytes, "too plain")

    def plan_all_reduce_add_rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> Any:
        return declined(FUSED, x.nbytes, f"rows of {len(weight)}: too odd")

    def all_reduce(self, *_: object) -> None:
        raise AssertionError("a plan said that this is declined")

    def all_reduce_add_rms_norm(self, *_: object, **__: object) -> None:
        raise AssertionError("a plan said that this is declined")


def arguments(**given: object) -> argparse.Namespace:
    usual = {"min": 16384, "max": 32768, "hidden": 8192, "reps": 1, "method": "aligned", "seconds": None, "json": None}
    return argparse.Namespace(**{**usual, **given})


def measure(
    comm: Any, group: dist.ProcessGroup, subject: Subject, given: argparse.Namespace, record: Record | None = None
) -> tune.Found:
    found, left = tune.measure(comm, group, [subject], given, record or Record(None, {}, {}))
    assert left == 0
    return found[subject.key]


def test_a_size_at_which_all_candidates_decline_is_named(group: dist.ProcessGroup) -> None:
    with pytest.raises(ConfigError, match="no kernel can be measured at 32K: too plain; leave it out"):
        measure(DecliningComm(), group, CollectiveSubject(ALL_REDUCE), arguments())
    with pytest.raises(ConfigError, match="no kernel can be measured at 32K: rows of 8192: too odd; leave it out"):
        measure(DecliningComm(), group, FusedSubject(8192), arguments())


class WillingComm(DecliningComm):
    """One that runs everything, in ever less time, by whatever table it was given last."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Row] = []

    def use_table(self, table: TuningTable) -> None:
        (rows,) = table.rows.values()
        self.given.extend(rows)

    def plan_all_reduce_add_rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> Any:
        problem = Problem(FUSED, x.numel(), len(weight), "bf16", 2, (0, 0))
        table = TuningTable("tune", by_operation(self.given[-1:]), 1 << 40, 1 << 40)
        return select(problem, table, CONFIG, self.limits)

    def all_reduce_add_rms_norm(self, *_: object, **__: object) -> None: ...


def test_what_runs_alike_is_measured_once(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    times = (1e6 * 0.9**n for n in itertools.count())
    monkeypatch.setattr(timing, "time_graph", lambda *_: SimpleNamespace(us=next(times)))
    comm: Any = WillingComm()
    record = Record(None, {}, {})
    subject = FusedSubject(8192)
    found = measure(comm, group, subject, arguments(max=16384), record)
    all_of_them = list(candidates(subject.problem(16384, 2), comm.limits))
    assert comm.given[: len(all_of_them)] == all_of_them
    assert len(all_of_them) == count_candidates(subject, [16384], comm)
    measured = record.sizes(FUSED)[16384].measured
    assert 1 < len(measured) < len(all_of_them)
    assert comm.given[len(all_of_them) :] == [m.row for m in measured]
    assert found.best[0].row.without_figures() == measured[-1].row


@pytest.mark.parametrize(
    ("smallest", "largest", "sizes"),
    [
        (1024, 1024, [1024]),
        (1024, 1535, [1024]),
        (1024, 1536, [1024, 1536]),
        (1024, 4096, [1024, 1536, 2048, 3072, 4096]),
    ],
)
def test_sizes_up_to_the_largest(smallest: int, largest: int, sizes: list[int]) -> None:
    assert list(CollectiveSubject(ALL_REDUCE).sizes(smallest, largest)) == sizes


def test_sizes_of_fused_messages_are_whole_rows() -> None:
    assert list(FusedSubject(512).sizes(1024, 6 * 1024)) == [1024, 2048, 3072, 4096, 6144]
    assert list(FusedSubject(512).sizes(1025, 6 * 1024 - 1)) == [2048, 3072, 4096]
    assert max(FusedSubject(8192).sizes(1024, 1 << 30)) == 64 << 20


def test_nccl_is_timed_from_a_mebibyte_on(group: dist.ProcessGroup) -> None:
    """The input is restored for it, which sums in place."""
    comm: Any = DecliningComm()
    assert CollectiveSubject(ALL_REDUCE).bind(comm, group, (1 << 20) - 2).nccl is None
    nccl = CollectiveSubject(ALL_REDUCE).bind(comm, group, 1 << 20).nccl
    assert nccl is not None


class TuningComm(DecliningComm):
    rank, nodes = 0, 1

    def __enter__(self) -> TuningComm:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("out", "json", "status"),
    [("/dev/full", "a.json", 1), ("a.yaml", "/dev/full", 1), ("/dev/full", "/dev/full", 1), ("a.yaml", "a.json", 0)],
)
def test_the_status_says_whether_all_files_are_written(
    out: str,
    json: str,
    status: int,
    group: dist.ProcessGroup,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(launch, "place", lambda *_, **__: launch.Placement(2, on_gpu=True))
    monkeypatch.setattr(launch, "in_rank", lambda: True)
    monkeypatch.setattr(launch, "local_rank", lambda: 0)
    monkeypatch.setattr(launch, "process_group", lambda _: contextlib.nullcontext(group))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "test device")
    monkeypatch.setattr(tune, "Communicator", lambda *_: TuningComm())
    monkeypatch.setattr(tune, "measure", lambda *_: ({ALL_REDUCE: found(ROW)}, 0))
    environment = {"date": "today", "ranks": {"world": 2, "device": "test"}, "versions": {}, "variables": {}}
    monkeypatch.setattr(tune.report, "environment", lambda _: environment)
    monkeypatch.chdir(tmp_path)
    options = [
        "--operations",
        "all-reduce",
        "--max",
        "4K",
        "--out",
        str(tmp_path / out),
        "--json",
        str(tmp_path / json),
    ]
    assert commands.main(["tune", *options]) == status
    assert (tmp_path / "a.yaml").exists() == (out == "a.yaml")
    assert (tmp_path / "a.json").exists() == (json == "a.json")


def test_a_message_without_an_element_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--min 1, .*the smallest message has an element"):
        tune.check_options(arguments(min=1, operations=("all-reduce",)), Config.load({}))


def test_times_of_which_another_was_taken_off_can_be_negative() -> None:
    first, second, third = (Measured(ROW._replace(blocks=n), us) for n, us in ((1, 0.3), (2, -0.1), (3, -0.2)))
    assert choosing.choose([first, second, third], 1024, []) == third


def test_a_failed_communicator_is_no_refusal(group: dist.ProcessGroup) -> None:
    class Failed(DecliningComm):
        def plan_all_reduce_add_rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> Any:
            return without_kernel(FUSED, "one_shot", x.nbytes, "")

        def all_reduce_add_rms_norm(self, *_: object, **__: object) -> None:
            raise PeerTimeout("rank 0 is gone", rank=1, peer=0)

    with pytest.raises(PeerTimeout):
        measure(Failed(), group, FusedSubject(8192), arguments())


def test_a_size_without_candidates_is_noticed_before_any_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_small_sizes(problem: Problem, *_: object, **__: object) -> Iterator[Row]:
        return iter([FUSED_ROW] if problem.message_bytes() <= 4 << 20 else [])

    monkeypatch.setattr(tune, "candidates", of_small_sizes)
    given = arguments(min=1024, max=8 << 20, hidden=64, operations=("fused",))
    with pytest.raises(ConfigError, match="no shape of grid and tile is worth measuring at 6M on this device"):
        tune.require_candidates(given, subjects_of(["fused"], 64, given.max, 8), 8, limits_of(CONFIG))


@pytest.mark.parametrize("world", launch.WORLDS)
@pytest.mark.parametrize("sm_count", [58, 108, 132, 148])
def test_by_default_every_size_has_candidates(world: int, sm_count: int) -> None:
    args = commands.build_parser().parse_args(["tune"])
    subjects = subjects_of(args.operations, args.hidden, args.max, world)
    assert [s.key for s in subjects] == [
        *(ALL_REDUCE, of_symmetric(ALL_REDUCE), FUSED),
        *(ALL_GATHER, of_symmetric(ALL_GATHER), REDUCE_SCATTER, ALL_TO_ALL),
    ]
    tune.require_candidates(args, subjects, world, limits_of(CONFIG, sm_count))


def test_choosing_prefers_the_simpler_of_two_that_cannot_be_told_apart() -> None:
    fast, slow = ROW._replace(blocks=1), ROW._replace(blocks=2)
    tried = [Measured(slow, 2.0), Measured(ROW, 1.001), Measured(fast, 1.0)]
    assert choosing.choose(tried, 1024, ["never mind"]) == Measured(ROW, 1.001)


@pytest.mark.parametrize(("us", "chosen"), [(1.0099, 0), (1.0101, 1)])
def test_what_differs_by_more_than_noise_is_told_apart(us: float, chosen: int) -> None:
    tried = [Measured(ROW._replace(blocks=1), us), Measured(ROW._replace(blocks=2), 1.0)]
    assert choosing.choose(tried, 1024, []) == tried[chosen]


# ---- The table -----------------------------------------------------------------------------------------------------


def found(*rows: Row, us: float = 5.0) -> tune.Found:
    return tune.Found([Measured(row, us) for row in rows], {})


def test_what_was_not_measured_stays_as_it_was() -> None:
    assert tune.tuned(SHIPPED, {}) == SHIPPED._replace(name="")
    plain = ROW._replace(up_to=1 << 20)
    assert tune.tuned(SHIPPED, {ALL_REDUCE: found(plain)}) == SHIPPED._replace(
        name="", rows=by_operation([plain, FUSED_ROW]), max_message_bytes=1 << 20
    )
    fused = FUSED_ROW._replace(cluster=4)
    assert tune.tuned(SHIPPED, {FUSED: found(fused)}) == SHIPPED.with_rows(fused)._replace(name="")
    gather = Row(4096, ALL_GATHER, "one_shot", "LL", blocks=8, tile_lines=16)
    assert tune.tuned(SHIPPED, {ALL_GATHER: found(gather)}) == SHIPPED.with_rows(gather)._replace(name="")


def test_the_table_ends_where_nccl_wins() -> None:
    rows = [ROW._replace(up_to=size, blocks=size) for size in (1 << 20, 2 << 20, 3 << 20)]
    measured = found(*rows)._replace(nccl={1 << 20: 6.0, 2 << 20: 5.0, 3 << 20: 4.9})
    assert tune.tuned(SHIPPED, {ALL_REDUCE: measured}).max_message_bytes == 2 << 20
    won_again = measured._replace(nccl={1 << 20: 6.0, 2 << 20: 4.9, 3 << 20: 6.0})
    assert tune.tuned(SHIPPED, {ALL_REDUCE: won_again}).max_message_bytes == 1 << 20
    cannot_be_told_apart = measured._replace(nccl={1 << 20: 4.96, 2 << 20: 4.94, 3 << 20: 6.0})
    assert tune.tuned(SHIPPED, {ALL_REDUCE: cannot_be_told_apart}).max_message_bytes == 1 << 20


def test_larger_fused_messages_keep_their_rows() -> None:
    large = FUSED_ROW._replace(up_to=1 << 30, cluster=1)
    table = SHIPPED.with_rows(FUSED_ROW, large)._replace(large_fused_bytes=1 << 29)
    measured = FUSED_ROW._replace(cluster=4)
    assert tune.tuned(table, {FUSED: found(measured)}).rows[FUSED] == (measured, large)
    assert tune.tuned(table, {FUSED: found(large)}).rows[FUSED] == (large,)
    without_large = table._replace(large_fused_bytes=None)
    assert tune.tuned(without_large, {FUSED: found(measured)}).rows[FUSED] == (measured,)


@pytest.mark.parametrize(("separate_us", "is_kept"), [(5.0, True), (4.9, False)])
def test_quantized_fused_rows_are_kept_if_they_win(separate_us: float, is_kept: bool) -> None:
    row = Row(1 << 26, FUSED, "two_shot_fp8_hb", "HB", blocks=8, tile_lines=64, depth=2)
    key = of_wire(FUSED, "fp8")
    rows = tune.tuned(SHIPPED, {key: found(row)._replace(separate={1 << 26: separate_us})}).rows
    assert (rows.get(key), rows[FUSED]) == ((row,) if is_kept else None, (FUSED_ROW,))


@pytest.mark.parametrize(
    ("separate_us", "bounds"),
    [
        ({}, (3 << 20, 24 << 20)),
        ({2: 9.0, 4: 9.0, 8: 9.0}, (8 << 20, 24 << 20)),
        ({2: 9.0}, (3 << 20, 24 << 20)),
        ({2: 4.9, 4: 4.9, 8: 9.0}, ((2 << 20) - 1, 8 << 20)),
        ({2: 9.0, 4: 4.9, 8: 9.0}, (3 << 20, 8 << 20)),
        ({2: 9.0, 4: 9.0, 8: 4.9}, (4 << 20, 24 << 20)),
        ({2: 4.97, 4: 4.97, 8: 4.97}, (8 << 20, 24 << 20)),
        ({8: 4.9, 32: 4.9, 64: 9.0}, (3 << 20, 64 << 20)),
        ({8: 4.9, 32: 4.9}, (3 << 20, None)),
        ({8: 4.9, 32: 9.0}, (3 << 20, 24 << 20)),
    ],
)
def test_fused_messages_are_bounded_by_two_kernels(
    separate_us: dict[int, float], bounds: tuple[int, int | None]
) -> None:
    """The present bounds are 3 and 24 MiB. They stay unless a comparison contradicts them. Two kernels are faster if by
    more than the noise."""
    rows = [FUSED_ROW._replace(up_to=mib << 20) for mib in (1, 2, 4, 8, 32, 64)]
    measured = found(*rows)._replace(separate={mib << 20: us for mib, us in separate_us.items()})
    table = tune.tuned(SHIPPED._replace(max_fused_bytes=3 << 20, large_fused_bytes=24 << 20), {FUSED: measured})
    assert (table.max_fused_bytes, table.large_fused_bytes) == bounds


@pytest.mark.parametrize(
    ("ordinary", "symmetric", "least"),
    [
        ([5, 5, 5], [5.04, 4, 3], 64),
        ([5, 5, 5], [5.1, 4, 3], 128),
        ([5, 5, 5], [4, 6, 3], 256),
        ([5, 5, 5], [4, 3, 6], 257),  # never, as far as it was measured
    ],
)
def test_symmetric_tensors_are_made_use_of_from_where_they_win(
    ordinary: list[float], symmetric: list[float], least: int
) -> None:
    sizes = (32, 64, 128, 256)
    pull = Row(0, ALL_REDUCE, "two_shot_pull_hb", "HB", blocks=2, tile_lines=8)
    measured = {
        ALL_REDUCE: tune.Found(
            [Measured(ROW._replace(up_to=n), us) for n, us in zip(sizes, [1, *ordinary], strict=True)], {}
        ),
        of_symmetric(ALL_REDUCE): tune.Found(
            [Measured(pull._replace(up_to=n), us) for n, us in zip(sizes[1:], symmetric, strict=True)], {}
        ),
    }
    shipped = SHIPPED._replace(min_symmetric_bytes=7)
    assert tune.least_symmetric(measured, shipped) == {ALL_REDUCE: least, ALL_GATHER: 7}
    table = tune.tuned(SHIPPED, measured)
    assert table.symmetric_from(ALL_REDUCE) == least
    assert [row.algorithm for row in table.rows[of_symmetric(ALL_REDUCE)]] == ["two_shot_pull_hb"]
    gather = {ALL_GATHER: found(ROW._replace(up_to=512)), of_symmetric(ALL_GATHER): found(ROW._replace(up_to=512))}
    assert tune.least_symmetric({**measured, **gather}, shipped) == {ALL_REDUCE: least, ALL_GATHER: 512}
    assert tune.least_symmetric({ALL_REDUCE: measured[ALL_REDUCE]}, shipped) == 7
    by_operation = shipped._replace(min_symmetric_bytes={ALL_REDUCE: 3, ALL_GATHER: 9})
    assert tune.least_symmetric(measured, by_operation) == {ALL_REDUCE: least, ALL_GATHER: 9}
    assert tune.least_symmetric({}, by_operation) == {ALL_REDUCE: 3, ALL_GATHER: 9}


def test_what_is_printed() -> None:
    row = ROW._replace(runner_up=RunnerUp("two_shot", "LL", 6.5))
    assert tune.line(CollectiveSubject(ALL_REDUCE), Measured(row, 5.0), 7.25) == (
        "        4K     5.00 us  one_shot LL  blocks<=8 tile_lines=16 depth=0   two_shot LL     6.50   NCCL     7.25"
    )
    assert tune.line(FusedSubject(8192), Measured(FUSED_ROW, 5.0), None) == (
        "       16K     5.00 us  fused one_shot LL  blocks<=8 threads<=128 cluster=2 depth=0"
    )


def test_the_bounds_of_fused_messages_survive_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "test device")
    path = tmp_path / "table.yaml"
    shipped = load_table(write_table(path, [ROW], max_fused_bytes=123456, fused_blocks=77))[2]
    table = tune.tuned(shipped, {})
    args: Any = SimpleNamespace(operations=["fused"], install=False)
    tune_tables.write(table, torch.device("cpu"), 8, args, MEASURED, CONFIG, out=path)
    written = load_table(path)[2]
    assert (written.max_fused_bytes, written.fused_blocks) == (123456, 77)


def test_a_full_disk_does_not_lose_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "test device")
    args: Any = SimpleNamespace(operations=["fused"], install=False)
    assert not tune_tables.write(SHIPPED, torch.device("cpu"), 8, args, MEASURED, CONFIG, out=Path("/dev/full"))
    out, err = capsys.readouterr()
    assert "--out /dev/full could not be written: No space left on device" in err
    (tmp_path / "table.yaml").write_text(out)
    assert load_table(tmp_path / "table.yaml").table.rows == SHIPPED.rows
