"""The part of ``llm-comm tune`` that measures the fused all-reduce + residual add + RMSNorm."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from llm_comm.bench import timing
from llm_comm.bench.choosing import ONE_SHOT_MAX_SENT, choose
from llm_comm.bench.report import Progress, format_bytes
from llm_comm.bench.timing import Schedule
from llm_comm.communicator import Communicator
from llm_comm.config import MIB
from llm_comm.planning import selection
from llm_comm.planning.fused_selection import CHUNK_LINES, ELEMENTS_PER_LINE, MAX_LOOP_THREADS
from llm_comm.planning.selection import FusedRow, TuningTable

_CALLS = 20
_EPS = 1e-5
#: Where a block has a row's tile for itself the kernels differ little above this: what the largest size says holds on.
LARGEST = 16 * MIB
_FEWEST_THREADS = 64  # that a row of a table may ask for


class Measured(NamedTuple):
    """Time of one candidate, in microseconds a call."""

    row: FusedRow
    us: float


class Found(NamedTuple):
    """The best candidate of each size, and all of them as JSON."""

    best: list[Measured]
    everything: list[dict[str, Any]]


def measure(comm: Communicator, group: dist.ProcessGroup, args: argparse.Namespace) -> Found:
    """Times all candidates for rows of ``args.hidden``. Collective.

    Raises:
        ConfigError: At some size there is nothing to measure.
    """
    schedule = Schedule.by(args.method, _CALLS, args.reps)
    sm_count = torch.cuda.get_device_properties(comm.device).multi_processor_count
    progress = Progress(enabled=comm.rank == 0)
    found = Found([], [])
    for rows in row_counts(args.min, min(args.max, LARGEST), args.hidden):
        size = rows * args.hidden * 2
        progress.show(f"tuning fused {format_bytes(size)}")
        x, residual, out, residual_out = (
            torch.randn(rows, args.hidden, device=comm.device, dtype=torch.bfloat16) for _ in range(4)
        )
        weight = torch.ones(args.hidden, device=comm.device, dtype=torch.bfloat16)
        call = partial(comm.all_reduce_add_rms_norm, x, residual, weight, _EPS, out=out, residual_out=residual_out)
        measured: list[Measured] = []
        refusals: list[str] = []
        plans = set()
        for row in candidates(rows, args.hidden, comm.world_size, sm_count):
            comm.use_table(TuningTable("tune", comm.table.rows, 1 << 40, (row,), 1 << 40))
            plan = comm.plan_fused(x, weight)
            if plan in plans:
                continue
            if plan.algorithm == "declined":
                refusals.append(plan.reason)
                continue
            plans.add(plan)
            call()  # what is wrong with it is told better outside of a capture
            measured.append(Measured(row, timing.time_graph(call, _nothing, schedule, group).us))
        found.best.append(choose(measured, size, refusals))
        found.everything.extend({"bytes": size, "us": round(m.us, 3), **m.row._asdict()} for m in measured)
    progress.clear()
    return found


def _nothing() -> None:
    """Outputs are separate tensors: a call leaves its inputs as they were."""


def row_counts(smallest: int, largest: int, hidden: int) -> Iterator[int]:
    """Powers of two and the numbers halfway between, of rows whose message lies within the bounds, in bytes."""
    rows = 1
    while rows * hidden * 2 <= largest:
        for count in (rows, rows * 3 // 2) if rows > 1 else (1,):
            if smallest <= count * hidden * 2 <= largest:
                yield count
        rows *= 2


def candidates(rows: int, hidden: int, world_size: int, sm_count: int) -> Iterator[FusedRow]:
    """Rows of a table worth measuring at a size, simplest first."""
    size = rows * hidden * 2
    row_lines = hidden // ELEMENTS_PER_LINE
    segment = math.ceil(row_lines / (CHUNK_LINES * world_size)) * CHUNK_LINES
    for algorithm, span in (("one_shot", row_lines), ("two_shot", segment)):
        if algorithm == "one_shot" and size * (world_size - 1) > ONE_SHOT_MAX_SENT:
            continue
        for cluster in (1, 2, 4, 8, 16):
            if cluster * CHUNK_LINES > span and cluster > 1:
                break  # a block would have nothing
            whole = max(_FEWEST_THREADS, math.ceil(span / (CHUNK_LINES * cluster)) * CHUNK_LINES * world_size)
            for threads in dict.fromkeys((whole, whole // 2, MAX_LOOP_THREADS)):
                if not _FEWEST_THREADS <= threads <= min(whole, selection.MAX_BLOCK_THREADS) or whole > 4 * threads:
                    continue
                resident = max(1, sm_count * selection.MAX_BLOCK_THREADS // threads)
                loops = threads < whole
                for blocks in dict.fromkeys((min(8 * sm_count, 4 * resident), resident, sm_count)):
                    if blocks < cluster or rows * cluster > 16 * blocks:
                        continue
                    yield FusedRow(size, algorithm, blocks, threads, cluster, 0)
                    if loops or rows * cluster > blocks:
                        yield FusedRow(size, algorithm, blocks, threads, cluster, 1)
                    if rows * cluster <= blocks // 2:
                        break  # smaller grids would be the same


def report_best(found: Found) -> None:
    """Prints a line for each size."""
    for row, us in found.best:
        shape = f"blocks<={row.blocks} threads<={row.threads} cluster={row.cluster} depth={row.depth}"
        print(f"{format_bytes(row.up_to):>10} {us:8.2f} us  fused {row.algorithm}  {shape}")
