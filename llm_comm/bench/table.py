"""Command ``llm-comm bench table``: the choices of the tuning table, compared with every candidate for the same
message.

It marks the sizes at which a candidate is more than a few percent faster. The table was then made on another machine,
or for a build with other algorithms.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from llm_comm import files
from llm_comm.bench import programs, report
from llm_comm.bench.agreement import require_alike
from llm_comm.bench.choosing import Measured, choose
from llm_comm.bench.measuring import Bench, Budget, Pace, count_candidates, schedule_of
from llm_comm.bench.report import Progress, format_bytes
from llm_comm.bench.tune import check_options, choice_text, options_of, require_candidates
from llm_comm.bench.tune_subjects import Subject, coarse_first, subjects_of
from llm_comm.cli import launch
from llm_comm.communicator import Communicator
from llm_comm.config import Config
from llm_comm.errors import ConfigError
from llm_comm.planning.plan import Plan

#: Tolerated slowness of the table's choice relative to the best candidate.
MARGIN = 0.05


class Compared(NamedTuple):
    """Table's choice and best candidate at one size of an operation.

    Attributes:
        operation: Key of the subject.
        size: Message size in bytes.
        chosen: Table's choice as a phrase, or why it does not run.
        us: Microseconds of the choice; None if it is declined.
        best: Best candidate.
    """

    operation: str
    size: int
    chosen: str
    us: float | None
    best: Measured

    @property
    def lost(self) -> float:
        """Relative slowness of the table's choice; 0 if it is not slower."""
        if self.us is None or self.best.us <= 0:  # a difference of two times can be negative
            return 0.0
        return max(0.0, self.us / self.best.us - 1)

    @property
    def is_marked(self) -> bool:
        """True if the table should choose another candidate."""
        return self.us is not None and 0 < self.best.us * (1 + MARGIN) < self.us

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison for JSON."""
        best = {"us": self.best.us, **self.best.row.entry()}
        marks = {"lost": round(self.lost, 4), "marked": self.is_marked}
        return {
            "operation": self.operation,
            "bytes": self.size,
            "chosen": self.chosen,
            "us": self.us,
            "best": best,
            **marks,
        }


def run(args: argparse.Namespace) -> int:
    """Run the command. Return 0, or 1 if the file could not be written.

    Raises:
        ConfigError: There are no GPUs, the options select nothing to measure, or the configuration is invalid.
    """
    placement = launch.place(args.world, args.device)
    if not placement.on_gpu:
        raise ConfigError(f"bench table measures GPUs: {placement.reason}")
    config = launch.checked_config({"--json": args.json}, dsl=args.dsl)
    check_options(args, config)
    if not launch.in_rank():
        return launch.spawn(placement, args.argv)
    with launch.process_group(placement) as group:
        require_alike(lambda: {f"--{name}": value for name, value in options_of(args).items()}, group)
        return 0 if _run(args, placement, group, config) else 1


def _run(args: argparse.Namespace, placement: launch.Placement, group: dist.ProcessGroup, config: Config) -> bool:
    """Return whether the requested file was written; True without one."""
    with Communicator(group, placement.device, config) as comm:
        subjects = subjects_of(args.operations, args.hidden, args.max, comm.world_size, comm.programs, config)
        require_candidates(args, subjects, comm.world_size, comm.limits)
        if comm.rank == 0:
            print(f"{comm.table.name}; microseconds a call; * more than {MARGIN:.0%} slower than the best candidate")
            programs.print_remarks(comm.programs, config, comm.world_size, args.operations, args.max)
        rows, left = compare(comm, group, subjects, args)
        if comm.rank != 0:
            return True
        if left:
            print(f"--seconds {args.seconds} are over: {left} of {left + len(rows)} sizes were not measured")
        print(summary(rows, comm.table.name))
        if args.json is None:
            return True
        found = {"table": comm.table.name, "method": args.method, "complete": left == 0}
        content = {"command": "bench table", **report.environment(placement), **found}
        return files.write_json("--json", args.json, {**content, "rows": [row.as_dict() for row in rows]})


def compare(
    comm: Communicator, group: dist.ProcessGroup, subjects: Sequence[Subject], args: argparse.Namespace
) -> tuple[list[Compared], int]:
    """Time everything and print a line for each size. Collective.

    Returns:
        The sizes of each operation in order, and how many were not measured because the time was up.
    """
    progress = Progress(enabled=comm.rank == 0)
    sizes = coarse_first(subjects, args.min, args.max)
    pace = Pace(sum(count_candidates(subject, [size], comm) for subject, size in sizes))
    budget = Budget(args.seconds, group)
    rows = []
    for subject, size in budget.take(sizes):
        what = f"{subject.label}{format_bytes(size)}"

        def show(which: str, what: str = what) -> None:
            progress.show(f"{what}: {which}; {pace.text()}")

        schedule = schedule_of(args.method, args.reps, subject.problem(size, comm.world_size).whole_bytes())
        row = _compare(comm, Bench(comm, group, subject, size, schedule), subject, size, show)
        pace.advance(count_candidates(subject, [size], comm))
        progress.clear()
        if comm.rank == 0:
            print(line(row, subject.label), flush=True)
        rows.append(row)
    order = [subject.key for subject in subjects]
    return sorted(rows, key=lambda row: (order.index(row.operation), row.size)), budget.left


def _compare(comm: Communicator, bench: Bench, subject: Subject, size: int, show: Any) -> Compared:
    table = comm.table
    try:
        plan = bench.bound.plan()
        at_size = bench.candidates(show)
        best = choose(at_size.measured, size, at_size.refusals)
        if plan.algorithm == "declined":
            return Compared(subject.key, size, f"declined: {plan.reason}", None, best)
        comm.use_table(table)
        show("the table's choice")
        found = Compared(subject.key, size, _phrase(plan), bench.time_present(), best)
        if found.is_marked:
            # The best of many measurements is biased towards luck, so both are timed again.
            again = bench.time(best.row, "the best again", show)
            comm.use_table(table)
            us = min(found.us or 0.0, bench.time_present())
            found = found._replace(us=us, best=best._replace(us=max(best.us, again)))
        return found
    finally:
        comm.use_table(table)


def _phrase(plan: Plan) -> str:
    if plan.symmetric:
        return f"{plan.symmetric} of symmetric tensors"
    return report.plan_text(vars(plan))


def line(row: Compared, label: str) -> str:
    """Format a size for printing."""
    us = "       -" if row.us is None else f"{row.us:8.2f}"
    mark = f"* {row.lost:+.1%}" if row.is_marked else ""
    best = f"{row.best.us:8.2f} us {choice_text(row.best.row)}"
    return f"{format_bytes(row.size):>10} {us} us  {label}{row.chosen}   best {best} {mark}".rstrip()


def summary(rows: Sequence[Compared], table: str) -> str:
    """Format the last line of the output."""
    marked = [row for row in rows if row.is_marked]
    if not marked:
        return f"{table}: its choice is within {MARGIN:.0%} of the best candidate at all {len(rows)} sizes"
    return (
        f"{table}: at {len(marked)} of {len(rows)} sizes another candidate is more than {MARGIN:.0%} faster (*); "
        "`llm-comm tune` makes a table of this machine"
    )
