"""Seeded schedules of all ranks in one process over weak memory, and the proof that they find what is to be found."""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

DETERMINISTIC = Path(__file__).parents[1] / "deterministic"
sys.path.append(str(DETERMINISTIC))

import controls  # noqa: E402
import driver  # noqa: E402
from edits import Edit  # noqa: E402
from protection import FP8, HANGS, PLAIN_BY_SWITCH, WAIT, Everywhere, Protection  # noqa: E402

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("g++") is None or shutil.which("cmake") is None, reason="needs g++ and cmake"),
    pytest.mark.timeout(1800),  # minutes of computation, beside other tests
]

#: In each of two processes: of `make nightly`, and of `make test`.
SCHEDULES, FEWER_SCHEDULES = 4_000, 1_500
#: Of each algorithm by the switch, at least, in each of four runs.
SCHEDULES_BY_SWITCH = 250
#: Of each algorithm, a third with each of the worlds.
SCHEDULES_OF_LARGE_WORLDS = 6


@pytest.fixture(scope="module")
def programs() -> Path:
    return driver.build()


@pytest.fixture(scope="module")
def with_controls() -> Path:
    return controls.build()


def test_model_of_memory(programs: Path) -> None:
    """The model shows what PTX allows and only that."""
    done = driver.run(programs / "litmus")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("schedules", [FEWER_SCHEDULES, pytest.param(SCHEDULES, marks=pytest.mark.nightly)])
def test_schedules(programs: Path, schedules: int) -> None:
    """All algorithms, data types and worlds."""
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(driver.run, programs / driver.PROGRAM, "--cases", schedules, "--seed", 1 + job * SCHEDULES)
            for job in range(2)
        ]
    for run in runs:
        done = run.result()
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{schedules} schedules" in done.stdout


@pytest.mark.parametrize("subject", [algorithm.subject for algorithm in controls.ALGORITHMS])
def test_schedules_of_large_worlds(programs: Path, subject: str) -> None:
    """Worlds of 9, 12 and 16 ranks, whose kernels take the number of ranks at run time."""
    done = driver.run(
        programs / driver.PROGRAM, "--large", "--cases", SCHEDULES_OF_LARGE_WORLDS, "--algorithm", subject
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "subject", [a.subject for a in controls.ALGORITHMS if re.search("switch|ld_reduce", a.subject)]
)
def test_schedules_by_switch(programs: Path, subject: str) -> None:
    """More of those that no lent GPU may run, and more than any control of them took to be noticed. A quarter is in FP8
    where there is any."""
    subjects = [subject] * 4 if "rms_norm" not in subject else [*[subject] * 3, subject + FP8]
    taken = [
        int(str(result["schedules_most"]))
        for result in controls.documented_results()
        if str(result["name"]).partition(":")[2] == subject
    ]
    cases = max(SCHEDULES_BY_SWITCH, max(taken) // len(subjects) + 1)
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(
                driver.run, programs / driver.PROGRAM, "--cases", cases, "--seed", 1 + job * cases, "--algorithm", s
            )
            for job, s in enumerate(subjects)
        ]
    for run in runs:
        done = run.result()
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{cases} schedules" in done.stdout


def test_a_failure_is_replayed_from_its_seed(programs: Path) -> None:
    """The command that a failure prints fails alike. To have one, grids order nothing."""
    failed = driver.run(programs / driver.PROGRAM, "--cases", 20_000, "--unordered-grids")
    assert failed.returncode == 1
    reason = re.search(r"^FAILED: seed \d+ \(.*?\): (.*)$", failed.stdout, flags=re.MULTILINE)
    command = re.search(r"replay: (.*)$", failed.stdout, flags=re.MULTILINE)
    assert reason is not None
    assert command is not None
    program, *arguments = command[1].split()
    again = driver.run(Path(program), *arguments)
    assert again.returncode == 1
    assert reason[1] in again.stdout


