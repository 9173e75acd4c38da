"""Comparison of one collective between llm_comm and other libraries in one run, with a check of every result.

``Collective`` describes the collective. ``collectives`` and ``fused`` define those of the commands.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from llm_comm.bench import agreement, programs, report, timing
from llm_comm.bench.agreement import checked, first_failure
from llm_comm.bench.report import DTYPES, Progress, Result, Row, format_bytes
from llm_comm.bench.timing import Schedule
from llm_comm.cli import launch
from llm_comm.cli.launch import Placement
from llm_comm.communicator import Communicator
from llm_comm.config import Config
from llm_comm.errors import ConfigError
from llm_comm.planning.plan import Plan

_T = TypeVar("_T")
_CHECKS = 2  # each with fresh data, so that a call cannot pass with the result of the previous one


@dataclass(frozen=True)
class Defaults:
    """Defaults of a command's options."""

    max_bytes: int
    modes: tuple[str, ...]
    calls: int
    reps: int


ON_GPU = Defaults(max_bytes=8 << 20, modes=("eager", "graph"), calls=20, reps=20)
# A CPU core often runs several emulated GPUs: few calls, to keep the run short.
EMULATED = Defaults(max_bytes=64 << 10, modes=("eager",), calls=2, reps=3)


@dataclass(frozen=True)
class Bound:
    """Library with its input ``x``. ``call`` enqueues the collective and returns the tensor or tensors of the
    result."""

    x: Tensor
    call: Callable[[], Any]


class Library(Protocol):
    """Implementation of the collective.

    Attributes:
        name: Column head.
        in_place: The result replaces the input.
        rounds_once: Sums are accumulated in float32 or wider and rounded once. Otherwise each partial sum may be
            rounded.
    """

    name: str
    in_place: bool
    rounds_once: bool

    def bind(self, count: int) -> Bound:
        """Bind to a message of ``count`` elements. The input may have a multiple of these.

        Raises:
            RuntimeError: Unsupported; raised on all ranks.
        """


class Judge(Protocol):
    """Inputs of one size, and the expected results."""

    def addend(self, rank: int, salt: int) -> Tensor:
        """Return the input of one rank. Another ``salt`` gives other data."""

    def error(self, actual: Any, salt: int, rounds_once: bool) -> float:
        """Return the error of this rank's result as a fraction of what rounding explains. Above 1 the result is
        wrong."""


@dataclass(frozen=True)
class Collective:
    """Collective to compare.

    Attributes:
        title: Name of the command, such as "all-reduce".
        libraries: Returns the libraries to compare, for a dtype and a largest message in bytes. Ours is first, and all
            ranks have the same ones. Also returns remarks on missing or doubtful libraries.
        judge: Returns the judge of messages of a number of elements.
        plan: Returns llm_comm's plan for a number of elements.
        ours: Returns llm_comm's implementation with ordinary tensors.
        heading: Title of tables and plots; "": ``title``.
        settings: Further entries of the JSON report.
    """

    title: str
    libraries: Callable[[Communicator, torch.dtype, int, dist.ProcessGroup], tuple[list[Library], list[str]]]
    judge: Callable[[Communicator, torch.dtype, int], Judge]
    plan: Callable[[Communicator, torch.dtype, int], Plan]
    ours: Callable[[Communicator, torch.dtype], Library]
    heading: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def operation(self) -> str:
        """Name in the registry."""
        return self.title.replace("-", "_")


class _Program:
    """DSL program in place of an algorithm, through the same call.

    Args:
        name: Program of ``comm`` for the collective's operation.
        collective: Collective.
        comm: Communicator, whose tuning table is replaced.
        dtype: Dtype of the elements.
    """

    in_place = False

    def __init__(self, name: str, collective: Collective, comm: Communicator, dtype: torch.dtype) -> None:
        self.name = name
        self.rounds_once = comm.programs[name].sums_in_rank_order
        self._collective, self._comm, self._dtype = collective, comm, dtype
        self._of_table = collective.ours(comm, dtype)

    def bind(self, count: int) -> Bound:
        self._comm.use_table(programs.table_of(self.name, self._collective.operation))
        why = programs.why_not_run(self._collective.plan(self._comm, self._dtype, count), self.name)
        if why:
            raise RuntimeError(why)
        return self._of_table.bind(count)


