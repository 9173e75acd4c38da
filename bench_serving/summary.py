"""Summary of the results of all runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench_serving import arms, metrics

BASELINES = (arms.NCCL, arms.DEFAULT)


@dataclass(frozen=True)
class Run:
    """One start of the engine.

    Attributes:
        repeat: Number of the repeat, from 0.
        arm: Name of the arm.
        seconds: Duration, including the start of the engine.
        failure: Why there is no valid result; "" if there is one.
        evidence: Log lines that show that the engine did what the arm says.
        result: Output of the engine's process (``engines/measure.py``); None after a failure.
    """

    repeat: int
    arm: str
    seconds: float
    failure: str = ""
    evidence: Sequence[str] = ()
    result: Mapping[str, Any] | None = None


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return median, minimum and maximum of the values of the repeats, and the values."""
    return {"median": median(values), "min": min(values), "max": max(values), "values": list(values)}


def summarize(runs: Sequence[Run]) -> dict[str, Any]:
    """Summarize the runs without failure: {"decode": {batch: {arm: ...}}, "prefill": {tokens: {arm: ...}}}.

    Each arm has:

    - The latencies over all its requests, under vLLM's names.
    - ``decode_ms`` (in ``prefill``: ``ttft_ms``): the median of each repeat, and their spread.
    - ``speedup_over`` a baseline: how many times faster it is, compared repeat by repeat.
    - ``recovered_share``: the part of the time between ``default`` and ``free`` that it saves.
    """
    good = [run for run in runs if not run.failure and run.result is not None]
    decode: dict[str, dict[str, Any]] = {}
    sizes = dict.fromkeys(size for run in good if run.result for size in run.result.get("batches", {}))
    for size in sorted(sizes, key=int):
        times: dict[str, dict[int, float]] = {}
        requests: dict[str, list[metrics.Request]] = {}
        served: dict[str, list[Mapping[str, float]]] = {}
        for run in good:
            assert run.result is not None
            batch = run.result["batches"][size]
            times.setdefault(run.arm, {})[run.repeat] = median(batch["decode_ms"])
            served.setdefault(run.arm, []).append(batch.get("latencies", {}))
            streams = [metrics.from_json(stream) for stream in batch.get("streams", [])]
            requests.setdefault(run.arm, []).extend(request for stream in streams for request in stream)
        compared = compare(times, "decode_ms")
        decode[size] = {
            arm: {**metrics.latencies(requests[arm]), **_means(served[arm]), **compared[arm]} for arm in compared
        }
    prefills: dict[str, dict[str, dict[int, float]]] = {}
    for run in good:
        assert run.result is not None
        for tokens, seconds in run.result.get("prefill_s", {}).items():
            prefills.setdefault(tokens, {}).setdefault(run.arm, {})[run.repeat] = median(seconds) * 1e3
    return {
        "decode": decode,
        "prefill": {tokens: compare(prefills[tokens], "ttft_ms") for tokens in sorted(prefills, key=int)},
    }


def _means(latencies: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means over the repeats of what an engine's own benchmark reported."""
    return {name: sum(values[name] for values in latencies) / len(latencies) for name in latencies[0]}


def compare(times: Mapping[str, Mapping[int, float]], name: str) -> dict[str, dict[str, Any]]:
    """Return spread, speedups and recovered share of each arm.

    Args:
        times: {arm: {repeat: milliseconds}}.
        name: Key of the times in the result.
    """
    result: dict[str, dict[str, Any]] = {}
    for arm, own in times.items():
        entry: dict[str, Any] = {name: spread(list(own.values())), "speedup_over": {}}
        for baseline in BASELINES:
            theirs = times.get(baseline, {})
            ratios = [theirs[repeat] / own[repeat] for repeat in own if repeat in theirs]
            if ratios and baseline != arm:
                entry["speedup_over"][baseline] = spread(ratios)
        if arms.DEFAULT in times and arms.FREE in times and arm not in (arms.DEFAULT, arms.FREE):
            default, free = (median(times[other].values()) for other in (arms.DEFAULT, arms.FREE))
            if default > free:
                entry["recovered_share"] = (default - median(own.values())) / (default - free)
        result[arm] = entry
    return result
