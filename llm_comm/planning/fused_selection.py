"""Which kernel runs a fused all-reduce + residual add + RMSNorm: ``selection`` for rows instead of elements.

A row is spread over a cluster of blocks that exchange their sums of squares through shared memory (sm_90 and later;
elsewhere a block has a row for itself).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llm_comm.config import MIB, Config
from llm_comm.planning.selection import (
    LINE_BYTES,
    MAX_BLOCK_THREADS,
    FusedRow,
    TuningRow,
    TuningTable,
    message_limit,
    slot_bytes,
)

MAX_HIDDEN = 16384
ELEMENT_BYTES = 2  # of bf16 and fp16
ELEMENTS_PER_LINE = LINE_BYTES // ELEMENT_BYTES
#: kChunkLines in csrc/kernels/fused/args.cuh: tiles and segments are whole chunks.
CHUNK_LINES = 8
WARP_THREADS = 32
#: Of a block of two-shot, and of one that walks over several tiles: those kernels need more registers
#: (kMaxTwoShotThreads and kMaxLoopThreads there).
MAX_TWO_SHOT_THREADS = 512
MAX_LOOP_THREADS = 512


class DeviceLimits(NamedTuple):
    """What a device lets a launch have."""

    #: Blocks of a cluster: 1 where it has no clusters.
    max_cluster: int
    sm_count: int
    #: Threads of two-shot for which an SM has registers (65536): 80 each.
    two_shot_threads: int = 768


@dataclass(frozen=True)
class FusedPlan:
    """What ``Communicator.all_reduce_add_rms_norm`` runs.

    Attributes:
        algorithm: ``"one_shot"``, ``"two_shot"``, ``"none"`` where there are no rows, or ``"declined"``.
        protocol: ``"LL"``, or ``"none"``.
        blocks: Blocks of a launch.
        threads: Threads of a block.
        tile_lines: Lines of 16 bytes that a block exchanges with each peer at a time.
        cluster: Blocks that share a row.
        depth: Tiles sent ahead of the one waited for.
        chunks: Launches that the message takes.
        chunk_rows: Rows of all launches but the last.
        message_bytes: Size of the message.
        reason: Why this plan.
    """

    algorithm: str
    protocol: str
    blocks: int
    threads: int
    tile_lines: int
    cluster: int
    depth: int
    chunks: int
    chunk_rows: int
    message_bytes: int
    reason: str


def without_kernel(algorithm: str, message_bytes: int, why: str) -> FusedPlan:
    """The plan of a message that is ``"declined"``, or for which there is nothing to do (``"none"``)."""
    return FusedPlan(algorithm, "none", 0, 0, 0, 0, 0, 0, 0, message_bytes, why)


def why_not_rows(hidden: int) -> str:
    """Why rows of ``hidden`` elements are not served, or ""."""
    if hidden <= 0 or hidden % ELEMENTS_PER_LINE or hidden > MAX_HIDDEN:
        return f"rows of {hidden} elements: they must have a multiple of {ELEMENTS_PER_LINE} up to {MAX_HIDDEN}"
    return ""


def select_fused(
    rows: int, hidden: int, world_size: int, table: TuningTable, config: Config, limits: DeviceLimits
) -> FusedPlan:
    """The plan for ``rows`` rows of ``hidden`` elements of 2 bytes.

    The same on every rank that has the same table, config and limits.
    """
    message_bytes = rows * hidden * ELEMENT_BYTES
    limit = message_limit(table, config)
    why = why_not_rows(hidden)
    if why:
        return without_kernel("declined", message_bytes, why)
    if world_size == 1:
        return without_kernel("declined", message_bytes, "one rank: nothing to fuse with")
    if rows == 0:
        return without_kernel("none", 0, "no rows")
    if message_bytes > limit:
        return without_kernel("declined", message_bytes, f"more than max_message_bytes={limit}")
    if message_bytes > table.max_fused_bytes:
        why = f"more than max_fused_bytes={table.max_fused_bytes} of {table.name}: two kernels are as fast"
        return without_kernel("declined", message_bytes, why)

    candidates = table.fused or derive_fused_rows(table.rows)
    row = next((row for row in candidates if message_bytes <= row.up_to), candidates[-1])
    algorithm = row.algorithm if config.algorithm == "auto" else config.algorithm
    row_lines = hidden // ELEMENTS_PER_LINE
    segment = math.ceil(row_lines / (CHUNK_LINES * world_size)) * CHUNK_LINES
    span, row_slot_lines = (
        (row_lines, world_size * row_lines) if algorithm == "one_shot" else (segment, 2 * world_size * segment)
    )
    chunk_rows = slot_bytes(config) // LINE_BYTES // row_slot_lines
    launch_rows = min(rows, chunk_rows)
    span_chunks = math.ceil(span / CHUNK_LINES)
    # A block that gets more of the row than the table has in mind may have more threads.
    most_of_kernel, resident_threads = (
        (MAX_TWO_SHOT_THREADS, limits.two_shot_threads)
        if algorithm == "two_shot"
        else (MAX_BLOCK_THREADS, MAX_BLOCK_THREADS)
    )
    most_threads = min(row.threads if row.cluster <= limits.max_cluster else MAX_BLOCK_THREADS, most_of_kernel)
    chunk_threads = CHUNK_LINES * world_size

    def threads_of(cluster: int) -> int:
        return _whole_warps(math.ceil(span_chunks / cluster) * chunk_threads)

    def is_enough(cluster: int) -> bool:
        threads = threads_of(cluster)
        runs_at_once = resident_clusters(limits, cluster, threads, resident_threads)
        return threads <= most_threads and runs_at_once >= launch_rows

    cluster = min(row.cluster, limits.max_cluster, 1 << int(math.log2(span_chunks)))
    while (cluster - 1) * math.ceil(span_chunks / cluster) >= span_chunks:
        cluster //= 2  # the last block would have nothing
    while cluster > 1 and launch_rows * cluster > table.fused_blocks and is_enough(cluster // 2):
        cluster //= 2
    most_clusters = min(launch_rows, max(1, row.blocks // cluster))
    tile_chunks = math.ceil(span_chunks / cluster)
    threads = threads_of(cluster)
    # All blocks run at once, as far as can be told: that does not rest on the order in which a device starts clusters.
    clusters = min(most_clusters, resident_clusters(limits, cluster, threads, resident_threads))
    if clusters < launch_rows or threads > most_threads:
        tile_chunks = max(1, min(tile_chunks, min(most_threads, MAX_LOOP_THREADS) // chunk_threads))
        threads = _whole_warps(tile_chunks * chunk_threads)
        clusters = max(1, min(most_clusters, resident_clusters(limits, cluster, threads, MAX_LOOP_THREADS)))
    return FusedPlan(
        algorithm=algorithm,
        protocol="LL",
        blocks=cluster * clusters,
        threads=threads,
        tile_lines=CHUNK_LINES * tile_chunks,
        cluster=cluster,
        depth=row.depth,
        chunks=math.ceil(rows / chunk_rows),
        chunk_rows=chunk_rows,
        message_bytes=message_bytes,
        reason=f"{table.name}, fused, up to {row.up_to} bytes"
        + ("" if table.fused else " (derived from all_reduce, not measured)")
        + ("" if config.algorithm == "auto" else f"; algorithm forced to {algorithm}"),
    )


def resident_clusters(limits: DeviceLimits, cluster: int, threads: int, resident_threads: int) -> int:
    """Clusters of ``cluster`` blocks that run at once, by estimate.

    An SM has registers for ``resident_threads``, so for as many blocks of ``threads`` as those make. A cluster lies
    within a GPC: of the 18 SMs that one of an H100 has, 2 may be left over. On a GPU with fewer SMs in some GPC the
    rest of the clusters start when others have ended, in the order of their numbers, as blocks of a plain grid do.
    """
    sm_count = limits.sm_count if cluster == 1 else limits.sm_count * 16 // 18
    return sm_count * (resident_threads // threads) // cluster


def _whole_warps(threads: int) -> int:
    return math.ceil(threads / WARP_THREADS) * WARP_THREADS


def derive_fused_rows(rows: Sequence[TuningRow]) -> tuple[FusedRow, ...]:
    """Rows for fused operations where none have been measured: the algorithm of the plain all-reduce at each size.

    One-shot receives the row from every rank: it takes as many blocks as a cluster can have, so that they are small,
    which the plain kernels' tables prefer too. Two-shot has 1/N of that to do, and takes smaller clusters where there
    are more rows than SMs.
    """
    derived: list[FusedRow] = []
    for row in rows:
        for up_to in (min(row.up_to, MIB), row.up_to):
            if derived and up_to <= derived[-1].up_to:
                continue
            if row.algorithm == "one_shot":
                fused = FusedRow(up_to, "one_shot", 1056, MAX_BLOCK_THREADS, 16, 0)
            else:
                small = FusedRow(up_to, "two_shot", 1056, MAX_TWO_SHOT_THREADS, 8, 0)
                fused = small if up_to <= MIB else FusedRow(up_to, "two_shot", 1056, MAX_LOOP_THREADS, 4, 1)
            if derived and derived[-1]._replace(up_to=up_to) == fused:
                derived.pop()
            derived.append(fused)
    return tuple(derived)
