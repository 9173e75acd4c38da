"""``llm-comm bench all-reduce``: times llm_comm beside other libraries in one run, and checks every result.

On GPUs the others are NCCL and torch's symmetric memory (its multicast variants are never called), on
emulated devices gloo.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from llm_comm import launch, preflight
from llm_comm.bench import others, report, timing
from llm_comm.bench.report import DTYPES, OURS, Progress, Result, Row, format_bytes
from llm_comm.bench.timing import Schedule
from llm_comm.communicator import Communicator
from llm_comm.errors import ConfigError, LlmCommError
from llm_comm.launch import Placement


@dataclass(frozen=True)
class _Defaults:
    max_bytes: int
    modes: tuple[str, ...]
    calls: int
    reps: int


_ON_GPU = _Defaults(max_bytes=8 << 20, modes=("eager", "graph"), calls=20, reps=20)
# One CPU core often runs several emulated GPUs: enough for a comparison, short enough to wait for.
_EMULATED = _Defaults(max_bytes=64 << 10, modes=("eager",), calls=2, reps=3)

_CHECKS = 2  # each on fresh data: a call must not be right only because the one before left the sum behind


@dataclass(frozen=True)
class Bound:
    """A library bound to its input ``x``: ``call`` enqueues one all-reduce and returns the sum's tensor."""

    x: Tensor
    call: Callable[[], Tensor]


class Library(Protocol):
    """One way to all-reduce.

    Attributes:
        name: column head.
        in_place: the sum replaces the input.
        rounds_once: sums are accumulated in float32 or wider and rounded once; otherwise every partial sum
            may be.
    """

    name: str
    in_place: bool
    rounds_once: bool

    def bind(self, count: int) -> Bound:
        """Binds to an input of ``count`` elements. Raises RuntimeError, on all ranks, where unsupported."""


class _LlmComm:
    name, in_place, rounds_once = OURS, False, True

    def __init__(self, comm: Communicator, dtype: torch.dtype) -> None:
        self._comm, self._dtype = comm, dtype

    def bind(self, count: int) -> Bound:
        x = torch.empty(count, dtype=self._dtype, device=self._comm.device)
        out = torch.empty_like(x)
        if not self._comm.accepts(x):
            raise RuntimeError(self._comm.plan(x).reason)
        return Bound(x, lambda: self._comm.all_reduce(x, out=out))


