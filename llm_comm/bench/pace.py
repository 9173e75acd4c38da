"""How far a run over many candidates is, how long it will take yet, and when it has to end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch.distributed as dist

from llm_comm.bench.agreement import any_rank

_T = TypeVar("_T")


class Pace:
    """Counts what is done of a number of candidates.

    Args:
        total: To do in this run.
    """

    def __init__(self, total: int) -> None:
        self._total, self._done, self._started = total, 0, time.monotonic()

    def advance(self, count: int = 1) -> None:
        """So many more are done."""
        self._done += count

    def text(self) -> str:
        """``300 of 1200 in all, about 3 min left``: at the pace so far."""
        done = f"{self._done} of {self._total} in all"
        if self._done == 0:
            return done
        left = (time.monotonic() - self._started) / self._done * max(0, self._total - self._done)
        return f"{done}, about {_duration(left)} left"


class Budget:
    """How long a run may measure, from now on.

    Args:
        seconds: None: as long as it takes.
        group: The ranks, which end together.

    Attributes:
        left: Of what was to be measured, how much was not.
    """

    def __init__(self, seconds: float | None, group: dist.ProcessGroup) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._group = group
        self.left = 0

    def take(self, items: Sequence[_T]) -> Iterator[_T]:
        """The items until the time is up; the one that is being measured then is finished. Collective."""
        for number, item in enumerate(items):
            if self._is_spent():
                self.left = len(items) - number
                return
            yield item

    def _is_spent(self) -> bool:
        # Clocks differ: one rank that ended alone would be waited for.
        return self._end is not None and any_rank(time.monotonic() >= self._end, self._group)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"
