"""Choice of tuning table rows from measured candidates."""

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

# Relative difference between repeated runs. A simpler candidate is kept if others are better by less.
_NOISE = 0.01
# Margin of the short measurement: slower candidates are not timed at length. The short measurement takes the fastest of
# a few runs. Disturbances only make it slower, and it repeats within a few percent. To drop the best candidate, it
# would have to be wrong by ten times the spread of the long measurement.
_LOOKS_WORSE = 0.10


class Measured(NamedTuple):
    """Time of one candidate in microseconds a call.

    Attributes:
        row: Candidate.
        us: Median of all runs; in a short measurement, the fastest run.
        at_length: False for a short measurement, which serves only to drop candidates.
    """

    row: Row
    us: float
    at_length: bool = True


def worth_timing(looks: Sequence[Measured], slack_us: float = 0.0) -> list[Row]:
    """Return the candidates to time at length, in their order: those that may be the best, and the best of each
    algorithm.

    The best of each algorithm is included so that the runner-up is timed at length too.

    Args:
        looks: Short measurements, at least one.
        slack_us: Absolute error of a short measurement in microseconds.
    """
    best = min(look.us for look in looks)
    limit = best + max(abs(best) * _LOOKS_WORSE, slack_us)
    best_of: dict[tuple[str, str], float] = {}
    for look in looks:
        kind = _kind(look.row)
        best_of[kind] = min(look.us, best_of.get(kind, look.us))
    return [look.row for look in looks if look.us <= limit or look.us == best_of[_kind(look.row)]]


def choose(measured: Sequence[Measured], size: int, refusals: Iterable[str]) -> Measured:
    """Return the fastest candidate, or an earlier one whose time differs by less than the noise.

    Args:
        measured: Candidates that ran, simplest first.
        size: Message size in bytes.
        refusals: Reasons why others did not run.

    Raises:
        ConfigError: No candidate ran.
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
    """Return whether a time is longer than another by more than the noise."""
    # A difference of two times, as in the spaced method, can be negative.
    return us > other_us + abs(other_us) * _NOISE


def with_figures(chosen: Measured, measured: Sequence[Measured]) -> Measured:
    """Add to the row its time and the fastest other algorithm."""
    others = [m for m in measured if m.at_length and _kind(m.row) != _kind(chosen.row)]
    runner_up = None
    if others:
        row, us, _ = min(others, key=lambda m: m.us)
        runner_up = RunnerUp(row.algorithm, row.protocol, us)
    return chosen._replace(row=chosen.row._replace(us=chosen.us, runner_up=runner_up))


def choose_by_means(measured: Sequence[Measured], size: int, refusals: Iterable[str]) -> list[Measured]:
    """Return the rows for a size, without duplicates: the best program if it is the best of all, and the best algorithm
    in each of three cases.

    The cases are: sums in any order; NVLink multicast for stores only; no multicast. At run time, the first row whose
    requirements are met counts.

    Raises:
        ConfigError: See ``choose``.
    """
    chosen: list[Measured] = []
    first = choose(measured, size, refusals)
    if registry.is_program(first.row.algorithm):
        chosen.append(with_figures(first, measured))
        # The other rows apply if the program is not served. Their runner-up must then be an algorithm too.
        measured = [m for m in measured if not registry.is_program(m.row.algorithm)]
    for fits in (lambda _: True, lambda row: not sums_in_switch(row), lambda row: not _by_switch(row)):
        of_means = [m for m in measured if fits(m.row)]
        # Programs are excluded: their row would have precedence over all algorithms of that size, including those of
        # the switch.
        algorithms = [m for m in of_means if not registry.is_program(m.row.algorithm)]
        best = with_figures(choose(algorithms, size, refusals), of_means)
        if all(best.row.without_figures() != other.row.without_figures() for other in chosen):
            chosen.append(best)
    return chosen


def sums_in_switch(row: Row) -> bool:
    """Return whether the row's algorithm computes sums in the NVLink switch."""
    algorithm = _algorithm_of(row)
    return algorithm is not None and algorithm.sums_in_switch


def _by_switch(row: Row) -> bool:
    algorithm = _algorithm_of(row)
    return algorithm is not None and algorithm.uses_multimem


def _algorithm_of(row: Row) -> registry.Algorithm | None:
    """Return None for a program."""
    return registry.operations()[row.operation].find(row.algorithm, row.protocol)


def merge(best: Sequence[Sequence[Measured]]) -> list[Row]:
    """Merge neighbouring sizes with equal rows. The figures are those of the largest size."""
    groups: list[list[Row]] = []
    for of_size in best:
        rows = [m.row for m in of_size]
        if groups and _as_of_size(groups[-1], rows[0].up_to) == _as_of_size(rows, rows[0].up_to):
            groups.pop()
        groups.append(rows)
    return [row for rows in groups for row in rows]


def last_of_alike(rows: Sequence[_Row]) -> list[_Row]:
    """Merge neighbouring rows that behave alike, with the figures of the largest. For rows of layers or of nodes."""
    groups = groupby(rows, key=lambda row: row.without_figures()._replace(up_to=0))
    return [list(group)[-1] for _, group in groups]


def _as_of_size(rows: Sequence[Row], size: int) -> list[Row]:
    return [row.without_figures()._replace(up_to=size) for row in rows]


def _kind(row: Row) -> tuple[str, str]:
    return row.algorithm, row.protocol
