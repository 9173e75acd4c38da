"""Balance check: in every call, signals match waits in number, and packets match their reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from llm_comm.dsl import ir
from llm_comm.dsl.checks.trial import Address, Trial, at
from llm_comm.dsl.errors import Fault, ProgramError
from llm_comm.dsl.ir import Location


class Semaphore(NamedTuple):
    """Receiving end, at rank ``to``, of a semaphore between two ranks."""

    source: int
    to: int
    number: int
    through_port: bool

    def __str__(self) -> str:
        return f"{'port ' if self.through_port else ''}semaphore {self.number}"


Key = TypeVar("Key", bound=Hashable)


@dataclass
class _Uses(Generic[Key]):
    """Lines that give (signal, put) and lines that take (wait, read) by key: (group, line)."""

    gives: dict[Key, list[tuple[int, Location]]] = field(default_factory=lambda: defaultdict(list))
    takes: dict[Key, list[tuple[int, Location]]] = field(default_factory=lambda: defaultdict(list))


def check_balance(trial: Trial) -> None:
    """Raise an error for signals or packets without a match: they would hang, or remain for the next call.

    One group takes what is given, and one group signals a semaphore. The n-th wait therefore takes the n-th signal, in
    whatever order ranks and groups progress.

    Raises:
        ProgramError: UNMATCHED, at a line without a match or at a line of a second group.
    """
    semaphores: _Uses[Semaphore] = _Uses()
    packets: _Uses[Address] = _Uses()
    for (rank, group), acts in zip(trial.actors, trial.acts, strict=True):
        for act in acts:
            op, world = act.op, trial.program.world
            line = (group, op.where)
            if isinstance(op, ir.Signal):
                key = Semaphore(rank, op.peer.on(rank, world), op.semaphore, op.through_port)
                semaphores.gives[key].append(line)
            elif isinstance(op, ir.Wait):
                key = Semaphore(op.peer.on(rank, world), rank, op.semaphore, op.through_port)
                semaphores.takes[key].append(line)
            elif isinstance(op, ir.PutPackets):
                for _, address in trial.addresses(act, rank, op.peer.on(rank, world), op.target, 0):
                    packets.gives[address].append(line)
            elif isinstance(op, ir.ReadPackets):
                for _, address in trial.addresses(act, rank, rank, op.source, 0):
                    packets.takes[address].append(line)
    _check_signals(trial, semaphores)
    _check_packets(packets)


def _check_signals(trial: Trial, uses: _Uses[Semaphore]) -> None:
    for key, waits in uses.takes.items():
        signals = uses.gives.get(key, [])
        if len(waits) > len(signals):
            raise ProgramError(
                Fault.UNMATCHED,
                f"rank {key.to} waits {_times(waits)} for {key} of rank {key.source}, which signals it "
                f"{_times(signals)}{_in_pieces(trial)}: it would "
                f"wait for ever. Have rank {key.source} signal, or wait for another peer",
                waits[len(signals)][1],
            )
    for key, signals in uses.gives.items():
        waits = uses.takes.get(key, [])
        if len(signals) > len(waits):
            raise ProgramError(
                Fault.UNMATCHED,
                f"rank {key.source} signals {key} of rank {key.to} {_times(signals)}, which waits for it "
                f"{_times(waits)}{_in_pieces(trial)}: the next call would take what is left for "
                f"its own. Have rank {key.to} wait, or drop the signal",
                signals[len(waits)][1],
            )
    for key in uses.takes:
        what = f"{key} of ranks {key.source} and {key.to}"
        _refuse_two_groups(trial, what, f"rank {key.source} signals", uses.gives[key])
        _refuse_two_groups(trial, what, f"rank {key.to} waits for", uses.takes[key])


def _refuse_two_groups(trial: Trial, what: str, who: str, lines: list[tuple[int, Location]]) -> None:
    first, line = lines[0]
    for group, where in lines:
        if group != first:
            names = [trial.program.groups[number].name for number in (first, group)]
            raise ProgramError(
                Fault.UNMATCHED,
                f"{what}: {who} it in group {names[0]!r} ({at(line)}) and in group "
                f"{names[1]!r}, so nobody knows which of them takes which signal: give each group a semaphore",
                where,
            )


def _check_packets(uses: _Uses[Address]) -> None:
    for address, reads in uses.takes.items():
        puts = uses.gives.get(address, [])
        if len(reads) > len(puts):
            raise ProgramError(
                Fault.UNMATCHED,
                f"rank {address.rank} reads packets of {address} {_times(reads)}, and they are put there "
                f"{_times(puts)}: it would wait for ever. Have a peer put packets to {address} of rank "
                f"{address.rank}, or read another chunk",
                reads[len(puts)][1],
            )
        if len({group for group, _ in reads}) > 1:
            raise ProgramError(
                Fault.UNMATCHED,
                f"two groups of rank {address.rank} read packets of {address} ({at(reads[0][1])}): one of them "
                "would take what is for the other. Have one group read them",
                next(where for group, where in reads if group != reads[0][0]),
            )
    for address, puts in uses.gives.items():
        reads = uses.takes.get(address, [])
        if len(puts) > len(reads):
            raise ProgramError(
                Fault.UNMATCHED,
                f"packets are put to {address} of rank {address.rank} {_times(puts)}, and it reads them "
                f"{_times(reads)}: a later call would take them for its own. Have rank {address.rank} read them, or "
                "put to another chunk",
                puts[len(reads)][1],
            )


def _times(lines: list[tuple[int, Location]]) -> str:
    return f"{len(lines)} time{'' if len(lines) == 1 else 's'}"


def _in_pieces(trial: Trial) -> str:
    return f" (with {trial.pieces} pieces)" if trial.pieces > 1 else ""
