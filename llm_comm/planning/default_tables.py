"""What is chosen where nothing has been measured."""

from __future__ import annotations

from llm_comm.planning.node_rows import PIECES, WHOLE, NodeRow
from llm_comm.planning.tables import ALL_GATHER, ALL_REDUCE, FUSED, REDUCE_SCATTER, Row, TuningTable, by_operation
from llm_comm.sizes import MIB

#: For each SM; what is best on an H200.
_FUSED_BLOCKS_PER_SM = 3


def general_table(world_size: int, sm_count: int) -> TuningTable:
    """For devices without a table of their own.

    One-shot sends (N-1) x bytes in one hop, two-shot 2 (N-1)/N x bytes in two: by the H200 tables they break even near
    400 KiB / (N-1), which is the time of a hop on NVLink. Tiles and grids are the H200's too.
    """
    one_shot = 400 * 1024 // max(1, world_size - 1)
    rows = (
        Row(one_shot, ALL_REDUCE, "one_shot", "LL", blocks=2 * sm_count, tile_lines=16),
        Row(512 * 1024, ALL_REDUCE, "two_shot", "LL", blocks=4 * sm_count, tile_lines=16),
        Row(64 * MIB, ALL_REDUCE, "two_shot", "LL", blocks=8 * sm_count, tile_lines=32),
    )
    return TuningTable("general table", by_operation(rows), 8 * MIB, fused_blocks=_FUSED_BLOCKS_PER_SM * sm_count)


def emulated_table() -> TuningTable:
    """Small blocks: an emulated GPU has few lanes, and what matters is that every path is taken."""
    rows = (
        Row(8 * 1024, ALL_REDUCE, "one_shot", "LL", blocks=2, tile_lines=16),
        Row(64 * MIB, ALL_REDUCE, "two_shot", "LL", blocks=4, tile_lines=16, depth=1),
        Row(8 * 1024, FUSED, "one_shot", "LL", blocks=4, threads=128, cluster=2),
        Row(64 * MIB, FUSED, "two_shot", "LL", blocks=4, threads=128, cluster=2, depth=1),
        *(
            row
            for operation in (ALL_GATHER, REDUCE_SCATTER)
            for row in (
                Row(8 * 1024, operation, "one_shot", "LL", blocks=2, tile_lines=16),
                Row(64 * MIB, operation, "push_hb", "HB", blocks=4, tile_lines=64, depth=2),
            )
        ),
        Row(64 * MIB, ALL_REDUCE, "two_shot_pull_hb", "HB", blocks=3, tile_lines=16),
        Row(64 * MIB, "all_gather", "direct_push_hb", "HB", blocks=3, tile_lines=16),
    )
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
        "emulated", by_operation(rows), 64 * MIB, max_fused_bytes=64 * MIB, min_symmetric_bytes=0, nodes=nodes
    )


def rows_of_parts(operation: str, sm_count: int) -> tuple[Row, ...]:
    """Rows for all-gather or reduce-scatter where none have been measured, by the bytes of the largest rank's part.

    As measured on two H200, where LL is faster up to 24 MiB, which is about one launch there. Where there are more
    ranks, each has a smaller share of a slot: parts of 4 MiB take one launch with six.
    """
    sms = max(1, sm_count)
    return (
        Row(64 * 1024, operation, "one_shot", "LL", blocks=sms, tile_lines=32),
        Row(MIB, operation, "one_shot", "LL", blocks=8 * sms, tile_lines=32),
        Row(4 * MIB, operation, "one_shot", "LL", blocks=8 * sms, tile_lines=128),
        Row(64 * MIB, operation, "push_hb", "HB", blocks=sms, tile_lines=1024, depth=2),
    )


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
