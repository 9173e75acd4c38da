"""``llm-comm bench fused``: all-reduce + residual add + RMSNorm, in one kernel and in two, in one run.

Beside the fused operation stand llm_comm's and NCCL's plain all-reduce, each followed by the add and the norm as one
kernel (on GPUs what ``torch.compile`` makes of them, as in an engine that compiles its model; on emulated devices plain
torch), and FlashInfer's fused all-reduce where it is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from llm_comm import registry
from llm_comm.bench import others, report, timing
from llm_comm.bench.agreement import first_failure
from llm_comm.bench.comparison import EMULATED, ON_GPU, in_ranks, settle, sizes
from llm_comm.bench.reference import Reference, worst
from llm_comm.bench.report import DTYPES, OURS, Progress, Result, Row, format_bytes
from llm_comm.bench.timing import Schedule
from llm_comm.cli import launch
from llm_comm.cli.launch import Placement
from llm_comm.communicator import Communicator
from llm_comm.config import Config
from llm_comm.errors import ConfigError, LlmCommError
from llm_comm.planning.tables import FUSED

EPS = 1e-5
NORM_REMARK = "norm: the residual add and the norm as torch.compile makes one kernel of them"
_CHECKS = 2
_ON_GPU = dataclasses.replace(ON_GPU, max_bytes=1 << 20, modes=("graph",))

#: Normed rows and new residual.
Outputs = tuple[Tensor, Tensor]
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Operands:
    """What a call works on: [rows, hidden], the same residual and weight on all ranks."""

    x: Tensor
    residual: Tensor
    weight: Tensor


class Library(Protocol):
    """One way to do it.

    Attributes:
        name: column head.
        rounds_once: sums are accumulated in float32 and rounded once.
    """

    name: str
    rounds_once: bool

    def bind(self, operands: Operands) -> Callable[[], Outputs]:
        """A call, which may overwrite ``x``. Raises RuntimeError, on all ranks, where unsupported."""


def add_rms_norm(summed: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
    """The residual add and the norm after an all-reduce, as engines write them for their compiler."""
    new_residual = summed + residual
    x = new_residual.float()
    factor = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return (x * factor * weight.float()).to(summed.dtype), new_residual


def norm_of_engines(comm: Communicator) -> Callable[..., Outputs]:
    """``add_rms_norm`` as an engine runs it."""
    return as_engines_run(add_rms_norm, comm)


def as_engines_run(function: Callable[..., _Result], comm: Communicator) -> Callable[..., _Result]:
    """What ``torch.compile`` makes of a function on GPUs; on emulated ones the function itself."""
    if comm.is_emulated:
        return function
    # Each size is a graph of its own; beyond the limit torch would run the function as it is.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(function, dynamic=False)


class _Fused:
    name, rounds_once = OURS, True

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def bind(self, operands: Operands) -> Callable[[], Outputs]:
        x, residual, weight = operands.x, operands.residual, operands.weight
        if not self._comm.accepts_all_reduce_add_rms_norm(x, weight):
            raise RuntimeError(self._comm.plan_all_reduce_add_rms_norm(x, weight).reason)
        out, residual_out = torch.empty_like(x), torch.empty_like(x)

        def call() -> Outputs:
            self._comm.all_reduce_add_rms_norm(x, residual, weight, EPS, out=out, residual_out=residual_out)
            return out, residual_out

        return call


class _Unfused:
    rounds_once = False

    def __init__(self, name: str, bind_reduce: Callable[[Tensor], Callable[[], Tensor]], norm: Callable[..., Outputs]):
        self.name, self._bind_reduce, self._norm = name, bind_reduce, norm

    def bind(self, operands: Operands) -> Callable[[], Outputs]:
        reduce = self._bind_reduce(operands.x)
        return lambda: self._norm(reduce(), operands.residual, operands.weight)


class _FlashInfer:
    """TensorRT-LLM's fused kernel through FlashInfer, with the FlashInfer workspace that needs no multicast object."""

    rounds_once = True

    def __init__(self, one_shot: bool, comm: Communicator, group: dist.ProcessGroup, tokens: int, hidden: int):
        from flashinfer import comm as flashinfer

        self.name = f"flashinfer {1 if one_shot else 2}-shot"
        self._module, self._one_shot, self._comm = flashinfer, one_shot, comm
        # The default memory is torch's symmetric memory or cudaIpc; multicast of the former is off (run()).
        self._handles, self._workspace = flashinfer.trtllm_create_ipc_workspace_for_all_reduce_fusion(
            comm.rank, comm.world_size, tokens, hidden, group=group
        )

    def bind(self, operands: Operands) -> Callable[[], Outputs]:
        x = operands.x
        if not self._one_shot and len(x) <= self._comm.world_size:
            raise RuntimeError("two-shot needs more rows than ranks")
        out, residual_out = torch.empty_like(x), torch.empty_like(x)

        def call() -> Outputs:
            self._module.trtllm_allreduce_fusion(
                allreduce_in=x,
                world_size=self._comm.world_size,
                world_rank=self._comm.rank,
                token_num=x.shape[0],
                hidden_dim=x.shape[1],
                workspace_ptrs=self._workspace,
                launch_with_pdl=True,
                trigger_completion_at_end=True,
                fp32_acc=True,
                pattern_code=self._module.AllReduceFusionPattern.kARResidualRMSNorm,
                use_oneshot=self._one_shot,
                allreduce_out=None,
                residual_in=operands.residual,
                residual_out=residual_out,
                norm_out=out,
                quant_out=None,
                scale_out=None,
                rms_gamma=operands.weight,
                rms_eps=EPS,
                scale_factor=None,
                layout_code=None,
            )
            return out, residual_out

        return call


