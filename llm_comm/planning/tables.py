"""Tuning tables: algorithm and tuning parameters by operation and message size."""

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
ALL_TO_ALL = "all_to_all"
ALL_TO_ALL_V = "all_to_all_v"
MOE_DISPATCH = "moe_dispatch"
MOE_COMBINE = "moe_combine"

#: Tuning parameters of DSL programs.
TUNABLES_OF_PROGRAMS = ("blocks", "threads")


class RunnerUp(NamedTuple):
    """Second fastest algorithm in the measurement of a row, with its microseconds a call."""

    algorithm: str
    protocol: str
    us: float


class Row(NamedTuple):
    """Algorithm and tuning parameters for messages of up to ``up_to`` bytes. For operations on shards, ``up_to`` is the
    largest shard.

    A parameter that the algorithm does not have, or that is left to a DSL program, is 0.
    """

    up_to: int
    operation: str
    algorithm: str
    protocol: str
    #: Maximum blocks of a launch; small messages take fewer.
    blocks: int = 0
    #: Maximum threads of a block.
    threads: int = 0
    #: 16-byte lines that a block exchanges with each peer at a time.
    tile_lines: int = 0
    #: Maximum blocks that share a row of the message; fewer if the device permits no more.
    cluster: int = 0
    #: Tiles that a block sends ahead of the one it waits for.
    depth: int = 0
    #: Measured microseconds of a call of ``up_to`` bytes, and the second fastest algorithm. Information for readers of
    #: the table, not used for selection.
    us: float | None = None
    runner_up: RunnerUp | None = None

    @property
    def wire(self) -> str:
        """Value of option ``wire`` that the row's algorithm needs; "" if it is exact."""
        algorithm = registry.operations()[self.operation].find(self.algorithm, self.protocol)
        return "" if algorithm is None else algorithm.wire

    def without_figures(self) -> Row:
        """Return the row without figures. Rows that are equal then behave alike."""
        return self._replace(us=None, runner_up=None)

    def tunables(self) -> dict[str, int]:
        """Return the tuning parameters that the algorithm has, by name. For a program: those that are not left to
        it."""
        if registry.is_program(self.algorithm):
            return {name: getattr(self, name) for name in TUNABLES_OF_PROGRAMS if getattr(self, name)}
        algorithm = registry.operations()[self.operation].find(self.algorithm, self.protocol)
        return {} if algorithm is None else {name: getattr(self, name) for name in algorithm.ranges}

    def entry(self) -> dict[str, Any]:
        """Return the entry of a table file."""
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
    """Convert the core's fields of a row."""
    us, runner_up = fields[9:]
    return Row(*fields[:9], us, None if runner_up is None else RunnerUp(**runner_up))


class MulticastEntry(NamedTuple):
    """Configuration on which ``llm-comm tune --multicast`` has tested algorithms of the NVLink switch.

    A communicator uses multicast by the table only on the same device, driver and world size.
    """

    device: str
    driver: str
    world_size: int
    date: str


class Origin(NamedTuple):
    """Place where the table of a communicator was found."""

    #: One of the constants below.
    kind: str = ""
    #: Path of the file; "" if there is none.
    path: str = ""
    #: True if measured on this kind of device with this number of ranks.
    is_tuned: bool = True
    #: File in the user's directory that would have precedence but cannot be used.
    passed_over: str = ""

    def describe(self) -> str:
        """Return the origin in words, for an operator whose ranks have different tables."""
        where = f"{self.kind} {shortened(self.path)}" if self.path else self.kind
        return f"{where}, as {shortened(self.passed_over)} cannot be used" if self.passed_over else where


BY_OPTION = "option table"
OF_USER = "user's directory"
SHIPPED = "shipped"
NEAREST = "nearest"
GENERAL = "general"
EMULATED = "emulated"
#: Origins of a table that its name does not show.
_SHOWN_AFTER_NAME = (BY_OPTION, OF_USER, SHIPPED)
NOT_TUNED = "not tuned for this machine: run llm-comm tune --install"


