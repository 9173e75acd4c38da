"""``llm-comm tune``: measures every sensible kernel shape at every size on this machine and writes a tuning table."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import yaml

from llm_comm import launch, outputs, preflight
from llm_comm.bench import report, timing, tune_fused
from llm_comm.bench.choosing import ONE_SHOT_MAX_SENT, choose, merge
from llm_comm.bench.report import Progress, format_bytes
from llm_comm.bench.timing import Schedule
from llm_comm.communicator import Communicator
from llm_comm.config import MIB, Config
from llm_comm.errors import ConfigError
from llm_comm.planning import selection
from llm_comm.planning.fused_selection import ELEMENT_BYTES, ELEMENTS_PER_LINE, MAX_HIDDEN
from llm_comm.planning.selection import FusedRow, TuningRow, TuningTable

_CALLS = 20
# From here NCCL is timed too: the table ends where NCCL wins.
_COMPARE_FROM = MIB
# Blocks of 1024 threads were slower at every size: their barrier waits for 32 warps.
_MAX_THREADS = 512


class Measured(NamedTuple):
    """Time of one candidate, in microseconds a call."""

    row: TuningRow
    us: float


def run(args: argparse.Namespace) -> int:
    """Entry point of the command; returns 0, or 1 when a file could not be written.

    Raises:
        ConfigError: There are no GPUs to tune for, the options name nothing to measure, or the configuration is wrong.
    """
    placement = launch.place(args.world, args.device)
    if not placement.on_gpu:
        raise ConfigError(f"tune measures GPUs: {placement.reason}")
    _check_options(args, preflight.check({"--out": args.out, "--json": args.json}))
    if not launch.in_rank():
        return launch.spawn(placement, args.argv)
    written = True
    with launch.process_group(placement) as group, Communicator(group, placement.device) as comm:
        _require_candidates(args, comm.world_size, _sm_count(comm))
        shipped = comm.table
        best, nccl, everything = _measure(comm, group, args) if "all-reduce" in args.operations else ([], {}, [])
        comm.use_table(shipped)
        fused = tune_fused.measure(comm, group, args) if "fused" in args.operations else tune_fused.Found([], [])
        if comm.rank == 0:
            _report(best, nccl)
            tune_fused.report_best(fused)
            environment = {**report.environment(placement), "method": args.method}
            if args.out is not None:
                table = tuned(shipped, best, nccl, fused)
                written = _write_table(comm, table, args.operations, environment, args.out)
            if args.json is not None:
                rows = [{"bytes": size, "nccl_us": round(us, 3)} for size, us in nccl.items()]
                content = {
                    "candidates": everything,
                    "nccl": rows,
                    "fused": {"hidden": args.hidden, "candidates": fused.everything},
                }
                written = outputs.write_json("--json", args.json, {**environment, **content}) and written
    return 0 if written else 1


def _check_options(args: argparse.Namespace, config: Config) -> None:
    bounds = f"--min {format_bytes(args.min)}, --max {format_bytes(args.max)}"
    if args.min < 2:
        raise ConfigError(f"{bounds}: the smallest message has an element, 2 bytes")
    if args.max < args.min:
        raise ConfigError(f"{bounds}: the largest message is smaller than the smallest")
    if "fused" in args.operations:
        if args.hidden % ELEMENTS_PER_LINE or args.hidden > MAX_HIDDEN:
            raise ConfigError(
                f"--hidden {args.hidden}: rows of fused operations have a multiple of {ELEMENTS_PER_LINE} elements, up "
                f"to {MAX_HIDDEN}"
            )
        if not any(tune_fused.row_counts(args.min, min(args.max, tune_fused.LARGEST), args.hidden)):
            raise ConfigError(
                f"{bounds}: no fused message lies between; they are rows of {args.hidden * ELEMENT_BYTES} bytes "
                f"(--hidden {args.hidden}), up to {format_bytes(tune_fused.LARGEST)}"
            )
    # They would have candidates declined, or run another algorithm than the table then says.
    for name in ("algorithm", "max_message_bytes"):
        if name in config.origins and getattr(config, name) != getattr(Config.load({}), name):
            raise ConfigError(
                f"option {name} is {getattr(config, name)!r} ({config.origins[name]}), but tune measures every "
                "algorithm and size: unset it"
            )


def _sm_count(comm: Communicator) -> int:
    return int(torch.cuda.get_device_properties(comm.device).multi_processor_count)


def _require_candidates(args: argparse.Namespace, world_size: int, sm_count: int) -> None:
    """Raises ConfigError if there is a size at which nothing would be measured: small ones take minutes."""
    found: list[tuple[int, Iterator[Any]]] = []
    if "all-reduce" in args.operations:
        found += [(size, candidates(size, world_size, sm_count)) for size in ladder(args.min, args.max)]
    if "fused" in args.operations:
        found += [
            (rows * args.hidden * ELEMENT_BYTES, tune_fused.candidates(rows, args.hidden, world_size, sm_count))
            for rows in tune_fused.row_counts(args.min, min(args.max, tune_fused.LARGEST), args.hidden)
        ]
    for size, rows_of_table in found:
        if next(rows_of_table, None) is None:
            raise ConfigError(
                f"--max {format_bytes(args.max)}: no shape of grid and tile is worth measuring at {format_bytes(size)} "
                "on this device; give a smaller one"
            )


def tuned(
    shipped: TuningTable, best: Sequence[Measured], nccl: dict[int, float], fused: tune_fused.Found
) -> TuningTable:
    """The table to write: what was measured, and for the rest what the device's present table says."""
    return TuningTable(
        "",
        tuple(merge(best)) or shipped.rows,
        largest_won(best, nccl) if best else shipped.max_message_bytes,
        tuple(merge(fused.best)) or shipped.fused,
        # From where on two kernels are as fast, and how many blocks are too many, is not measured here.
        shipped.max_fused_bytes,
        shipped.fused_blocks,
    )


