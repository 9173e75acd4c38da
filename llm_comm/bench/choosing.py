"""From measured candidates to the rows of a tuning table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from llm_comm.bench.report import format_bytes
from llm_comm.errors import ConfigError
from llm_comm.planning.tables import Row

# A simpler candidate is kept when another is better by less than the spread of repeated runs.
_NOISE = 0.01


class Measured(NamedTuple):
    """Time of one candidate, in microseconds a call."""

    row: Row
    us: float


def choose(measured: Sequence[Measured], size: int, refusals: Iterable[str]) -> Measured:
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
    best = min(candidate.us for candidate in measured)
    limit = best + abs(best) * _NOISE  # a time that another was taken off can be negative
    return next(candidate for candidate in measured if candidate.us <= limit)


def merge(best: Sequence[Measured]) -> list[Row]:
    """One row for neighbouring sizes that run alike."""
    rows: list[Row] = []
    for row, _ in best:
        if rows and rows[-1]._replace(up_to=row.up_to) == row:
            rows.pop()
        rows.append(row)
    return rows
