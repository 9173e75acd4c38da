"""Happens-before knowledge of each group of blocks, and what signals and packets transfer of it to other groups.

A signal is a release and a wait an acquire, both with a barrier of the block. All operations of the group before the
signal therefore happen before all operations after the wait.

Packets are plain stores, polled by plain loads. A thread gains knowledge only through the elements it has read:

- The sender had begun its kernel, and had acquired the knowledge of its waits. Its own loads and stores in this call
  may still be in flight, so packets acknowledge nothing.
- A store after the poll happens after the sender's knowledge, because the poll's branch decides whether it is executed.
  A load may be executed before the poll.
- Threads that hold elements of chunks of another size, or of another loop, have not polled. Nor have all threads if the
  last piece of a loop is short. The barrier of a signal transfers the knowledge to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

#: Vector clock: for each actor, the number of its last operation known to be complete.
Clock = tuple[int, ...]


def join(one: Clock, other: Clock) -> Clock:
    """Return the union of two clocks."""
    return one if one is other else tuple(map(max, one, other))


def with_own(clock: Clock, actor: int, number: int) -> Clock:
    """Return the clock extended by the operations of ``actor`` up to ``number``."""
    return (*clock[:actor], max(clock[actor], number), *clock[actor + 1 :])


class Carriers(NamedTuple):
    """Threads that hold the elements of a piece of a chunk. ``loop``: number of the loop, 0 outside of loops."""

    parts: int
    loop: int
    piece: int


@dataclass(frozen=True)
class SignalClocks:
    """Knowledge transferred by a signal. ``polled`` applies to stores only."""

    seen: Clock
    polled: Clock


@dataclass
class Knowledge:
    """Knowledge of one actor.

    Attributes:
        actor: Number of the actor.
        number: Number of its last operation.
        seen: Clock that happens before all its further operations.
        polled: Clock that happens before all its further stores, beyond ``seen``.
        by_carriers: Clocks that happen before the stores of some elements, beyond both.
    """

    actor: int
    seen: Clock
    polled: Clock
    number: int = 0
    by_carriers: dict[Carriers, Clock] = field(default_factory=dict)

    def begin(self, clock: Clock) -> None:
        """Begin a kernel: all earlier operations are complete and visible."""
        self.seen = self.polled = clock
        self.by_carriers.clear()

    def before_store(self, carriers: Carriers) -> Clock:
        """Return the clock before a store, without this actor's own operations. Packets transfer this clock."""
        known = join(self.seen, self.polled)
        for of, polled in self.by_carriers.items():
            if of[:2] == carriers[:2] and of.piece <= carriers.piece:
                known = join(known, polled)
        return known

    def before_all(self) -> Clock:
        """Return the clock at the end of the kernel."""
        self._merge_polled()
        return with_own(join(self.seen, self.polled), self.actor, self.number)

    def poll(self, received: Clock, carriers: Carriers) -> None:
        """Receive packets with the sender's clock ``received``."""
        self.by_carriers[carriers] = join(received, self.by_carriers.get(carriers, received))

    def signal(self) -> SignalClocks:
        """Return the knowledge that a signal transfers. The barrier before it merges the polled knowledge of all
        threads."""
        self._merge_polled()
        return SignalClocks(
            with_own(self.seen, self.actor, self.number),
            with_own(join(self.seen, self.polled), self.actor, self.number),
        )

    def wait(self, received: SignalClocks) -> None:
        """Receive a signal."""
        self.seen = join(self.seen, received.seen)
        self.polled = join(self.polled, received.polled)

    def _merge_polled(self) -> None:
        for polled in self.by_carriers.values():
            self.polled = join(self.polled, polled)
        self.by_carriers.clear()
