"""``llm-comm bench all-gather``: llm_comm beside other libraries, by the bytes of a rank's part.

On GPUs the others are NCCL, which is what vLLM and SGLang gather by, and copies from the peers' parts in torch's
symmetric memory (its multicast operators are never called); on emulated devices gloo.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llm_comm.bench import comparison, others, report
from llm_comm.bench.comparison import Bound, Collective, Library
from llm_comm.bench.reference import Reference
from llm_comm.bench.report import OURS, OURS_SYMMETRIC
from llm_comm.communicator import Communicator
from llm_comm.planning.plan import Plan


class _Library:
    """One that gathers ``x`` into ``out`` by ``gather(x, out)``."""

    in_place, rounds_once = False, True  # nothing is rounded

    def __init__(
        self, name: str, comm: Communicator, dtype: torch.dtype, gather: Callable[[Tensor, Tensor], object]
    ) -> None:
        self.name = name
        self._comm, self._dtype, self._gather = comm, dtype, gather

    def bind(self, count: int) -> Bound:
        x, out = self.operands(count)

        def call() -> Tensor:
            self._gather(x, out)
            return out

        return Bound(x, call)

    def operands(self, count: int) -> tuple[Tensor, Tensor]:
        """A part, and what is gathered."""
        return self._ordinary(count), self._ordinary(count * self._comm.world_size)

    def _ordinary(self, count: int) -> Tensor:
        return torch.empty(count, dtype=self._dtype, device=self._comm.device)


class _LlmComm(_Library):
    """``heap``: symmetric memory of the communicator for the largest result; None: the result is an ordinary tensor."""

    def __init__(self, name: str, comm: Communicator, dtype: torch.dtype, heap: Tensor | None) -> None:
        super().__init__(name, comm, dtype, lambda x, out: comm.all_gather(x, out=out))
        self._heap = heap

    def operands(self, count: int) -> tuple[Tensor, Tensor]:
        x, out = super().operands(count)
        if not self._comm.accepts_all_gather(x):
            raise RuntimeError(self._comm.plan_all_gather(x).reason)
        return x, out if self._heap is None else self._heap[: out.numel()]


class _CopiesOfPeers(_Library):
    """The parts lie in torch's symmetric memory. Each rank copies those of its peers, between two barriers: what
    ``torch.ops.symm_mem._low_contention_all_gather`` does, on the stream of the call."""

    def __init__(self, comm: Communicator, dtype: torch.dtype, buffer: Tensor, handle: Any) -> None:
        super().__init__("symm copies", comm, dtype, self._copy)
        self._buffer, self._handle = buffer, handle

    def operands(self, count: int) -> tuple[Tensor, Tensor]:
        return self._buffer[:count], super().operands(count)[1]

    def _copy(self, x: Tensor, out: Tensor) -> None:
        world, rank = self._comm.world_size, self._comm.rank
        self._handle.barrier()
        for step in range(world):
            peer = (rank - step) % world
            part = out[peer * x.numel() : (peer + 1) * x.numel()]
            part.copy_(self._handle.get_buffer(peer, x.shape, x.dtype))
        self._handle.barrier()


class Parts:
    """As of ``Judge``: the parts of all ranks in their order, bit for bit."""

    def __init__(self, count: int, world: int, dtype: torch.dtype, device: torch.device) -> None:
        self._world, self._inputs = world, Reference(count, world, dtype, device)

    def addend(self, rank: int, salt: int) -> Tensor:
        """The part of one rank."""
        return self._inputs.addend(rank, salt)

    def error(self, actual: Tensor, salt: int, rounds_once: bool) -> float:
        """0, or infinite where the result has other bits anywhere."""
        del rounds_once
        expected = torch.cat([self.addend(rank, salt) for rank in range(self._world)])
        return 0.0 if torch.equal(actual, expected) else float("inf")


def run(args: argparse.Namespace) -> int:
    """``llm-comm bench all-gather``: as ``comparison.run``."""
    return comparison.run(args, ALL_GATHER)


def libraries_of(
    comm: Communicator, dtype: torch.dtype, max_bytes: int, group: dist.ProcessGroup
) -> tuple[list[Library], list[str]]:
    """As of ``Collective``."""
    count = max_bytes // dtype.itemsize

    def by_torch(x: Tensor, out: Tensor) -> None:
        dist.all_gather_into_tensor(out, x, group=group)

    heap = comm.empty(count * comm.world_size, dtype)
    libraries: list[Library] = [
        _ours(comm, dtype),
        _LlmComm(OURS_SYMMETRIC, comm, dtype, heap),
        _Library("gloo" if comm.is_emulated else "nccl", comm, dtype, by_torch),
    ]
    if comm.is_emulated:
        return libraries, [report.EMULATED_REMARK]
    try:
        buffer, handle = comparison.symmetric_buffer(count, dtype, comm.device, group)
    except others.NotUsableError as error:
        return libraries, [f"torch symmetric memory is not usable here: {error}"]
    return [*libraries, _CopiesOfPeers(comm, dtype, buffer, handle)], []


def _judge(comm: Communicator, dtype: torch.dtype, count: int) -> Parts:
    return Parts(count, comm.world_size, dtype, comm.device)


def _plan(comm: Communicator, dtype: torch.dtype, count: int) -> Plan:
    return comm.plan_all_gather(torch.empty(count, dtype=dtype, device=comm.device))


def _ours(comm: Communicator, dtype: torch.dtype) -> Library:
    return _LlmComm(OURS, comm, dtype, None)


ALL_GATHER = Collective("all-gather", libraries_of, _judge, _plan, _ours)
