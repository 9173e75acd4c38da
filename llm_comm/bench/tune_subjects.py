"""What ``llm-comm tune`` measures: operations, the sizes to measure them at, and candidates for rows of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from llm_comm import _core, registry
from llm_comm.communicator import Communicator
from llm_comm.config import MIB
from llm_comm.planning.plan import Plan, Problem
from llm_comm.planning.tables import ALL_REDUCE, FUSED, Row

#: bf16, in which everything is measured.
ELEMENT_BYTES = 2
_DTYPE, _DATA_TYPE = torch.bfloat16, "bf16"
_EPS = 1e-5
#: Where a block has a row's tile for itself the kernels differ little above this: what the largest size says holds on.
LARGEST_FUSED = 16 * MIB
# From here NCCL is timed too: the table ends where NCCL wins.
_COMPARE_FROM = MIB

Call = Callable[[], object]


@dataclass(frozen=True)
class Bound:
    """An operation with operands of one size.

    Attributes:
        plan: What ``call`` would run.
        call: Runs it; the inputs stay as they are.
        nccl: The same by NCCL, and what restores its input, where that is to be timed too.
    """

    plan: Callable[[], Plan]
    call: Call
    nccl: tuple[Call, Call] | None = None


class Subject(Protocol):
    """An operation as the tuner sees it.

    Attributes:
        operation: Its name in the registry.
        label: Goes before sizes and algorithms where they are shown.
    """

    operation: str
    label: str

    def sizes(self, smallest: int, largest: int) -> Iterator[int]:
        """Bytes of the messages to measure within the bounds."""

    def problem(self, size: int, world_size: int) -> Problem:
        """What a call of that size computes."""

    def bind(self, comm: Communicator, group: dist.ProcessGroup, size: int) -> Bound:
        """A call of that size."""


class AllReduceSubject:
    """The plain all-reduce."""

    operation, label = ALL_REDUCE, ""

    def sizes(self, smallest: int, largest: int) -> Iterator[int]:
        """Powers of two and the sizes halfway between."""
        size = smallest
        while size <= largest:
            yield size
            if size * 3 // 2 <= largest:
                yield size * 3 // 2
            size *= 2

    def problem(self, size: int, world_size: int) -> Problem:
        return Problem(self.operation, size // ELEMENT_BYTES, 0, _DATA_TYPE, world_size)

    def bind(self, comm: Communicator, group: dist.ProcessGroup, size: int) -> Bound:
        x = torch.randn(size // ELEMENT_BYTES, device=comm.device, dtype=_DTYPE)
        out = torch.empty_like(x)
        nccl = (partial(dist.all_reduce, x, group=group), x.zero_) if size >= _COMPARE_FROM else None
        return Bound(partial(comm.plan, x), partial(comm.all_reduce, x, out), nccl)


class FusedSubject:
    """All-reduce + residual add + RMSNorm, of rows of ``hidden`` elements."""

    operation, label = FUSED, "fused "

    def __init__(self, hidden: int) -> None:
        self._hidden = hidden

    def sizes(self, smallest: int, largest: int) -> Iterator[int]:
        """Of powers of two of rows, and the numbers halfway between."""
        row_bytes = self._hidden * ELEMENT_BYTES
        largest = min(largest, LARGEST_FUSED)
        rows = 1
        while rows * row_bytes <= largest:
            for count in (rows, rows * 3 // 2) if rows > 1 else (1,):
                if smallest <= count * row_bytes <= largest:
                    yield count * row_bytes
            rows *= 2

    def problem(self, size: int, world_size: int) -> Problem:
        return Problem(self.operation, size // ELEMENT_BYTES, self._hidden, _DATA_TYPE, world_size, (_EPS, 0))

    def bind(self, comm: Communicator, group: dist.ProcessGroup, size: int) -> Bound:
        shape = (size // (self._hidden * ELEMENT_BYTES), self._hidden)
        x, residual, out, residual_out = (torch.randn(shape, device=comm.device, dtype=_DTYPE) for _ in range(4))
        weight = torch.ones(self._hidden, device=comm.device, dtype=_DTYPE)
        fused = comm.all_reduce_add_rms_norm
        call = partial(fused, x, residual, weight, _EPS, out=out, residual_out=residual_out)
        return Bound(partial(comm.plan_fused, x, weight), call)


def candidates(problem: Problem, limits: _core.Limits) -> Iterator[Row]:
    """Rows of a table worth measuring for a problem, of every algorithm for tensors of any kind, simplest first."""
    for algorithm in registry.operations()[problem.operation].algorithms:
        if problem.data_type not in algorithm.data_types or algorithm.is_symmetric:
            continue
        for choice in _core.candidates(algorithm.number, problem.for_core(), limits):
            tunables = {name: getattr(choice, name) for name in algorithm.ranges}
            yield Row(problem.message_bytes(), problem.operation, algorithm.name, algorithm.protocol, **tunables)
