"""``tests/gpu/cycles.py`` on emulated GPUs: some communicators made and closed, and nothing that is left of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from programs import run_as_ranks

GPU_PROGRAMS = Path(__file__).parents[1] / "gpu"
sys.path.insert(0, str(GPU_PROGRAMS))

import cycles  # noqa: E402

RSS_SLACK = 32 << 20  # of so few cycles


def test_nothing_grows() -> None:
    options = ["--cycles", "40", "--rss-slack", str(RSS_SLACK), "--device", "emulated"]
    run_as_ranks(GPU_PROGRAMS / "cycles.py", *options, timeout_s=280)


@pytest.mark.parametrize("name", ["descriptors", "threads", "mappings", "abstract_sockets"])
def test_growth_is_that_of_the_last_over_the_first(name: str) -> None:
    nothing = cycles.Usage(0, 0, 0, 0, 0, 0, 0)
    grown = cycles.dataclasses.replace(nothing, **{name: 2})
    growth = cycles.growth_of([nothing, grown, grown])
    assert growth[name] == 2 > cycles.SLACK.get(name, 0)
    assert sum(growth.values()) == 2