class TuningTable(NamedTuple):
    """Rows for one device and world size, by operation (``by_operation``) and size.

    The last row of an operation serves all larger messages. If several rows have one size, the first whose algorithm
    may be used counts. Rows that need the NVLink switch therefore precede the row that does not.
    """

    name: str
    rows: Mapping[str, tuple[Row, ...]]
    max_message_bytes: int
    #: Size in bytes above which messages are not fused: all-reduce and a separate norm are as fast. Default: measured
    #: on 4 H200.
    max_fused_bytes: int = MIB
    #: Size in bytes from which on messages are fused again, by kernels that norm rows while the links carry other rows;
    #: None: there is none.
    large_fused_bytes: int | None = None
    #: Block count above which fewer blocks share a row of a fused call. Between a model's kernels, many small blocks
    #: cost more than they gain (docs/experiments/model_kernels.md). 0: no bound.
    fused_blocks: int = 0
    #: Size in bytes below which symmetric tensors get no special algorithm: exchanging their addresses costs one hop.
    #: One number, or one for each operation. The default is not measured.
    min_symmetric_bytes: int | Mapping[str, int] = MIB
    #: Set in a table that permits NVLink multicast.
    multicast: MulticastEntry | None = None
    #: Rows of linear layers. Rows of one layer are sorted by tokens.
    layers: tuple[LayerRow, ...] = ()
    #: Rows of groups over several nodes. Rows of one number of nodes are sorted by bytes. In a table with node rows,
    #: all other rows apply to the ranks of one node.
    nodes: tuple[NodeRow, ...] = ()
    #: Origin of a communicator's table. Not used for selection.
    origin: Origin = Origin()

    def describe(self) -> str:
        """Return name and origin, with advice if the table is of another machine."""
        words = f"{self.name}, {self.origin.kind}" if self.origin.kind in _SHOWN_AFTER_NAME else self.name
        return words if self.origin.is_tuned else f"{words}; {NOT_TUNED}"

    def symmetric_from(self, operation: str) -> int:
        """Return ``min_symmetric_bytes`` of an operation."""
        least = self.min_symmetric_bytes
        return least if isinstance(least, int) else least.get(operation, MIB)

    def with_rows(self, *rows: Row) -> TuningTable:
        """Return a table in which ``rows`` replace all rows of their operations."""
        found = self._replace(rows={**self.rows, **by_operation(rows)})
        # Programs serve exact messages only, so rows for quantized ones leave theirs.
        exact = {row.operation for row in rows if not row.wire}
        replaced = {of_programs(operation) for operation in exact} - by_operation(rows).keys()
        return found._replace(rows={key: of_key for key, of_key in found.rows.items() if key not in replaced})

    def with_layers(self, rows: Iterable[LayerRow]) -> TuningTable:
        """Return a table in which ``rows`` replace all rows of their layers."""
        rows = tuple(rows)
        replaced = {row.layer() for row in rows}
        return self._replace(layers=(*(row for row in self.layers if row.layer() not in replaced), *rows))

    def with_programs(self, names: Container[str]) -> TuningTable:
        """Return a table without rows of programs other than ``names``."""
        kept = (row for rows in self.rows.values() for row in rows)
        return self._replace(
            rows=by_operation(row for row in kept if not registry.is_program(row.algorithm) or row.algorithm in names)
        )

    def digest(self) -> str:
        """Return the name and a digest of everything that affects selection. Ranks compare it."""
        rows = {key: tuple(row.without_figures() for row in rows) for key, rows in self.rows.items()}
        layers = tuple(row.without_figures() for row in self.layers)
        nodes = tuple(row.without_figures() for row in self.nodes)
        content = repr((sorted(rows.items()), *self._replace(layers=layers, nodes=nodes, origin=Origin())[2:]))
        return f"{self.name} ({hashlib.sha256(content.encode()).hexdigest()[:12]})"


def by_operation(rows: Iterable[Row]) -> dict[str, tuple[Row, ...]]:
    """Group rows by the keys of ``TuningTable.rows``."""
    found: dict[str, tuple[Row, ...]] = {}
    for row in rows:
        algorithm = registry.operations()[row.operation].find(row.algorithm, row.protocol)
        key = row.operation
        if algorithm is not None and algorithm.is_symmetric:
            key = of_symmetric(row.operation)
        if algorithm is not None and algorithm.wire:
            key = of_wire(row.operation, algorithm.wire)
        if registry.is_program(row.algorithm):
            key = of_programs(row.operation)
        found[key] = (*found.get(key, ()), row)
    return found


def of_symmetric(operation: str) -> str:
    """Key of the rows that apply to symmetric tensors."""
    return f"{operation} of symmetric tensors"


def of_wire(operation: str, wire: str) -> str:
    """Key of the rows that apply to messages quantized by option ``wire``."""
    return f"{operation} with wire {wire}"


#: Operations whose rows may name DSL programs.
OPERATIONS_OF_PROGRAMS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)


def of_programs(operation: str) -> str:
    """Key of the rows that name DSL programs (planning/programs.py)."""
    return f"{operation} by programs"


def row_of(rows: tuple[Row, ...], message_bytes: int) -> Row | None:
    """Return the row for a message size. A message above all rows gets the first row of the largest size. None without
    rows."""
    of_largest = next((row for row in rows if row.up_to == rows[-1].up_to), None)
    return next((row for row in rows if message_bytes <= row.up_to), of_largest)