@pytest.mark.parametrize("seed", [3, 45, 1_000_000_007])
def test_a_seed_decides_every_access(programs: Path, seed: int, tmp_path: Path) -> None:
    traces = []
    for name in ("first", "second", "other"):
        trace = tmp_path / name
        driver.run(programs / driver.PROGRAM, "--replay", seed + 7000 * (name == "other"), "--trace", trace)
        traces.append(trace.read_bytes())
    assert traces[0] == traces[1]
    assert traces[0] != traces[2]
    assert traces[0].count(b"\n") > 10


def test_unknown_algorithms_are_refused(programs: Path) -> None:
    done = driver.run(programs / driver.PROGRAM, "--algorithm", "three_shot")
    assert done.returncode == 2
    assert "there is no algorithm 'three_shot'; there are all_reduce/one_shot, all_reduce/two_shot" in done.stderr


def test_subjects_are_the_algorithms_of_the_registry(programs: Path) -> None:
    """As the program has them, and as the controls read them."""
    listed = driver.run(programs / driver.PROGRAM, "--list").stdout.splitlines()
    algorithms = [algorithm.subject for algorithm in controls.ALGORITHMS]
    assert listed[: len(algorithms)] == algorithms
    fused = [name for name in algorithms if name.startswith("all_reduce_add_rms_norm/")]
    quantizations = ("static", "dynamic", "group", "group_column_major_tma_ue8m0", "nvfp4", "mxfp8")
    fp8 = [f"{name}+{quantization}" for name in fused for quantization in quantizations]
    kinds = ("linear", "linear_silu_and_mul", "linear_gelu_tanh_and_mul")
    layers = [name + operands for name in kinds for operands in ("", "+fp8")]
    others = ["put", "get", "packets", "port", *layers, "fused_experts", "moe_route", "linear_rope"]
    assert listed[len(algorithms) :] == [*fp8, *others]
    assert "broadcast/direct" in algorithms


def test_a_process_that_crashes_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of several; the others are as promised."""
    program = tmp_path / driver.PROGRAM
    program.write_text('#!/bin/sh\n[ "$2" != 1 ] || kill -SEGV $$\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(driver, "build", lambda: tmp_path)
    monkeypatch.setattr(sys, "argv", ["driver.py", "--jobs", "2", "--seed", "1"])
    assert driver.main() == 1
    monkeypatch.setattr(sys, "argv", ["driver.py", "--jobs", "2", "--seed", "2"])
    assert driver.main() == 0


# ---- Negative controls ---------------------------------------------------------------------------------------------


def control(name: str, number: int = 0, subject: str = "", **protection: Any) -> controls.Control:
    return controls.Control(Protection(name, "", (), **protection), subject, number)


def test_the_copy_with_controls_is_right_as_long_as_none_is_on(with_controls: Path) -> None:
    assert controls.run(control("none", budget=500), with_controls).failure == ""


def test_a_control_that_fails_otherwise_than_expected_proves_nothing(with_controls: Path, tmp_path: Path) -> None:
    """Misused, crashed, or a failure that its missing protection does not explain."""
    with pytest.raises(RuntimeError, match=r"ended with 2: .*there is no algorithm 'three_shot'"):
        controls.run(control("misused", subject="three_shot"), with_controls)
    crashing = tmp_path / "crashing"
    crashing.write_text("#!/bin/sh\nkill -SEGV $$\n", encoding="utf-8")
    crashing.chmod(0o755)
    with pytest.raises(RuntimeError, match="ended with -11"):
        controls.run(control("crashed"), crashing)
    first = next(control for control in controls.CONTROLS if control.protection.name == "sentinel_check")
    other_failure = dataclasses.replace(first.protection, failure=HANGS)
    explained_otherwise = dataclasses.replace(first, protection=other_failure)
    with pytest.raises(RuntimeError, match="not what this leads to"):
        controls.run(explained_otherwise, with_controls)


def test_a_copy_that_is_there_already_is_not_written_again(tmp_path: Path) -> None:
    """So that a build compiles only what has changed."""
    controls.edited_copy(tmp_path)
    changed = tmp_path / WAIT
    others = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file() and path != changed}
    changed.write_text("", encoding="utf-8")
    (tmp_path / "csrc" / "removed.h").touch()
    controls.edited_copy(tmp_path)
    assert {
        path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file() and path != changed
    } == others
    assert "control_that_is_on" in changed.read_text(encoding="utf-8")


def test_a_text_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a primitive, and of all algorithms."""
    gone = Edit(WAIT, "text that is not there", "")
    for edits, message in (((gone,), "does not hold"), (Everywhere(("not there", "")), "no algorithm holds")):
        monkeypatch.setattr(controls, "PROTECTIONS", (Protection("gone", "", edits),))
        with pytest.raises(ValueError, match=message):
            controls.find_controls()


