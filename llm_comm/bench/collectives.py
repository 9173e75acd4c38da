"""Commands ``llm-comm bench all-reduce``, ``all-gather``, ``reduce-scatter`` and ``all-to-all``: comparison of llm_comm
with other libraries.

On GPUs these are NCCL and torch's symmetric memory, whose multicast operators are never called; on emulated devices
gloo. DSL programs of option ``dsl`` are compared too. Sizes of operations on shards are the bytes of one
shard.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from llm_comm.bench import agreement, comparison, report
from llm_comm.bench.comparison import Bound, Collective, Judge, Library
from llm_comm.bench.reference import AllGatherReference, AllToAllReference, ReduceScatterReference, Reference
from llm_comm.bench.report import OURS, OURS_SYMMETRIC
from llm_comm.communicator import Communicator
from llm_comm.operations.operation import TORCH_TYPES
from llm_comm.planning.plan import Plan, Problem
from llm_comm.planning.selection import wire_of
from llm_comm.planning.tables import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER


class Primitive(NamedTuple):
    """Collective as a single call of llm_comm and of ``torch.distributed``.

    Attributes:
        takes_whole: The input holds the shards of all ranks; otherwise one shard.
        gives_whole: The output holds the shards of all ranks; otherwise one shard.
        accepts: Returns whether a communicator accepts an input.
        plan: Returns the communicator's plan for an input.
        run: Computes ``out`` from ``x`` with a communicator.
        by_torch: Computes ``out`` from ``x`` with a process group, and returns the result; in place it is ``x``.
    """

    takes_whole: bool
    gives_whole: bool
    accepts: Callable[[Communicator, Tensor], bool]
    plan: Callable[[Communicator, Tensor], Plan]
    run: Callable[[Communicator, Tensor, Tensor], Tensor]
    by_torch: Callable[[Tensor, Tensor, dist.ProcessGroup], Tensor]

    def counts(self, part: int, world_size: int) -> tuple[int, int]:
        """Return the number of elements of input and output for shards of ``part`` elements."""
        whole = part * world_size
        return whole if self.takes_whole else part, whole if self.gives_whole else part


def _all_reduce(x: Tensor, _: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.all_reduce(x, group=group)
    return x


def _all_gather(x: Tensor, out: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.all_gather_into_tensor(out, x, group=group)
    return out


def _reduce_scatter(x: Tensor, out: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.reduce_scatter_tensor(out, x, group=group)
    return out


def _all_to_all(x: Tensor, out: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.all_to_all_single(out, x, group=group)
    return out


#: Primitives by the operation's name in the registry. A shard of an all-reduce is the whole message.
PRIMITIVES = {
    ALL_REDUCE: Primitive(
        False,
        False,
        lambda comm, x: comm.accepts(x),
        lambda comm, x: comm.plan(x),
        lambda comm, x, out: comm.all_reduce(x, out=out),
        _all_reduce,
    ),
    ALL_GATHER: Primitive(
        False,
        True,
        lambda comm, x: comm.accepts_all_gather(x),
        lambda comm, x: comm.plan_all_gather(x),
        lambda comm, x, out: comm.all_gather(x, out=out),
        _all_gather,
    ),
    REDUCE_SCATTER: Primitive(
        True,
        False,
        lambda comm, x: comm.accepts_reduce_scatter(x),
        lambda comm, x: comm.plan_reduce_scatter(x),
        lambda comm, x, out: comm.reduce_scatter(x, out=out),
        _reduce_scatter,
    ),
    # Of equal parts. Parts of any sizes (ALL_TO_ALL_V) are not measured: they take the rows of equal ones.
    ALL_TO_ALL: Primitive(
        True,
        True,
        lambda comm, x: comm.accepts_all_to_all(x),
        lambda comm, x: comm.plan_all_to_all(x),
        lambda comm, x, out: comm.all_to_all(x, out=out),
        _all_to_all,
    ),
}
#: All-gather whose values option ``wire`` may quantize.
LOSSY_ALL_GATHER = PRIMITIVES[ALL_GATHER]._replace(
    plan=lambda comm, x: comm.plan_all_gather(x, lossy=True),
    run=lambda comm, x, out: comm.all_gather(x, out=out, lossy=True),
)


@dataclass
class _Way:
    """Library that computes ``call(x, out)``.

    Attributes:
        name, in_place, rounds_once: Attributes of ``Library``.
        primitive: Collective.
        comm: Communicator that defines ranks and device.
        dtype: Dtype of the elements.
        call: Computes the collective.
        why_not: Returns why an input is not served, or "".
        x, out: Memory for input or output of the largest message; None: an ordinary tensor for each size.
    """

    name: str
    in_place: bool
    rounds_once: bool
    primitive: Primitive
    comm: Communicator
    dtype: torch.dtype
    call: Callable[[Tensor, Tensor], Tensor]
    why_not: Callable[[Tensor], str] = lambda _: ""
    x: Tensor | None = None
    out: Tensor | None = None

    def bind(self, count: int) -> Bound:
        counts = self.primitive.counts(count, self.comm.world_size)
        x, out = (
            torch.empty(elements, dtype=self.dtype, device=self.comm.device) if memory is None else memory[:elements]
            for elements, memory in zip(counts, (self.x, self.out), strict=True)
        )
        if why := self.why_not(x):
            raise RuntimeError(why)
        return Bound(x, lambda: self.call(x, out))


def ours(operation: str, comm: Communicator, dtype: torch.dtype, heap: Tensor | None = None) -> Library:
    """Return llm_comm's implementation. ``heap``: symmetric memory for results; None: ordinary tensors."""
    primitive = PRIMITIVES[operation]

    def why_not(x: Tensor) -> str:
        return "" if primitive.accepts(comm, x) else primitive.plan(comm, x).reason

    name = OURS if heap is None else OURS_SYMMETRIC
    return _Way(
        name, False, True, primitive, comm, dtype, lambda x, out: primitive.run(comm, x, out), why_not, out=heap
    )


