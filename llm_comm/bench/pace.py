"""How far a run over many candidates is, and how long it will take yet."""

from __future__ import annotations

import time


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


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"
