"""Contents of chunks: which inputs a value is the sum of, and whether outputs hold what the operation requires."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from llm_comm.dsl.checks.trial import Address, Trial, at
from llm_comm.dsl.errors import Fault, ProgramError
from llm_comm.dsl.ir import Location, Operation, Program, Space


class Leaf(NamedTuple):
    """Piece of a chunk of a rank's input to a call."""

    rank: int
    chunk: int
    piece: int
    call: int


@dataclass(frozen=True)
class Content:
    """Content of a value: the sum of ``leaves``, in the order given by ``form``. Equal forms are bitwise equal."""

    leaves: tuple[Leaf, ...]
    form: Hashable


@dataclass(frozen=True)
class _Written:
    content: Content | None
    piece: int
    call: int
    where: Location


class Contents:
    """Tracker of data through the memory of all ranks. Content None is unknown: its error has been reported already.

    Errors are kept until ``check``, because data races are reported first and may be their cause.
    """

    def __init__(self, trial: Trial) -> None:
        self._faults: list[tuple[int, int, ProgramError]] = []
        self._trial = trial
        self._memory: dict[Address, _Written] = {}
        self._first_results: dict[tuple[Address, int], tuple[int, _Written]] = {}

    def check(self) -> None:
        """Raise the first error: of the first call, and within it of the first rank.

        Raises:
            ProgramError: UNWRITTEN or CONTENT.
        """
        if self._faults:
            raise min(self._faults, key=lambda fault: fault[:2])[2]

    def load(self, address: Address, piece: int, call: int, where: Location) -> Content | None:
        """Return the content of an address that is read for ``piece``."""
        if self._trial.buffers[address.buffer].space is Space.INPUT:
            leaf = Leaf(address.rank, address.chunk, piece, call)
            return Content((leaf,), leaf)
        written = self._memory.get(address)
        if written is None or written.call != call:
            self._report(
                (call, address.rank),
                Fault.UNWRITTEN,
                f"{address} of rank {address.rank} is read, and no line before has written it in this call",
                where,
            )
            return None
        if written.piece != piece:
            self._report(
                (call, address.rank),
                Fault.CONTENT,
                f"{address} of rank {address.rank} is read for piece {piece}, and holds piece {written.piece} "
                f"({at(written.where)}): give {address.buffer} more stages than pieces lie between "
                "the two lines",
                where,
            )
            return None
        return written.content

    def store(self, address: Address, piece: int, call: int, content: Content | None, where: Location) -> None:
        """Record that ``content`` was written to an address for ``piece``."""
        self._memory[address] = _Written(content, piece, call, where)

    def add(self, operands: Iterable[tuple[int, Content | None]], rank: int, where: Location) -> Content | None:
        """Return the sum that ``rank`` computes. Operands are (rank label, content), summed in the order of labels."""
        known = []
        for label, content in sorted(operands, key=lambda operand: operand[0]):
            if content is None:
                return None
            known.append((label, content))
        leaves = [leaf for _, content in known for leaf in content.leaves]
        message = _wrong_sum(known, leaves)
        if message:
            self._report((leaves[0].call, rank), Fault.CONTENT, f"on rank {rank} {message}", where)
            return None
        form = known[0][1].form if len(known) == 1 else tuple(content.form for _, content in known)
        return Content(tuple(sorted(leaves)), form)

    def check_output(self, rank: int, call: int) -> None:
        """Report errors in the output of a rank at the end of a call."""
        program = self._trial.program
        for index, piece, address in self._trial.tensor_addresses(Space.OUTPUT, rank):
            written = self._memory.get(address)
            if written is None or written.call != call:
                self._report(
                    (call, rank),
                    Fault.CONTENT,
                    f"{address} of rank {rank} is never written: store or put what rank {rank} is to get",
                    program.where,
                )
            elif written.content is not None:
                wanted = expected(program, self._trial, rank, index, piece, call)
                if written.content.leaves != wanted:
                    self._report(
                        (call, rank), Fault.CONTENT, _wrong(address, written.content.leaves, wanted), written.where
                    )
                elif program.operation is Operation.ALL_REDUCE:
                    self._check_alike(address, rank, call, written)

    def _check_alike(self, address: Address, rank: int, call: int, written: _Written) -> None:
        """Report an all-reduce output that two ranks have summed in different orders."""
        first_rank, first = self._first_results.setdefault((address._replace(rank=0), call), (rank, written))
        if first.content and written.content and first.content.form != written.content.form:
            one, other = sorted((first_rank, rank))
            self._report(
                (call, rank),
                Fault.CONTENT,
                f"ranks {one} and {other} add up {address} in different order: their results would differ in the "
                "last bits. Have one rank add up each chunk and send it to the others, or have all add in one sum",
                written.where,
            )

    def _report(self, when: tuple[int, int], fault: Fault, message: str, where: Location) -> None:
        """Keep an error. ``when``: call and rank."""
        self._faults.append((*when, ProgramError(fault, message, where)))


