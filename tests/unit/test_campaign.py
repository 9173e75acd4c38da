"""``tests/gpu/campaign.py``: that whatever goes wrong with a part fails the campaign, in time, and is written down."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[1] / "gpu"

# Stands for a program of tests/gpu: without torch, so that it starts at once.
STAND_IN = """
import argparse, json, os, pathlib, sys, time
options = argparse.ArgumentParser()
options.add_argument("--json", type=pathlib.Path)
arguments, _ = options.parse_known_args()
rank = os.environ.get("RANK", "0")
print("rank", rank, "of", os.environ.get("WORLD_SIZE", "none"), "speaks", flush=True)
"""
RIGHT = (
    STAND_IN + "if rank == '0': arguments.json.write_text(json.dumps({'figures': {'cycles': 7, 'wrong_results': 0}}))\n"
)
FEWER = RIGHT.replace("'cycles': 7", "'cycles': 6")
ONE_FAILS = RIGHT + "sys.exit(4 if rank == '1' else 0)\n"
ONE_FAILS_OTHERS_HANG = RIGHT + "sys.exit(4) if rank == '1' else time.sleep(600)\n"
HANGS = RIGHT + "time.sleep(600)\n"
SILENT = STAND_IN

# The campaign with its programs in another directory, and patience for tests.
START = """
import runpy, sys, pathlib
directory, grace_s, *sys.argv[1:] = sys.argv[1:]
sys.path.insert(0, {programs!r})
import campaign, common
campaign.HERE, campaign.GRACE_S = pathlib.Path(directory), float(grace_s)
common.run(campaign.main)
"""


def run_campaign(directory: Path, cycles: str, *options: str) -> tuple[int, dict[str, object], str]:
    """Of one part, `cycles`, at world 2. Returns status, result of the part, and the log."""
    (directory / "cycles.py").write_text(cycles)
    out = directory / "out"
    command = [
        sys.executable,
        "-c",
        START.format(programs=str(PROGRAMS)),
        str(directory),
        "0.5",
        "--device",
        "emulated",
    ]
    command += ["--out", str(out), "--commit", "c0ffee", "--parts", "cycles", "--cycles", "7", "--cycles-world", "2"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120, check=False)
    content = json.loads((out / "campaign.json").read_text())
    assert content["commit"] == "c0ffee", done.stdout + done.stderr
    assert "cycles" in done.stdout.partition("campaign: ")[2]
    log = out / "campaign.log"
    return done.returncode, content["parts"]["cycles"], log.read_text() if log.exists() else ""


def test_a_part_that_goes_well(tmp_path: Path) -> None:
    status, result, log = run_campaign(tmp_path, RIGHT)
    assert (status, result["verdict"], result["problems"]) == (0, "ok", [])
    assert result["figures"] == {"cycles": 7, "wrong_results": 0}
    assert "rank 0 of 2 speaks" in log


@pytest.mark.parametrize(
    ("program", "options", "verdict", "problem"),
    [
        (FEWER, [], "FAIL", "cycles is 6, not 7"),
        (ONE_FAILS, [], "FAIL", "statuses [0, 4]"),
        (ONE_FAILS_OTHERS_HANG, [], "FAIL", "statuses [None, 4]"),
        (SILENT, [], "FAIL", "no result"),
        (HANGS, ["--budget-s", "4", "--least-s", "1"], "FAIL", "killed after"),
        (RIGHT, ["--budget-s", "4", "--least-s", "5"], "not run", "no time was left"),
    ],
    ids=["below its bar", "a rank fails", "a rank fails, others hang", "no result", "hangs", "no time"],
)
def test_a_part_that_does_not(tmp_path: Path, program: str, options: list[str], verdict: str, problem: str) -> None:
    status, result, log = run_campaign(tmp_path, program, *options)
    assert (status, result["verdict"]) == (1, verdict)
    assert any(problem in text for text in result["problems"]), result["problems"]
    assert verdict == "not run" or "rank 1 of 2 speaks" in log


def test_unknown_part(tmp_path: Path) -> None:
    command = [
        sys.executable,
        PROGRAMS / "campaign.py",
        "--device",
        "emulated",
        "--parts",
        "soak,sok",
        "--out",
        tmp_path,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown parts sok; there are random_8" in done.stderr
