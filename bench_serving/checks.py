"""Checks that the arms compute the same: tokens over repeats, logits between arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench_serving import arms
from bench_serving.summary import Run


@dataclass(frozen=True)
class Tolerance:
    """Permitted distance between the logits of two correct arms.

    Attributes:
        distance: Relative L2 distance that rounding explains.
        by_median: Judge the prompt with the median distance; otherwise the worst prompt.
    """

    distance: float
    by_median: bool = False

    @property
    def prompt(self) -> str:
        """Which prompt is judged."""
        return "median" if self.by_median else "worst"

    def of(self, distances: Sequence[float]) -> float:
        """Return the judged distance from those of all prompts; NaN if one of them is."""
        return float(np.median(distances) if self.by_median else np.max(distances))


#: bf16 rounds by up to 2^-9, and hundreds of sums, each rounded in another order, precede the logits.
PLAIN = Tolerance(0.04)
#: Models in fp8, where a difference in the last bit becomes a step of up to 12 %. Also option ``wire`` of llm_comm,
#: which moves the logits of a small model by 0.06 to 0.08, where bf16's rounding moves them by 0.02
#: (docs/experiments/wire.md).
QUANTIZED = Tolerance(0.15)
#: Models with experts. A difference in the last bit can make a router choose others, which moves single prompts by 0.2
#: to 0.4.
EXPERTS = Tolerance(0.2, by_median=True)
#: Limit of each prompt's distance if the median is judged. A sum without one rank's operand moves a prompt by 0.9 or
#: more.
MOST_OF_ONE_PROMPT = 0.7
#: Largest number of layers for the tolerances of fp8 and experts (tests/serving/test_tolerances.py, on a small model).
#: With more layers, correct and wrong sums are harder to distinguish.
AMPLIFYING_LAYERS = 24
#: The limit is at least this multiple of the distance that the engine's own all-reduce shows.
TIMES_DEFAULT = 2.0


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the relative L2 distance |a - b| / |b|, after subtracting the mean of each.

    Log probabilities are logits minus a constant, so they can be compared with logits.
    """
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    x, y = x - x.mean(), y - y.mean()
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def tolerance(config: Mapping[str, Any], wire: str = "none") -> Tolerance:
    """Return the tolerance for a model, by its config.json and llm_comm's option ``wire``."""
    if any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return EXPERTS
    return QUANTIZED if "quantization_config" in config or wire != "none" else PLAIN


def wire(environment: Mapping[str, str], names: Sequence[str] = ()) -> str:
    """Return option ``wire`` of the arms ``names`` with llm_comm: the first of an arm, else the environment's."""
    of_arms = [arms.ARMS[name].environment.get("LLM_COMM_WIRE") for name in names]
    return next((wire for wire in [*of_arms, environment.get("LLM_COMM_WIRE")] if wire), "none")


def most_layers(config: Mapping[str, Any], wire: str = "none") -> int | None:
    """Return the largest number of layers for which the model's tolerance holds; None if any."""
    return None if tolerance(config, wire) == PLAIN else AMPLIFYING_LAYERS


