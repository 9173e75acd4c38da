"""What a group of blocks knows to be over, and what it tells others by signals and by packets.

A signal is a release and a wait an acquire, with a barrier of the block: all that was before the signal, of the whole
group, is before all that is behind the wait.

Packets are plain stores that are polled by plain loads. Each thread knows of the elements it has read, and no more:

- The sender had begun its kernel, and had acquired what its waits told it. Its own loads and stores in this call may
  still be under way, so packets acknowledge nothing.
- A store behind the poll comes after that (the poll's branch decides whether it is made). A load may come before it.
- Threads that carry elements of chunks of another size, or of another loop, have not polled, nor have all threads where
  the last piece of a loop is short. A barrier, which a signal has, tells them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

#: Of each actor the number of its last operation that is known to be over.
Clock = tuple[int, ...]


def join(one: Clock, other: Clock) -> Clock:
    """What is known by either."""
    return one if one is other else tuple(map(max, one, other))


def with_own(clock: Clock, actor: int, number: int) -> Clock:
    """The clock, and the operations of ``actor`` up to ``number``."""
    return (*clock[:actor], max(clock[actor], number), *clock[actor + 1 :])


class Carriers(NamedTuple):
    """Threads that carry the elements of a piece of a chunk. ``loop``: its number, 0 outside of loops."""

    parts: int
    loop: int
    piece: int


@dataclass(frozen=True)
class Told:
    """By a signal. ``polled``: known for stores only."""

    seen: Clock
    polled: Clock


@dataclass
class Knowledge:
    """Of one actor.

    Attributes:
        actor: Its number.
        number: Of its last operation.
        seen: What all its operations come after.
        polled: What all its stores come after, beyond ``seen``.
        by_carriers: What the stores of some elements come after, beyond both.
    """

    actor: int
    seen: Clock
    polled: Clock
    number: int = 0
    by_carriers: dict[Carriers, Clock] = field(default_factory=dict)

    def begin(self, clock: Clock) -> None:
        """A kernel begins: what came before is over, and seen."""
        self.seen = self.polled = clock
        self.by_carriers.clear()

    def before_store(self, carriers: Carriers) -> Clock:
        """What comes before a store; without this actor's own operations, packets tell it."""
        known = join(self.seen, self.polled)
        for of, polled in self.by_carriers.items():
            if of[:2] == carriers[:2] and of.piece <= carriers.piece:
                known = join(known, polled)
        return known

    def before_all(self) -> Clock:
        """What comes before the end of the kernel."""
        self._meet()
        return with_own(join(self.seen, self.polled), self.actor, self.number)

    def poll(self, told: Clock, carriers: Carriers) -> None:
        """Packets have come."""
        self.by_carriers[carriers] = join(told, self.by_carriers.get(carriers, told))

    def signal(self) -> Told:
        """What a signal tells. The barrier before it has all threads know what any of them has polled."""
        self._meet()
        return Told(
            with_own(self.seen, self.actor, self.number),
            with_own(join(self.seen, self.polled), self.actor, self.number),
        )

    def wait(self, told: Told) -> None:
        """A signal has come."""
        self.seen = join(self.seen, told.seen)
        self.polled = join(self.polled, told.polled)

    def _meet(self) -> None:
        for polled in self.by_carriers.values():
            self.polled = join(self.polled, polled)
        self.by_carriers.clear()
