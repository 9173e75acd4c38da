"""Order of the runs."""

from __future__ import annotations

from collections.abc import Sequence


def interleaved(arms: Sequence[str], repeats: int) -> list[tuple[int, str]]:
    """Return (repeat, arm) in the order of the runs: all arms, then all in reverse order, and so on.

    Effects that drift with time (temperature, clocks, other tenants) thereby affect all arms alike.
    """
    order: list[tuple[int, str]] = []
    for repeat in range(repeats):
        order += [(repeat, arm) for arm in (arms if repeat % 2 == 0 else reversed(arms))]
    return order
