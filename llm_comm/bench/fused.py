"""Command ``llm-comm bench fused``: all-reduce + residual add + RMSNorm, in one kernel and in two, in one run.

The fused operation is compared with the plain all-reduces of llm_comm and NCCL, each followed by add and norm in one
kernel. FlashInfer's fused all-reduce is compared too if it is installed. On GPUs, add and norm are compiled by
``torch.compile``, as in an engine that compiles its model; on emulated devices they are plain torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from llm_comm import registry
from llm_comm.bench import agreement, comparison, report
from llm_comm.bench.comparison import EMULATED, ON_GPU, Bound, Collective, Library
from llm_comm.bench.reference import EPS, FusedReference, Operands, Outputs
from llm_comm.bench.report import OURS, format_bytes
from llm_comm.communicator import Communicator
from llm_comm.errors import ConfigError
from llm_comm.planning.plan import Plan
from llm_comm.planning.tables import FUSED

NORM_REMARK = "norm: the residual add and the norm as torch.compile makes one kernel of them"
_ON_GPU = dataclasses.replace(ON_GPU, max_bytes=1 << 20, modes=("graph",))

_Result = TypeVar("_Result")


def add_rms_norm(summed: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
    """Compute residual add and norm after an all-reduce, in the form in which engines write them for their compiler."""
    new_residual = summed + residual
    x = new_residual.float()
    factor = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return (x * factor * weight.float()).to(summed.dtype), new_residual


def as_engines_run(function: Callable[..., _Result], comm: Communicator) -> Callable[..., _Result]:
    """Compile a function with ``torch.compile`` on GPUs; on emulated ones return it unchanged."""
    if comm.is_emulated:
        return function
    # Each size is a graph of its own. Beyond the limit torch would silently stop compiling.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(function, dynamic=False)


class _Rows:
    """Operands of a rank, by the number of elements.

    Args:
        comm: Communicator.
        dtype: Dtype of the elements.
        hidden: Elements of a row.
    """

    def __init__(self, comm: Communicator, dtype: torch.dtype, hidden: int) -> None:
        self.comm, self.hidden, self._dtype = comm, hidden, dtype

    def reference(self, count: int) -> FusedReference:
        """Return the judge of results of ``count`` elements."""
        return FusedReference(count // self.hidden, self.hidden, self.comm.world_size, self._dtype, self.comm.device)

    def operands(self, count: int) -> Operands:
        """Return the operands of this rank."""
        return self.reference(count).operands(self.comm.rank, 0)

    def plan(self, count: int) -> Plan:
        """Return the plan of the fused operation."""
        operands = self.operands(count)
        return self.comm.plan_all_reduce_add_rms_norm(operands.x, operands.weight)


class _Fused:
    name, in_place, rounds_once = OURS, False, True

    def __init__(self, rows: _Rows) -> None:
        self._rows, self._comm = rows, rows.comm

    def bind(self, count: int) -> Bound:
        operands = self._rows.operands(count)
        x, residual, weight = operands.x, operands.residual, operands.weight
        if not self._comm.accepts_all_reduce_add_rms_norm(x, weight):
            raise RuntimeError(self._comm.plan_all_reduce_add_rms_norm(x, weight).reason)
        out, residual_out = torch.empty_like(x), torch.empty_like(x)

        def call() -> Outputs:
            self._comm.all_reduce_add_rms_norm(x, residual, weight, EPS, out=out, residual_out=residual_out)
            return out, residual_out

        return Bound(x, call)


class _Unfused:
    """All-reduce followed by a separate norm.

    Args:
        name: Column head.
        rows: Operands.
        bind_reduce: Returns the all-reduce of a tensor as a call.
        norm: Residual add and norm.
        in_place: The sums replace the tensor.
    """

    rounds_once = False

    def __init__(
        self,
        name: str,
        rows: _Rows,
        bind_reduce: Callable[[Tensor], Callable[[], Tensor]],
        norm: Callable[..., Outputs],
        in_place: bool,
    ) -> None:
        self.name, self.in_place = name, in_place
        self._rows, self._bind_reduce, self._norm = rows, bind_reduce, norm

    def bind(self, count: int) -> Bound:
        operands = self._rows.operands(count)
        reduce = self._bind_reduce(operands.x)
        return Bound(operands.x, lambda: self._norm(reduce(), operands.residual, operands.weight))


class _FlashInfer:
    """TensorRT-LLM's fused kernel through FlashInfer, with the FlashInfer workspace that needs no multicast object."""

    in_place, rounds_once = False, True

    def __init__(self, one_shot: bool, rows: _Rows, group: dist.ProcessGroup, tokens: int) -> None:
        from flashinfer import comm as flashinfer

        comm = rows.comm

        self.name = f"flashinfer {1 if one_shot else 2}-shot"
        self._module, self._one_shot, self._rows, self._comm = flashinfer, one_shot, rows, comm
        # The default memory is torch's symmetric memory, whose multicast run() turns off, or cudaIpc.
        self._handles, self._workspace = flashinfer.trtllm_create_ipc_workspace_for_all_reduce_fusion(
            comm.rank, comm.world_size, tokens, rows.hidden, group=group
        )

    def bind(self, count: int) -> Bound:
        operands = self._rows.operands(count)
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

        return Bound(x, call)