def test_every_algorithm_has_controls_of_what_all_rely_on() -> None:
    """Without a word about it in the protections; the example of an algorithm of one's own too."""
    of_all = {"stop_after_an_error"}
    of_blocks = {"one_number_per_operation", "tickets"}
    of_lines = {"arrive_last", "dependency_wait", "re_arm_after_receive", "second_slot", "sends_nothing_in_vain"}
    of_signals = {"hb_dependency_wait", "hb_operation_number"}
    of_ports = {"port_dependency_wait", "proxy_order", "room_in_the_fifo", "signal_behind_puts"}
    for algorithm in controls.ALGORITHMS:
        found = {control.protection.name for control in controls.CONTROLS if control.subject == algorithm.subject}
        name = algorithm.subject.partition("/")[2]
        by_signals = name.endswith(("_hb", "_port", "_ce")) or re.fullmatch(PLAIN_BY_SWITCH, algorithm.subject)
        own = of_ports if name == "port" else of_signals if by_signals else of_lines
        if algorithm.subject == "all_reduce_add_rms_norm/two_shot_ld_reduce":
            # Of lines it has only the second hop: peers have heard of the operation before they store them.
            own = own - {"second_slot", "sends_nothing_in_vain"} | {"switch_signals_whole_tiles"}
        assert of_all | own | (set() if name == "direct_ce" else of_blocks) <= found


def of_each_protection() -> list[Any]:
    """All fast controls; of those of a protection, all but the one that is noticed first are for `make nightly`."""
    taken = {str(result["name"]): result["schedules_median"] for result in controls.documented_results()}
    found = controls.fast_controls()
    kept: dict[str, controls.Control] = {}
    for control in sorted(found, key=lambda control: (taken.get(control.name, 0), control.number)):
        kept.setdefault(control.protection.name, control)
    return [
        pytest.param(
            control, id=control.name, marks=() if kept[control.protection.name] is control else pytest.mark.nightly
        )
        for control in found
    ]


@pytest.mark.parametrize("control", of_each_protection())
def test_a_missing_protection_is_noticed(control: controls.Control, with_controls: Path) -> None:
    outcome = controls.run(control, with_controls)
    text = control.protection.text
    assert outcome.failure, f"{text}: nobody noticed in {outcome.schedules} schedules that this is gone"


@pytest.mark.parametrize(
    "name",
    [
        "re_arm:all_reduce/one_shot",
        "sums_complete:all_reduce/two_shot",
        "hb_acquire:all_reduce/two_shot_hb",
        "tensors_ready:all_reduce/two_shot_pull_hb",
        "lines_complete:all_reduce_add_rms_norm/two_shot",
        "hb_release:all_gather/push_hb",
    ],
)
def test_a_missing_protection_is_noticed_in_large_worlds(name: str, with_controls: Path) -> None:
    control = next(control for control in controls.CONTROLS if control.name == name)
    outcome = controls.run(control, with_controls, more=("--large",))
    assert outcome.failure, f"nobody noticed in {outcome.schedules} schedules"


def test_the_documented_controls_are_those_that_there_are() -> None:
    documented = controls.documented_results()
    run = [(control.name, control.protection.budget) for control in controls.CONTROLS]
    assert sorted((entry["name"], entry["budget"]) for entry in documented) == sorted(run)
    assert all(entry["noticed"] == entry["runs"] for entry in documented)
