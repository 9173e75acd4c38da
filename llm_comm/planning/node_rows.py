"""Rows of a tuning table for groups over several nodes.

A row is found by the number of nodes and the size of the all-reduce. It says how slices are exchanged between nodes, in
which chunks, and whether NCCL over all ranks is slower.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llm_comm import _core
from llm_comm.options import MIB

#: Exchange: each node receives the slices of all nodes and sums them.
WHOLE = "all_gather"
#: Exchange in two steps: each node receives a piece of all nodes' slices, sums it, and sends the sum to all. From three
#: nodes on, this moves fewer bytes than WHOLE.
PIECES = "all_to_all"
EXCHANGES = (WHOLE, PIECES)

_MOST_NODES = 1 << 16
_MOST_BYTES = 1 << 60
#: Slice size in bytes up to which WHOLE is expected to be faster. Modelled, not measured (docs/experiments/nodes.md).
_WHOLE_SLICE = 64 * 1024
#: (most nodes, bytes): message size up to which 2PH is expected to be faster than NCCL over all ranks. Modelled, not
#: measured (docs/experiments/nodes.md).
_WON_BY_NODES = ((2, 2 * MIB), (4, MIB // 2), (_MOST_NODES, MIB // 8))


class NodeRow(NamedTuple):
    """Exchange between ``nodes`` nodes for all-reduces of up to ``up_to`` bytes."""

    nodes: int
    up_to: int
    #: One of ``EXCHANGES``.
    exchange: str
    #: Chunk size in bytes of larger messages. The exchange of a chunk overlaps with the in-node phases of the next. 0:
    #: no chunks.
    chunk_bytes: int
    #: Faster than NCCL over all ranks, where both were measured. Messages are served up to the first row with False.
    is_faster: bool
    #: Microseconds of a call of ``up_to`` bytes, and of NCCL. Information for readers of the table, not used for
    #: selection.
    us: float | None = None
    nccl_us: float | None = None

    def without_figures(self) -> NodeRow:
        """Return the row without figures, which do not affect selection."""
        return self._replace(us=None, nccl_us=None)

    def describe(self) -> str:
        """Return the exchange in words, such as "all_gather, chunks of 262144 bytes"."""
        return self.exchange if self.chunk_bytes == 0 else f"{self.exchange}, chunks of {self.chunk_bytes} bytes"

    def entry(self) -> dict[str, Any]:
        """Return the entry of a table file."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class NodeRows(NamedTuple):
    """Rows of a table for one number of nodes, sorted by size, and their origin."""

    rows: tuple[NodeRow, ...]
    origin: str

    @property
    def limit(self) -> int:
        """Size in bytes above which messages are declined; 0 declines all."""
        limit = 0
        for row in self.rows:
            if not row.is_faster:
                break
            limit = row.up_to
        return limit

    def find(self, message_bytes: int) -> NodeRow:
        """Return the row of a message. An option can permit messages above all rows: these get the last one."""
        return next((row for row in self.rows if message_bytes <= row.up_to), self.rows[-1])


def rows_for(rows: tuple[NodeRow, ...], name: str, nodes: int, ranks_of_node: int) -> NodeRows:
    """Return the rows of a table for ``nodes`` nodes, or general rows if the table has none.

    Args:
        rows: Rows of the table.
        name: Name of the table.
        nodes: Number of nodes.
        ranks_of_node: Ranks of each node.
    """
    found = tuple(row for row in rows if row.nodes == nodes)
    if found:
        return NodeRows(found, name)
    return NodeRows(general_rows(nodes, ranks_of_node), "general rows, reasoned, not measured")


def general_rows(nodes: int, ranks_of_node: int = _core.max_world_size) -> tuple[NodeRow, ...]:
    """Return rows by the model of docs/experiments/nodes.md, for node counts that were not measured.

    The rows have no chunks: the model shows no gain from chunks at sizes where 2PH beats NCCL over all ranks.
    """
    won = next(nbytes for most, nbytes in _WON_BY_NODES if nodes <= most)
    whole = won if nodes == 2 else min(won, _WHOLE_SLICE * ranks_of_node)
    rows = [NodeRow(nodes, whole, WHOLE, 0, is_faster=True)]
    if whole < won:
        rows.append(NodeRow(nodes, won, PIECES, 0, is_faster=True))
    elif nodes > 2:
        # larger messages, which an option can permit
        rows.append(NodeRow(nodes, _MOST_BYTES, PIECES, 0, is_faster=False))
    return tuple(rows)
