"""The registry of the core as Python sees it: the operations, the algorithms of each, and what a table may say of them.

Whatever is said here comes from the descriptors in ``csrc/algorithms``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from llm_comm import _core
from llm_comm.errors import guess, quoted

#: Before the name of a program of llm_comm.dsl, where an option or a table names one in place of an algorithm.
PROGRAM_PREFIX = "dsl:"
_PROGRAM = re.compile(rf"(?a:{PROGRAM_PREFIX}\w+)")
_MAX_PROGRAM = 200


class Range(NamedTuple):
    """What a tunable may be."""

    least: int
    most: int
    is_power_of_two: bool

    def takes(self, value: int) -> bool:
        """Whether it may be ``value``."""
        return self.least <= value <= self.most and not (self.is_power_of_two and value & (value - 1))


class Algorithm(NamedTuple):
    """One algorithm of an operation, with one protocol.

    Attributes:
        number: By which the core knows it.
        operation: That it does.
        name, protocol: By which tables and people know it, beside the operation.
        title: In errors.
        data_types: Names of the types that it has kernels for.
        ranges: Its tunables, and what each may be.
        is_symmetric: Peers access tensors of a call themselves, which have to lie in symmetric memory.
        by_switch: Its kernels use NVLink multicast (SwitchChannel): only where the ranks have set that up.
        sums_in_switch: Its sums are made in the switch, not in rank order: only with the option ``sum: any``.
        ranks_may_differ: Each rank asks the switch for its own sum, so ranks may get other bits.
        needs_row: Only an option or a row of a table chooses it (AlgorithmInfo in csrc/algorithms/algorithm.h).
    """

    number: int
    operation: str
    name: str
    protocol: str
    title: str
    data_types: tuple[str, ...]
    ranges: dict[str, Range]
    is_symmetric: bool = False
    by_switch: bool = False
    sums_in_switch: bool = False
    ranks_may_differ: bool = False
    needs_row: bool = False

    @property
    def is_by_proxy(self) -> bool:
        """A thread of the host enqueues its copies. Only an option or a row of a table chooses such an algorithm:
        where the process has filled the queue of the GPU, frees memory or first uses a kernel meanwhile, the copies
        wait for the very kernel that waits for them (docs/experiments/channels.md)."""
        return self.protocol == "Port"

    @property
    def needs(self) -> tuple[str, ...]:
        """What has to be there for it to run, in words for people; nothing for most."""
        found = {
            "symmetric tensors": self.is_symmetric,
            "NVLink multicast": self.by_switch,
            "sum=any": self.sums_in_switch,
            "a row or option": self.needs_row,
        }
        return tuple(what for what, is_needed in found.items() if is_needed)


class Operation(NamedTuple):
    """What is computed.

    Attributes:
        name, title: By which programs and people know it.
        buffers: Names of the tensors of a call, in order.
        outputs, optional: Those that are written, and those that may be left out.
        parameters: Names of the numbers of a call, in order.
        row_multiple, max_row: Of an operation that works by rows: their elements are a multiple of the first and at
            most the second. Else 0.
        algorithms: In the order of the registry.
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
    def has_parts(self) -> bool:
        """Whether each rank has a part of a tensor, of a size that the parameters say (csrc/algorithms/parts.h)."""
        return self.parameters[:2] == ("rows", "size_0")

    def takes_rows_of(self, elements: int) -> bool:
        """Whether it works on rows of so many elements; 0 for an operation that knows no rows."""
        if self.row_multiple == 0:
            return elements == 0
        return 0 < elements <= self.max_row and elements % self.row_multiple == 0

    def why_not_rows(self, elements: int) -> str:
        """Why it does not work on rows of so many elements, or ""."""
        if self.takes_rows_of(elements):
            return ""
        if self.row_multiple == 0:
            return f"rows of {elements} elements: {self.name} knows no rows"
        return f"rows of {elements} elements: they must have a multiple of {self.row_multiple} up to {self.max_row}"

    def find(self, algorithm: str, protocol: str) -> Algorithm | None:
        """The algorithm of that name and protocol, if there is one."""
        return next((a for a in self.algorithms if (a.name, a.protocol) == (algorithm, protocol)), None)


@functools.cache
def data_types() -> dict[str, int]:
    """Bytes of an element by the type's name, in the order in which the core numbers them."""
    return _core.data_types()


@functools.cache
def operations() -> dict[str, Operation]:
    """The operations by name, in the order of the registry."""
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
            by_switch=found.by_switch,
            sums_in_switch=found.sums_in_switch,
            ranks_may_differ=found.ranks_may_differ,
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
    """The names of all algorithms, whatever they do, once each."""
    return tuple(dict.fromkeys(a.name for operation in operations().values() for a in operation.algorithms))


def is_program(name: Any) -> bool:
    """Whether an option or a table means a program by it, of those that are registered or not."""
    return isinstance(name, str) and len(name) <= _MAX_PROGRAM and _PROGRAM.fullmatch(name) is not None


def why_not_a_name(name: Any) -> str:
    """Why a program, or a group of blocks, cannot be called that, or "". Names stand in errors, logs and sources."""
    most = _MAX_PROGRAM - len(PROGRAM_PREFIX)
    if isinstance(name, str) and 0 < len(name) <= most and name.isprintable():
        return ""
    return f"is {quoted(name)}; it must have 1 to {most} characters, all of them printable"


def why_not_known(what: str, name: Any, valid: Iterable[str]) -> str:
    """Why there is no such name, with a guess and what is valid; "" if there is."""
    known = tuple(dict.fromkeys(valid))
    if name in known:
        return ""
    return f"{what} is {quoted(name)}{guess(str(name), known)}; valid: {', '.join(known) or 'none'}"