def run(args: argparse.Namespace) -> int:
    """Run ``llm-comm bench fused``. Return 0, or 1 if a result was wrong or a file could not be written.

    Raises:
        ConfigError: The options contradict each other or the machine, or the configuration is invalid.
    """
    args.min = args.min or max(16 << 10, args.hidden * 2)
    placement = comparison.settle(args, _ON_GPU, EMULATED)
    why = registry.operations()[FUSED].why_not_rows(args.hidden)
    if why:
        raise ConfigError(f"--hidden: {why}")
    if args.max < args.min or args.min < args.hidden * 2:
        raise ConfigError(
            f"--min {format_bytes(args.min)}, --max {format_bytes(args.max)}: the smallest message is a row of "
            f"--hidden {args.hidden} elements, and the largest is no smaller"
        )
    args.min -= args.min % (args.hidden * 2)  # whole rows
    return comparison.start(args, placement, collective(args.hidden))


def collective(hidden: int) -> Collective:
    """Return the fused operation on rows of ``hidden`` elements."""
    return Collective(
        "fused",
        partial(libraries_of, hidden),
        lambda comm, dtype, count: _Rows(comm, dtype, hidden).reference(count),
        lambda comm, dtype, count: _Rows(comm, dtype, hidden).plan(count),
        lambda comm, dtype: _Fused(_Rows(comm, dtype, hidden)),
        f"all-reduce + add + RMSNorm, hidden {hidden}",
        {"hidden": hidden},
    )


def libraries_of(
    hidden: int, comm: Communicator, dtype: torch.dtype, max_bytes: int, group: dist.ProcessGroup
) -> tuple[list[Library], list[str]]:
    """Return the libraries to compare for the fused operation, see ``Collective``, and remarks on missing ones."""
    rows = _Rows(comm, dtype, hidden)

    def ours(x: Tensor) -> Callable[[], Tensor]:
        if not comm.accepts(x):
            raise RuntimeError(comm.plan(x).reason)
        return partial(comm.all_reduce, x, out=torch.empty_like(x))

    def other(x: Tensor) -> Callable[[], Tensor]:
        def call() -> Tensor:
            dist.all_reduce(x, group=group)
            return x

        return call

    norm = as_engines_run(add_rms_norm, comm)
    libraries: list[Library] = [
        _Fused(rows),
        _Unfused("plain + norm", rows, ours, norm, in_place=False),
        _Unfused("gloo + norm" if comm.is_emulated else "nccl + norm", rows, other, norm, in_place=True),
    ]
    if comm.is_emulated:
        return libraries, [report.EMULATED_REMARK]
    remarks = [NORM_REMARK]
    try:
        agreement.set_up("import", lambda: importlib.import_module("flashinfer.comm"), group)
        for one_shot in (True, False):
            make = partial(_FlashInfer, one_shot, rows, group, max_bytes // (2 * hidden))
            libraries.append(agreement.set_up("set-up of its workspace", make, group))
    except agreement.NotUsableError as error:
        remarks.append(f"FlashInfer is not usable here: {error}")
    return libraries, remarks
