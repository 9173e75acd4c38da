"""``tests/gpu/cycles.py`` on emulated GPUs: some communicators made and closed, and nothing that is left of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GPU_PROGRAMS = Path(__file__).parents[1] / "gpu"
sys.path.insert(0, str(GPU_PROGRAMS))

import cycles  # noqa: E402

RSS_SLACK = 32 << 20  # of so few cycles


def test_nothing_grows(tmp_path: Path) -> None:
    torchrun = ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    options = ["--cycles", "40", "--rss-slack", str(RSS_SLACK), "--device", "emulated"]
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, str(GPU_PROGRAMS / "cycles.py"), *options],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("name", ["descriptors", "threads", "mappings", "abstract_sockets"])
def test_growth_is_that_of_the_last_over_the_first(name: str) -> None:
    nothing = cycles.Usage(0, 0, 0, 0, 0, 0, 0)
    grown = cycles.dataclasses.replace(nothing, **{name: 2})
    growth = cycles.growth_of([nothing, grown, grown])
    assert growth[name] == 2 > cycles.SLACK.get(name, 0)
    assert sum(growth.values()) == 2
