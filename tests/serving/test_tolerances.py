"""The tolerances of the check: rounding alone stays within them, a wrong sum does not."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator

import pytest
import small_model
import torch

from bench_serving import checks
from bench_serving.settings import SHAPES

LAYERS = checks.AMPLIFYING_LAYERS
KINDS = {
    "bf16": ({}, checks.PLAIN),
    "fp8, static": ({"quantized": small_model.STATIC}, checks.QUANTIZED),
    "fp8 for tokens": ({"quantized": small_model.TOKEN}, checks.QUANTIZED),
    "fp8 for blocks": ({"quantized": small_model.BLOCKS}, checks.QUANTIZED),
    "experts": ({"has_experts": True}, checks.EXPERTS),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The matrices are small: threads would wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def model(kind: str) -> small_model.Model:
    return small_model.Model(LAYERS, **KINDS[kind][0])


def prompt(seed: int) -> torch.Tensor:
    return torch.randint(0, small_model.VOCABULARY, (24,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_norms_that_round_elsewhere_stay_within_the_tolerance(kind: str) -> None:
    distances = []
    for seed in range(3):
        ours, size = model(kind).logits(prompt(seed), rounds_residual_first=True)
        theirs, _ = model(kind).logits(prompt(seed), rounds_residual_first=False)
        distances.append(checks.distance(ours, theirs))
        # The layers' part of the residual does not vanish beside the embeddings, whose size is 1.
        assert 1.2 < size < 4
    assert 0 < KINDS[kind][1].of(distances) < KINDS[kind][1].distance


@pytest.mark.parametrize("kind", KINDS)
def test_sums_without_an_addend_do_not(kind: str) -> None:
    right, _ = model(kind).logits(prompt(0), rounds_residual_first=True)
    wrong, _ = model(kind).logits(prompt(0), rounds_residual_first=True, loses_an_addend=True)
    assert checks.distance(wrong, right) > 2 * KINDS[kind][1].distance


@pytest.mark.parametrize(
    ("shape", "tolerance"),
    [
        ("llama-2-70b-quarter", checks.PLAIN),
        ("qwen3-32b", checks.PLAIN),
        ("llama-2-70b-quarter-fp8", checks.QUANTIZED),
        ("llama-2-70b-quarter-fp8-dynamic", checks.QUANTIZED),
        ("qwen3-32b-quarter-fp8", checks.QUANTIZED),
        ("qwen3-30b-a3b", checks.EXPERTS),
        ("qwen3-30b-a3b-fp8", checks.EXPERTS),
    ],
)
def test_the_tolerance_is_that_of_the_model(shape: str, tolerance: checks.Tolerance) -> None:
    config = json.loads((SHAPES / shape / "config.json").read_text())
    assert checks.tolerance(config) == tolerance
    assert (checks.most_layers(config) is None) == (tolerance == checks.PLAIN)
    quantized = checks.QUANTIZED if tolerance == checks.PLAIN else tolerance
    assert checks.tolerance(config, checks.wire({"LLM_COMM_WIRE": "fp8"})) == quantized
    assert checks.tolerance(config, checks.wire({}, ["llm_comm", "llm_comm_wire"])) == quantized
    assert checks.most_layers(config, "int8") == checks.AMPLIFYING_LAYERS
