"""Ranks as a program names them: by themselves, or counted from the rank that runs the program."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Relative:
    """The rank ``(rank + offset) % world`` for the rank that runs the program. Relative(0) is that rank itself.

    ``+`` and ``-`` of a whole number count on, around the world.
    """

    offset: int

    def on(self, rank: int, world: int) -> int:
        return (rank + self.offset) % world

    def __add__(self, steps: int) -> Relative:
        return Relative(self.offset + steps)

    def __sub__(self, steps: int) -> Relative:
        return Relative(self.offset - steps)

    def __str__(self) -> str:
        return "rank" if self.offset == 0 else f"rank{self.offset:+}"


@dataclass(frozen=True)
class Absolute:
    """The same rank, whoever runs the program."""

    rank: int

    def on(self, rank: int, world: int) -> int:
        return self.rank

    def __str__(self) -> str:
        return str(self.rank)


#: A rank of a program for a certain world.
Rank = Relative | Absolute
