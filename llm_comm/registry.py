"""Registry of operations and algorithms, as Python named tuples of the core's descriptors (``csrc/algorithms``)."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from llm_comm import _core
from llm_comm.errors import guess, quoted

#: Prefix of a DSL program's name where an option or table names it instead of an algorithm.
PROGRAM_PREFIX = "dsl:"
_PROGRAM = re.compile(rf"(?a:{PROGRAM_PREFIX}\w+)")
_MAX_PROGRAM = 200


class Range(NamedTuple):
    """Allowed values of a tunable."""

    least: int
    most: int
    is_power_of_two: bool

    def takes(self, value: int) -> bool:
        """Return whether ``value`` is allowed."""
        return self.least <= value <= self.most and not (self.is_power_of_two and value & (value - 1))


class Algorithm(NamedTuple):
    """One algorithm of an operation, with one protocol.

    Attributes:
        number: Index in the core.
        operation: Name of its operation.
        name, protocol: Identification in tables and texts, together with the operation.
        title: Name in errors.
        data_types: Names of the data types with kernels.
        ranges: Tunables with their allowed values.
        is_symmetric: Peers access the tensors of a call directly, so these must be in symmetric memory.
        uses_multimem: Kernels use NVLink multicast (SwitchChannel), which the ranks must have set up.
        sums_in_switch: The switch computes sums, in no defined order. Requires the option ``sum: any``.
        ranks_may_differ: Each rank asks the switch for its own sum, so results may differ bitwise between ranks.
        wire: Value of option ``wire`` that permits the algorithm, whose ranks exchange quantized values; "" if it
            exchanges the tensor's own type.
        needs_row: Selected only by an option or a row of a table (AlgorithmInfo in csrc/algorithms/algorithm.h).
    """

    number: int
    operation: str
    name: str
    protocol: str
    title: str
    data_types: tuple[str, ...]
    ranges: dict[str, Range]
    is_symmetric: bool = False
    uses_multimem: bool = False
    sums_in_switch: bool = False
    ranks_may_differ: bool = False
    wire: str = ""
    needs_row: bool = False

    @property
    def is_by_proxy(self) -> bool:
        """True if a host proxy thread enqueues the copies. Only an option or a row of a table selects such an
        algorithm.

        It can deadlock: if the process fills the GPU's queue, frees memory or first uses a kernel meanwhile, the copies
        wait for the kernel that waits for them (docs/experiments/channels.md).
        """
        return self.protocol == "Port"

    @property
    def needs(self) -> tuple[str, ...]:
        """Requirements of the algorithm, in words; empty for most."""
        found = {
            "symmetric tensors": self.is_symmetric,
            "NVLink multicast": self.uses_multimem,
            "sum=any": self.sums_in_switch,
            f"wire={self.wire}": bool(self.wire),
            "a row or option": self.needs_row and not self.wire,
        }
        return tuple(what for what, is_needed in found.items() if is_needed)


class Operation(NamedTuple):
    """One operation.

    Attributes:
        name, title: Name in programs, and name in texts.
        buffers: Names of the tensors of a call, in order.
        outputs: Buffers that are written.
        optional: Buffers that may be omitted.
        parameters: Names of the numeric parameters of a call, in order.
        row_multiple: For an operation on rows: the row length is a multiple of this. Else 0.
        max_row: For an operation on rows: largest row length in elements. Else 0.
        algorithms: Algorithms in the order of the registry.
    """

    name: str
    title: str
    buffers: tuple[str, ...]
    outputs: frozenset[str]
    optional: frozenset[str]
    parameters: tuple[str, ...]
    row_multiple: int
    max_row: int
    algorithms: tuple[Algorithm, ...]

    @property
    def has_shards(self) -> bool:
        """True if each rank has a shard of a tensor, with sizes given by the parameters (csrc/algorithms/shards.h)."""
        return self.parameters[:2] == ("rows", "size_0")

    @property
    def bounds_parts(self) -> bool:
        """True if the count bounds parts whose sizes are in device memory (csrc/algorithms/all_to_all_v)."""
        return self.parameters[:1] == ("row_bytes",)

    def takes_rows_of(self, elements: int) -> bool:
        """Return whether rows of ``elements`` elements are supported. An operation without rows supports 0 only."""
        if self.row_multiple == 0:
            return elements == 0
        return 0 < elements <= self.max_row and elements % self.row_multiple == 0

    def why_not_rows(self, elements: int) -> str:
        """Return why rows of ``elements`` elements are not supported, or ""."""
        if self.takes_rows_of(elements):
            return ""
        if self.row_multiple == 0:
            return f"rows of {elements} elements: {self.name} knows no rows"
        return f"rows of {elements} elements: they must have a multiple of {self.row_multiple} up to {self.max_row}"

    def find(self, algorithm: str, protocol: str) -> Algorithm | None:
        """Return the algorithm with this name and protocol, or None."""
        return next((a for a in self.algorithms if (a.name, a.protocol) == (algorithm, protocol)), None)


@functools.cache
def data_types() -> dict[str, int]:
    """Return the element size in bytes of each data type, in the core's order."""
    return _core.data_types()


@functools.cache
def operations() -> dict[str, Operation]:
    """Return the operations by name, in the order of the registry."""
    algorithms = [
        Algorithm(
            number=found.number,
            operation=found.operation,
            name=found.name,
            protocol=found.protocol,
            title=found.title,
            data_types=tuple(found.data_types),
            ranges={name: Range(*found.ranges[name]) for name in found.tunables},
            is_symmetric=found.symmetric != 0,
            uses_multimem=found.uses_multimem,
            sums_in_switch=found.sums_in_switch,
            ranks_may_differ=found.ranks_may_differ,
            wire=found.wire,
            needs_row=found.needs_row,
        )
        for found in _core.algorithms()
    ]
    return {
        found.name: Operation(
            name=found.name,
            title=found.title,
            buffers=tuple(found.buffers),
            outputs=frozenset(found.outputs),
            optional=frozenset(found.optional),
            parameters=tuple(found.parameters),
            row_multiple=found.row_multiple,
            max_row=found.max_row,
            algorithms=tuple(algorithm for algorithm in algorithms if algorithm.operation == found.name),
        )
        for found in _core.operations()
    }


def algorithm_names() -> tuple[str, ...]:
    """Return the names of all algorithms of all operations, without duplicates."""
    return tuple(dict.fromkeys(a.name for operation in operations().values() for a in operation.algorithms))


def is_program(name: Any) -> bool:
    """Return whether ``name`` has the form of a DSL program's name. The program need not be registered."""
    return isinstance(name, str) and len(name) <= _MAX_PROGRAM and _PROGRAM.fullmatch(name) is not None


def why_not_a_name(name: Any) -> str:
    """Return why ``name`` cannot name a program or a group of blocks, or "". Names appear in errors, logs and
    sources."""
    most = _MAX_PROGRAM - len(PROGRAM_PREFIX)
    if isinstance(name, str) and 0 < len(name) <= most and name.isprintable():
        return ""
    return f"is {quoted(name)}; it must have 1 to {most} characters, all of them printable"


def why_not_known(what: str, name: Any, valid: Iterable[str]) -> str:
    """Return why ``name`` is not among ``valid``, with a guess and the valid names, or "". ``what`` is the kind of
    name."""
    known = tuple(dict.fromkeys(valid))
    if name in known:
        return ""
    return f"{what} is {quoted(name)}{guess(str(name), known)}; valid: {', '.join(known) or 'none'}"
