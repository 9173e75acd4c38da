"""What a trial has done to memory, for the checks behind it."""

from __future__ import annotations

from dataclasses import dataclass, field

from llm_comm.dsl import ir
from llm_comm.dsl.checks.clocks import Clock
from llm_comm.dsl.checks.trial import Place
from llm_comm.dsl.ir import Location


@dataclass(frozen=True, eq=False)
class Access:
    """An access to a piece of a chunk.

    Attributes:
        actor: Whose operation it is; the proxy of a rank and its host are actors too.
        number: Of the operation.
        before: What comes before it, beside the actor's own operations.
        writes: Whether it writes.
        rank: That does it, or has its proxy do it.
        call: Of the operation.
        place: The memory.
        op: The line of the program; None for the caller, between calls.
        where: That line.
    """

    actor: int
    number: int
    before: Clock
    writes: bool
    rank: int
    call: int
    place: Place
    op: ir.Op | None
    where: Location

    def comes_before(self, other: Access) -> bool:
        if self.actor == other.actor:
            return self.number <= other.number
        return other.before[self.actor] >= self.number


@dataclass(frozen=True)
class PortWork:
    """A ``port_put``: two actors stand for what the proxy has read, and for what has come."""

    where: Location
    rank: int
    peer: int
    call: int
    source_actor: int
    target_actor: int
    number: int
    target: Place


@dataclass
class Records:
    """Of a trial.

    Attributes:
        accesses: Of each place of plain memory, in the order in which the trial came to them.
        packet_puts: Of each place of packets.
        packet_reads: The same; the n-th one has taken the n-th put.
        port_work: All of it.
        begins: Of each call, of each rank: (actor of its host, number) of the begin.
        ends: Of each call, of each rank: what came before its end.
    """

    accesses: dict[Place, list[Access]] = field(default_factory=dict)
    packet_puts: dict[Place, list[Access]] = field(default_factory=dict)
    packet_reads: dict[Place, list[Access]] = field(default_factory=dict)
    port_work: list[PortWork] = field(default_factory=list)
    begins: list[dict[int, tuple[int, int]]] = field(default_factory=list)
    ends: list[dict[int, Clock]] = field(default_factory=list)
