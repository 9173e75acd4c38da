"""From measured candidates to the rows of a tuning table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from llm_comm.bench.report import format_bytes
from llm_comm.config import MIB
from llm_comm.errors import ConfigError
from llm_comm.planning.selection import FusedRow, TuningRow

#: One-shot sends world - 1 copies of the message: far above this it only costs time to measure.
ONE_SHOT_MAX_SENT = 4 * MIB
# A simpler candidate is kept when another is better by less than the spread of repeated runs.
_NOISE = 0.01

RowT = TypeVar("RowT", TuningRow, FusedRow)
#: A row of a table, and its time.
MeasuredT = TypeVar("MeasuredT", bound="tuple[Any, float]")


def choose(measured: Sequence[MeasuredT], size: int, refusals: Iterable[str]) -> MeasuredT:
    """The fastest, or an earlier candidate that cannot be told from it.

    Args:
        measured: The candidates that ran, simplest first.
        size: Of the message, in bytes.
        refusals: Why others did not run.

    Raises:
        ConfigError: None ran.
    """
    if not measured:
        reasons = "; ".join(dict.fromkeys(refusals)) or "there is no candidate"
        raise ConfigError(
            f"no kernel can be measured at {format_bytes(size)}: {reasons}; leave it out by --min or --max"
        )
    best = min(us for _, us in measured)
    limit = best + abs(best) * _NOISE  # a time that another was taken off can be negative
    return next(candidate for candidate in measured if candidate[1] <= limit)


def merge(best: Sequence[tuple[RowT, float]]) -> list[RowT]:
    """One row for neighbouring sizes that run alike."""
    rows: list[RowT] = []
    for row, _ in best:
        if rows and rows[-1]._replace(up_to=row.up_to) == row:
            rows.pop()
        rows.append(row)
    return rows
