"""Subjects of ``llm-comm tune``: operations, sizes to measure, and candidate rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from llm_comm import _core, registry
from llm_comm.bench import OPERATIONS
from llm_comm.bench.collectives import LOSSY_ALL_GATHER, PRIMITIVES
from llm_comm.bench.fused import add_rms_norm, as_engines_run
from llm_comm.bench.programs import rows_for
from llm_comm.communicator import Communicator
from llm_comm.config import Config
from llm_comm.options import MIB
from llm_comm.planning.multicast import why_not
from llm_comm.planning.plan import Plan, Problem
from llm_comm.planning.programs import NO_PROGRAMS, Kernels
from llm_comm.planning.selection import wire_of
from llm_comm.planning.tables import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    FUSED,
    REDUCE_SCATTER,
    Row,
    TuningTable,
    of_symmetric,
    of_wire,
)

#: Size of bf16, in which everything is measured.
ELEMENT_BYTES = 2
_DTYPE, _DATA_TYPE = torch.bfloat16, "bf16"
_EPS = 1e-5
#: Largest fused size measured. The row of the largest size applies to larger messages.
LARGEST_FUSED = 64 * MIB
#: Smallest fused size at which an all-reduce and a norm are timed too. Below, one kernel saves the start of another.
_SEPARATE_FROM = MIB
# Sizes from which NCCL is timed too. The table of all-reduces ends where NCCL wins. For the other operations NCCL's
# times are information only.
_COMPARE_FROM = {ALL_REDUCE: MIB, ALL_GATHER: MIB // 16, REDUCE_SCATTER: MIB // 16, ALL_TO_ALL: MIB // 16}
#: Smallest size measured with symmetric tensors. Below it ordinary memory is expected to be faster: a call on symmetric
#: tensors begins with a hop that carries no data.
SYMMETRIC_FROM = MIB // 16
_ALIGNMENT = 256


Call = Callable[[], object]


@dataclass(frozen=True)
class Bound:
    """Operation with operands of one size.

    Attributes:
        plan: Returns the plan of ``call``.
        call: Runs the operation; the inputs stay unchanged.
        nccl: The same operation by NCCL, and a function that restores its input; None if NCCL is not timed.
        separate: A fused operation by an all-reduce and a norm, and a function to call before; None if it is not timed.
    """

    plan: Callable[[], Plan]
    call: Call
    nccl: tuple[Call, Call] | None = None
    separate: tuple[Call, Call] | None = None


class Subject(Protocol):
    """Operation to tune, on tensors of one kind.

    Attributes:
        operation: Name in the registry.
        key: Key of its rows in a table.
        label: Prefix of sizes and algorithms in output.
        is_symmetric: Tensors are in symmetric memory, and candidates are for such tensors.
        programs: DSL programs among its candidates, by name.
        wire: Value of option ``wire`` that its messages are quantized by; "" for exact ones.
    """

    operation: str
    key: str
    label: str
    is_symmetric: bool
    programs: Mapping[str, Kernels]
    wire: str

    def sizes(self, smallest: int, largest: int) -> Iterator[int]:
        """Yield the message sizes in bytes to measure within the bounds; for operations on shards, of the largest
        shard."""

    def problem(self, size: int, world_size: int) -> Problem:
        """Return the computation of a call of that size."""

    def bind(self, comm: Communicator, group: dist.ProcessGroup, size: int) -> Bound:
        """Return a call of that size. Collective."""


class SymmetricPool:
    """Memory from which all symmetric tensors are cut, for one size after another. A communicator frees no symmetric
    memory once CUDA graphs hold its operations."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = nbytes + _ALIGNMENT
        self._whole: torch.Tensor | None = None

    def tensors(self, comm: Communicator, *counts: int) -> list[torch.Tensor]:
        """Return tensors of ``counts`` elements, one after the other in memory. The first call is collective."""
        if self._whole is None:
            self._whole = comm.empty(self._bytes, torch.uint8)
        found, begin = [], 0
        for count in counts:
            found.append(self._whole[begin : begin + count * ELEMENT_BYTES].view(_DTYPE))
            begin += -(-count * ELEMENT_BYTES // _ALIGNMENT) * _ALIGNMENT
        return found


def doubling_sizes(smallest: int, largest: int) -> Iterator[int]:
    """Yield the doublings of the smallest size and the sizes halfway between, all in whole elements."""
    size = smallest - smallest % ELEMENT_BYTES
    while size <= largest:
        yield size
        halfway = size + size // (2 * ELEMENT_BYTES) * ELEMENT_BYTES
        if size < halfway <= largest:
            yield halfway
        size *= 2


class CollectiveSubject:
    """All-reduce, or all-gather or reduce-scatter of equal shards along the first dimension. Sizes are those of a
    shard.

    Args:
        operation: Key of ``PRIMITIVES``.
        pool: Symmetric memory for results and for inputs of an all-reduce; None: ordinary memory.
        programs: Programs of a communicator to measure as well.
    """

    def __init__(
        self, operation: str, pool: SymmetricPool | None = None, programs: Mapping[str, Kernels] = NO_PROGRAMS
    ) -> None:
        self.operation, self._pool, self.programs, self.wire = operation, pool, programs, ""
        self._primitive = PRIMITIVES[operation]
        self.is_symmetric = pool is not None
        self.key = operation if pool is None else of_symmetric(operation)
        self.label = "" if operation == ALL_REDUCE else f"{operation.replace('_', '-')} "
        self.label += "" if pool is None else "symmetric "

    def sizes(self, smallest: int, largest: int) -> Iterator[int]:
        return doubling_sizes(_from(smallest, self._pool), largest)

    def problem(self, size: int, world_size: int) -> Problem:
        # Where nothing is summed or quantized, bytes are moved, whatever the dtype.
        moves_bytes = self.operation in (ALL_GATHER, ALL_TO_ALL) and not self.wire
        count, data_type = (size, "byte") if moves_bytes else (size // ELEMENT_BYTES, _DATA_TYPE)
        parts = () if self.operation == ALL_REDUCE else (1.0, *[float(count)] * world_size)
        return Problem(self.operation, count, 0, data_type, world_size, parts)

    def bind(self, comm: Communicator, group: dist.ProcessGroup, size: int) -> Bound:
        primitive = self._primitive
        counts = primitive.counts(size // ELEMENT_BYTES, comm.world_size)

        def ordinary(count: int) -> torch.Tensor:
            return torch.empty(count, device=comm.device, dtype=_DTYPE)

        if self._pool is None:
            x, out = map(ordinary, counts)
        elif self.operation == ALL_REDUCE:
            x, out = self._pool.tensors(comm, *counts)
        else:
            x, (out,) = ordinary(counts[0]), self._pool.tensors(comm, counts[1])
        x.normal_()
        nccl: tuple[Call, Call] | None = None
        if self._pool is None and size >= _COMPARE_FROM[self.operation]:
            in_place = self.operation == ALL_REDUCE
            nccl = partial(primitive.by_torch, x, out, group), x.zero_ if in_place else nothing
        return Bound(partial(primitive.plan, comm, x), partial(primitive.run, comm, x, out), nccl)


class QuantizedSubject(CollectiveSubject):
    """All-reduce, all-gather or reduce-scatter of the messages that option ``wire`` quantizes.

    Args:
        operation: Key of ``PRIMITIVES``.
        config: Options of the communicator; ``wire`` is not "none".
        world_size: Number of ranks.
    """

    def __init__(self, operation: str, config: Config, world_size: int) -> None:
        super().__init__(operation)
        if operation == ALL_GATHER:
            self._primitive = LOSSY_ALL_GATHER
        self._config, self._world_size = config, world_size
        self.wire, self.key = config.wire, of_wire(operation, config.wire)
        self.label = f"{config.wire} {self.label}"

    def sizes(self, smallest: int, largest: int) -> Iterator[int]:
        sizes = doubling_sizes(smallest, largest)
        return (size for size in sizes if wire_of(self.problem(size, self._world_size), self._config))


class FusedSubject:
    """All-reduce + residual add + RMSNorm on rows of ``hidden`` elements.

    Args:
        hidden: Elements of a row.
        table: Table by which an all-reduce is chosen that is timed with a separate norm. None: no such pair is timed.
    """

    operation, is_symmetric, programs = FUSED, False, NO_PROGRAMS

    def __init__(self, hidden: int, table: TuningTable | None = None) -> None:
        self._hidden, self._table = hidden, table
        self.key, self.label, self.wire = FUSED, "fused ", ""

    def sizes(self, smallest: int, largest: int) -> Iterator[int]:
        """Yield the sizes of powers of two of rows, and of the numbers halfway between."""
        row_bytes = self._hidden * ELEMENT_BYTES
        largest = min(largest, LARGEST_FUSED)
        rows = 1
        while rows * row_bytes <= largest:
            for count in (rows, rows * 3 // 2) if rows > 1 else (1,):
                if smallest <= count * row_bytes <= largest:
                    yield count * row_bytes
            rows *= 2

    def problem(self, size: int, world_size: int) -> Problem:
        return Problem(self.operation, size // ELEMENT_BYTES, self._hidden, _DATA_TYPE, world_size, (_EPS, 0))

    def bind(self, comm: Communicator, group: dist.ProcessGroup, size: int) -> Bound:
        shape = (size // (self._hidden * ELEMENT_BYTES), self._hidden)
        x, residual, out, residual_out = (torch.randn(shape, device=comm.device, dtype=_DTYPE) for _ in range(4))
        weight = torch.ones(self._hidden, device=comm.device, dtype=_DTYPE)
        fused = comm.all_reduce_add_rms_norm
        call = partial(fused, x, residual, weight, _EPS, out=out, residual_out=residual_out)
        plan = partial(comm.plan_all_reduce_add_rms_norm, x, weight)
        if self._table is None or size < _SEPARATE_FROM:
            return Bound(plan, call)
        norm = as_engines_run(add_rms_norm, comm)

        def separate() -> object:
            if comm.accepts(x):
                return norm(comm.all_reduce(x, out), residual, weight)
            dist.all_reduce(out, group=group)  # as engines do with messages that are too large
            return norm(out, residual, weight)

        return Bound(plan, call, separate=(separate, partial(comm.use_table, self._table)))


class QuantizedFusedSubject(FusedSubject):
    """All-reduce + residual add + RMSNorm of the messages that option ``wire`` quantizes. See ``QuantizedSubject``."""

    def __init__(self, hidden: int, table: TuningTable | None, config: Config) -> None:
        super().__init__(hidden, table)
        self.wire, self._smallest = config.wire, config.wire_min_bytes
        self.key, self.label = of_wire(FUSED, config.wire), f"{config.wire} fused "

    def sizes(self, smallest: int, largest: int) -> Iterator[int]:
        return super().sizes(max(smallest, self._smallest), largest)


def subjects_of(
    names: Sequence[str],
    hidden: int,
    largest: int,
    world_size: int,
    programs: Mapping[str, Kernels] = NO_PROGRAMS,
    config: Config | None = None,
    table: TuningTable | None = None,
) -> list[Subject]:
    """Return the subjects for the names of operations, on symmetric tensors too if there are algorithms for them.

    With option ``wire``, operations that have algorithms for it are measured only where they are quantized.

    Args:
        names: Names from ``llm_comm.bench.OPERATIONS``.
        hidden: Elements of a row of fused operations.
        largest: Largest message in bytes.
        world_size: Number of ranks.
        programs: Programs to measure, on ordinary tensors only: programs do not serve symmetric ones.
        config: Options of the communicator. None: the defaults.
        table: Table in use, by which all-reduces before separate norms are chosen. None: no such pair is timed.
    """
    gathers = "all-gather" in names
    # Memory for the result of an all-gather, or for input and output of an all-reduce.
    pool = SymmetricPool(largest * max(2, world_size if gathers else 0))
    known: dict[str, list[Subject]] = {
        "all-reduce": [CollectiveSubject(ALL_REDUCE, None, programs), CollectiveSubject(ALL_REDUCE, pool)],
        "fused": [FusedSubject(hidden, table)],
        "all-gather": [CollectiveSubject(ALL_GATHER, None, programs), CollectiveSubject(ALL_GATHER, pool)],
        "reduce-scatter": [CollectiveSubject(REDUCE_SCATTER, None, programs)],
        "all-to-all": [CollectiveSubject(ALL_TO_ALL)],
    }
    if config is not None and config.wire != "none":
        has_wire = {
            operation.name: any(algorithm.wire == config.wire for algorithm in operation.algorithms)
            for operation in registry.operations().values()
        }
        known["all-reduce"] = [QuantizedSubject(ALL_REDUCE, config, world_size)]
        for operation in (ALL_GATHER, REDUCE_SCATTER):
            if has_wire[operation]:
                known[operation.replace("_", "-")] = [QuantizedSubject(operation, config, world_size)]
        # An all-reduce before a separate norm would be quantized.
        known["fused"] = [QuantizedFusedSubject(hidden, table, config) if has_wire[FUSED] else FusedSubject(hidden)]
    return [subject for name in OPERATIONS if name in names for subject in known[name]]


def coarse_first(subjects: Sequence[Subject], smallest: int, largest: int) -> list[tuple[Subject, int]]:
    """Return all sizes of all subjects in order of refinement: every eighth size from the largest down, then those
    halfway between, and so on.

    A run that ends early has thereby measured every operation over the whole range, only more coarsely.
    """
    found = []
    for number, subject in enumerate(subjects):
        for step, size in enumerate(reversed(list(subject.sizes(smallest, largest)))):
            fineness = next(level for level, stride in enumerate((8, 4, 2, 1)) if step % stride == 0)
            found.append((fineness, number, size, subject))
    return [(subject, size) for *_, size, subject in sorted(found, key=lambda entry: entry[:3])]


def without_switch(algorithm: registry.Algorithm) -> bool:
    """Return whether an algorithm works without NVLink multicast."""
    return not algorithm.uses_multimem


def admitted_by(comm: Communicator) -> Callable[[registry.Algorithm], bool]:
    """Return a function that tells whether a communicator may use an algorithm that a row names."""
    return lambda algorithm: not why_not(algorithm, comm.config, comm.multicast)


def candidates(
    problem: Problem,
    limits: _core.Limits,
    is_symmetric: bool = False,
    admits: Callable[[registry.Algorithm], bool] = without_switch,
    wire: str = "",
) -> Iterator[Row]:
    """Yield rows to measure for a problem, for every algorithm for tensors of one kind, simplest first.

    Algorithms with port channels are left out: they run only where a row or option names them.

    Args:
        problem: Computation.
        limits: Launch limits of the device.
        is_symmetric: Yield algorithms for symmetric tensors instead of ordinary ones.
        admits: Returns whether an algorithm may be used.
        wire: Yield algorithms that quantize messages to this type. "": only exact ones.
    """
    for algorithm in registry.operations()[problem.operation].algorithms:
        if problem.data_type not in algorithm.data_types or algorithm.is_symmetric != is_symmetric:
            continue
        if algorithm.is_by_proxy or algorithm.wire != wire or not admits(algorithm):
            continue
        for choice in _core.candidates(algorithm.number, problem.for_core(), limits):
            tunables = {name: getattr(choice, name) for name in algorithm.ranges}
            yield Row(problem.message_bytes(), problem.operation, algorithm.name, algorithm.protocol, **tunables)


def candidates_on(comm: Communicator, subject: Subject, size: int) -> Iterator[Row]:
    """Yield rows to measure on a communicator: of permitted algorithms, simplest first, then of programs."""
    problem = subject.problem(size, comm.world_size)
    yield from candidates(problem, comm.limits, subject.is_symmetric, admitted_by(comm), subject.wire)
    yield from rows_for(problem, subject.programs)


def nothing() -> None:
    """Restore nothing: outputs are separate tensors, so a call leaves its inputs unchanged."""


def _from(smallest: int, pool: SymmetricPool | None) -> int:
    """Return the smallest size to measure. With symmetric tensors it is a multiple of the alignment, and usually one
    that is measured with ordinary tensors too."""
    if pool is None:
        return smallest
    while smallest < SYMMETRIC_FROM:
        smallest *= 2
    return -(-smallest // _ALIGNMENT) * _ALIGNMENT