def libraries_of(
    operation: str, comm: Communicator, dtype: torch.dtype, max_bytes: int, group: dist.ProcessGroup
) -> tuple[list[Library], list[str]]:
    """Return the libraries to compare, see ``Collective``, and remarks on missing ones."""
    primitive = PRIMITIVES[operation]
    inputs, outputs = primitive.counts(max_bytes // dtype.itemsize, comm.world_size)
    in_place, gathers = operation == ALL_REDUCE, operation == ALL_GATHER
    libraries = [ours(operation, comm, dtype)]
    if gathers:
        libraries.append(ours(operation, comm, dtype, comm.empty(outputs, dtype)))

    def way(name: str, call: Callable[[Tensor, Tensor], Tensor], in_place: bool, x: Tensor | None = None) -> None:
        libraries.append(_Way(name, in_place, gathers, primitive, comm, dtype, call, x=x))

    way("gloo" if comm.is_emulated else "nccl", lambda x, out: primitive.by_torch(x, out, group), in_place)
    if comm.is_emulated:
        return libraries, [report.EMULATED_REMARK]
    if operation == ALL_TO_ALL:  # torch.ops.symm_mem has none of equal parts
        return libraries, []
    try:
        buffer, handle = comparison.symmetric_buffer(inputs, dtype, comm.device, group)
    except agreement.NotUsableError as error:
        return libraries, [f"torch symmetric memory is not usable here: {error}"]
    ops, name = torch.ops.symm_mem, group.group_name
    if operation == ALL_REDUCE:
        way("symm 1-shot", lambda x, _: ops.one_shot_all_reduce(x, "sum", name), False, buffer)
        way("symm 2-shot", lambda x, _: ops.two_shot_all_reduce_(x, "sum", name), True, buffer)
    elif gathers:
        way("symm copies", lambda x, out: _copy_of_peers(comm, handle, x, out), False, buffer)
    else:
        way("symm 1-shot", lambda x, out: ops.reduce_scatter_out(x, name, False, out), False, buffer)
    return libraries, []


def _copy_of_peers(comm: Communicator, handle: Any, x: Tensor, out: Tensor) -> Tensor:
    """Copy the peers' shards from torch's symmetric memory, between two barriers.

    ``torch.ops.symm_mem._low_contention_all_gather`` does the same, but on a stream of its own.
    """
    handle.barrier()
    for step in range(comm.world_size):
        peer = (comm.rank - step) % comm.world_size
        part = out[peer * x.numel() : (peer + 1) * x.numel()]
        part.copy_(handle.get_buffer(peer, x.shape, x.dtype))
    handle.barrier()
    return out


def _collective(operation: str, judge: Callable[[Communicator, torch.dtype, int], Judge]) -> Collective:
    primitive = PRIMITIVES[operation]

    def plan(comm: Communicator, dtype: torch.dtype, count: int) -> Plan:
        inputs, _ = primitive.counts(count, comm.world_size)
        return primitive.plan(comm, torch.empty(inputs, dtype=dtype, device=comm.device))

    return Collective(
        operation.replace("_", "-"),
        partial(libraries_of, operation),
        judge,
        plan,
        partial(ours, operation),
    )


def _judge_of_all_reduce(comm: Communicator, dtype: torch.dtype, count: int) -> Reference:
    data_type = next(name for name, torch_type in TORCH_TYPES.items() if torch_type == dtype)
    problem = Problem(ALL_REDUCE, count, 0, data_type, comm.world_size)
    wire = wire_of(problem, comm.config) if comm.nodes == 1 else ""
    return Reference(count, comm.world_size, dtype, comm.device, wire)


#: Collectives by the name of the command.
COLLECTIVES = {
    collective.title: collective
    for collective in (
        _collective(ALL_REDUCE, _judge_of_all_reduce),
        _collective(ALL_GATHER, lambda c, dtype, count: AllGatherReference(count, c.world_size, dtype, c.device)),
        _collective(
            REDUCE_SCATTER, lambda c, dtype, n: ReduceScatterReference(n, c.rank, c.world_size, dtype, c.device)
        ),
        _collective(ALL_TO_ALL, lambda c, dtype, n: AllToAllReference(n, c.rank, c.world_size, dtype, c.device)),
    )
}


def run(args: argparse.Namespace) -> int:
    """Run one of the three commands; ``args.collective`` names it. See ``comparison.run``."""
    return comparison.run(args, COLLECTIVES[args.collective])
