"""Chains of linear layers with cold weights, timed in a few milliseconds each.

A CUDA graph holds a layer for each of the weights, so many that none is in the L2 cache when its turn comes, as in a
model. ``llm_comm.bench.timing`` aligns ranks and repeats more often; here one rank times what no other takes part in.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from llm_comm.bench.linear_operands import make_weights
from llm_comm.bench.timing import capture

#: By how much the weights of a chain exceed the L2 cache, which keeps part of what was read before.
_COLD = 2.5
#: Of a GPU that does not say how large its L2 cache is.
_USUAL_L2_BYTES = 64 << 20
_FEWEST_WEIGHTS = 4
_DELAY_CYCLES = 100_000  # longer than the host takes to enqueue a replay
_EMULATED_WEIGHTS = 2


def cold_weights(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Random weights of [outputs, inputs]. Zeros would draw less power, and so run faster."""
    count = _EMULATED_WEIGHTS
    if device.type == "cuda":
        l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or _USUAL_L2_BYTES
        count = max(_FEWEST_WEIGHTS, -(-int(_COLD * l2_bytes) // (shape[0] * shape[1] * dtype.itemsize)))
    return make_weights(count, shape, dtype, device, rank=0)


def time_chain(call: Callable[[torch.Tensor], object], weights: Sequence[torch.Tensor], reps: int) -> float:
    """Microseconds a layer: the median of ``reps`` runs of ``call`` with each of the weights in turn.

    Args:
        call: Enqueues a layer with this weight on the current stream.
        weights: As of ``cold_weights``.
        reps: Timed runs.
    """
    device = weights[0].device
    if device.type != "cuda":
        return _median_us([_host_seconds(call, weights) for _ in range(reps)], len(weights))
    for weight in weights[:2]:
        call(weight)
    turn = iter(weights)
    graph = capture(lambda: call(next(turn)), len(weights))
    graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(reps)]
    for begin, end in events:
        torch.cuda._sleep(_DELAY_CYCLES)
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize(device)
    return _median_us([begin.elapsed_time(end) / 1e3 for begin, end in events], len(weights))


def _host_seconds(call: Callable[[torch.Tensor], object], weights: Sequence[torch.Tensor]) -> float:
    start = time.perf_counter()
    for weight in weights:
        call(weight)
    return time.perf_counter() - start


def _median_us(seconds: Sequence[float], layers: int) -> float:
    return statistics.median(seconds) / layers * 1e6
