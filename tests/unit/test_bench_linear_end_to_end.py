"""``llm-comm bench linear`` as a user runs it, on emulated GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llm_comm.cli import launch
from llm_comm.cli.launch import Placement

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SMALL = ["bench", "linear", "--device", "emulated", "--shapes", "128x64", "--tokens", "3"]
LAYER, CHAIN = {"llm_comm", "mm"}, {"llm_comm fused", "mm + llm_comm", "mm + gloo", "mm + norm"}

# Runs the command line with a communicator of which one rank returns a wrong element from one method.
SABOTAGE = """
import os, sys
sys.path[:] = {path!r}
import llm_comm
from llm_comm.cli import commands
right = llm_comm.Communicator.{method}
def wrong(self, *tensors, **options):
    results = right(self, *tensors, **options)
    (results[0] if isinstance(results, tuple) else results).view(-1)[-1] += 1
    return results
if os.environ["RANK"] == "{saboteur}":
    llm_comm.Communicator.{method} = wrong
sys.exit(commands.main(sys.argv[1:]))
"""


def run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    start = f"import sys; sys.path[:] = {sys.path!r}; from llm_comm.cli.commands import main; sys.exit(main())"
    command = [sys.executable, "-c", start, *argv]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize(("world", "arms"), [(1, LAYER), (2, LAYER | CHAIN)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_all_arms_are_right(world: int, arms: set[str], dtype: str, tmp_path: Path) -> None:
    report = tmp_path / "linear.json"
    done = run(
        ["bench", "linear", "--world", str(world), "--device", "emulated", "--dtype", dtype, "--json", str(report)]
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert (found["command"], found["dtype"], found["ranks"]["world"]) == ("bench linear", dtype, world)
    rows = found["rows"]
    assert [(row["outputs"], row["inputs"], row["tokens"], row["pdl"]) for row in rows] == [
        (outputs, inputs, tokens, pdl)
        for outputs, inputs in ((192, 128), (64, 320))
        for tokens in (1, 9)
        for pdl in (True, False)
    ]
    for row in rows:
        assert set(row["results"]) == arms
        assert all(0 < result["error"] <= 1 and result["us"] > 0 for result in row["results"].values())
        assert row["wrong"] == row["choices"] == []
        assert row["over_cublas"] is None
    assert "192x128" in done.stdout
    assert ("llm_comm fused" in done.stdout) is (world > 1)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_projections_with_silu_and_mul(dtype: str, tmp_path: Path) -> None:
    report = tmp_path / "linear.json"
    done = run([*SMALL, "--silu", "--world", "2", "--dtype", dtype, "--json", str(report)])
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert found["silu"] is True
    for row in found["rows"]:
        assert (row["outputs"], row["inputs"], row["silu"], row["wrong"]) == (128, 64, True, [])
        assert set(row["results"]) == {"llm_comm", "mm + silu"}
        assert all(0 < result["error"] <= 1 and result["us"] > 0 for result in row["results"].values())
    assert "mm + silu" in done.stdout


@pytest.mark.parametrize("scales", ["row", "tensor"])
def test_layers_of_fp8(scales: str, tmp_path: Path) -> None:
    report = tmp_path / "linear.json"
    options = ["--fp8", scales, "--shapes", "128x384", "--world", "2", "--json", str(report)]
    done = run([*SMALL, *options])
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert found["fp8"] == scales
    for row in found["rows"]:
        assert (row["outputs"], row["inputs"], row["fp8"], row["wrong"]) == (128, 384, True, [])
        assert set(row["results"]) == {"llm_comm", "mm"}, "the layer alone"
        assert all(0 < result["error"] <= 1 and result["us"] > 0 for result in row["results"].values())
    assert f"linear layers of FP8, a scale for each {scales}" in done.stdout


def test_many_tokens_are_layers_alone(tmp_path: Path) -> None:
    report = tmp_path / "linear.json"
    done = run([*SMALL[:-1], "3,65,300", "--world", "2", "--pdl", "on", "--json", str(report)])
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text())["rows"]
    assert [(row["tokens"], set(row["results"])) for row in rows] == [(3, LAYER | CHAIN), (65, LAYER), (300, LAYER)]
    for row in rows:
        assert all(0 < result["error"] <= 1 and result["us"] > 0 for result in row["results"].values())


@pytest.mark.parametrize("options", [[], ["--silu"]])
def test_choices(options: list[str], tmp_path: Path) -> None:
    report = tmp_path / "linear.json"
    done = run([*SMALL, *options, "--choices", "--pdl", "on", "--reps", "1", "--json", str(report)])
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert found["ranks"]["world"] == 1
    (row,) = found["rows"]
    assert len(row["choices"]) > 3
    assert all(choice["block_outputs"] % 16 == 0 or not options for choice in row["choices"])
    assert all(choice["result"]["error"] <= 1 for choice in row["choices"])
    assert row["best_choice"]["result"]["us"] > 0
    assert "best choice" in done.stdout


@pytest.mark.parametrize(
    ("method", "saboteur", "name", "options"),
    [
        ("linear", 0, "llm_comm", []),
        ("linear", 1, "llm_comm", []),
        ("batch_invariant_linear", 1, "llm_comm", ["--tokens", "70"]),
        ("linear_silu_and_mul", 1, "llm_comm", ["--silu"]),
        ("linear_all_reduce_add_rms_norm", 1, "llm_comm fused", []),
        ("all_reduce_add_rms_norm", 1, "mm + llm_comm", []),
    ],
)
def test_one_wrong_element_on_one_rank_fails_the_run(
    method: str, saboteur: int, name: str, options: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "linear.json"
    script = SABOTAGE.format(path=sys.path, method=method, saboteur=saboteur)
    argv = [*SMALL, *options, "--pdl", "on", "--json", str(report)]
    assert launch.run_ranks(Placement(2, on_gpu=False), [sys.executable, "-c", script, *argv]) == 1
    tokens = argv[len(argv) - argv[::-1].index("--tokens")]
    assert f"BAD at 128x64 {tokens} PDL on: {name}" in capfd.readouterr().out
    (row,) = json.loads(report.read_text())["rows"]
    assert row["wrong"] == [name]
    assert row["results"][name]["us"] is None
