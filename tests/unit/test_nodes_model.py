"""The prediction for several nodes that is in the docs is what ``tools/nodes_model.py`` says."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import nodes_model  # noqa: E402

RESULT = ROOT / "docs/results/2026-11-26_nodes_model.json"


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    return content


def test_the_committed_prediction_is_of_this_model(shown: dict[str, Any], tmp_path: Path) -> None:
    nodes_model.main(["--json", str(tmp_path / "now.json")])
    assert json.loads((tmp_path / "now.json").read_text(encoding="utf-8")) == shown


def test_the_page_shows_the_prediction(shown: dict[str, Any]) -> None:
    page = (ROOT / "docs/experiments/nodes.md").read_text(encoding="utf-8")
    rows = {row["bytes"]: row for row in shown["nodes"]["2"]}
    checked = 0
    for size, unit, ours, nccl, worst, probable, best in re.findall(
        r"^\| (\d+)([KM]) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+)x \| ([\d.]+)x \| ([\d.]+)x \|", page, re.MULTILINE
    ):
        row = rows[int(size) << (10 if unit == "K" else 20)]
        assert [float(ours), float(nccl)] == [row["us"], row["nccl_us"]]
        assert [float(worst), float(probable), float(best)] == row["ratio"]
        checked += 1
    assert checked >= 8


def test_an_exchange_of_two_nodes_sends_each_slice_once() -> None:
    # 8 MiB a rank of 47 GB/s: what NCCL adds is small beside it.
    us = nodes_model.between_nodes(2, 8 << 20, nodes_model.MIDDLE)
    assert us == pytest.approx((8 << 20) / 47e3, rel=0.12)


def test_small_messages_are_bound_by_latency() -> None:
    for nodes in nodes_model.NODES:
        small, smallest = (nodes_model.hierarchical(nodes, size, nodes_model.MIDDLE) for size in (16 << 10, 8 << 10))
        assert smallest < small < 1.1 * smallest
