"""The acceptance program of algorithms by the NVLink switch, on emulated GPUs: what it accepts, and that it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llm_comm import _core

PROGRAM = Path(__file__).parents[1] / "gpu" / "switch_acceptance.py"
WORLD = 2
PERMITTED = not _core.multicast_switched_off(
    {name: os.environ[name] for name in _core.multicast_switches if name in os.environ}
)


def run(folder: Path, *options: str, **variables: str) -> tuple[list[int], list[str], dict[str, Any]]:
    """Statuses and errors of the ranks, and the report."""
    file = folder / "report.json"
    command = [sys.executable, str(PROGRAM), "--device", "emulated", "--cases", "40", "--json", str(file), *options]
    common = {"LLM_COMM_TEST_MEETING_POINT": f"file://{folder / 'meeting'}", "WORLD_SIZE": str(WORLD), **variables}
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(WORLD)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    said = [rank.communicate(timeout=400)[1] for rank in ranks]
    return [rank.returncode for rank in ranks], said, json.loads(file.read_text())["figures"] if file.exists() else {}


@pytest.mark.timeout(500)
@pytest.mark.skipif(not PERMITTED, reason="this machine forbids NVLink multicast")
def test_it_accepts_what_is_right(tmp_path: Path) -> None:
    statuses, said, figures = run(tmp_path)
    assert statuses == [0] * WORLD, said
    assert figures["accepted"]
    assert figures["self_test"] == "right"
    cases = figures["random_cases"]
    assert cases["cases"] == 40
    assert sum(cases["calls"].values()) >= 40  # fused ones go through both algorithms, some twice
    assert {call.rpartition("/")[0] for call in cases["calls"]} == {
        *("all_reduce/two_shot_switch", "all_reduce/two_shot_ld_reduce", "all_reduce/one_shot_ld_reduce"),
        *("reduce_scatter/ld_reduce", "all_gather/push_switch", "fused/two_shot_switch", "fused/two_shot_ld_reduce"),
    }
    assert [drill["is_right"] for drill in figures["drills"]] == [True] * 3
    assert figures["us"] == "not measured: no GPU for each rank"


@pytest.mark.parametrize(("name", "off"), _core.multicast_switches.items())
def test_it_refuses_where_multicast_is_forbidden(tmp_path: Path, name: str, off: str) -> None:
    recorder = PROGRAM.parents[1] / "stand_in_driver" / "recorder"
    record = tmp_path / "record"
    variables = {"LLM_COMM_MULTICAST": "1", name: off, "LLM_COMM_TEST_RECORD": str(record)}
    statuses, said, figures = run(tmp_path, PYTHONPATH=str(recorder), **variables)
    assert statuses == [2] * WORLD
    assert all(f"refused: {name}={off} forbids NVLink multicast on this machine" in text for text in said)
    assert figures == {}
    assert set(record.read_text().splitlines()) == {"start"}
