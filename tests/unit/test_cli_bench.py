"""The benchmark: what it calls wrong, how it ranks, and how it reports."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from llm_comm.bench import METHODS, collectives, comparison, report, timing
from llm_comm.bench.reference import AllGatherReference, ReduceScatterReference, Reference
from llm_comm.bench.report import Result, Row
from llm_comm.bench.timing import Schedule
from llm_comm.bench.wire_reference import FORMAT_OF_WIRE, quantized_all_reduce
from llm_comm.errors import ConfigError

CPU = torch.device("cpu")
PLAN = {"algorithm": "one_shot", "protocol": "LL", "blocks": 8, "threads": 512}


def rank_order_sum(reference: Reference, world: int, dtype: torch.dtype) -> torch.Tensor:
    """What a correct all-reduce returns: a float32 sum in rank order, rounded once."""
    total = reference.addend(0, salt=1).float()
    for rank in range(1, world):
        total += reference.addend(rank, salt=1).float()
    return total.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_reference_accepts_a_right_sum(world: int, dtype: torch.dtype) -> None:
    reference = Reference(10_007, world, dtype, CPU)
    total = rank_order_sum(reference, world, dtype)
    assert reference.error(total, salt=1, rounds_once=True) <= 1.0
    assert reference.error(total, salt=1, rounds_once=False) <= 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reference_finds_a_sum_that_was_rounded_twice(dtype: torch.dtype) -> None:
    world = 4
    reference = Reference(10_007, world, dtype, CPU)
    total = reference.addend(0, salt=1)
    for rank in range(1, world):
        total = total + reference.addend(rank, salt=1)
    assert reference.error(total, salt=1, rounds_once=True) > 1.0
    assert reference.error(total, salt=1, rounds_once=False) <= 1.0


@pytest.mark.parametrize("position", [0, 5_000, 10_006])
@pytest.mark.parametrize("rounds_once", [True, False])
def test_reference_finds_one_missing_addend(position: int, rounds_once: bool) -> None:
    reference = Reference(10_007, 4, torch.bfloat16, CPU)
    total = rank_order_sum(reference, 4, torch.bfloat16)
    total[position] -= reference.addend(2, salt=1)[position]
    assert reference.error(total, salt=1, rounds_once=rounds_once) > 1.0


@pytest.mark.parametrize("wire", FORMAT_OF_WIRE)
def test_reference_compares_a_quantized_sum_bit_by_bit(wire: str) -> None:
    reference = Reference(10_007, 4, torch.bfloat16, CPU, wire)
    total = quantized_all_reduce([reference.addend(rank, salt=1) for rank in range(4)], FORMAT_OF_WIRE[wire])
    assert reference.error(total, salt=1, rounds_once=True) == 0.0
    assert reference.error(total[5_000:], salt=1, rounds_once=True, first=5_000) == 0.0
    total.view(torch.int16)[5_000] ^= 1
    assert reference.error(total, salt=1, rounds_once=True) > 1.0
    # Other libraries add exactly.
    assert reference.error(rank_order_sum(reference, 4, torch.bfloat16), salt=1, rounds_once=False) <= 1.0


def test_reference_finds_stale_and_missing_results() -> None:
    reference = Reference(1_000, 2, torch.float32, CPU)
    total = rank_order_sum(reference, 2, torch.float32)
    assert reference.error(total, salt=0, rounds_once=False) > 1.0
    total[3] = float("nan")
    assert reference.error(total, salt=1, rounds_once=False) > 1.0


def test_gathered_parts_are_judged_bit_for_bit() -> None:
    parts = AllGatherReference(100, 3, torch.float32, CPU)
    inputs = [parts.addend(rank, 7) for rank in range(3)]
    assert parts.error(torch.cat(inputs), 7, True) == 0
    assert parts.error(torch.cat(inputs), 8, True) == float("inf")
    assert parts.error(torch.cat([inputs[0], inputs[2], inputs[1]]), 7, True) == float("inf")
    last_bit = torch.cat(inputs)
    last_bit[-1] = last_bit[-1].nextafter(torch.tensor(9.0))
    assert parts.error(last_bit, 7, False) == float("inf")


def test_scattered_sums_are_judged_by_rank() -> None:
    judges = [ReduceScatterReference(100, rank, 3, torch.float32, CPU) for rank in range(3)]
    total = sum(judges[0].addend(rank, 7).double() for rank in range(3)).float()  # type: ignore[union-attr]
    assert total.shape == (300,)
    for rank, judge in enumerate(judges):
        assert judge.error(total[100 * rank :][:100], 7, True) <= 1
        assert judge.error(total[100 * (rank + 1) % 300 :][:100], 7, False) > 1


def test_sizes_double() -> None:
    assert list(comparison.sizes(1000, 4000)) == [1000, 2000, 4000]
    assert list(comparison.sizes(1000, 3999)) == [1000, 2000]


def row(**us: float | Result) -> Row:
    results = {name: value if isinstance(value, Result) else Result(us=value, error=0.0) for name, value in us.items()}
    return Row(2048, "graph", PLAN, results)


def test_speedup_is_over_the_best_other_that_was_right() -> None:
    measured = row(llm_comm=2.0, nccl=9.0, slow=20.0, wrong=Result(us=1.0, error=3.0), absent=Result(skipped="why"))
    assert measured.best_other == "nccl"
    assert measured.speedup == 4.5
    assert measured.wrong


def test_our_own_symmetric_memory_is_no_rival() -> None:
    results = {"llm_comm": Result(us=4.0), "llm_comm symm": Result(us=2.0), "nccl": Result(us=8.0)}
    row = Row(1024, "eager", {}, results)
    assert (row.best_other, row.speedup) == ("nccl", 2.0)


def test_programs_are_no_rivals() -> None:
    results = {"llm_comm": Result(us=4.0), "dsl:mine": Result(us=2.0), "nccl": Result(us=8.0)}
    row = Row(1024, "eager", {}, results)
    assert (row.best_other, row.speedup) == ("nccl", 2.0)


def test_no_speedup_without_a_time_or_a_rival() -> None:
    assert row(llm_comm=Result(skipped="too large"), nccl=9.0).speedup is None
    assert row(llm_comm=2.0, nccl=Result(skipped="why")).speedup is None


@pytest.mark.parametrize(("error", "wrong"), [(1.0, False), (1.01, True), (float("nan"), True), (None, False)])
def test_wrong(error: float | None, wrong: bool) -> None:
    assert Result(us=1.0, error=error).wrong is wrong


def test_table_marks_wrong_results_and_shows_the_lead() -> None:
    text = report.table([row(llm_comm=2.0, nccl=9.0), row(llm_comm=Result(us=1.0, error=2.0), nccl=9.0)], "graph", True)
    head, good, bad = text.splitlines()
    assert head.split() == ["bytes", "llm_comm", "nccl", "speedup", "over", "plan"]
    assert good.split()[:5] == ["2K", "2.00", "9.00", "4.50x", "nccl"]
    assert "1.00 BAD" in bad
    assert "BAD" not in good


def test_nothing_is_faster_on_emulated_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    for on_gpu in (True, False):
        args = arguments(json=path, mode=("graph",), method="aligned", calls=1, reps=1)
        placement = SimpleNamespace(world=2, on_gpu=on_gpu, describe=lambda: "two")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
            report.publish("title", args, placement, [row(llm_comm=2.0, nccl=9.0)], [], {})  # type: ignore[arg-type]
        head = capsys.readouterr().out.splitlines()[1].split()
        assert head == ["bytes", "llm_comm", "nccl", *(["speedup", "over"] if on_gpu else []), "plan"]
        found = json.loads(path.read_text())["rows"][0]
        assert (found["speedup"], found["best_other"]) == ((4.5, "nccl") if on_gpu else (None, None))


def test_a_full_disk_loses_no_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    placement = SimpleNamespace(world=2, on_gpu=False, describe=lambda: "two")
    rows = [row(llm_comm=2.0, nccl=9.0)]
    (tmp_path / "full.png").symlink_to("/dev/full")
    for name in ("json", "plot"):
        file = {"json": "/dev/full", "plot": tmp_path / "full.png"}[name]
        args = arguments(mode=("graph",), method="aligned", calls=1, reps=1, **{name: Path(file)})
        assert not report.publish("title", args, placement, rows, [], {"command": "x"})  # type: ignore[arg-type]
        out, err = capsys.readouterr()
        assert f"--{name} {file} could not be written: No space left on device; " in err
        assert "2.00" in out
        if name == "json":
            assert json.loads(out[out.index("{\n") :])["rows"][0]["results"]["llm_comm"]["us"] == 2.0


def test_table_shows_host_time_where_the_host_issues_calls() -> None:
    text = report.table([row(llm_comm=Result(us=2.0, host_us=1.5, error=0.0), nccl=9.0)], "graph", True)
    assert text.splitlines()[0].split()[3] == "host"
    assert text.splitlines()[1].split()[3] == "1.50"


def test_skipped_notes_name_library_sizes_and_reason() -> None:
    rows = [row(llm_comm=2.0, symm=Result(skipped="no fp16"))] * 2
    assert report.skipped_notes(rows) == ["symm (graph) left out at 2K, 2K: no fp16"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(1, "1"), (1023, "1023"), (1024, "1K"), (20036, "19.6K"), (8 << 20, "8M"), (3 << 30, "3G")],
)
def test_format_bytes(count: int, text: str) -> None:
    assert report.format_bytes(count) == text


def test_row_survives_json() -> None:
    found = json.loads(json.dumps(row(llm_comm=2.0, nccl=Result(us=9.0, error=2.0)).as_dict(True)))
    assert found["message_bytes"] == 2048
    assert found["results"]["llm_comm"]["us"] == 2.0
    assert found["wrong"] == ["nccl"]


@pytest.mark.parametrize(
    ("name", "begin"),
    [("plot.png", b"\x89PNG"), ("plot.PNG", b"\x89PNG"), ("plot.svg", b"<?xml"), ("plot.pdf", b"%PDF")],
)
def test_plot_writes_what_the_suffix_says(name: str, begin: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / name, [row(llm_comm=2.0, nccl=9.0, absent=Result(skipped="why"))], "title")
    assert (tmp_path / name).read_bytes().startswith(begin)


def test_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install"):
        report.require_matplotlib()


def arguments(**given: object) -> argparse.Namespace:
    defaults = {
        "collective": "all-reduce",
        "world": 2,
        "device": "emulated",
        "dtype": "bf16",
        "min": 1024,
        "max": None,
        "mode": None,
        "calls": None,
        "reps": None,
    }
    return argparse.Namespace(**{**defaults, "dsl": None, "json": None, "plot": None, "argv": [], **given})


@pytest.mark.parametrize(
    "given",
    [
        {"mode": ("graph",)},
        {"min": 4096, "max": 1024},
        {"min": 3},
        {"min": 2, "dtype": "fp32"},
        {"json": Path("/no/such/directory/x.json")},
        {"plot": Path("/no/such/directory/x.png")},
    ],
)
def test_options_that_cannot_work_are_refused_before_any_rank_starts(
    given: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(comparison.launch, "spawn", lambda *_: pytest.fail("started ranks"))
    with pytest.raises(ConfigError):
        collectives.run(arguments(**given))


def test_multicast_of_torch_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "")
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST")
    environ = comparison.os.environ
    monkeypatch.setattr(
        comparison.launch, "spawn", lambda *_: seen.append(environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"]) or 0
    )
    assert collectives.run(arguments()) == 0
    assert seen == ["1"]


@pytest.mark.parametrize(("aligned", "calls_a_run"), [(True, 5 + 2), (False, 5)])
def test_eager_runs_reset_before_each_and_time_the_right_calls(
    aligned: bool, calls_a_run: int, group: dist.ProcessGroup
) -> None:
    done: list[str] = []
    schedule = Schedule(calls=5, reps=4, aligned=aligned)
    timed = timing.time_eager(lambda: done.append("call"), lambda: done.append("reset"), schedule, CPU, group)
    runs = 4 + timing._WARM_UP_RUNS
    assert done == (["reset"] + ["call"] * calls_a_run) * runs
    assert timed.min_us <= timed.us
    assert timed.host_us is not None


def test_spaced_runs_take_off_what_lies_between_the_calls(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 0.0

    def advance(seconds: float) -> None:
        nonlocal clock
        clock += seconds

    def spacing(call: timing.Call, device: torch.device) -> tuple[timing.Call, timing.Call]:
        return lambda: advance(3.0), lambda: (advance(3.0), call())

    monkeypatch.setattr(timing, "_spacing", spacing)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock)
    schedule = Schedule.by("spaced", calls=5, reps=4)
    timed = timing.time_eager(lambda: advance(2.0), lambda: None, schedule, CPU, group)
    assert (timed.us, timed.min_us, timed.host_us) == pytest.approx((2e6, 2e6, 2e6))


def test_a_spaced_call_comes_behind_another_kernel() -> None:
    done: list[int] = []
    spacer, spaced = timing._spacing(lambda: done.append(len(done)), CPU)
    assert done == [0]  # has run once, as a capture wants it
    spacer()
    assert done == [0]
    spaced()
    assert done == [0, 1]


@pytest.mark.parametrize(
    ("method", "schedule"),
    [
        ("aligned", Schedule(5, 4, True)),
        ("spaced", Schedule(5, 4, True, spaced=True)),
        ("plain", Schedule(5, 4, False)),
    ],
)
def test_schedule_by_method(method: str, schedule: Schedule) -> None:
    assert method in METHODS
    assert Schedule.by(method, 5, 4) == schedule


class WrongOnFreshData:
    """A library whose result is right once and stale ever after."""

    name, in_place, rounds_once = "stale", False, True

    def bind(self, count: int) -> comparison.Bound:
        x = torch.empty(count)
        first: list[torch.Tensor] = []

        def call() -> torch.Tensor:
            first[:] = first or [x.clone()]
            return first[0]

        return comparison.Bound(x, call)


class Unsupported:
    """A library that takes no input."""

    name, in_place, rounds_once = "none", False, True

    def bind(self, count: int) -> comparison.Bound:
        raise RuntimeError(f"cannot take {count} elements\nand a long explanation")


class LoneComm:
    """Stands for a communicator of one rank."""

    rank, world_size, device = 0, 1, CPU


def test_measuring_notices_stale_results_and_keeps_reasons(group: dist.ProcessGroup) -> None:
    schedule, comm = Schedule(1, 1, False), LoneComm()
    collective = collectives.COLLECTIVES["all-reduce"]
    bench = comparison.Comparison(collective, comm, group, torch.float32, schedule)  # type: ignore[arg-type]
    reference = Reference(100, 1, torch.float32, CPU)
    assert bench.measure(WrongOnFreshData(), 100, "eager", reference).wrong
    assert bench.measure(Unsupported(), 100, "eager", reference) == Result(skipped="cannot take 100 elements")
