"""The commands as a user runs them, on emulated GPUs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llm_comm.cli import launch
from llm_comm.cli.launch import Placement

pytestmark = pytest.mark.long

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SMALL = ["--hidden", "64", "--layers", "2", "--vocab", "64", "--tokens", "6", "--prompt-len", "3"]

# Runs the command line with a communicator of which one rank returns the sum of all but the last element.
SABOTAGE = """
import os, sys
sys.path[:] = {path!r}
import llm_comm
from llm_comm.cli import commands
def wrong(right):
    def call(self, *tensors, **options):
        result = right(self, *tensors, **options)
        result.view(-1)[-1] = 0
        return result
    return call
if os.environ["RANK"] == "{saboteur}":
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        setattr(llm_comm.Communicator, name, wrong(getattr(llm_comm.Communicator, name)))
sys.exit(commands.main(sys.argv[1:]))
"""


def run(argv: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES} | variables
    start = f"import sys; sys.path[:] = {sys.path!r}; from llm_comm.cli.commands import main; sys.exit(main())"
    command = [sys.executable, "-c", start, *argv]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("batch", [1, 3])
def test_demo(batch: int, tmp_path: Path) -> None:
    report = tmp_path / "demo.json"
    argv = [
        "demo",
        "--device",
        "emulated",
        "--world",
        "2",
        "--batch",
        str(batch),
        "--json",
        str(report),
        *SMALL,
    ]
    done = run(argv)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "2 emulated GPUs" in lines[0]
    assert lines[-1].startswith("demo passed on 2 emulated GPUs")
    found = json.loads(report.read_text())
    assert found["check"]["passed"]
    assert found["check"]["rank_spread"] == 0
    # Two all-reduces a layer: one prefill and five steps.
    assert found["all_reduce"]["served"] == {
        str(batch * 3 * 64 * 4): 4,
        str(batch * 64 * 4): 20,
    }
    assert {plan["message_bytes"] for plan in found["all_reduce"]["plans"]} >= {1024 << step for step in range(11)}


def test_a_full_disk_loses_no_report() -> None:
    done = run(["demo", "--device", "emulated", "--world", "2", "--json", "/dev/full", *SMALL])
    assert done.returncode == 1
    assert done.stderr.startswith(
        "llm-comm: --json /dev/full could not be written: No space left on device; its content"
    )
    before, _, report = done.stdout.partition("{\n")
    assert "demo passed" in before
    assert json.loads("{" + report)["check"]["passed"]


def test_demo_fails_where_nothing_goes_through_llm_comm() -> None:
    done = run(["demo", "--device", "emulated", "--world", "2", *SMALL], LLM_COMM_MAX_MESSAGE_BYTES="2")
    assert done.returncode == 1, done.stderr
    assert "NO all-reduce went through llm_comm" in done.stdout
    assert "demo FAILED" in done.stdout


def test_bench_fused_leaves_out_what_is_declined(tmp_path: Path) -> None:
    report = tmp_path / "fused.json"
    argv = [
        "bench",
        "fused",
        "--device",
        "emulated",
        "--world",
        "2",
        "--hidden",
        "64",
        "--min",
        "128",
        "--max",
        "1K",
        "--json",
        str(report),
    ]
    done = run(argv, LLM_COMM_MAX_MESSAGE_BYTES="256")
    assert done.returncode == 0, done.stderr
    small, large = (json.loads(report.read_text())["rows"][which]["results"] for which in (0, -1))
    assert small["plain + norm"]["us"] > 0
    assert "max_message_bytes=256" in large["plain + norm"]["skipped"]
    assert large["gloo + norm"]["us"] > 0


def test_demo_refuses_a_world_that_does_not_divide_the_model() -> None:
    done = run(["demo", "--device", "emulated", "--world", "3"])
    assert done.returncode == 2
    assert "does not split over 3 ranks" in done.stderr


@pytest.mark.parametrize("saboteur", [0, 1])
def test_demo_fails_when_one_rank_gets_one_wrong_element(saboteur: int, capfd: pytest.CaptureFixture[str]) -> None:
    status, output = run_sabotaged(["demo", "--device", "emulated", *SMALL], saboteur, capfd)
    assert status == 1
    assert "demo FAILED" in output


@pytest.mark.parametrize("collective", ["all-reduce", "all-gather", "reduce-scatter"])
def test_bench_of_a_collective(collective: str, tmp_path: Path) -> None:
    report = tmp_path / "bench.json"
    done = run(["bench", collective, "--device", "emulated", "--world", "3", "--max", "2K", "--json", str(report)])
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert found["command"] == f"bench {collective}"
    assert [row["message_bytes"] for row in found["rows"]] == [1024, 2048]
    libraries = {"llm_comm", "gloo", *(["llm_comm symm"] if collective == "all-gather" else [])}
    for row in found["rows"]:
        assert row["plan"]["operation"] == collective.replace("-", "_")
        assert row["plan"]["message_bytes"] == row["message_bytes"]
        assert set(row["results"]) == libraries
        assert all(result["error"] <= 1 and not result["skipped"] for result in row["results"].values())
    assert "llm_comm" in done.stdout


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_bench_of_a_program_beside_algorithms(tmp_path: Path) -> None:
    report = tmp_path / "bench.json"
    named = "llm_comm.dsl.library:two_shot_ll,llm_comm.dsl.library:all_gather_ll"
    argv = ["bench", "all-reduce", "--device", "emulated", "--world", "2", "--max", "2K", "--dsl", named]
    variables = {"LLM_COMM_CACHE_DIR": str(tmp_path), "LLM_COMM_DSL_MAX_BYTES": "1K", "LLM_COMM_ALGORITHM": "one_shot"}
    done = run([*argv, "--json", str(report)], **variables)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    for row in found["rows"]:
        assert list(row["results"]) == ["llm_comm", "dsl:two_shot_ll", "gloo"]
        assert row["plan"]["algorithm"] == "one_shot"
    served, not_served = (row["results"]["dsl:two_shot_ll"] for row in found["rows"])
    assert served["us"] > 0
    assert served["error"] <= 1
    assert (not_served["us"], not_served["skipped"]) == (None, "more than dsl_max_bytes=1024")
    lines = done.stdout.splitlines()
    assert lines[1].split()[:4] == ["bytes", "llm_comm", "dsl:two_shot_ll", "gloo"]
    assert "dsl:two_shot_ll (eager) left out at 2K: more than dsl_max_bytes=1024" in lines
    assert "all_gather_ll" not in done.stdout, "it is of another collective"


@pytest.mark.parametrize("level", ["info", ""])
def test_the_log_of_all_ranks_comes_out_if_asked_for(level: str) -> None:
    done = run(["bench", "all-reduce", "--device", "emulated", "--world", "2", "--max", "1K"], LLM_COMM_LOG=level)
    assert done.returncode == 0, done.stderr
    shown = {line.partition(" of 2 ")[0] for line in done.stderr.splitlines() if line.startswith("llm-comm")}
    of_sums = {line for line in shown if "sums in rank order; NVLink multicast is off" in line}  # told once
    assert len(of_sums) == bool(level)
    named = {line.partition(" (")[0] for line in shown - of_sums}
    assert named == ({f"llm-comm, rank {r}: INFO: group WORLD, rank {r}" for r in (0, 1)} if level else set())


@pytest.mark.parametrize("collective", ["all-reduce", "all-gather", "reduce-scatter"])
def test_bench_marks_wrong_results_and_fails(collective: str, capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", collective, "--device", "emulated", "--max", "1K"]
    status, output = run_sabotaged(argv, saboteur=1, capfd=capfd)
    assert status == 1
    assert " BAD" in output


def run_sabotaged(argv: list[str], saboteur: int, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status and output of two ranks, one of which gets wrong sums."""
    script = SABOTAGE.format(path=sys.path, saboteur=saboteur)
    status = launch.run_ranks(Placement(2, on_gpu=False), [sys.executable, "-c", script, *argv])
    return status, capfd.readouterr().out
