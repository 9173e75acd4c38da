"""TTFT, TPOT and ITL from arrival times of tokens, as defined by vLLM's and SGLang's serving benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Request:
    """Arrivals of one request at the client: times in seconds since it was sent, and number of tokens each time."""

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def arrived(self, when: float, tokens: Sequence[int]) -> None:
        """Record ``tokens`` that arrived ``when`` seconds after the request was sent."""
        self.times.append(when)
        self.counts.append(len(tokens))
        self.tokens.extend(tokens)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0]

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None if there is no other."""
        following = sum(self.counts) - 1
        return (self.times[-1] - self.times[0]) / following if following > 0 else None

    @property
    def itl(self) -> list[float]:
        """Seconds between arrivals."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


def decode_ms(batch: Sequence[Request]) -> float:
    """Return the milliseconds of a decode step that contains all requests of ``batch``.

    The span begins when the last request receives its first token, and ends when the first request receives its last.
    It excludes a prefill that was split into several steps, and the end, where requests finish one by one. If all
    requests run in step, the result is the TPOT, and equals the difference between a long and a short generation.

    Raises:
        ValueError: There is no such span, because there are too few tokens.
    """
    begin = max(request.times[0] for request in batch)
    end = min(request.times[-1] for request in batch)
    steps = []
    for request in batch:
        within = [(t, n) for t, n in zip(request.times, request.counts, strict=True) if begin <= t <= end]
        tokens = sum(n for _, n in within[1:])
        if tokens == 0:
            raise ValueError("no span in which all requests decode: use more --output-tokens")
        steps.append((within[-1][0] - within[0][0]) / tokens)
    return float(np.mean(steps)) * 1e3


def latencies(requests: Iterable[Request]) -> dict[str, float]:
    """Return mean, median and P99 over requests in ms, under vLLM's names. For ITL: over all arrivals, and also
    P99.9."""
    requests = list(requests)
    samples = {
        "ttft": [request.ttft for request in requests],
        "tpot": [request.tpot for request in requests if request.tpot is not None],
        "itl": [gap for request in requests for gap in request.itl],
    }
    result: dict[str, float] = {}
    for name, seconds in samples.items():
        if seconds:
            result[f"mean_{name}_ms"] = float(np.mean(seconds)) * 1e3
            result[f"median_{name}_ms"] = float(np.median(seconds)) * 1e3
            result[f"p99_{name}_ms"] = float(np.percentile(seconds, 99)) * 1e3
    if samples["itl"]:
        result["p99.9_itl_ms"] = float(np.percentile(samples["itl"], 99.9)) * 1e3
    return result


def to_json(batch: Sequence[Request]) -> list[dict[str, Any]]:
    """Convert a batch for a result file: times to the microsecond, without tokens."""
    return [{"times": [round(t, 6) for t in request.times], "counts": request.counts} for request in batch]


def from_json(content: Sequence[dict[str, Any]]) -> list[Request]:
    """Inverse of ``to_json``."""
    return [Request(request["times"], request["counts"]) for request in content]
