"""The tiling that a linear layer chooses itself, among measured times of all (docs/experiments/linear.md)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llm_comm import _core, registry
from llm_comm.planning.layers import tokens_by_size

RESULTS = Path(__file__).parents[2] / "docs" / "results"
SM_90_SHARED_BYTES = 227 << 10
BF16 = tuple(registry.data_types()).index("bf16")
#: Of the kernel for silu-and-mul that stands behind cuBLAS, where it was not timed.
ACTIVATION_US = 2.0
#: Of layers that the model was not fitted to: how much slower than the best tiling is allowed.
MEDIAN, WORST = 0.05, 0.12


def figures_of(device: str, which: str) -> dict[str, Any]:
    file = RESULTS / f"2026-11-28_{device}_linear_choices_{which}.json"
    figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["figures"]
    assert figures["sm_count"] == 132
    return figures


def measured(figures: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[tuple[int, ...], float]]]:
    """Layer, what was measured of a number of tokens, and by tiling the time of a layer in a row and of one behind a
    short kernel together."""
    for layer in figures["layers"]:
        for row in layer["tokens"]:
            times = {}
            for choice in row["choices"].split("; "):
                *tiling, in_row, spaced = map(float, choice.split())
                times[tuple(map(int, tiling))] = in_row + spaced
            del times[0, 0, 0]
            yield layer, row, times


def own_choice(layer: dict[str, Any], tokens: int) -> tuple[int, int, int]:
    fp8 = layer["operation"].endswith("_fp8")
    choice = _core.linear_choice(
        tokens=tokens,
        inputs=layer["inputs"],
        outputs=layer["outputs"],
        data_type=BF16,
        epilogue="silu_and_mul" if layer["operation"].startswith("linear_silu_and_mul") else "none",
        scales=(True, True) if fp8 else None,
        choice=_core.LinearChoice(),
        sm_count=132,
        max_shared_bytes=SM_90_SHARED_BYTES,
    )
    return choice.block_outputs, choice.stages, choice.stage_boxes


@pytest.mark.parametrize("device", ["h100", "h200"])
def test_the_choice_is_near_the_best(device: str) -> None:
    slower = {}
    for layer, row, times in measured(figures_of(device, "judged")):
        tokens = row["tokens"]
        choice = own_choice(layer, tokens)
        best = min(times.values())
        # What was left out of the file is slower than the worst that is allowed.
        what = f"{layer['operation']} {layer['outputs']}x{layer['inputs']}, {tokens} tokens: {choice}"
        slower[what] = times.get(choice, 2 * best) / best - 1
    assert len(slower) == 100
    assert statistics.median(slower.values()) <= MEDIAN
    assert {what: share for what, share in slower.items() if share > WORST} == {}


@pytest.mark.parametrize("device", ["h100", "h200"])
@pytest.mark.parametrize("which", ["fitted", "judged"])
def test_layers_that_are_given_away_by_size_are_faster(device: str, which: str) -> None:
    """Than cuBLAS or torch._scaled_mm, in both chains together, without the short kernel in one of them."""
    figures = figures_of(device, which)
    alone = figures["spacer_us"]
    ratios = {}
    for layer, row, times in measured(figures):
        tokens, other = row["tokens"], row["other_us"] + row["other_spaced_us"]
        by_size = tokens_by_size(layer["operation"], layer["outputs"], layer["inputs"])
        choice = own_choice(layer, tokens)
        if tokens <= by_size and choice in times:
            what = f"{layer['operation']} {layer['outputs']}x{layer['inputs']}, {tokens} tokens: {choice}"
            activations = 2 * ACTIVATION_US if "silu" in layer["operation"] else 0.0
            ratios[what] = (other + activations - alone) / (times[choice] - alone)
    assert len(ratios) > 50
    assert {what: ratio for what, ratio in ratios.items() if ratio < 1.03} == {}