def expected(program: Program, trial: Trial, rank: int, index: int, piece: int, call: int) -> tuple[Leaf, ...]:
    """Return the inputs whose sum ``output[index]`` of a rank must be."""
    chunks = next(buffer.chunks for buffer in trial.buffers.values() if buffer.space is Space.OUTPUT)
    world = program.world
    share = chunks // world
    if program.operation is Operation.ALL_REDUCE:
        sources = [(source, index) for source in range(world)]
    elif program.operation is Operation.REDUCE_SCATTER:
        sources = [(source, rank * chunks + index) for source in range(world)]
    elif program.operation is Operation.ALL_GATHER:
        sources = [(index // share, index % share)]
    elif program.operation is Operation.ALL_TO_ALL:
        sources = [(index // share, rank * share + index % share)]
    else:
        sources = [(program.root, index)]
    return tuple(Leaf(source, of_source, piece, call) for source, of_source in sources)


def _wrong_sum(operands: list[tuple[int, Content]], leaves: list[Leaf]) -> str:
    """Return what is wrong with a sum of labelled operands, or ""."""
    for label, content in operands:
        ranks = sorted({leaf.rank for leaf in content.leaves})
        if label not in ranks:
            return (
                f"the operand labelled with rank {label} is of rank(s) {ranks}, so ranks would add up in different "
                "order: label it with the rank it is of"
            )
    for leaf in leaves:
        if leaves.count(leaf) > 1:
            return f"the sum has input[{leaf.chunk}] of rank {leaf.rank} {leaves.count(leaf)} times: add each rank once"
        if leaf.chunk != leaves[0].chunk:
            return (
                f"the sum adds input[{leaf.chunk}] of rank {leaf.rank} to input[{leaves[0].chunk}] of rank "
                f"{leaves[0].rank}: add the same chunk of all ranks"
            )
    return ""


def _wrong(address: Address, found: tuple[Leaf, ...], wanted: tuple[Leaf, ...]) -> str:
    text = f"{address} of rank {address.rank} is to hold {_names(wanted)}, and holds {_names(found)}"
    lacking = sorted({leaf.rank for leaf in wanted} - {leaf.rank for leaf in found})
    if lacking and len(wanted) > 1:
        return f"{text}: rank(s) {lacking} are lacking. Add them"
    return f"{text}: store another value, or to another chunk"


def _names(leaves: tuple[Leaf, ...]) -> str:
    by_index: dict[int, list[int]] = {}
    for leaf in leaves:
        by_index.setdefault(leaf.chunk, []).append(leaf.rank)
    return " and ".join(
        f"input[{index}] of rank {ranks[0]}" if len(ranks) == 1 else f"the sum of input[{index}] of ranks {ranks}"
        for index, ranks in by_index.items()
    )
