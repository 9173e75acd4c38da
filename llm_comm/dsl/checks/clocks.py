"""Vector clocks: which operations of each actor come before a point."""

from __future__ import annotations

#: Of each actor the number of its last operation that is known to be over.
Clock = tuple[int, ...]


def join(one: Clock, other: Clock) -> Clock:
    """What is known by either."""
    return one if one is other else tuple(map(max, one, other))


def with_own(clock: Clock, actor: int, number: int) -> Clock:
    """The clock, and the operations of ``actor`` up to ``number``."""
    return (*clock[:actor], max(clock[actor], number), *clock[actor + 1 :])
