"""``llm-comm tune``: measures every sensible kernel shape at every size on this machine and writes a tuning table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from llm_comm import _core, launch, outputs, preflight, registry
from llm_comm.bench import report, timing
from llm_comm.bench.choosing import Measured, choose, merge
from llm_comm.bench.report import Progress, format_bytes
from llm_comm.bench.timing import Schedule
from llm_comm.bench.tune_subjects import (
    ELEMENT_BYTES,
    LARGEST_FUSED,
    AllReduceSubject,
    FusedSubject,
    Subject,
    candidates,
)
from llm_comm.communicator import Communicator
from llm_comm.config import Config
from llm_comm.errors import ConfigError
from llm_comm.planning.table_files import table_text
from llm_comm.planning.tables import ALL_REDUCE, FUSED, TuningTable, by_operation

_CALLS = 20
_NO_LIMIT = 1 << 40
#: Tunables that a launch may stay below.
_BOUNDS = ("blocks", "threads")


class Found(NamedTuple):
    """What was measured of one operation: the best candidate of each size, NCCL's microseconds by size, and all as
    JSON."""

    best: list[Measured]
    nccl: dict[int, float]
    everything: list[dict[str, Any]]


NOTHING = Found([], {}, [])


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
        subjects = _subjects(args)
        _require_candidates(args, subjects, comm.world_size, comm.limits)
        shipped = comm.table
        found = {}
        for subject in subjects:
            found[subject.operation] = measure(comm, group, subject, args)
            comm.use_table(shipped)
        plain, fused = found.get(ALL_REDUCE, NOTHING), found.get(FUSED, NOTHING)
        if comm.rank == 0:
            for subject in subjects:
                _report(subject, found[subject.operation])
            environment = {**report.environment(placement), "method": args.method}
            if args.out is not None:
                table = tuned(shipped, plain, fused)
                written = _write_table(comm, table, args.operations, environment, args.out)
            if args.json is not None:
                rows = [{"bytes": size, "nccl_us": round(us, 3)} for size, us in plain.nccl.items()]
                content = {
                    "candidates": plain.everything,
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
        fused = registry.operations()[FUSED]
        if not fused.takes_rows_of(args.hidden):
            raise ConfigError(
                f"--hidden {args.hidden}: rows of fused operations have a multiple of {fused.row_multiple} elements, "
                f"up to {fused.max_row}"
            )
        if not any(FusedSubject(args.hidden).sizes(args.min, args.max)):
            raise ConfigError(
                f"{bounds}: no fused message lies between; they are rows of {args.hidden * ELEMENT_BYTES} bytes "
                f"(--hidden {args.hidden}), up to {format_bytes(LARGEST_FUSED)}"
            )
    # They would have candidates declined, or run another algorithm than the table then says.
    for name in ("algorithm", "max_message_bytes"):
        if name in config.origins and getattr(config, name) != getattr(Config.load({}), name):
            raise ConfigError(
                f"option {name} is {getattr(config, name)!r} ({config.origins[name]}), but tune measures every "
                "algorithm and size: unset it"
            )


def _subjects(args: argparse.Namespace) -> list[Subject]:
    known: dict[str, Subject] = {"all-reduce": AllReduceSubject(), "fused": FusedSubject(args.hidden)}
    return [subject for name, subject in known.items() if name in args.operations]


def _require_candidates(
    args: argparse.Namespace, subjects: Sequence[Subject], world_size: int, limits: _core.Limits
) -> None:
    """Raises ConfigError if there is a size at which nothing would be measured: small ones take minutes."""
    for subject in subjects:
        for size in subject.sizes(args.min, args.max):
            if next(candidates(subject.problem(size, world_size), limits), None) is None:
                raise ConfigError(
                    f"--max {format_bytes(args.max)}: no shape of grid and tile is worth measuring at "
                    f"{format_bytes(size)} on this device; give a smaller one"
                )


def measure(comm: Communicator, group: dist.ProcessGroup, subject: Subject, args: argparse.Namespace) -> Found:
    """Times all candidates for an operation, those that run alike once. Collective.

    Raises:
        ConfigError: At some size there is nothing to measure.
    """
    schedule = Schedule.by(args.method, _CALLS, args.reps)
    progress = Progress(enabled=comm.rank == 0)
    found = Found([], {}, [])
    for size in subject.sizes(args.min, args.max):
        progress.show(f"tuning {subject.label}{format_bytes(size)}")
        bound = subject.bind(comm, group, size)
        measured: list[Measured] = []
        refusals: list[str] = []
        plans = set()
        for row in candidates(subject.problem(size, comm.world_size), comm.limits):
            comm.use_table(TuningTable("tune", by_operation([row]), _NO_LIMIT, _NO_LIMIT))
            plan = bound.plan()
            if plan in plans:
                continue
            if plan.algorithm == "declined":
                refusals.append(plan.reason)
                continue
            plans.add(plan)
            bound.call()  # what is wrong with it is told better outside of a capture
            measured.append(Measured(row, timing.time_graph(bound.call, _nothing, schedule, group).us))
        found.best.append(choose(measured, size, refusals))
        found.everything.extend({"bytes": size, "us": round(m.us, 3), **m.row.entry()} for m in measured)
        if bound.nccl is not None:
            call, restore = bound.nccl
            call()
            found.nccl[size] = timing.time_graph(call, restore, schedule, group).us
    progress.clear()
    return found


def _nothing() -> None:
    """Outputs are separate tensors: a call leaves its inputs as they were."""


def tuned(shipped: TuningTable, plain: Found, fused: Found) -> TuningTable:
    """The table to write: what was measured, and for the rest what the device's present table says."""
    limit = largest_won(plain.best, plain.nccl) if plain.best else shipped.max_message_bytes
    # From where on two kernels are as fast, and how many blocks are too many, is not measured here.
    return shipped.with_rows(*merge(plain.best), *merge(fused.best))._replace(name="", max_message_bytes=limit)


def largest_won(best: Sequence[Measured], nccl: dict[int, float]) -> int:
    """The largest measured size up to which NCCL was never faster."""
    won = 0
    for row, us in best:
        if us > nccl.get(row.up_to, us):
            break
        won = row.up_to
    return won


def _report(subject: Subject, found: Found) -> None:
    for row, us in found.best:
        shape = " ".join(f"{name}{'<=' if name in _BOUNDS else '='}{value}" for name, value in row.tunables().items())
        beside = f"   NCCL {found.nccl[row.up_to]:8.2f}" if row.up_to in found.nccl else ""
        what = f"{subject.label}{row.algorithm} {row.protocol}"
        print(f"{format_bytes(row.up_to):>10} {us:8.2f} us  {what}  {shape}{beside}")


def _write_table(
    comm: Communicator, table: TuningTable, operations: Sequence[str], environment: dict[str, Any], path: Path
) -> bool:
    measured = {
        "date": environment["date"],
        **environment["versions"],
        "operations": list(operations),
        "method": environment["method"],
    }
    text = table_text(torch.cuda.get_device_name(comm.device), comm.world_size, table, measured)
    return outputs.write_text("--out", path, text)
