"""The part of ``llm-comm tune`` about groups over several nodes: how the slices of an all-reduce go between them, in
which chunks, and up to which size that is faster than NCCL over all ranks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from llm_comm.bench import timing, tune_tables
from llm_comm.bench.agreement import on_all, require_alike
from llm_comm.bench.choosing import is_slower, last_of_alike
from llm_comm.bench.comparison import sizes as doublings
from llm_comm.bench.measuring import Budget, schedule_of
from llm_comm.bench.report import Progress, format_bytes
from llm_comm.bench.timing import Schedule
from llm_comm.bench.tune_record import Record
from llm_comm.bench.tune_subjects import ELEMENT_BYTES
from llm_comm.communicator import Communicator
from llm_comm.config import Config
from llm_comm.errors import ConfigError
from llm_comm.options import MIB
from llm_comm.planning.node_rows import EXCHANGES, WHOLE, NodeRow
from llm_comm.planning.tables import TuningTable

_NO_LIMIT = 1 << 40
#: From a quarter of a MiB on, below which latencies bound an exchange, and at most so many of a message.
_CHUNK_BYTES = tuple((MIB << power) // 4 for power in range(10))
_MOST_CHUNKS = 16


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError where the options name what is measured within a machine alone."""
    given = [f"--{name.replace('_', '-')}" for name in ("layers", "silu_layers", "fp8_layers") if getattr(args, name)]
    if args.multicast:
        given.append("--multicast")
    if given:
        raise ConfigError(f"{', '.join(given)}: the ranks are on several nodes; measure that on one of them")
    if "all-reduce" not in args.operations:
        asked = ",".join(args.operations) or "none"
        raise ConfigError(
            f"--operations {asked}: the ranks are on several nodes, over which all-reduce alone is measured"
        )


def check_table(comm: Communicator, group: dist.ProcessGroup) -> None:
    """Whether the rows of a node, which are installed with those found here, may be taken for measured. Collective.

    Raises:
        ConfigError: They are of other machines on some rank. On all ranks alike.
    """
    table = comm.table_of_node

    def of_this_rank() -> dict[str, str]:
        # The phases of a node of one rank go by no row.
        if not table.origin.is_tuned and comm.nodes < comm.world_size:
            raise ConfigError(
                f"--install: rank {comm.rank} goes by a table of other machines ({table.describe()}), whose rows "
                "would be installed as if they had been measured: tune a node by itself first, or give --out FILE in "
                "place of --install"
            )
        return {}

    require_alike(of_this_rank, group)


def run(comm: Communicator, group: dist.ProcessGroup, args: argparse.Namespace, record: Record, config: Config) -> bool:
    """Measures, and writes what the options say: rank 0 the files, the first rank of each node into its user's
    directory. Collective.

    Returns:
        Whether everything was written.

    Raises:
        ConfigError: As of ``check`` and ``check_table``.
    """
    check(args)
    if args.install:
        check_table(comm, group)
    of_node = comm.table_of_node
    found, left = measure(comm, group, args)
    comm.use_table(of_node)
    record.nodes = [row.entry() for row in found]
    # Of rank 0: one table on all nodes, which compare what they go by.
    environment: list[Any] = [record.report(is_complete=left == 0)]
    dist.broadcast_object_list(environment, src=dist.get_global_rank(group, 0), group=group)
    ranks_of_node = comm.world_size // comm.nodes
    table = with_rows(of_node, last_of_alike(found))._replace(name="")
    written = True
    if comm.rank_in_node == 0 and found:
        out = args.out if comm.rank == 0 else None
        written = tune_tables.write(table, comm.device, ranks_of_node, args, environment[0], config, out=out)
    if comm.rank == 0:
        written = record.write(is_complete=left == 0) and written
    return written


def measure(comm: Communicator, group: dist.ProcessGroup, args: argparse.Namespace) -> tuple[list[NodeRow], int]:
    """Times all candidates at powers of two times the smallest size, and NCCL over all ranks. Collective.

    Returns:
        The best row of each size, with its figures, and how many sizes were not measured, because the time was up.
    """
    found: list[NodeRow] = []
    progress = Progress(enabled=comm.rank == 0)
    sizes = list(doublings(args.min - args.min % ELEMENT_BYTES, args.max))  # of whole elements
    budget = Budget(args.seconds, group)
    for size in budget.take(sizes):
        schedule = schedule_of(args.method, args.reps, size)
        row = best_of(comm, group, size, schedule, progress)
        progress.clear()
        if comm.rank == 0:
            print(line(row), flush=True)
        found.append(row)
    if budget.left and comm.rank == 0:
        print(f"--seconds {args.seconds} are over: {budget.left} of {len(sizes)} sizes were not measured")
    return found, budget.left


def candidates(nodes: int, size: int) -> list[NodeRow]:
    """Rows worth measuring for messages of a size, simplest first. Of two nodes both exchanges move the same bytes."""
    chunks = [0, *(chunk for chunk in _CHUNK_BYTES if 2 * chunk <= size <= _MOST_CHUNKS * chunk)]
    exchanges = (WHOLE,) if nodes == 2 else EXCHANGES
    return [NodeRow(nodes, size, exchange, chunk, is_faster=True) for chunk in chunks for exchange in exchanges]


def best_of(comm: Communicator, group: dist.ProcessGroup, size: int, schedule: Schedule, progress: Progress) -> NodeRow:
    """The fastest candidate for messages of a size, or an earlier one that cannot be told from it. Collective."""
    x = torch.randn(size // ELEMENT_BYTES, device=comm.device).to(torch.bfloat16)
    out = torch.empty_like(x)
    measured: list[NodeRow] = []
    rows = candidates(comm.nodes, size)
    for number, row in enumerate(rows, 1):
        progress.show(f"tuning between nodes, {format_bytes(size)}: candidate {number} of {len(rows)}")
        comm.use_table(comm.table_of_node._replace(nodes=(row._replace(up_to=_NO_LIMIT),)))
        call = partial(comm.all_reduce, x, out)
        on_all(call, group)  # what is wrong with it is told better outside of a capture
        us = timing.time_graph(call, lambda: None, schedule, group).us
        measured.append(row._replace(us=round(us, 3)))
    progress.show(f"tuning between nodes, {format_bytes(size)}: NCCL")
    call = partial(dist.all_reduce, x, group=group)
    on_all(call, group)
    nccl_us = round(timing.time_graph(call, x.zero_, schedule, group).us, 3)
    return choose(measured, nccl_us)


def choose(measured: Sequence[NodeRow], nccl_us: float) -> NodeRow:
    """The row of a size, of candidates that say their times, simplest first."""
    best = min(us for row in measured if (us := row.us) is not None)
    chosen = next(row for row in measured if row.us is not None and not is_slower(row.us, best))
    assert chosen.us is not None
    return chosen._replace(is_faster=not is_slower(chosen.us, nccl_us), nccl_us=nccl_us)


def with_rows(table: TuningTable, rows: Sequence[NodeRow]) -> TuningTable:
    """A table with these in place of all rows of their numbers of nodes."""
    replaced = {row.nodes for row in rows}
    return table._replace(nodes=(*(row for row in table.nodes if row.nodes not in replaced), *rows))


def line(row: NodeRow) -> str:
    """What is printed of a size."""
    beside = "" if row.is_faster else "   not faster: left to the engine"
    return f"{format_bytes(row.up_to):>10} {row.us:8.2f} us  {row.describe()}   NCCL {row.nccl_us:8.2f}{beside}"
