"""Measurement of the candidates for one message: first all of them briefly, then the promising ones at length.

``Pace`` reports progress over many candidates, and ``Budget`` limits the time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from llm_comm.bench import timing
from llm_comm.bench.agreement import any_rank, on_all
from llm_comm.bench.choosing import Measured, worth_timing
from llm_comm.bench.programs import why_not_run
from llm_comm.bench.timing import Schedule
from llm_comm.bench.tune_subjects import Bound, Subject, candidates_on, nothing
from llm_comm.communicator import Communicator
from llm_comm.options import MIB
from llm_comm.planning.tables import Row, TuningTable, by_operation
from llm_comm.registry import is_program

_T = TypeVar("_T")
_NO_LIMIT = 1 << 40
_CALLS = 20
# Fewest calls in a row. Long calls need fewer, since the start of the row matters less.
_FEWEST_CALLS = 4
_ALL_CALLS_UP_TO = 16 * MIB
_LOOK_RUNS, _LOOK_WARM_UPS = 3, 1
# Absolute error in microseconds of short spaced measurements. The subtracted time of the spacers is tens of
# microseconds and varies by one or two percent.
_SPACED_SLACK_US = 1.0


class AtSize(NamedTuple):
    """Measurements of an operation at one size.

    Attributes:
        size: Message size in bytes.
        measured: Candidates that ran, simplest first.
        nccl_us: Microseconds of NCCL; None if it was not timed.
        separate_us: Microseconds of a fused operation by an all-reduce and a norm; None if it was not timed.
        refusals: Reasons why others did not run.
    """

    size: int
    measured: list[Measured]
    nccl_us: float | None = None
    separate_us: float | None = None
    refusals: tuple[str, ...] = ()


def schedule_of(method: str, reps: int, whole_bytes: int) -> Schedule:
    """Return how a call on a tensor of ``whole_bytes`` bytes is timed at length."""
    calls = max(_FEWEST_CALLS, min(_CALLS, _CALLS * _ALL_CALLS_UP_TO // max(1, whole_bytes)))
    return Schedule.by(method, calls, reps)


class Bench:
    """Operation on tensors of one size, to be timed with several candidates. Construction and all methods are
    collective.

    Args:
        comm, group: Communicator and process group of this rank. The table of ``comm`` is replaced.
        subject, size: Operation, and message size in bytes.
        schedule: How a call is timed at length.
    """

    def __init__(
        self, comm: Communicator, group: dist.ProcessGroup, subject: Subject, size: int, schedule: Schedule
    ) -> None:
        self._comm, self._group, self._subject, self._size = comm, group, subject, size
        self._schedule = schedule
        self.bound: Bound = on_all(lambda: subject.bind(comm, group, size), group)

    def candidates(self, show: Callable[[str], None], with_nccl: bool = True) -> AtSize:
        """Time all distinct candidates, and what they are compared with.

        Args:
            show: Receives progress texts.
            with_nccl: False for a group without NCCL.
        """
        refusals: list[str] = []
        rows = self._that_run(refusals)
        look = dataclasses.replace(self._schedule, reps=_LOOK_RUNS, warm_ups=_LOOK_WARM_UPS)
        if self._schedule.reps <= look.reps or not rows:
            measured = [Measured(row, self.time(row, f"{n} of {len(rows)}", show)) for n, row in enumerate(rows, 1)]
        else:
            measured = []
            for number, row in enumerate(rows, 1):
                show(f"candidate {number} of {len(rows)}")
                self.use(row)
                measured.append(Measured(row, _rounded(self._timed(look).min_us), at_length=False))
            again = set(worth_timing(measured, _SPACED_SLACK_US if self._schedule.spaced else 0.0))
            done = 0
            for index, (row, *_) in enumerate(measured):
                if row in again:
                    done += 1
                    us = self.time(row, f"{done} of the best {len(again)}", show)
                    measured[index] = Measured(row, us)
        nccl_us = separate_us = None
        if self.bound.nccl is not None and with_nccl:
            show("NCCL")
            call, restore = self.bound.nccl
            nccl_us = self._time_other(call, restore)
        if self.bound.separate is not None:
            show("an all-reduce and a norm")
            call, prepare = self.bound.separate
            prepare()
            separate_us = self._time_other(call, nothing)
        return AtSize(self._size, measured, nccl_us, separate_us, tuple(refusals))

    def _time_other(self, call: Callable[[], object], restore: Callable[[], object]) -> float:
        on_all(call, self._group)
        return _rounded(timing.time_graph(call, restore, self._schedule, self._group).us)

    def time(self, row: Row, which: str, show: Callable[[str], None]) -> float:
        """Return the microseconds of a candidate, timed at length."""
        show(f"candidate {which}")
        self.use(row)
        return self.time_present()

    def time_present(self) -> float:
        """Return the microseconds of the communicator's current table, timed at length."""
        return _rounded(self._timed(self._schedule).us)

    def use(self, row: Row) -> None:
        """Make the communicator run a candidate."""
        only_symmetric = 0 if self._subject.is_symmetric else _NO_LIMIT
        table = TuningTable("tune", by_operation([row]), _NO_LIMIT, _NO_LIMIT, min_symmetric_bytes=only_symmetric)
        self._comm.use_table(table)

    def _that_run(self, refusals: list[str]) -> list[Row]:
        """Return the candidates that the communicator accepts, without duplicates."""
        rows, plans = [], set()
        for row in candidates_on(self._comm, self._subject, self._size):
            self.use(row)
            plan = self.bound.plan()
            if plan.algorithm == "declined":
                refusals.append(plan.reason)
                continue
            if self._subject.is_symmetric and plan.symmetric != row.algorithm:
                refusals.append(f"{row.algorithm} has no shape for it")
                continue
            if is_program(row.algorithm) and (why := why_not_run(plan, row.algorithm)):
                refusals.append(f"{row.algorithm}: {why}")
                continue
            # For symmetric tensors a plan names only the algorithm, so rows are compared.
            key = row if self._subject.is_symmetric else plan
            if key not in plans:
                plans.add(key)
                rows.append(row)
        return rows

    def _timed(self, schedule: Schedule) -> timing.Timing:
        on_all(self.bound.call, self._group)  # a failure here has a better error than one inside a capture
        return timing.time_graph(self.bound.call, nothing, schedule, self._group)