def run(args: argparse.Namespace, collective: Collective) -> int:
    """Run a command. Return 0, or 1 if a result was wrong or a file could not be written.

    Raises:
        ConfigError: The options contradict each other or the machine, or the configuration is invalid.
    """
    placement = settle(args, ON_GPU, EMULATED)
    if args.max < args.min:
        raise ConfigError(f"--max {format_bytes(args.max)} is smaller than --min {format_bytes(args.min)}")
    if args.min % DTYPES[args.dtype].itemsize:
        raise ConfigError(f"--min {args.min}: a message is made of elements of {DTYPES[args.dtype].itemsize} bytes")
    return start(args, placement, collective, dsl=args.dsl)


def start(args: argparse.Namespace, placement: Placement, collective: Collective, **overrides: Any) -> int:
    """Compare a collective in all ranks, with options completed by ``settle``. See ``run``."""
    return in_ranks(
        args, placement, lambda group, config: _run_rank(args, collective, placement, group, config), **overrides
    )


def programs_of(collective: Collective, comm: Communicator, dtype: torch.dtype) -> list[Library]:
    """Return an implementation for each program of the collective. They replace the communicator's table."""
    names = [name for name, found in comm.programs.items() if found.operation == collective.operation]
    return [_Program(name, collective, comm, dtype) for name in names]


def settle(args: argparse.Namespace, on_gpu: Defaults, emulated: Defaults) -> Placement:
    """Return where the ranks of a benchmark run, and fill in default options. Must precede ``in_ranks``.

    Raises:
        ConfigError: The options do not fit this machine.
    """
    # Must be set before the ranks start: torch reads it when it first allocates symmetric memory.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    placement = launch.place(args.world, args.device)
    defaults = on_gpu if placement.on_gpu else emulated
    args.max = args.max or max(args.min, defaults.max_bytes)
    args.mode = args.mode or defaults.modes
    args.calls = args.calls or defaults.calls
    args.reps = args.reps or defaults.reps
    if "graph" in args.mode and not placement.on_gpu:
        raise ConfigError("--mode graph needs GPUs: emulated devices have no CUDA graphs")
    return placement


def in_ranks(
    args: argparse.Namespace,
    placement: Placement,
    run_rank: Callable[[dist.ProcessGroup, Config], int],
    **overrides: Any,
) -> int:
    """Start the ranks of a benchmark after checking that its output files can be written. In a rank, run it.

    ``overrides``: options of the configuration that the command line replaces.

    Raises:
        ConfigError: The configuration is invalid, a file cannot be written, or ``--plot`` lacks its library.
    """
    config = launch.checked_config({"--json": args.json, "--plot": args.plot}, **overrides)
    if args.plot:
        report.require_matplotlib()
    if not launch.in_rank():
        return launch.spawn(placement, args.argv)
    with launch.process_group(placement) as group:
        return run_rank(group, config)


def _run_rank(
    args: argparse.Namespace, collective: Collective, placement: Placement, group: dist.ProcessGroup, config: Config
) -> int:
    speaks, written = launch.rank() == 0, True
    dtype = DTYPES[args.dtype]
    with contextlib.ExitStack() as stack:
        comm = stack.enter_context(Communicator(group, placement.device, config))
        libraries, remarks = collective.libraries(comm, dtype, args.max, group)
        has_programs = any(found.operation == collective.operation for found in comm.programs.values())
        if has_programs and config.wire != "none":
            remarks.append(f"DSL programs are not measured with option wire ({config.wire}): their sums are exact")
        elif has_programs:
            # A forced algorithm would have precedence over the tables that name programs.
            by_table = config.replace(algorithm="auto")
            own = stack.enter_context(Communicator(group, placement.device, by_table))
            libraries[1:1] = programs_of(collective, own, dtype)
        if speaks:
            remarks += programs.unmeasured(comm.programs, config, comm.world_size, [collective.title])
        bench = Comparison(collective, comm, group, dtype, Schedule.by(args.method, args.calls, args.reps))
        progress = Progress(enabled=speaks)
        rows = []
        for message_bytes in sizes(args.min, args.max):
            for mode in args.mode:
                rows.append(bench.row(message_bytes, mode, libraries, progress))
        progress.clear()
    if speaks:
        title = f"{collective.heading or collective.title}, {args.dtype}, {placement.describe()}"
        command = {"command": f"bench {collective.title}", **collective.settings}
        written = report.publish(title, args, placement, rows, remarks, command)
    return 1 if not written or any(row.wrong for row in rows) else 0