class _TorchDistributed:
    in_place, rounds_once = True, False

    def __init__(self, name: str, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> None:
        self.name = name
        self._group, self._dtype, self._device = group, dtype, device

    def bind(self, count: int) -> Bound:
        x = torch.empty(count, dtype=self._dtype, device=self._device)

        def call() -> Tensor:
            dist.all_reduce(x, group=self._group)
            return x

        return Bound(x, call)


class _SymmetricMemory:
    """One of torch's symmetric-memory operators, which read the peers' buffers directly."""

    rounds_once = False

    def __init__(self, name: str, operator: str, in_place: bool, buffer: Tensor, group: dist.ProcessGroup) -> None:
        self.name, self.in_place = name, in_place
        self._operator, self._buffer, self._group_name = operator, buffer, group.group_name

    def bind(self, count: int) -> Bound:
        x = self._buffer[:count]
        operator = getattr(torch.ops.symm_mem, self._operator)
        return Bound(x, lambda: operator(x, "sum", self._group_name))


def run(args: argparse.Namespace) -> int:
    """``llm-comm bench all-reduce``. Returns 0, or 1 when a result was wrong or a file could not be written.

    Raises:
        ConfigError: the options do not fit together or this machine, or the configuration is wrong.
    """
    # Set before the ranks start: torch reads it when it first allocates symmetric memory.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    placement = launch.place(args.world, args.device)
    _fill_in(args, _ON_GPU if placement.on_gpu else _EMULATED)
    if "graph" in args.mode and not placement.on_gpu:
        raise ConfigError("--mode graph needs GPUs: emulated devices have no CUDA graphs")
    if args.max < args.min:
        raise ConfigError(f"--max {format_bytes(args.max)} is smaller than --min {format_bytes(args.min)}")
    if args.min % DTYPES[args.dtype].itemsize:
        raise ConfigError(f"--min {args.min}: a message is made of elements of {DTYPES[args.dtype].itemsize} bytes")
    preflight.check({"--json": args.json, "--plot": args.plot})
    if args.plot:
        report.require_matplotlib()
    if not launch.in_rank():
        return launch.spawn(placement, args.argv)
    with launch.process_group(placement) as group:
        return _run_rank(args, placement, group)


def _fill_in(args: argparse.Namespace, defaults: _Defaults) -> None:
    args.max = args.max or max(args.min, defaults.max_bytes)
    args.mode = args.mode or defaults.modes
    args.calls = args.calls or defaults.calls
    args.reps = args.reps or defaults.reps


def _run_rank(args: argparse.Namespace, placement: Placement, group: dist.ProcessGroup) -> int:
    speaks, written = launch.rank() == 0, True
    dtype = DTYPES[args.dtype]
    with Communicator(group, placement.device) as comm:
        libraries, remarks = _libraries(comm, dtype, args.max, group)
        bench = _Bench(comm, group, dtype, Schedule.by(args.method, args.calls, args.reps))
        progress = Progress(enabled=speaks)
        rows = []
        for message_bytes in sizes(args.min, args.max):
            for mode in args.mode:
                rows.append(bench.row(message_bytes, mode, libraries, progress))
        progress.clear()
    if speaks:
        title = f"all-reduce, {args.dtype}, {placement.describe()}"
        written = report.publish(title, args, placement, rows, remarks, {"command": "bench all-reduce"})
    return 1 if not written or any(row.wrong for row in rows) else 0


def sizes(smallest: int, largest: int) -> Iterator[int]:
    """``smallest`` and its doublings up to ``largest``, in bytes."""
    while smallest <= largest:
        yield smallest
        smallest *= 2


def _libraries(
    comm: Communicator, dtype: torch.dtype, max_bytes: int, group: dist.ProcessGroup
) -> tuple[list[Library], list[str]]:
    """The libraries to compare, the same on all ranks, and remarks on what is missing or to be read with care."""
    ours = _LlmComm(comm, dtype)
    if comm.is_emulated:
        return [ours, _TorchDistributed("gloo", group, dtype, comm.device)], [report.EMULATED_REMARK]
    libraries: list[Library] = [ours, _TorchDistributed("nccl", group, dtype, comm.device)]

    def allocate() -> tuple[Any, Tensor]:
        from torch.distributed import _symmetric_memory as symmetric_memory

        count = max_bytes // dtype.itemsize
        return symmetric_memory, symmetric_memory.empty(count, dtype=dtype, device=comm.device)

    try:
        module, buffer = others.set_up("allocation", allocate, group)
        others.set_up("exchange of handles", lambda: module.rendezvous(buffer, group), group)
    except others.NotUsableError as error:
        return libraries, [f"torch symmetric memory is not usable here: {error}"]
    libraries.append(_SymmetricMemory("symm 1-shot", "one_shot_all_reduce", False, buffer, group))
    libraries.append(_SymmetricMemory("symm 2-shot", "two_shot_all_reduce_", True, buffer, group))
    return libraries, []


class _Bench:
    """Measures on this rank; its methods are collective."""

    def __init__(self, comm: Communicator, group: dist.ProcessGroup, dtype: torch.dtype, schedule: Schedule) -> None:
        self._comm, self._group, self._dtype, self._schedule = comm, group, dtype, schedule

    def row(self, message_bytes: int, mode: str, libraries: list[Library], progress: Progress) -> Row:
        """Checks and times all libraries at one size."""
        count = message_bytes // self._dtype.itemsize
        reference = Reference(count, self._comm.world_size, self._dtype, self._comm.device)
        results = {}
        for library in libraries:
            progress.show(f"all-reduce {format_bytes(message_bytes)} {mode}: {library.name}")
            results[library.name] = self._measure(library, count, mode, reference)
        self._comm.check()
        plan = self._comm.plan(torch.empty(count, dtype=self._dtype, device=self._comm.device))
        return Row(message_bytes, mode, dataclasses.asdict(plan), results)

    def _measure(self, library: Library, count: int, mode: str, reference: Reference) -> Result:
        failure, error = "", 0.0
        try:
            bound = library.bind(count)
            error = self._check(library, bound, bound.call, reference)
        except LlmCommError:
            raise
        except RuntimeError as reason:
            failure = report.first_line(reason)
        failure, error = self._agree(failure, error)
        if failure:
            return Result(skipped=failure)

        original = bound.x.clone()

        def reset() -> None:
            if library.in_place:
                bound.x.copy_(original)

        if mode == "graph":
            # Repeated in place the sums would be summed again, past what the dtype can hold: check one call.
            replay = _replayable(bound.call, 1 if library.in_place else self._schedule.calls)
            _, error = self._agree("", max(error, self._check(library, bound, replay, reference)))
            timed = timing.time_graph(bound.call, reset, self._schedule, self._group)
        else:
            timed = timing.time_eager(bound.call, reset, self._schedule, self._comm.device, self._group)
        return Result(timed.us, timed.min_us, timed.host_us, error)

    def _check(self, library: Library, bound: Bound, call: Callable[[], Tensor], reference: Reference) -> float:
        error = 0.0
        for salt in range(_CHECKS):
            bound.x.copy_(reference.addend(self._comm.rank, salt))
            error = max(error, reference.error(call(), salt, library.rounds_once))
        return error

    def _agree(self, failure: str, error: float) -> tuple[str, float]:
        """The first rank's failure, if any, and the largest error of all ranks."""
        outcomes: list[Any] = [None] * self._comm.world_size
        dist.all_gather_object(outcomes, (failure, error), group=self._group)
        return next((text for text, _ in outcomes if text), ""), max(worst for _, worst in outcomes)


def _replayable(call: Callable[[], Tensor], calls: int) -> Callable[[], Tensor]:
    """A function that replays a CUDA graph of ``calls`` calls and returns the last one's result."""
    last: list[Tensor] = []

    def keep_last() -> None:
        last[:] = [call()]

    graph = timing.capture(keep_last, calls)

    def replay() -> Tensor:
        graph.replay()
        return last[0]

    return replay


class Reference:
    """Inputs that depend on rank and position, and their sums in float64, which judge a result.

    Args:
        count: elements.
        world: number of ranks.
        dtype, device: of the inputs; the sums are formed on the device as well.
    """

    def __init__(self, count: int, world: int, dtype: torch.dtype, device: torch.device) -> None:
        self._count, self._world, self._dtype, self._device = count, world, dtype, device
        self._expected: dict[int, tuple[Tensor, Tensor]] = {}

    def addend(self, rank: int, salt: int) -> Tensor:
        """The input of one rank; another ``salt`` gives other data. Values lie within +-2."""
        # The period is a prime, so no shard, chunk or line of one size starts at the same values again.
        index = torch.arange(1, self._count + 1, device=self._device)
        steps = (index * (7919 + 104729 * rank) + 1009 * salt) % 4001 - 2000
        return (steps / 1024).to(self._dtype)

    def error(self, actual: Tensor, salt: int, rounds_once: bool) -> float:
        """Largest difference from the float64 sum, as a fraction of what rounding explains; huge for a NaN.

        Args:
            actual: (count,) the result to judge.
            salt: as of the inputs.
            rounds_once: allow a float32 accumulation and one rounding to the dtype; otherwise a rounding to
                the dtype for every addend.
        """
        total, magnitude = self._sums(salt)
        epsilon = torch.finfo(self._dtype).eps
        if rounds_once:
            allowed = total.abs() * (epsilon / 2) + magnitude * (self._world * torch.finfo(torch.float32).eps)
        else:
            allowed = magnitude * (self._world * epsilon)
        difference = (actual.double() - total).abs()
        # Where all addends are 0 nothing is allowed, and 0 / 0 would not say that the result is right.
        ratio = torch.where(difference == 0, 0.0, difference / allowed)
        return float(ratio.nan_to_num(nan=torch.inf).max())

    def _sums(self, salt: int) -> tuple[Tensor, Tensor]:
        """Sum of the addends and of their absolute values, float64."""
        if salt not in self._expected:
            addends = [self.addend(rank, salt).double() for rank in range(self._world)]
            total = torch.stack(addends).sum(dim=0)
            self._expected[salt] = total, torch.stack(addends).abs().sum(dim=0)
        return self._expected[salt]
