"""Sizes of routers that SGLang's hooks take by themselves, against the committed measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llm_comm.integrations.sglang.routers import was_faster

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "2026-11-30_h200_experts_layers_2.json"
ROWS: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))["routers"]["rows"]


def test_sizes_that_are_taken_were_faster() -> None:
    taken = [row for row in ROWS if was_faster(row["experts"], row["tokens"], row["columns"])]
    assert len(taken) == 19
    assert max(row["llm_comm_us"] / row["sglang_us"] for row in taken) < 0.95


def test_larger_sizes_than_were_measured_are_not_taken() -> None:
    assert was_faster(128, 64, 2048)
    assert not was_faster(129, 1, 2048)
    assert not was_faster(128, 65, 2048)
    assert was_faster(8, 16, 4096)
    assert not was_faster(8, 1, 4097)
