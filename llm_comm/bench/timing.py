"""Timing of collectives.

- *Plain* starts the clock after a host barrier. The skew between the hosts' launches is included in every call.
- *Aligned* starts the ranks together on the GPU and times the kernel. Before the clock starts, each rank queues a delay
  longer than the hosts' skew, and two untimed calls that synchronize the ranks.
- *Spaced* is aligned, with a linear layer of one token before each call. The time of a row of these layers alone is
  subtracted. In a model, other kernels run between collectives and stream their weights through the L2 cache. In a row
  of equal calls, a kernel's prologue overlaps with the previous call (programmatic dependent launch), and everything
  that it reads is in the cache.

Eager runs have no delay in front. The host would run ahead during the delay, and its time to issue a call, which users
pay, would vanish from the result.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from llm_comm.bench import ALIGNED_METHODS
from llm_comm.cli import launch

_WARM_UP_RUNS = 3
#: Untimed calls before the clock starts, in aligned methods.
ALIGNING_CALLS = 2
#: About 0.3 ms: longer than the skew of ranks after a host barrier and than the launch of a graph.
ALIGNING_DELAY_CYCLES = 600_000

_SPACER_HIDDEN = 8192

Call = Callable[[], object]


@dataclass(frozen=True)
class Schedule:
    """Schedule of a measurement: ``warm_ups`` untimed and ``reps`` timed runs of ``calls`` calls each.

    ``aligned`` and ``spaced`` select the method.
    """

    calls: int
    reps: int
    aligned: bool
    spaced: bool = False
    warm_ups: int = _WARM_UP_RUNS

    @staticmethod
    def by(method: str, calls: int, reps: int) -> Schedule:
        """Return the schedule of a method in ``llm_comm.bench.METHODS``."""
        return Schedule(calls, reps, aligned=method in ALIGNED_METHODS, spaced=method == "spaced")


@dataclass(frozen=True)
class Timing:
    """Microseconds a call, each the maximum over the ranks: median run, fastest run, and host time.

    ``host_us`` is None if the host issues a graph instead of calls.
    """

    us: float
    min_us: float
    host_us: float | None

    def less(self, other: Timing) -> Timing:
        """Return the difference to ``other``."""
        host_us = None if self.host_us is None or other.host_us is None else self.host_us - other.host_us
        return Timing(self.us - other.us, self.min_us - other.min_us, host_us)


def capture(call: Call, calls: int) -> torch.cuda.CUDAGraph:
    """Capture a CUDA graph of ``calls`` calls in a row. The call must have run before, outside of a capture.

    ``torch.cuda.graph`` is not used: it collects garbage before each capture, which dominates the time in a process
    with an engine.
    """
    graph, device = torch.cuda.CUDAGraph(), torch.cuda.current_device()
    pool = torch.cuda.graph_pool_handle()
    torch.cuda.synchronize()
    with torch.cuda.stream(_capture_stream(device)):
        # thread_local: NCCL's watchdog thread may query its own events during the capture.
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            for _ in range(calls):
                call()
            graph.capture_end()
        except BaseException:
            _leave_capture(graph, device, pool)
            raise
    return graph


def _leave_capture(graph: torch.cuda.CUDAGraph, device: int, pool: Any) -> None:
    """End a failed capture. torch would leave its allocator and random number generator in capture mode."""
    with contextlib.suppress(RuntimeError):
        graph.capture_end()
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device, pool)
    generator = torch.cuda.default_generators[device]
    state = generator.get_state()
    generator.graphsafe_set_state(torch.Generator(device=f"cuda:{device}").graphsafe_get_state())
    generator.set_state(state)


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream for all captures. cuBLAS allocates a workspace for each stream, so one is shared."""
    return torch.cuda.Stream(device)


def time_graph(call: Call, reset: Call, schedule: Schedule, group: dist.ProcessGroup) -> Timing:
    """Time replays of a CUDA graph of ``schedule.calls`` calls. Collective.

    Args:
        call: Enqueues one collective.
        reset: Restores the input before each run, untimed.
        schedule: Schedule of the measurement.
        group: Process group, whose CPU backend aligns the hosts.
    """
    if schedule.spaced:
        return _time_spaced(
            lambda call, schedule: time_graph(call, reset, schedule, group), call, schedule, torch.device("cuda")
        )
    graph = capture(call, schedule.calls)
    lead_in = capture(call, ALIGNING_CALLS) if schedule.aligned else None

    def align() -> None:
        if lead_in is not None:
            torch.cuda._sleep(ALIGNING_DELAY_CYCLES)
            lead_in.replay()

    seconds, _ = _timed_runs(graph.replay, align, reset, schedule, CudaClock(), group)
    return _slowest_rank(seconds, None, schedule.calls, group)