def run(args: argparse.Namespace) -> int:
    """``llm-comm bench fused``. Returns 0, or 1 when a result was wrong or a file could not be written.

    Raises:
        ConfigError: the options do not fit together or this machine, or the configuration is wrong.
    """
    args.min = args.min or max(16 << 10, args.hidden * 2)
    placement = settle(args, _ON_GPU, EMULATED)
    why = registry.operations()[FUSED].why_not_rows(args.hidden)
    if why:
        raise ConfigError(f"--hidden: {why}")
    if args.max < args.min or args.min < args.hidden * 2:
        raise ConfigError(
            f"--min {format_bytes(args.min)}, --max {format_bytes(args.max)}: the smallest message is a row of "
            f"--hidden {args.hidden} elements, and the largest is no smaller"
        )
    return in_ranks(args, placement, lambda group, config: _run_rank(args, placement, group, config))


def _run_rank(args: argparse.Namespace, placement: Placement, group: dist.ProcessGroup, config: Config) -> int:
    rows, written = [], True
    with Communicator(group, placement.device, config) as comm:
        libraries, remarks = _libraries(comm, group, args.max // (2 * args.hidden), args.hidden)
        schedule = Schedule.by(args.method, args.calls, args.reps)
        bench = _Bench(comm, group, DTYPES[args.dtype], args.hidden, schedule)
        progress = Progress(enabled=comm.rank == 0)
        for message_bytes in sizes(args.min, args.max):
            for mode in args.mode:
                rows.append(bench.row(message_bytes // (2 * args.hidden), mode, libraries, progress))
        progress.clear()
    if launch.rank() == 0:
        title = f"all-reduce + add + RMSNorm, hidden {args.hidden}, {args.dtype}, {placement.describe()}"
        content = {"command": "bench fused", "hidden": args.hidden}
        written = report.publish(title, args, placement, rows, remarks, content)
    return 1 if not written or any(row.wrong for row in rows) else 0


def _libraries(
    comm: Communicator, group: dist.ProcessGroup, tokens: int, hidden: int
) -> tuple[list[Library], list[str]]:
    """The libraries to compare, the same on all ranks, and remarks on what is missing or to be read with care."""

    def ours(x: Tensor) -> Callable[[], Tensor]:
        if not comm.accepts(x):
            raise RuntimeError(comm.plan(x).reason)
        return partial(comm.all_reduce, x, out=torch.empty_like(x))

    def other(x: Tensor) -> Callable[[], Tensor]:
        def call() -> Tensor:
            dist.all_reduce(x, group=group)
            return x

        return call

    if comm.is_emulated:
        return [
            _Fused(comm),
            _Unfused("plain + norm", ours, add_rms_norm),
            _Unfused("gloo + norm", other, add_rms_norm),
        ], [report.EMULATED_REMARK]
    norm = norm_of_engines(comm)
    libraries: list[Library] = [
        _Fused(comm),
        _Unfused("plain + norm", ours, norm),
        _Unfused("nccl + norm", other, norm),
    ]
    remarks = [NORM_REMARK]
    try:
        others.set_up("import", lambda: importlib.import_module("flashinfer.comm"), group)
        for one_shot in (True, False):
            make = partial(_FlashInfer, one_shot, comm, group, tokens, hidden)
            libraries.append(others.set_up("set-up of its workspace", make, group))
    except others.NotUsableError as error:
        remarks.append(f"FlashInfer is not usable here: {error}")
    return libraries, remarks


class _Bench:
    """Measures on this rank; its methods are collective."""

    def __init__(
        self,
        comm: Communicator,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        hidden: int,
        schedule: Schedule,
    ) -> None:
        self._comm, self._group, self._dtype, self._hidden, self._schedule = comm, group, dtype, hidden, schedule

    def row(self, rows: int, mode: str, libraries: list[Library], progress: Progress) -> Row:
        """Checks and times all libraries at one size."""
        reference = FusedReference(rows, self._hidden, self._comm.world_size, self._dtype, self._comm.device)
        results = {}
        for library in libraries:
            progress.show(f"fused {rows} rows {mode}: {library.name}")
            results[library.name] = self._measure(library, mode, reference)
        self._comm.check()
        operands = reference.operands(0, 0)
        plan = self._comm.plan_all_reduce_add_rms_norm(operands.x, operands.weight)
        return Row(plan.message_bytes, mode, dataclasses.asdict(plan), results)

    def _measure(self, library: Library, mode: str, reference: FusedReference) -> Result:
        operands = reference.operands(self._comm.rank, 0)
        failure, error = "", 0.0
        try:
            call = library.bind(operands)
            for salt in range(_CHECKS):
                operands.x.copy_(reference.operands(self._comm.rank, salt).x)
                error = max(error, reference.error(call(), salt, library.rounds_once))
        except LlmCommError:
            raise
        except RuntimeError as reason:
            failure = report.first_line(reason)
        failure, error = first_failure(failure, error, self._group)
        if failure:
            return Result(skipped=failure)
        if mode == "graph":
            timed = timing.time_graph(call, _nothing, self._schedule, self._group)
        else:
            timed = timing.time_eager(call, _nothing, self._schedule, self._comm.device, self._group)
        return Result(timed.us, timed.min_us, timed.host_us, error)


def _nothing() -> None:
    """What a library that works in place makes of its input in the end does not matter to its time."""


class FusedReference:
    """Operands that depend on rank and position, and float64 results, which judge a library."""

    def __init__(self, rows: int, hidden: int, world: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._world = (rows, hidden), world
        self._sums = Reference(rows * hidden, world, dtype, device)

    def operands(self, rank: int, salt: int) -> Operands:
        """Of one rank; another ``salt`` gives another ``x``. The residual is that of a rank that does not exist."""
        x = self._sums.addend(rank, salt).view(self._shape)
        residual = self._sums.addend(self._world, 0).view(self._shape)
        weight = self._sums.addend(self._world + 1, 0).view(self._shape)[0].clone()
        return Operands(x, residual, weight)

    def error(self, outputs: Outputs, salt: int, rounds_once: bool) -> float:
        """Largest difference from the float64 results, as a fraction of what rounding explains; huge for a NaN.

        The norm is judged by the library's own new residual: what that is off by is counted once.
        """
        normed, new_residual = outputs
        addends = torch.stack([self.operands(rank, salt).x.double() for rank in range(self._world)])
        operands = self.operands(0, salt)
        epsilon = torch.finfo(normed.dtype).eps
        total = addends.sum(0)
        exact = total + operands.residual.double()
        magnitude = addends.abs().sum(0)
        summing = magnitude * self._world * (torch.finfo(torch.float32).eps if rounds_once else epsilon)
        allowed = summing + (total.abs() + exact.abs() + epsilon) * (epsilon / 2) * 1.01
        return max(worst(new_residual.double() - exact, allowed), norm_error(normed, new_residual, operands.weight))


def norm_error(normed: Tensor, new_residual: Tensor, weight: Tensor) -> float:
    """Largest difference of normed rows from the float64 norm of a residual, as a fraction of what rounding explains;
    infinite for a NaN."""
    x = new_residual.double()
    norm = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    # One ulp more than half of one; and a rounding before the weight, as some kernels do.
    return worst(normed.double() - norm, norm.abs() * torch.finfo(normed.dtype).eps * 1.5 + 1e-30)
