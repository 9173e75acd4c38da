"""From measured candidates to the rows of a tuning table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple, TypeVar

from llm_comm import registry
from llm_comm.bench.report import format_bytes
from llm_comm.errors import ConfigError
from llm_comm.planning.layers import LayerRow
from llm_comm.planning.node_rows import NodeRow
from llm_comm.planning.tables import Row, RunnerUp

_Row = TypeVar("_Row", LayerRow, NodeRow)

# A simpler candidate is kept when another is better by less than the spread of repeated runs.
_NOISE = 0.01
# A candidate that looks slower than the best by more than this is not timed at length. Short looks go by the fastest of
# a few runs, which a disturbance can only make slower, and repeat within a few percent: to be lost, the best would have
# to look worse than it is by ten times the spread of what is timed at length.
_LOOKS_WORSE = 0.10


class Measured(NamedTuple):
    """Time of one candidate, in microseconds a call.

    Attributes:
        at_length: It is the median of all runs; else the fastest of a short look, good for leaving candidates out and
            for nothing else.
    """

    row: Row
    us: float
    at_length: bool = True


def worth_timing(looks: Sequence[Measured], slack_us: float = 0.0) -> list[Row]:
    """The candidates to time at length after a short look at all of them, in their order: those that may be the best,
    and the best of every algorithm, so that the runner-up is timed too.

    Args:
        looks: One at least.
        slack_us: By how much a look may be wrong whatever its time.
    """
    best = min(look.us for look in looks)
    limit = best + max(abs(best) * _LOOKS_WORSE, slack_us)
    best_of: dict[tuple[str, str], float] = {}
    for look in looks:
        kind = _kind(look.row)
        best_of[kind] = min(look.us, best_of.get(kind, look.us))
    return [look.row for look in looks if look.us <= limit or look.us == best_of[_kind(look.row)]]


def choose(measured: Sequence[Measured], size: int, refusals: Iterable[str]) -> Measured:
    """The fastest, or an earlier candidate that cannot be told from it.

    Args:
        measured: The candidates that ran, simplest first.
        size: Of the message, in bytes.
        refusals: Why others did not run.

    Raises:
        ConfigError: None ran.
    """
    measured = [candidate for candidate in measured if candidate.at_length]
    if not measured:
        reasons = "; ".join(dict.fromkeys(refusals)) or "there is no candidate"
        raise ConfigError(
            f"no kernel can be measured at {format_bytes(size)}: {reasons}; leave it out by --min or --max"
        )
    best = min(candidate.us for candidate in measured)
    return next(candidate for candidate in measured if not is_slower(candidate.us, best))


def is_slower(us: float, other_us: float) -> bool:
    """Whether a time is worse than another by more than repeated runs differ."""
    # A time that another was taken off can be negative.
    return us > other_us + abs(other_us) * _NOISE


def with_figures(chosen: Measured, measured: Sequence[Measured]) -> Measured:
    """The same with a row that says its time, and which other algorithm came next."""
    others = [m for m in measured if m.at_length and _kind(m.row) != _kind(chosen.row)]
    runner_up = None
    if others:
        row, us, _ = min(others, key=lambda m: m.us)
        runner_up = RunnerUp(row.algorithm, row.protocol, us)
    return chosen._replace(row=chosen.row._replace(us=chosen.us, runner_up=runner_up))


def choose_by_means(measured: Sequence[Measured], size: int, refusals: Iterable[str]) -> list[Measured]:
    """What runs at a size, by what may be used, with figures and without repetition: a program where that is the best
    of all, and the best algorithms: where sums may be in any order, where NVLink multicast only stores, and without it.
    Of these rows the first counts that can be used.

    Raises:
        ConfigError: As of ``choose``.
    """
    chosen: list[Measured] = []
    first = choose(measured, size, refusals)
    if registry.is_program(first.row.algorithm):
        chosen.append(with_figures(first, measured))
        # The other rows are for where it is not served: what came next is then an algorithm too.
        measured = [m for m in measured if not registry.is_program(m.row.algorithm)]
    for fits in (lambda _: True, lambda row: not sums_in_switch(row), lambda row: not _by_switch(row)):
        of_means = [m for m in measured if fits(m.row)]
        # A row of a program would count before those of all algorithms of that size, by the switch too.
        algorithms = [m for m in of_means if not registry.is_program(m.row.algorithm)]
        best = with_figures(choose(algorithms, size, refusals), of_means)
        if all(best.row.without_figures() != other.row.without_figures() for other in chosen):
            chosen.append(best)
    return chosen


def sums_in_switch(row: Row) -> bool:
    """Whether what a row names sums in the NVLink switch."""
    algorithm = _algorithm_of(row)
    return algorithm is not None and algorithm.sums_in_switch


def _by_switch(row: Row) -> bool:
    algorithm = _algorithm_of(row)
    return algorithm is not None and algorithm.by_switch


def _algorithm_of(row: Row) -> registry.Algorithm | None:
    """None of a program."""
    return registry.operations()[row.operation].find(row.algorithm, row.protocol)


def merge(best: Sequence[Sequence[Measured]]) -> list[Row]:
    """One row, or as many as a size has, for neighbouring sizes that run alike. Figures are those of the largest size,
    as of any row."""
    groups: list[list[Row]] = []
    for of_size in best:
        rows = [m.row for m in of_size]
        if groups and _as_of_size(groups[-1], rows[0].up_to) == _as_of_size(rows, rows[0].up_to):
            groups.pop()
        groups.append(rows)
    return [row for rows in groups for row in rows]


def last_of_alike(rows: Sequence[_Row]) -> list[_Row]:
    """One row for neighbouring rows that run alike, with the figures of the largest; rows of layers, or of nodes."""
    groups = groupby(rows, key=lambda row: row.without_figures()._replace(up_to=0))
    return [list(group)[-1] for _, group in groups]


def _as_of_size(rows: Sequence[Row], size: int) -> list[Row]:
    return [row.without_figures()._replace(up_to=size) for row in rows]


def _kind(row: Row) -> tuple[str, str]:
    return row.algorithm, row.protocol
