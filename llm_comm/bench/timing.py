"""How a collective is timed.

*Aligned* starts the ranks together on the GPU: each queues a delay longer than the hosts are apart and two
untimed calls, which synchronize the ranks, before the clock starts. That times the kernel. *Plain* starts the
clock right after a host barrier and so adds the skew between the hosts' launches to every call.

In a row of equal calls, what a kernel does before it needs the one before it is hidden (programmatic dependent launch),
and all that it reads is in the L2 cache. In a model other kernels lie between, which stream their weights through the
cache. *Spaced* is aligned with such a kernel, a linear layer of one token, before each call, and takes off what a row
of those alone takes.

Eager runs are never preceded by the delay: it would let the host run ahead, and its time to issue a call,
which the user pays, would vanish from the result.
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
#: Calls before the clock starts, where ranks are aligned.
ALIGNING_CALLS = 2
#: About 0.3 ms: longer than ranks leave a host barrier apart and than a graph takes to launch.
ALIGNING_DELAY_CYCLES = 600_000

_SPACER_HIDDEN = 8192

Call = Callable[[], object]


@dataclass(frozen=True)
class Schedule:
    """``reps`` timed runs of ``calls`` calls each, after ``warm_ups`` untimed ones, ``aligned`` or plain, ``spaced`` or
    not."""

    calls: int
    reps: int
    aligned: bool
    spaced: bool = False
    warm_ups: int = _WARM_UP_RUNS

    @staticmethod
    def by(method: str, calls: int, reps: int) -> Schedule:
        """``method``: of ``llm_comm.bench.METHODS``."""
        return Schedule(calls, reps, aligned=method in ALIGNED_METHODS, spaced=method == "spaced")


@dataclass(frozen=True)
class Timing:
    """Microseconds a call, each the largest over the ranks: median run, fastest run, and the host's part.

    ``host_us`` is None where the host issues a graph instead of calls.
    """

    us: float
    min_us: float
    host_us: float | None

    def less(self, other: Timing) -> Timing:
        """What is left of a call without ``other``."""
        host_us = None if self.host_us is None or other.host_us is None else self.host_us - other.host_us
        return Timing(self.us - other.us, self.min_us - other.min_us, host_us)


def capture(call: Call, calls: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of ``calls`` calls in a row. The call must have run before, outside of a capture.

    Not by ``torch.cuda.graph``: that collects garbage before each capture, which takes longer than all the rest where
    an engine is loaded.
    """
    graph, device = torch.cuda.CUDAGraph(), torch.cuda.current_device()
    pool = torch.cuda.graph_pool_handle()
    torch.cuda.synchronize()
    with torch.cuda.stream(_capture_stream(device)):
        # thread_local: NCCL's watchdog thread may query its own events while we capture.
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
    """Ends a capture that has failed. torch would leave its allocator and its random numbers in there."""
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
    """One for all captures: cuBLAS has a workspace for each stream."""
    return torch.cuda.Stream(device)


def time_graph(call: Call, reset: Call, schedule: Schedule, group: dist.ProcessGroup) -> Timing:
    """Times replays of a CUDA graph of ``schedule.calls`` calls. Collective.

    Args:
        call: enqueues one collective.
        reset: restores the input before each run, untimed.
        group: the ranks; its CPU backend aligns the hosts.
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
    """Times ``schedule.calls`` eager calls in a row, on GPU or CPU. Collective; arguments as above."""
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
    """A linear layer that has nothing to do with ``call``, and the two in a row. Both have run once."""
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
    """Of weights: twice what the L2 cache holds."""
    return 1 << 20 if device.type == "cpu" else 2 * int(torch.cuda.get_device_properties(device).L2_cache_size)


class CudaClock:
    """Measures between two points of the current stream."""

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
    """Measures host time; for calls that return when they are done."""

    def settle(self) -> None:
        pass

    def start(self) -> None:
        self._start = time.perf_counter()

    def stop(self) -> float:
        return time.perf_counter() - self._start


def timed_run(run: Call, align: Call, clock: CudaClock | HostClock, group: dist.ProcessGroup) -> tuple[float, float]:
    """Seconds of one run by the clock, and seconds the host needed to issue it. Collective.

    ``align`` comes between a host barrier, which all devices reach idle, and the start of the clock.
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
    """Seconds of each run by the clock, and seconds the host needed to issue it."""
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