def summarize(runs: Sequence[Run], tolerance: Tolerance = PLAIN, of_lossy: Tolerance = QUANTIZED) -> dict[str, Any]:
    """Return {"tokens": {arm: ...}, "logits": {arm: {length: ...}}, "limit": {length: ...}, "passed": bool, "failures":
    [...]}; empty if no run was checked.

    Tokens: greedy generations of equal prompts must be equal in all repeats of an arm. The number of requests equal to
    those of ``nccl`` is information. Logits: those of the first token must be finite and not all equal, and llm_comm's
    must agree with those of ``nccl``. The limit is ``tolerance``, of lossy arms ``of_lossy``, or ``TIMES_DEFAULT``
    times the distance of ``default`` if that is larger. If the median is judged, no prompt may exceed
    ``MOST_OF_ONE_PROMPT`` either. Prompts of each length are judged separately. The bound ``free`` is not checked,
    since its results are meaningless.
    """
    checked: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        if not run.failure and run.result and "check" in run.result and not arms.ARMS[run.arm].free:
            checked.setdefault(run.arm, []).append(run.result["check"])
    if not checked:
        return {}
    failures: list[str] = []
    tokens = {arm: _tokens(arm, results, failures) for arm, results in checked.items()}
    first = {arm: results[0]["logits"] for arm, results in checked.items()}
    logits = {
        arm: {length: _logits(arm, length, rows, failures) for length, rows in by_length.items()}
        for arm, by_length in first.items()
    }
    summary: dict[str, Any] = {"tokens": tokens, "logits": logits}
    if arms.NCCL in checked:
        summary["limit"] = {
            length: _compare_with_nccl(
                length,
                {arm: by_length[length] for arm, by_length in first.items()},
                {arm: entries[length] for arm, entries in logits.items()},
                tolerance,
                of_lossy,
                failures,
            )
            for length in first[arms.NCCL]
        }
        for arm, results in checked.items():
            tokens[arm]["same_as_nccl"] = _same_requests(results[0]["tokens"], checked[arms.NCCL][0]["tokens"])
    return {**summary, "passed": not failures, "failures": failures}


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


def _same_requests(own: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """Return how many requests with equal prompts generated equal tokens."""
    return sum(a == b for size in own for a, b in zip(own[size], other[size], strict=True))


def _logits(arm: str, length: str, own: Sequence[Sequence[float]], failures: list[str]) -> dict[str, Any]:
    if not all(np.isfinite(row).all() and np.ptp(row) > 0 for row in own):
        failures.append(f"{arm}, prompts of {length} tokens: logits are not finite, or all equal")
    return {"prompts": len(own), "vocabulary": len(own[0]), "largest": float(np.abs(own).max())}


def _compare_with_nccl(
    length: str,
    logits: Mapping[str, Sequence[Sequence[float]]],
    entries: Mapping[str, dict[str, Any]],
    tolerance: Tolerance,
    of_lossy: Tolerance,
    failures: list[str],
) -> float:
    """Add the distances to ``entries``, and return the largest permitted distance of exact arms.

    Added are ``distances`` (of each prompt), ``distance_to_nccl`` (of the judged prompt), ``judged`` (which prompt that
    is) and ``same_first_token`` (number of prompts).
    """

    def tolerance_of(arm: str) -> Tolerance:
        return of_lossy if arms.ARMS[arm].lossy else tolerance

    reference = logits[arms.NCCL]
    for arm, own in logits.items():
        if arm != arms.NCCL:
            pairs = list(zip(own, reference, strict=True))
            distances = [distance(a, b) for a, b in pairs]
            entries[arm] |= {
                "distances": distances,
                "distance_to_nccl": tolerance_of(arm).of(distances),
                "judged": tolerance_of(arm).prompt,
                "same_first_token": sum(int(np.argmax(a) == np.argmax(b)) for a, b in pairs),
            }
    theirs: float = entries.get(arms.DEFAULT, {}).get("distance_to_nccl", 0.0)

    def limit_of(tolerance: Tolerance) -> float:
        return max(tolerance.distance, TIMES_DEFAULT * theirs)

    for arm, entry in entries.items():
        is_ours = arms.ARMS[arm].llm_comm or arms.ARMS[arm].nccl_library
        if not is_ours:
            continue
        limit = limit_of(tolerance_of(arm))
        # In this form a NaN fails.
        if not entry["distance_to_nccl"] <= limit:
            failures.append(
                f"{arm}, prompts of {length} tokens: logits differ from nccl's by {entry['distance_to_nccl']:.3g}, "
                f"more than {limit:.3g}"
            )
        elif tolerance_of(arm).by_median and not max(entry["distances"]) <= MOST_OF_ONE_PROMPT:
            failures.append(
                f"{arm}, prompts of {length} tokens: logits of one differ from nccl's by "
                f"{max(entry['distances']):.3g}, more than {MOST_OF_ONE_PROMPT}"
            )
    return limit_of(tolerance)
