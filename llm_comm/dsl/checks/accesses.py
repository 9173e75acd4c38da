"""Memory accesses of a simulation, and checks for accesses that no synchronization orders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations

from llm_comm.dsl import ir
from llm_comm.dsl.checks.knowledge import Clock
from llm_comm.dsl.checks.trial import Address, Trial, at, is_workspace
from llm_comm.dsl.errors import Fault, ProgramError
from llm_comm.dsl.ir import Location


@dataclass(frozen=True, eq=False)
class Access:
    """Access to a piece of a chunk.

    Attributes:
        actor: Actor whose operation it is. A group of a rank, a proxy and the host are actors.
        number: Number of the operation within its actor.
        before: Vector clock of the operations that happen before it, apart from the actor's own.
        writes: True for a write.
        rank: Rank that performs it, or whose proxy does.
        call: Number of the call.
        address: Memory accessed.
        op: Operation of the program; None for an access of the caller between calls.
        where: Line of the program.
    """

    actor: int
    number: int
    before: Clock
    writes: bool
    rank: int
    call: int
    address: Address
    op: ir.Op | None
    where: Location

    def comes_before(self, other: Access) -> bool:
        """Return whether this access happens before ``other`` by their vector clocks."""
        if self.actor == other.actor:
            return self.number <= other.number
        return other.before[self.actor] >= self.number


@dataclass(frozen=True)
class PortWork:
    """One ``port_put``. The proxy has two actors: one for reads of the source, one for writes at the target."""

    where: Location
    rank: int
    peer: int
    call: int
    target_actor: int
    number: int
    target: Address


@dataclass
class Records:
    """Record of a simulation.

    Attributes:
        accesses: Accesses to each address of plain memory, in the order of the simulation.
        packet_puts: Writes to each address for packets.
        packet_reads: Reads of each address for packets. The n-th read takes the n-th put.
        port_work: All copies of proxies.
        begins: For each call and rank: (actor of its host, number) of the call's begin.
        ends: For each call and rank: clock of the operations that happen before the call's end.
    """

    accesses: dict[Address, list[Access]] = field(default_factory=dict)
    packet_puts: dict[Address, list[Access]] = field(default_factory=dict)
    packet_reads: dict[Address, list[Access]] = field(default_factory=dict)
    port_work: list[PortWork] = field(default_factory=list)
    begins: list[dict[int, tuple[int, int]]] = field(default_factory=list)
    ends: list[dict[int, Clock]] = field(default_factory=list)


def check_races(trial: Trial, records: Records) -> None:
    """Raise an error for a data race: two unordered accesses to a piece of a chunk, at least one of which writes.

    Races within a call are reported before those between two calls.

    Raises:
        ProgramError: RACE within a call or CALLS between two, at the line that comes too early.
    """
    found = next(_races(records, within_call=True), None) or next(_races(records, within_call=False), None)
    if found is not None:
        raise _error(trial, records, *found)


def check_packets(trial: Trial, records: Records) -> None:
    """Raise an error for packets that may arrive before the previous ones at their address have been read.

    Raises:
        ProgramError: RACE or CALLS, at the line that puts too early.
    """
    for address, puts in records.packet_puts.items():
        for read, put in zip(records.packet_reads.get(address, ()), puts[1:], strict=False):
            if not read.comes_before(put):
                when, fault = _when(read, put)
                other_way = "give the buffer more stages" if trial.has_loops else "use another chunk"
                raise ProgramError(
                    fault,
                    f"rank {address.rank} may not have read {address} ({at(read.where)}) when rank {put.rank} puts "
                    f"packets there again{when}: these would be lost. Have rank {put.rank} wait before it for a signal "
                    f"that rank {address.rank} gives after the read, or {other_way}",
                    put.where,
                )


def check_port_work(records: Records) -> None:
    """Raise an error for copies of a proxy that may still run when the call ends.

    Raises:
        ProgramError: RACE, at the ``port_put``.
    """
    for work in records.port_work:
        if records.ends[work.call][work.peer][work.target_actor] < work.number:
            raise ProgramError(
                Fault.RACE,
                f"the call may end on rank {work.peer} before the proxy of rank {work.rank} has put {work.target} "
                f"there: signal through the port after it, and have rank {work.peer} wait for that",
                work.where,
            )


def check_calls(trial: Trial, records: Records) -> None:
    """Raise an error for a program in which one rank can be two calls ahead of another.

    The workspace has two copies. The next but one call, which may have another size, uses the same copy again.

    Raises:
        ProgramError: CALLS, at the begin of the program.
    """
    for call, ends in enumerate(records.ends):
        for rank, clock in sorted(ends.items()):
            for other, (host, number) in records.begins[call].items():
                if clock[host] < number:
                    raise ProgramError(
                        Fault.CALLS,
                        f"rank {rank} may end a call before rank {other} has begun it, and so overwrite in the next "
                        f"but one what rank {other} still reads: have rank {rank} wait, in each call, for something of "
                        f"rank {other}, or of a rank that has heard from it",
                        trial.program.where,
                    )


def _races(records: Records, *, within_call: bool) -> Iterator[tuple[Access, Access]]:
    for accesses in records.accesses.values():
        for one, other in combinations(accesses, 2):
            concerns = (one.writes or other.writes) and (one.call == other.call) == within_call
            if concerns and not one.comes_before(other) and not other.comes_before(one):
                yield one, other


def _error(trial: Trial, records: Records, one: Access, other: Access) -> ProgramError:
    if one.op is None or other.op is None:
        host, access = (one, other) if one.op is None else (other, one)
        return _with_caller(host, access)
    address = one.address
    if one.call != other.call:
        early, late = sorted((one, other), key=lambda access: access.call)
        advice = _advice(trial, early, late)
        return ProgramError(
            Fault.CALLS,
            f"rank {early.rank} may still {'write' if early.writes else 'read'} {address} of rank {address.rank} "
            f"({at(early.where)}) when rank {late.rank} {_acts(late)}{_when(early, late)[0]}: {advice}",
            late.where,
        )
    if one.writes and other.writes:
        return ProgramError(
            Fault.RACE,
            f"rank {one.rank} ({at(one.where)}) and rank {other.rank} write {address} of rank {address.rank}, and "
            "nothing says which of them last: use a chunk for each, or have the second one wait for a signal behind "
            "the first",
            other.where,
        )
    write, read = (one, other) if one.writes else (other, one)
    if _has_data(records, write, read):
        return ProgramError(
            Fault.RACE,
            f"rank {read.rank} may still read {address} of rank {address.rank} ({at(read.where)}) when rank "
            f"{write.rank} {_acts(write)}: {_advice(trial, read, write)}",
            write.where,
        )
    return ProgramError(
        Fault.RACE,
        f"rank {read.rank} reads {address} of rank {address.rank}, and may not see what rank {write.rank} "
        f"{_acts(write)} ({at(write.where)}): {_announce(write, read)}",
        read.where,
    )


def _with_caller(host: Access, access: Access) -> ProgramError:
    """Build the error for a race with the caller, which accesses its tensors before and after each call.

    ``host``: the caller's access at the begin of this or of the next call.
    """
    owner, address = host.address.rank, access.address
    if isinstance(access.op, ir.PortPut) and not access.writes:
        return ProgramError(
            Fault.RACE,
            f"the proxy of rank {access.rank} may still read {address} when the call ends, and the caller changes it: "
            f"flush({access.op.peer}) behind it",
            access.where,
        )
    if host.call <= access.call:
        return ProgramError(
            Fault.RACE,
            f"rank {access.rank} {_uses(access)} {address} of rank {owner} before it has heard from rank {owner} in "
            f"this call, whose caller may still use it: have rank {owner} signal first, and rank {access.rank} wait. "
            "(Packets are enough for what is stored there, of chunks of the same size.)",
            access.where,
        )
    return ProgramError(
        Fault.RACE,
        f"the call may end on rank {owner} while rank {access.rank} still {_uses(access)} {address} there: have "
        f"rank {access.rank} signal after it, and rank {owner} wait for that",
        access.where,
    )


def _has_data(records: Records, write: Access, read: Access) -> bool:
    """Return whether another write of the call precedes the read. The race then destroys that write's data."""
    return any(
        other.writes
        and other is not write
        and other.call == read.call
        and other.op is not None
        and other.comes_before(read)
        for other in records.accesses[read.address]
    )


