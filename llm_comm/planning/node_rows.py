"""The part of a tuning table that is about groups over several nodes: by the number of nodes and the bytes of an
all-reduce, how its slices go between the nodes, in which chunks, and whether NCCL over all ranks is slower."""

from __future__ import annotations

from typing import Any, NamedTuple

from llm_comm import _core
from llm_comm.options import MIB

#: Each node gets the slices of all nodes, and adds them.
WHOLE = "all_gather"
#: Each gets a piece of the slices of all nodes, adds that, and hands it out: fewer bytes of three nodes and more, in
#: two steps.
PIECES = "all_to_all"
EXCHANGES = (WHOLE, PIECES)

_MOST_NODES = 1 << 16
_MOST_BYTES = 1 << 60
#: Of a slice, up to which the first exchange is expected to be faster: reasoned, not measured
#: (docs/experiments/nodes.md).
_WHOLE_SLICE = 64 * 1024
#: Up to which 2PH is expected to be faster than NCCL over all ranks, by the most nodes that it holds for: there too.
_WON_BY_NODES = ((2, 2 * MIB), (4, MIB // 2), (_MOST_NODES, MIB // 8))


class NodeRow(NamedTuple):
    """How an all-reduce of up to ``up_to`` bytes goes over so many nodes."""

    nodes: int
    up_to: int
    #: One of ``EXCHANGES``.
    exchange: str
    #: Larger messages are cut in chunks of so many bytes: the exchange of one runs beside the phases in the node of the
    #: next. 0: they are not.
    chunk_bytes: int
    #: Than NCCL over all ranks, where both were measured. A message is served up to the first row that is not.
    is_faster: bool
    #: Of ``up_to`` bytes: microseconds a call, and those of NCCL. They are for people who read a table; nothing is
    #: chosen by them.
    us: float | None = None
    nccl_us: float | None = None

    def without_figures(self) -> NodeRow:
        """What is chosen by."""
        return self._replace(us=None, nccl_us=None)

    def describe(self) -> str:
        """How the slices go, for plans and people: "all_gather, chunks of 262144 bytes"."""
        return self.exchange if self.chunk_bytes == 0 else f"{self.exchange}, chunks of {self.chunk_bytes} bytes"

    def entry(self) -> dict[str, Any]:
        """What a file says of it."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class NodeRows(NamedTuple):
    """The rows of a table for one number of nodes, sorted by size, and where they are from."""

    rows: tuple[NodeRow, ...]
    origin: str

    @property
    def limit(self) -> int:
        """Larger messages are declined, in bytes; 0: all are."""
        limit = 0
        for row in self.rows:
            if not row.is_faster:
                break
            limit = row.up_to
        return limit

    def find(self, message_bytes: int) -> NodeRow:
        """The row of a message; the last one where it is larger than all: an option may permit that."""
        return next((row for row in self.rows if message_bytes <= row.up_to), self.rows[-1])


def rows_for(rows: tuple[NodeRow, ...], name: str, nodes: int, ranks_of_node: int) -> NodeRows:
    """What a table says of so many nodes, or what is expected where it says nothing.

    Args:
        rows: Of the table.
        name: Of the table.
        nodes: How many there are.
        ranks_of_node: Ranks of each.
    """
    found = tuple(row for row in rows if row.nodes == nodes)
    if found:
        return NodeRows(found, name)
    return NodeRows(general_rows(nodes, ranks_of_node), "general rows, reasoned, not measured")


def general_rows(nodes: int, ranks_of_node: int = _core.max_world_size) -> tuple[NodeRow, ...]:
    """Rows where nothing has been measured: by the model of docs/experiments/nodes.md. It expects nothing of chunks up
    to the sizes at which NCCL over all ranks wins."""
    won = next(nbytes for most, nbytes in _WON_BY_NODES if nodes <= most)
    whole = won if nodes == 2 else min(won, _WHOLE_SLICE * ranks_of_node)
    rows = [NodeRow(nodes, whole, WHOLE, 0, is_faster=True)]
    if whole < won:
        rows.append(NodeRow(nodes, won, PIECES, 0, is_faster=True))
    elif nodes > 2:
        # Of larger messages, where an option has them served.
        rows.append(NodeRow(nodes, _MOST_BYTES, PIECES, 0, is_faster=False))
    return tuple(rows)
