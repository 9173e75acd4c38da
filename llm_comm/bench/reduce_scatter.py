"""``llm-comm bench reduce-scatter``: llm_comm beside other libraries, by the bytes of a rank's part.

On GPUs the others are NCCL, which is what vLLM and SGLang scatter by, and an operator of torch's symmetric memory (its
multicast operators are never called); on emulated devices gloo.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from llm_comm.bench import comparison, others, report
from llm_comm.bench.comparison import Bound, Collective, Library
from llm_comm.bench.reference import Reference
from llm_comm.bench.report import OURS
from llm_comm.communicator import Communicator
from llm_comm.planning.plan import Plan


class _Library:
    """One that scatters the sums of ``x`` into ``out`` by ``scatter(x, out)``.

    Args:
        buffer: where ``x`` lies; None: in an ordinary tensor.
    """

    in_place = False

    def __init__(
        self,
        name: str,
        comm: Communicator,
        dtype: torch.dtype,
        scatter: Callable[[Tensor, Tensor], object],
        buffer: Tensor | None = None,
    ) -> None:
        self.name, self.rounds_once = name, name == OURS
        self._comm, self._dtype, self._scatter, self._buffer = comm, dtype, scatter, buffer

    def bind(self, count: int) -> Bound:
        whole, device = count * self._comm.world_size, self._comm.device
        x = torch.empty(whole, dtype=self._dtype, device=device) if self._buffer is None else self._buffer[:whole]
        out = torch.empty(count, dtype=self._dtype, device=device)
        if self.name == OURS and not self._comm.accepts_reduce_scatter(x):
            raise RuntimeError(self._comm.plan_reduce_scatter(x).reason)

        def call() -> Tensor:
            self._scatter(x, out)
            return out

        return Bound(x, call)


class PartOfSums:
    """As of ``Judge``: a rank's part of the sums."""

    def __init__(self, count: int, rank: int, world: int, dtype: torch.dtype, device: torch.device) -> None:
        self._sums, self._first = Reference(count * world, world, dtype, device), rank * count

    def addend(self, rank: int, salt: int) -> Tensor:
        """The whole input of one rank."""
        return self._sums.addend(rank, salt)

    def error(self, actual: Tensor, salt: int, rounds_once: bool) -> float:
        """As of ``Reference``."""
        return self._sums.error(actual, salt, rounds_once, self._first)


def run(args: argparse.Namespace) -> int:
    """``llm-comm bench reduce-scatter``: as ``comparison.run``."""
    return comparison.run(args, REDUCE_SCATTER)


def libraries_of(
    comm: Communicator, dtype: torch.dtype, max_bytes: int, group: dist.ProcessGroup
) -> tuple[list[Library], list[str]]:
    """As of ``Collective``."""

    def by_torch(x: Tensor, out: Tensor) -> None:
        dist.reduce_scatter_tensor(out, x, group=group)

    libraries: list[Library] = [
        _ours(comm, dtype),
        _Library("gloo" if comm.is_emulated else "nccl", comm, dtype, by_torch),
    ]
    if comm.is_emulated:
        return libraries, [report.EMULATED_REMARK]
    count = max_bytes // dtype.itemsize * comm.world_size
    try:
        buffer, _ = comparison.symmetric_buffer(count, dtype, comm.device, group)
    except others.NotUsableError as error:
        return libraries, [f"torch symmetric memory is not usable here: {error}"]

    def by_symmetric_memory(x: Tensor, out: Tensor) -> None:
        torch.ops.symm_mem.reduce_scatter_out(x, group.group_name, False, out)

    return [*libraries, _Library("symm 1-shot", comm, dtype, by_symmetric_memory, buffer)], []


def _judge(comm: Communicator, dtype: torch.dtype, count: int) -> PartOfSums:
    return PartOfSums(count, comm.rank, comm.world_size, dtype, comm.device)


def _plan(comm: Communicator, dtype: torch.dtype, count: int) -> Plan:
    return comm.plan_reduce_scatter(torch.empty(count * comm.world_size, dtype=dtype, device=comm.device))


def _ours(comm: Communicator, dtype: torch.dtype) -> Library:
    return _Library(OURS, comm, dtype, lambda x, out: comm.reduce_scatter(x, out=out))


REDUCE_SCATTER = Collective("reduce-scatter", libraries_of, _judge, _plan, _ours)