def _advice(trial: Trial, early: Access, late: Access) -> str:
    if isinstance(early.op, ir.PortPut) and not early.writes and early.rank == late.rank:
        return f"the proxy reads its source later. flush({early.op.peer}) before"
    if early.rank == late.rank:
        return "groups of a rank run side by side. Use a chunk for each group"
    has_stages = trial.has_loops and is_workspace(trial.buffers[early.address.buffer])
    more = ", or give the buffer more stages" if has_stages else ", or use another chunk"
    return (
        f"have rank {late.rank} wait before it for a signal that rank {early.rank} gives behind its line{more}. "
        "Packets are no such signal"
    )


def _announce(write: Access, read: Access) -> str:
    if write.rank == read.rank:
        return "groups of a rank run side by side. Have one group do both"
    if isinstance(write.op, ir.PortPut):
        return (
            f"have rank {write.rank} signal through the port after it, and rank {read.rank} wait for that signal "
            "before it reads"
        )
    return f"have rank {write.rank} signal after it, and rank {read.rank} wait for that signal before it reads"


def _acts(access: Access) -> str:
    """Return the verb phrase for an access whose address was named already."""
    if not access.writes:
        return "reads it"
    return "stores there" if isinstance(access.op, ir.Store) else "puts there"


def _uses(access: Access) -> str:
    """Return the verb phrase for an access whose address is named after it."""
    if not access.writes:
        return "gets" if isinstance(access.op, ir.Get) else "reads"
    return "stores to" if isinstance(access.op, ir.Store) else "puts to"


def _when(early: Access, late: Access) -> tuple[str, Fault]:
    calls = late.call - early.call
    if calls == 0:
        return "", Fault.RACE
    return (" in the next call" if calls == 1 else " in the next call but one"), Fault.CALLS