def time_eager(call: Call, reset: Call, schedule: Schedule, device: torch.device, group: dist.ProcessGroup) -> Timing:
    """Time ``schedule.calls`` eager calls in a row, on GPU or CPU. Collective; arguments as in ``time_graph``."""
    if schedule.spaced:
        return _time_spaced(
            lambda call, schedule: time_eager(call, reset, schedule, device, group), call, schedule, device
        )

    def repeat(calls: int) -> None:
        for _ in range(calls):
            call()

    clock = CudaClock() if device.type == "cuda" else HostClock()
    aligning = ALIGNING_CALLS if schedule.aligned else 0
    seconds, host_seconds = _timed_runs(
        lambda: repeat(schedule.calls), lambda: repeat(aligning), reset, schedule, clock, group
    )
    return _slowest_rank(seconds, host_seconds, schedule.calls, group)


def _time_spaced(
    timed: Callable[[Call, Schedule], Timing], call: Call, schedule: Schedule, device: torch.device
) -> Timing:
    spacer, spaced = _spacing(call, device)
    schedule = replace(schedule, spaced=False)
    return timed(spaced, schedule).less(timed(spacer, schedule))


def _spacing(call: Call, device: torch.device) -> tuple[Call, Call]:
    """Return a linear layer that is independent of ``call``, and that layer followed by ``call``. Both have run
    once."""
    weight = torch.ones(
        _spacer_bytes(device) // (2 * _SPACER_HIDDEN), _SPACER_HIDDEN, dtype=torch.bfloat16, device=device
    )
    x = torch.ones(_SPACER_HIDDEN, dtype=torch.bfloat16, device=device)
    out = torch.empty(len(weight), dtype=torch.bfloat16, device=device)

    def spacer() -> None:
        torch.mv(weight, x, out=out)

    def spaced() -> None:
        spacer()
        call()

    spaced()
    return spacer, spaced


def _spacer_bytes(device: torch.device) -> int:
    """Return the bytes of the layer's weights: twice the L2 cache."""
    return 1 << 20 if device.type == "cpu" else 2 * int(torch.cuda.get_device_properties(device).L2_cache_size)


class CudaClock:
    """Clock between two points of the current stream."""

    def __init__(self) -> None:
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def settle(self) -> None:
        torch.cuda.synchronize()

    def start(self) -> None:
        self._start.record()

    def stop(self) -> float:
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e-3


class HostClock:
    """Clock of the host, for calls that return when they are done."""

    def settle(self) -> None:
        pass

    def start(self) -> None:
        self._start = time.perf_counter()

    def stop(self) -> float:
        return time.perf_counter() - self._start


def timed_run(run: Call, align: Call, clock: CudaClock | HostClock, group: dist.ProcessGroup) -> tuple[float, float]:
    """Return the seconds of one run by the clock, and the host seconds to issue it. Collective.

    ``align`` runs between a host barrier, at which all devices are idle, and the start of the clock.
    """
    clock.settle()
    launch.barrier(group)
    align()
    clock.start()
    issued = time.perf_counter()
    run()
    issued = time.perf_counter() - issued
    return clock.stop(), issued


def _timed_runs(
    run: Call, align: Call, reset: Call, schedule: Schedule, clock: CudaClock | HostClock, group: dist.ProcessGroup
) -> tuple[list[float], list[float]]:
    """Return the seconds of each run by the clock, and the host seconds to issue it."""
    seconds, host_seconds = [], []
    for index in range(schedule.warm_ups + schedule.reps):
        reset()
        taken, issued = timed_run(run, align, clock, group)
        if index >= schedule.warm_ups:
            seconds.append(taken)
            host_seconds.append(issued)
    return seconds, host_seconds


def _slowest_rank(
    seconds: list[float], host_seconds: list[float] | None, calls: int, group: dist.ProcessGroup
) -> Timing:
    mine = [statistics.median(seconds), min(seconds), statistics.median(host_seconds or [0.0])]
    worst = torch.tensor(mine, dtype=torch.float64) * (1e6 / calls)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    us, min_us, host_us = worst.tolist()
    return Timing(us, min_us, None if host_seconds is None else host_us)
