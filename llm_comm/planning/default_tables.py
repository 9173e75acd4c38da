"""Rows where nothing has been measured. Those of the core (csrc/host/table_choice.cpp) serve the NCCL library too."""

from __future__ import annotations

from llm_comm import _core
from llm_comm.options import MIB
from llm_comm.planning.node_rows import PIECES, WHOLE, NodeRow
from llm_comm.planning.tables import FUSED, Row, TuningTable, by_operation

#: For each SM; what is best on an H200.
_FUSED_BLOCKS_PER_SM = 3


def general_table(world_size: int, sm_count: int) -> TuningTable:
    """The table of devices without one of their own."""
    limit, rows = _core.general_table(world_size, sm_count)
    return TuningTable("general table", _by_operation(rows), limit, fused_blocks=_FUSED_BLOCKS_PER_SM * sm_count)


def emulated_table() -> TuningTable:
    """The table of emulated GPUs."""
    limit, rows = _core.emulated_table()
    nodes = tuple(
        NodeRow(count, up_to, exchange if count > 2 else WHOLE, chunk_bytes, is_faster=True)
        for count in range(2, 9)
        for up_to, exchange, chunk_bytes in (
            (32 * 1024, WHOLE, 0),
            (64 * 1024, PIECES, 0),
            (MIB, PIECES, 32 * 1024),
            (64 * MIB, PIECES, 4 * MIB),
        )
    )
    return TuningTable(
        "emulated", _by_operation(rows), limit, max_fused_bytes=limit, min_symmetric_bytes=0, nodes=nodes
    )


def rows_of_parts(operation: str, sm_count: int) -> tuple[Row, ...]:
    """Rows of all-gather or reduce-scatter where none have been measured, by the bytes of the largest rank's part."""
    return tuple(Row(*fields) for fields in _core.rows_of_parts(operation, sm_count))


def _by_operation(rows: list[_core.RowFields]) -> dict[str, tuple[Row, ...]]:
    return by_operation(Row(*fields) for fields in rows)


# One-shot receives the row from every rank: it takes as many blocks as a cluster can have, so that they are small, as
# the plain kernels' tables prefer them too. Two-shot has 1/N of that to do, and takes smaller clusters where there are
# more rows than SMs.
_FUSED_ONE_SHOT = Row(0, FUSED, "one_shot", "LL", blocks=1056, threads=1024, cluster=16)
_FUSED_TWO_SHOT = Row(0, FUSED, "two_shot", "LL", blocks=1056, threads=512, cluster=8)
_FUSED_TWO_SHOT_OF_MANY = _FUSED_TWO_SHOT._replace(cluster=4, depth=1)


def derive_fused_rows(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Rows for fused operations where none have been measured: the algorithm of the plain all-reduce at each size."""
    derived: list[Row] = []
    for row in rows:
        for up_to in sorted({min(row.up_to, MIB), row.up_to}):
            if derived and up_to <= derived[-1].up_to:
                continue
            if row.algorithm == "one_shot":
                fused = _FUSED_ONE_SHOT
            else:
                fused = _FUSED_TWO_SHOT if up_to <= MIB else _FUSED_TWO_SHOT_OF_MANY
            if derived and derived[-1]._replace(up_to=0) == fused:
                derived.pop()
            derived.append(fused._replace(up_to=up_to))
    return tuple(derived)