def _measure(
    comm: Communicator, group: dist.ProcessGroup, args: argparse.Namespace
) -> tuple[list[Measured], dict[int, float], list[dict[str, Any]]]:
    schedule = Schedule.by(args.method, _CALLS, args.reps)
    sm_count = _sm_count(comm)
    progress = Progress(enabled=comm.rank == 0)
    best: list[Measured] = []
    nccl: dict[int, float] = {}
    everything: list[dict[str, Any]] = []
    for size in ladder(args.min, args.max):
        progress.show(f"tuning {format_bytes(size)}")
        x = torch.randn(size // 2, device=comm.device, dtype=torch.bfloat16)
        out = torch.empty_like(x)
        measured: list[Measured] = []
        refusals: list[str] = []
        for row in candidates(size, comm.world_size, sm_count):
            comm.use_table(TuningTable("tune", (row,), 1 << 40))
            plan = comm.plan(x)
            if plan.algorithm == "declined":
                refusals.append(plan.reason)
                continue
            comm.all_reduce(x, out)
            us = timing.time_graph(partial(comm.all_reduce, x, out), _nothing, schedule, group).us
            measured.append(Measured(row, us))
        best.append(choose(measured, size, refusals))
        everything += [{"bytes": size, "us": round(m.us, 3), **m.row._asdict()} for m in measured]
        if size >= _COMPARE_FROM:
            dist.all_reduce(x, group=group)
            nccl[size] = timing.time_graph(partial(dist.all_reduce, x, group=group), x.zero_, schedule, group).us
    progress.clear()
    return best, nccl, everything


def _nothing() -> None:
    """all_reduce into a separate tensor leaves its input as it was."""


def ladder(smallest: int, largest: int) -> Iterator[int]:
    """Powers of two and the sizes halfway between, in bytes."""
    size = smallest
    while size <= largest:
        yield size
        if size * 3 // 2 <= largest:
            yield size * 3 // 2
        size *= 2


def candidates(size: int, world_size: int, sm_count: int) -> Iterator[TuningRow]:
    """Rows worth measuring at a size, simplest first."""
    lines = size // selection.LINE_BYTES
    for algorithm, tiled in (("one_shot", lines), ("two_shot", -(-lines // world_size))):
        if algorithm == "one_shot" and size * (world_size - 1) > ONE_SHOT_MAX_SENT:
            continue
        for tile_lines in (8, 16, 32, 64, 128, 256):
            if tile_lines * world_size > _MAX_THREADS:
                break
            tiles = -(-tiled // tile_lines)
            for waves in (1, 2, 4, 8):
                blocks = waves * sm_count
                if waves > 1 and tiles <= blocks // 2:
                    break  # the grid would be the same
                rounds = -(-tiles // blocks)
                if rounds <= 8:
                    yield TuningRow(size, algorithm, blocks, tile_lines, 0)
                if 1 < rounds <= 32:
                    yield TuningRow(size, algorithm, blocks, tile_lines, 1)


def largest_won(best: Sequence[Measured], nccl: dict[int, float]) -> int:
    """The largest measured size up to which NCCL was never faster."""
    won = 0
    for row, us in best:
        if us > nccl.get(row.up_to, us):
            break
        won = row.up_to
    return won


def _report(best: Sequence[Measured], nccl: dict[int, float]) -> None:
    for row, us in best:
        beside = f"   NCCL {nccl[row.up_to]:8.2f}" if row.up_to in nccl else ""
        shape = f"blocks<={row.blocks} tile_lines={row.tile_lines} depth={row.depth}"
        print(f"{format_bytes(row.up_to):>10} {us:8.2f} us  {row.algorithm}  {shape}{beside}")


def _write_table(
    comm: Communicator, table: TuningTable, operations: Sequence[str], environment: dict[str, Any], path: Path
) -> bool:
    head = {
        "device": torch.cuda.get_device_name(comm.device),
        "world_size": comm.world_size,
        "max_message_bytes": table.max_message_bytes,
        "max_fused_bytes": table.max_fused_bytes,
        "fused_blocks": table.fused_blocks,
        "measured": {
            "date": environment["date"],
            **environment["versions"],
            "operations": list(operations),
            "method": environment["method"],
        },
    }

    # A row a line: tables are read by people who compare rows.
    def lines(rows: Sequence[TuningRow] | Sequence[FusedRow]) -> str:
        return "".join(
            "  - " + yaml.safe_dump(row._asdict(), sort_keys=False, default_flow_style=True, width=200) for row in rows
        )

    return outputs.write_text(
        "--out",
        path,
        "# Written by `llm-comm tune`. The last row serves all larger messages, up to max_message_bytes.\n"
        f"{yaml.safe_dump(head, sort_keys=False)}all_reduce:\n{lines(table.rows)}"
        + (f"fused:\n{lines(table.fused)}" if table.fused else ""),
    )
