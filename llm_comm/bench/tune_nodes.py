"""Part of ``llm-comm tune`` for groups over several nodes.

It measures how the slices of an all-reduce are exchanged, in which chunks, and up to which size 2PH beats NCCL over all
ranks.
"""

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
#: Chunk sizes in bytes to measure. Below a quarter of a MiB, latency dominates an exchange.
_CHUNK_BYTES = tuple((MIB << power) // 4 for power in range(10))
_MOST_CHUNKS = 16


def check(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that are measured within a machine only."""
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
    """Check that the in-node rows, which ``--install`` writes together with the new rows, were measured. Collective.

    Raises:
        ConfigError: On some rank the table is of other machines. Raised on all ranks alike.
    """
    table = comm.table_of_node

    def of_this_rank() -> dict[str, str]:
        # In nodes of one rank no phase uses a row.
        if not table.origin.is_tuned and comm.nodes < comm.world_size:
            raise ConfigError(
                f"--install: rank {comm.rank} goes by a table of other machines ({table.describe()}), whose rows "
                "would be installed as if they had been measured: tune a node by itself first, or give --out FILE in "
                "place of --install"
            )
        return {}

    require_alike(of_this_rank, group)


def run(comm: Communicator, group: dist.ProcessGroup, args: argparse.Namespace, record: Record, config: Config) -> bool:
    """Measure and write the results. Rank 0 writes the files; the first rank of each node installs the table.
    Collective.

    Returns:
        True if everything was written.

    Raises:
        ConfigError: See ``check`` and ``check_table``.
    """
    check(args)
    if args.install:
        check_table(comm, group)
    of_node = comm.table_of_node
    found, left = measure(comm, group, args)
    comm.use_table(of_node)
    record.nodes = [row.entry() for row in found]
    # The report of rank 0, so that all nodes install the same table; ranks compare their tables at set-up.
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
    """Time all candidates, and NCCL over all ranks, at doublings of the smallest size. Collective.

    Returns:
        The best row of each size, with figures, and how many sizes were not measured because the time was up.
    """
    found: list[NodeRow] = []
    progress = Progress(enabled=comm.rank == 0)
    sizes = list(doublings(args.min - args.min % ELEMENT_BYTES, args.max))  # whole elements
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
    """Return rows to measure for a message size, simplest first. With two nodes, both exchanges move the same bytes."""
    chunks = [0, *(chunk for chunk in _CHUNK_BYTES if 2 * chunk <= size <= _MOST_CHUNKS * chunk)]
    exchanges = (WHOLE,) if nodes == 2 else EXCHANGES
    return [NodeRow(nodes, size, exchange, chunk, is_faster=True) for chunk in chunks for exchange in exchanges]


def best_of(comm: Communicator, group: dist.ProcessGroup, size: int, schedule: Schedule, progress: Progress) -> NodeRow:
    """Return the fastest candidate for a message size, or an earlier one within the noise. Collective."""
    x = torch.randn(size // ELEMENT_BYTES, device=comm.device).to(torch.bfloat16)
    out = torch.empty_like(x)
    measured: list[NodeRow] = []
    rows = candidates(comm.nodes, size)
    for number, row in enumerate(rows, 1):
        progress.show(f"tuning between nodes, {format_bytes(size)}: candidate {number} of {len(rows)}")
        comm.use_table(comm.table_of_node._replace(nodes=(row._replace(up_to=_NO_LIMIT),)))
        call = partial(comm.all_reduce, x, out)
        on_all(call, group)  # a failure here has a better error than one inside a capture
        us = timing.time_graph(call, lambda: None, schedule, group).us
        measured.append(row._replace(us=round(us, 3)))
    progress.show(f"tuning between nodes, {format_bytes(size)}: NCCL")
    call = partial(dist.all_reduce, x, group=group)
    on_all(call, group)
    nccl_us = round(timing.time_graph(call, x.zero_, schedule, group).us, 3)
    return choose(measured, nccl_us)


def choose(measured: Sequence[NodeRow], nccl_us: float) -> NodeRow:
    """Return the row of a size from measured candidates, simplest first."""
    best = min(us for row in measured if (us := row.us) is not None)
    chosen = next(row for row in measured if row.us is not None and not is_slower(row.us, best))
    assert chosen.us is not None
    return chosen._replace(is_faster=not is_slower(chosen.us, nccl_us), nccl_us=nccl_us)


def with_rows(table: TuningTable, rows: Sequence[NodeRow]) -> TuningTable:
    """Return a table in which ``rows`` replace all rows of their numbers of nodes."""
    replaced = {row.nodes for row in rows}
    return table._replace(nodes=(*(row for row in table.nodes if row.nodes not in replaced), *rows))


def line(row: NodeRow) -> str:
    """Format a size for printing."""
    beside = "" if row.is_faster else "   not faster: left to the engine"
    return f"{format_bytes(row.up_to):>10} {row.us:8.2f} us  {row.describe()}   NCCL {row.nccl_us:8.2f}{beside}"
