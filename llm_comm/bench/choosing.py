"""From measured candidates to the rows of a tuning table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from llm_comm.config import MIB
from llm_comm.selection import FusedRow, TuningRow

#: One-shot sends world - 1 copies of the message: far above this it only costs time to measure.
ONE_SHOT_MAX_SENT = 4 * MIB
# A simpler candidate is kept when another is better by less than the spread of repeated runs.
_NOISE = 0.01

RowT = TypeVar("RowT", TuningRow, FusedRow)
#: A row of a table, and its time.
MeasuredT = TypeVar("MeasuredT", bound="tuple[Any, float]")


def choose(measured: Sequence[MeasuredT]) -> MeasuredT:
    """The fastest, or an earlier candidate that cannot be told from it."""
    limit = min(us for _, us in measured) * (1 + _NOISE)
    return next(candidate for candidate in measured if candidate[1] <= limit)


def merge(best: Sequence[tuple[RowT, float]]) -> list[RowT]:
    """One row for neighbouring sizes that run alike."""
    rows: list[RowT] = []
    for row, _ in best:
        if rows and rows[-1]._replace(up_to=row.up_to) == row:
            rows.pop()
        rows.append(row)
    return rows