def sizes(smallest: int, largest: int) -> Iterator[int]:
    """Yield ``smallest`` and its doublings up to ``largest``, in bytes."""
    while smallest <= largest:
        yield smallest
        smallest *= 2


def symmetric_buffer(
    count: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> tuple[Tensor, Any]:
    """Allocate ``count`` elements in torch's symmetric memory. Return the tensor and its handle. Collective.

    Raises:
        agreement.NotUsableError: A rank failed; raised on all ranks.
    """

    def allocate() -> tuple[Any, Tensor]:
        from torch.distributed import _symmetric_memory as symmetric_memory

        return symmetric_memory, symmetric_memory.empty(count, dtype=dtype, device=device)

    module, buffer = agreement.set_up("allocation", allocate, group)
    return buffer, agreement.set_up("exchange of handles", lambda: module.rendezvous(buffer, group), group)


class Comparison:
    """Measurement on this rank. All methods are collective."""

    def __init__(
        self,
        collective: Collective,
        comm: Communicator,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        schedule: Schedule,
    ) -> None:
        self._collective = collective
        self._comm, self._group, self._dtype, self._schedule = comm, group, dtype, schedule

    def row(self, message_bytes: int, mode: str, libraries: list[Library], progress: Progress) -> Row:
        """Check and time all libraries at one size."""
        count = message_bytes // self._dtype.itemsize
        judge = self._collective.judge(self._comm, self._dtype, count)
        results = {}
        for library in libraries:
            progress.show(f"{self._collective.title} {format_bytes(message_bytes)} {mode}: {library.name}")
            results[library.name] = self.measure(library, count, mode, judge)
        self._comm.check()
        plan = self._collective.plan(self._comm, self._dtype, count)
        return Row(message_bytes, mode, dataclasses.asdict(plan), results)

    def measure(self, library: Library, count: int, mode: str, judge: Judge) -> Result:
        """Check and time one library."""
        bound: Bound

        def check() -> float:
            nonlocal bound
            bound = library.bind(count)
            return self._check(library, bound, bound.call, judge)

        failure, error = checked(check, self._group)
        if failure:
            return Result(skipped=failure)
        original = bound.x.clone()

        def reset() -> None:
            if library.in_place:
                bound.x.copy_(original)

        if mode == "graph":
            # In place, repeated calls would sum the sums again, beyond the range of the dtype: check a single call.
            replay = replayable(bound.call, 1 if library.in_place else self._schedule.calls)
            error = max(error, self._check(library, bound, replay, judge))
            _, error = first_failure("", error, self._group)
            timed = timing.time_graph(bound.call, reset, self._schedule, self._group)
        else:
            timed = timing.time_eager(bound.call, reset, self._schedule, self._comm.device, self._group)
        return Result(timed.us, timed.min_us, timed.host_us, error)

    def _check(self, library: Library, bound: Bound, call: Callable[[], Any], judge: Judge) -> float:
        error = 0.0
        for salt in range(_CHECKS):
            bound.x.copy_(judge.addend(self._comm.rank, salt))
            error = max(error, judge.error(call(), salt, library.rounds_once))
        return error


def replayable(call: Callable[[], _T], calls: int) -> Callable[[], _T]:
    """Return a function that replays a CUDA graph of ``calls`` calls and returns the last call's result."""
    last: list[_T] = []

    def keep_last() -> None:
        last[:] = [call()]

    graph = timing.capture(keep_last, calls)

    def replay() -> _T:
        graph.replay()
        return last[0]

    return replay
