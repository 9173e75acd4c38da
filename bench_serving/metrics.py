"""TTFT, TPOT and ITL from the times at which tokens arrived, as vLLM's and SGLang's serving benchmarks define them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Request:
    """What a client saw of one request: when tokens arrived, in seconds since it was sent, and how many each time."""

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def arrived(self, when: float, tokens: Sequence[int]) -> None:
        self.times.append(when)
        self.counts.append(len(tokens))
        self.tokens.extend(tokens)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0]

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None if there is no other."""
        following = sum(self.counts) - 1
        return (self.times[-1] - self.times[0]) / following if following > 0 else None

    @property
    def itl(self) -> list[float]:
        """Seconds between arrivals."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


def decode_ms(batch: Sequence[Request]) -> float:
    """Milliseconds of a decode step with all requests of ``batch`` in it.

    Counted from the moment when the last request has its first token to the moment when the first one has its last:
    a prefill that was cut into several steps, or an end that frays, is left out. Where all requests run in step this
    is the TPOT, and the same as the difference between a long and a short generation.

    Raises:
        ValueError: There is no such time span: too few tokens.
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
    """Mean, median and P99 over requests (ITL: over all arrivals, and P99.9), in ms, under the names that vLLM gives
    them."""
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
    """A batch for a result file: times to the microsecond, tokens left out."""
    return [{"times": [round(t, 6) for t in request.times], "counts": request.counts} for request in batch]


def from_json(content: Sequence[dict[str, Any]]) -> list[Request]:
    """The inverse of ``to_json``."""
    return [Request(request["times"], request["counts"]) for request in content]
