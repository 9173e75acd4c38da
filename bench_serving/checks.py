"""Whether the arms compute the same: tokens over repeats, logits between arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench_serving import arms
from bench_serving.summary import Run

#: Largest relative difference of logits that rounding of sums to bf16 explains: half a unit in the last place is
#: 2^-9, and hundreds of sums, each rounded in another order, lie between the embedding and the logits.
LOGITS_TOLERANCE = 0.04


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Relative difference in the L2 norm, |a - b| / |b|, after the mean is taken out of each.

    Log probabilities are logits less a constant, so both can be compared.
    """
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    x, y = x - x.mean(), y - y.mean()
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def summarize(runs: Sequence[Run]) -> dict[str, Any]:
    """{"tokens": {arm: ...}, "logits": {arm: ...}, "passed": bool, "failures": [...]}; empty if nothing was checked.

    Tokens: greedy generations of equal prompts must be equal in all repeats of an arm. Logits: those of the first token
    must be finite, not all equal, and agree with those of ``nccl`` within ``LOGITS_TOLERANCE``. The bound ``free`` is
    left out: it computes nonsense.
    """
    checked: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        if not run.failure and run.result and "check" in run.result and not arms.ARMS[run.arm].free:
            checked.setdefault(run.arm, []).append(run.result["check"])
    if not checked:
        return {}
    failures: list[str] = []
    tokens = {arm: _tokens(arm, results, failures) for arm, results in checked.items()}
    logits = {arm: _logits(arm, results, checked.get(arms.NCCL), failures) for arm, results in checked.items()}
    return {"tokens": tokens, "logits": logits, "passed": not failures, "failures": failures}


def _tokens(arm: str, results: Sequence[Mapping[str, Any]], failures: list[str]) -> dict[str, Any]:
    first = results[0]["tokens"]
    differing = [
        f"repeat {number}, batch {size}, request {index}"
        for number, result in enumerate(results[1:], 1)
        for size, requests in result["tokens"].items()
        for index, request in enumerate(requests)
        if request != first[size][index]
    ]
    if differing:
        failures.append(f"{arm}: tokens differ from those of repeat 0 at {'; '.join(differing[:5])}")
    generated = [token for requests in first.values() for request in requests for token in request]
    return {
        "repeats": len(results),
        "requests": sum(len(requests) for requests in first.values()),
        "tokens": len(generated),
        "distinct_tokens": len(set(generated)),
        "identical": not differing,
    }


def _logits(
    arm: str, results: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]] | None, failures: list[str]
) -> dict[str, Any]:
    own = results[0]["logits"]
    entry: dict[str, Any] = {"prompts": len(own), "vocabulary": len(own[0])}
    if not all(np.isfinite(row).all() and np.ptp(row) > 0 for row in own):
        failures.append(f"{arm}: logits are not finite, or all equal")
        return entry
    entry["largest"] = float(np.abs(own).max())
    if reference is not None and arm != arms.NCCL:
        distances = [distance(a, b) for a, b in zip(own, reference[0]["logits"], strict=True)]
        entry["distance_to_nccl"] = max(distances)
        entry["same_first_token"] = sum(
            int(np.argmax(a) == np.argmax(b)) for a, b in zip(own, reference[0]["logits"], strict=True)
        )
        if not max(distances) <= LOGITS_TOLERANCE:
            failures.append(f"{arm}: logits differ from nccl's by {max(distances):.3g}, more than {LOGITS_TOLERANCE}")
    return entry
