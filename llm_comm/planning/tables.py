"""Tuning tables: by operation and message size, which algorithm runs, and with which tunables."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

from llm_comm import _core, registry
from llm_comm.errors import shortened
from llm_comm.options import MIB
from llm_comm.planning.layers import LayerRow
from llm_comm.planning.node_rows import NodeRow

ALL_REDUCE = "all_reduce"
FUSED = "all_reduce_add_rms_norm"
ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"

#: What a row may say of how a program of llm_comm.dsl is launched.
TUNABLES_OF_PROGRAMS = ("blocks", "threads")


class RunnerUp(NamedTuple):
    """The fastest of the other algorithms where a row was measured, and its microseconds a call."""

    algorithm: str
    protocol: str
    us: float


class Row(NamedTuple):
    """How an operation runs on messages of up to ``up_to`` bytes: of an operation on parts, the largest rank's part. A
    tunable that the algorithm does not have is 0, and so is one that is left to a program."""

    up_to: int
    operation: str
    algorithm: str
    protocol: str
    #: Most blocks of a launch; a message with less to do takes fewer.
    blocks: int = 0
    #: Most threads of a block.
    threads: int = 0
    #: 16-byte lines that a block exchanges with each peer at a time.
    tile_lines: int = 0
    #: Most blocks that share a row of the message; fewer where the device permits no more.
    cluster: int = 0
    #: Tiles that a block sends ahead of the one it waits for.
    depth: int = 0
    #: Of a message of ``up_to`` bytes, where that was measured: microseconds a call, and what came next. They are for
    #: people who read a table; nothing is chosen by them.
    us: float | None = None
    runner_up: RunnerUp | None = None

    def without_figures(self) -> Row:
        """What is chosen by: rows that are alike in it run alike."""
        return self._replace(us=None, runner_up=None)

    def tunables(self) -> dict[str, int]:
        """Those that the algorithm has, by name; of a program, those that are not left to it."""
        if registry.is_program(self.algorithm):
            return {name: getattr(self, name) for name in TUNABLES_OF_PROGRAMS if getattr(self, name)}
        algorithm = registry.operations()[self.operation].find(self.algorithm, self.protocol)
        return {} if algorithm is None else {name: getattr(self, name) for name in algorithm.ranges}

    def entry(self) -> dict[str, Any]:
        """What a file says of it."""
        figures: dict[str, Any] = {} if self.us is None else {"us": self.us}
        if self.runner_up is not None:
            figures["runner_up"] = self.runner_up._asdict()
        return {
            "operation": self.operation,
            "up_to": self.up_to,
            "algorithm": self.algorithm,
            "protocol": self.protocol,
            **self.tunables(),
            **figures,
        }


def row_of_fields(fields: _core.RowFields) -> Row:
    """A row from the fields that the core has of it."""
    us, runner_up = fields[9:]
    return Row(*fields[:9], us, None if runner_up is None else RunnerUp(**runner_up))


class MulticastEntry(NamedTuple):
    """On what ``llm-comm tune --multicast`` has tested algorithms by the NVLink switch: a communicator uses multicast
    where it is on the same."""

    device: str
    driver: str
    world_size: int
    date: str


class Origin(NamedTuple):
    """Where the table of a communicator was found."""

    #: One of the words below.
    kind: str = ""
    #: Its file; empty where there is none.
    path: str = ""
    #: Whether it was measured on this kind of device, and on as many of them.
    is_tuned: bool = True
    #: A file in the user's directory that would have been taken but cannot be used.
    passed_over: str = ""

    def describe(self) -> str:
        """For people who look for the reason why ranks differ."""
        where = f"{self.kind} {shortened(self.path)}" if self.path else self.kind
        return f"{where}, as {shortened(self.passed_over)} cannot be used" if self.passed_over else where


BY_OPTION = "option table"
OF_USER = "user's directory"
SHIPPED = "shipped"
NEAREST = "nearest"
GENERAL = "general"
EMULATED = "emulated"
#: Those that the name of a table does not say already.
_TOLD_BESIDE_NAME = (BY_OPTION, OF_USER, SHIPPED)
NOT_TUNED = "not tuned for this machine: run llm-comm tune --install"


class TuningTable(NamedTuple):
    """Rows for one device and world size, by operation (``by_operation``) and size. An operation's last row serves all
    larger messages. Of several rows of one size the first counts whose algorithm can be used: those by the NVLink
    switch stand before one that needs none."""

    name: str
    rows: Mapping[str, tuple[Row, ...]]
    max_message_bytes: int
    #: Larger messages are not fused: an all-reduce and a norm of its own are as fast. The default is what was found on
    #: 4 H200s.
    max_fused_bytes: int = MIB
    #: Where fused rows would take more blocks than this, fewer of them share a row: among the kernels of a model, many
    #: small blocks cost more than they gain (docs/experiments/model_kernels.md). 0: any number.
    fused_blocks: int = 0
    #: Smaller messages run alike whether or not their tensors are symmetric: to tell the peers where they lie takes a
    #: hop. For all operations, or by operation. The default is not measured.
    min_symmetric_bytes: int | Mapping[str, int] = MIB
    #: Of a table that permits NVLink multicast.
    multicast: MulticastEntry | None = None
    #: Of linear layers, those of one layer sorted by tokens.
    layers: tuple[LayerRow, ...] = ()
    #: Of groups over several nodes, those of one number of nodes sorted by bytes. The other rows are then of the ranks
    #: of one node.
    nodes: tuple[NodeRow, ...] = ()
    #: Of a table that a communicator goes by. Nothing is chosen by it.
    origin: Origin = Origin()

    def describe(self) -> str:
        """Its name and origin, and what to do where it is that of another machine."""
        words = f"{self.name}, {self.origin.kind}" if self.origin.kind in _TOLD_BESIDE_NAME else self.name
        return words if self.origin.is_tuned else f"{words}; {NOT_TUNED}"

    def symmetric_from(self, operation: str) -> int:
        """``min_symmetric_bytes`` of an operation."""
        least = self.min_symmetric_bytes
        return least if isinstance(least, int) else least.get(operation, MIB)

    def with_rows(self, *rows: Row) -> TuningTable:
        """A table with these in place of all rows of their operations."""
        found = self._replace(rows={**self.rows, **by_operation(rows)})
        replaced = {of_programs(row.operation) for row in rows} - by_operation(rows).keys()
        return found._replace(rows={key: of_key for key, of_key in found.rows.items() if key not in replaced})

    def with_layers(self, rows: Iterable[LayerRow]) -> TuningTable:
        """A table with these in place of all rows of their layers."""
        rows = tuple(rows)
        replaced = {row.layer() for row in rows}
        return self._replace(layers=(*(row for row in self.layers if row.layer() not in replaced), *rows))

    def with_programs(self, names: Container[str]) -> TuningTable:
        """A table without the rows of all other programs."""
        kept = (row for rows in self.rows.values() for row in rows)
        return self._replace(
            rows=by_operation(row for row in kept if not registry.is_program(row.algorithm) or row.algorithm in names)
        )

    def digest(self) -> str:
        """The name, and a digest of what is chosen by: what ranks compare."""
        rows = {key: tuple(row.without_figures() for row in rows) for key, rows in self.rows.items()}
        layers = tuple(row.without_figures() for row in self.layers)
        nodes = tuple(row.without_figures() for row in self.nodes)
        content = repr((sorted(rows.items()), *self._replace(layers=layers, nodes=nodes, origin=Origin())[2:]))
        return f"{self.name} ({hashlib.sha256(content.encode()).hexdigest()[:12]})"


def by_operation(rows: Iterable[Row]) -> dict[str, tuple[Row, ...]]:
    """Rows as a table has them."""
    found: dict[str, tuple[Row, ...]] = {}
    for row in rows:
        algorithm = registry.operations()[row.operation].find(row.algorithm, row.protocol)
        is_symmetric = algorithm is not None and algorithm.is_symmetric
        key = of_symmetric(row.operation) if is_symmetric else row.operation
        if registry.is_program(row.algorithm):
            key = of_programs(row.operation)
        found[key] = (*found.get(key, ()), row)
    return found


def of_symmetric(operation: str) -> str:
    """By which a table has the rows of an operation that run in place of its others where tensors are symmetric."""
    return f"{operation} of symmetric tensors"


#: Whose rows may name programs.
OPERATIONS_OF_PROGRAMS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)


def of_programs(operation: str) -> str:
    """By which a table has the rows of an operation that name programs of llm_comm.dsl (planning/programs.py)."""
    return f"{operation} by programs"


def row_of(rows: tuple[Row, ...], message_bytes: int) -> Row | None:
    """The row that serves a message, the first of the largest size if it is larger than all; None where there are no
    rows."""
    of_largest = next((row for row in rows if row.up_to == rows[-1].up_to), None)
    return next((row for row in rows if message_bytes <= row.up_to), of_largest)