def count_candidates(subject: Subject, sizes: Sequence[int], comm: Communicator) -> int:
    """Return the number of candidates of all sizes, including duplicates."""
    return sum(1 for size in sizes for _ in candidates_on(comm, subject, size))


def _rounded(us: float) -> float:
    """Round as table files do, so that a table chooses alike before and after writing."""
    return round(us, 3)


class Pace:
    """Progress over a number of candidates.

    Args:
        total: Number of candidates in this run.
    """

    def __init__(self, total: int) -> None:
        self._total, self._done, self._started = total, 0, time.monotonic()

    def advance(self, count: int = 1) -> None:
        """Count ``count`` more candidates as done."""
        self._done += count

    def text(self) -> str:
        """Return "300 of 1200 in all, about 3 min left", extrapolated from the pace so far."""
        done = f"{self._done} of {self._total} in all"
        if self._done == 0:
            return done
        left = (time.monotonic() - self._started) / self._done * max(0, self._total - self._done)
        return f"{done}, about {_duration(left)} left"


class Budget:
    """Time limit of a run, beginning now.

    Args:
        seconds: Limit; None: no limit.
        group: Process group, whose ranks end together.

    Attributes:
        left: Number of items that were not measured.
    """

    def __init__(self, seconds: float | None, group: dist.ProcessGroup) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._group = group
        self.left = 0

    def take(self, items: Sequence[_T]) -> Iterator[_T]:
        """Yield items until the time is up. The item in progress is finished. Collective."""
        for number, item in enumerate(items):
            if self._is_spent():
                self.left = len(items) - number
                return
            yield item

    def _is_spent(self) -> bool:
        # The decision is collective, because clocks differ: the others would wait for a rank that ends alone.
        return self._end is not None and any_rank(time.monotonic() >= self._end, self._group)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"
