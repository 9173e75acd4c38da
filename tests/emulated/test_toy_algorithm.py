"""An algorithm of one's own: one file and one row, from which all follows (docs/develop/architecture.md)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from toy_build import TOY, built_core, needs_compiler, run, run_ranks

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def core() -> Path:
    return built_core()


def test_runs_and_is_listed(core: Path) -> None:
    """Planned from its descriptor, run by two and three ranks, and found by the command line."""
    listed = run(sys.executable, TOY / "ranks.py", core).replace(",", "")
    (row,) = [line.split() for line in listed.splitlines() if line.startswith("broadcast") and "direct" in line]
    assert row[:3] == ["broadcast", "direct", "LL"]
    assert {"bf16", "fp16", "fp32", "blocks", "tile_lines"} <= set(row)
    assert [line.split()[-1] for line in listed.splitlines() if "input output" in line and "broadcast" in line] == [
        "root"
    ]


@pytest.mark.parametrize("world", [2, 3])
def test_a_communicator_runs_it(core: Path, world: int, tmp_path: Path) -> None:
    """Each rank a process: ``plan_for`` and ``run`` know it by its name."""
    run_ranks(TOY / "communicator.py", core, tmp_path / "meeting", world)
