"""``llm-comm bench all-reduce``: llm_comm beside other libraries.

On GPUs the others are NCCL and torch's symmetric memory (its multicast variants are never called), on
emulated devices gloo. Programs of llm_comm.dsl that option ``dsl`` names are compared too.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor

from llm_comm.bench import comparison, others, report
from llm_comm.bench.comparison import Bound, Collective, Library
from llm_comm.bench.reference import Reference
from llm_comm.bench.report import OURS
from llm_comm.communicator import Communicator
from llm_comm.planning.plan import Plan


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
    """``llm-comm bench all-reduce``: as ``comparison.run``."""
    return comparison.run(args, ALL_REDUCE)


def libraries_of(
    comm: Communicator, dtype: torch.dtype, max_bytes: int, group: dist.ProcessGroup
) -> tuple[list[Library], list[str]]:
    """As of ``Collective``."""
    ours = _LlmComm(comm, dtype)
    if comm.is_emulated:
        return [ours, _TorchDistributed("gloo", group, dtype, comm.device)], [report.EMULATED_REMARK]
    libraries: list[Library] = [ours, _TorchDistributed("nccl", group, dtype, comm.device)]
    try:
        buffer, _ = comparison.symmetric_buffer(max_bytes // dtype.itemsize, dtype, comm.device, group)
    except others.NotUsableError as error:
        return libraries, [f"torch symmetric memory is not usable here: {error}"]
    libraries.append(_SymmetricMemory("symm 1-shot", "one_shot_all_reduce", False, buffer, group))
    libraries.append(_SymmetricMemory("symm 2-shot", "two_shot_all_reduce_", True, buffer, group))
    return libraries, []


def _judge(comm: Communicator, dtype: torch.dtype, count: int) -> Reference:
    return Reference(count, comm.world_size, dtype, comm.device)


def _plan(comm: Communicator, dtype: torch.dtype, count: int) -> Plan:
    return comm.plan(torch.empty(count, dtype=dtype, device=comm.device))


ALL_REDUCE = Collective("all-reduce", libraries_of, _judge, _plan, _LlmComm)
