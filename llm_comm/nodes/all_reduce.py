"""All-reduce over nodes, plain and fused: reduce-scatter in the node, sum between nodes, all-gather in the node."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from llm_comm import _core
from llm_comm.nodes.exchange import Exchange
from llm_comm.nodes.hierarchy import IN_ORDER, Hierarchy, Run
from llm_comm.nodes.in_node import InNode, address_of, bytes_at, chunks, slices
from llm_comm.operations.all_reduce import AllReduce
from llm_comm.operations.all_reduce_add_rms_norm import AllReduceAddRmsNorm
from llm_comm.planning.plan import Problem
from llm_comm.planning.planner import Planner
from llm_comm.planning.selection import Layout
from llm_comm.planning.tables import ALL_REDUCE, FUSED
from llm_comm.runtime.core_handle import CoreHandle


class AllReduceOverNodes(AllReduce):
    """All-reduce of one communicator over several nodes.

    Args:
        handle: Handle of the core that connects the ranks of this node.
        planner: Planner for the ranks of all nodes.
        hierarchy: Common parts of the communicator's hierarchical operations.
    """

    def __init__(self, handle: CoreHandle, planner: Planner, hierarchy: Hierarchy) -> None:
        super().__init__(handle, planner)
        self._hierarchy = hierarchy

    def _layout(self, count: int, dtype: torch.dtype) -> Layout:
        planner, hierarchy = self._planner, self._hierarchy
        data_type, nbytes = self._data_types[dtype], count * dtype.itemsize
        problem = Problem(ALL_REDUCE, count, 0, data_type, planner.world_size)
        nothing = hierarchy.without_phases(problem, planner)
        if nothing is not None:
            return nothing
        in_node = hierarchy.in_node
        row = hierarchy.rows.find(nbytes)
        sizes = chunks(count, row.chunk_bytes, in_node.ranks, dtype.itemsize)
        what = f"{count} {data_type}"
        if in_node.ranks == 1:
            # No in-node phase could overlap with the exchange, so there are no chunks.
            return hierarchy.layout(
                ALL_REDUCE,
                nbytes,
                what,
                [hierarchy.between(row)],
                lambda counter: self._alone(nbytes, dtype, row.exchange, counter),
            )
        by_size = {size: _Phases.of(in_node, size, data_type, dtype.itemsize) for size in dict.fromkeys(sizes)}
        largest = by_size[sizes[0]]
        phases: list[Layout | str] = [largest.scatter, hierarchy.between(row, len(sizes)), largest.gather]
        return hierarchy.layout(
            ALL_REDUCE, nbytes, what, phases, lambda counter: self._make(sizes, by_size, dtype, row.exchange, counter)
        )

    def _make(
        self, sizes: list[int], by_size: dict[int, _Phases], dtype: torch.dtype, how: str, counter: _core.Counter
    ) -> Run:
        """Return a function that runs the phases of each chunk as a pipeline.

        Chunk i + 1 is scattered while chunk i is exchanged, and chunk i is gathered while chunk i + 1 is exchanged. The
        links within and between nodes are thereby busy at the same time.
        """
        hierarchy = self._hierarchy
        in_node, exchange, side = hierarchy.in_node, hierarchy.exchange, hierarchy.side
        prepared = {
            size: (in_node.prepare(phases.scatter), in_node.prepare(phases.gather)) for size, phases in by_size.items()
        }
        # Only the last gather increments the counter of calls.
        gathers_last = in_node.prepare(by_size[sizes[-1]].gather, counter)
        own_sizes = [by_size[size].slices[in_node.local_rank] for size in sizes]
        begins = [begin * dtype.itemsize for begin in accumulate(sizes[:-1], initial=0)]
        exchanges = side if len(sizes) > 1 else IN_ORDER

        def run(x: int, out: int, stream: int) -> bool:
            def gather(chunk: int) -> bool:
                slice_, wait = exchanged[chunk]
                wait()
                gathers = gathers_last if chunk == len(sizes) - 1 else prepared[sizes[chunk]][1]
                return gathers(address_of(slice_), out + begins[chunk], stream)

            exchanged: list[tuple[torch.Tensor, Callable[[], None]]] = []
            with exchanges.joined():
                for chunk, size in enumerate(sizes):
                    slice_ = hierarchy.empty(own_sizes[chunk], dtype)
                    scatters, _ = prepared[size]
                    if not scatters(x + begins[chunk], address_of(slice_), stream):
                        return False
                    exchanged.append((slice_, exchanges.behind(partial(_add, exchange, slice_, how))))
                    if chunk > 0 and not gather(chunk - 1):
                        return False
                return gather(len(sizes) - 1)

        return run

    def _alone(self, nbytes: int, dtype: torch.dtype, how: str, counter: _core.Counter) -> Run:
        """Return the runner for nodes of one rank, which only exchange."""
        hierarchy = self._hierarchy

        def run(x: int, out: int, stream: int) -> bool:
            own, total = (bytes_at(address, nbytes, hierarchy.device).view(dtype) for address in (x, out))
            hierarchy.exchange.add(own, total, how)
            counter.add()
            return True

        return run


class _Phases(NamedTuple):
    """In-node phases of a chunk.

    Attributes:
        slices: Elements of the slice of each rank in the node.
        scatter: Reduce-scatter in the node.
        gather: All-gather in the node.
    """

    slices: list[int]
    scatter: Layout
    gather: Layout

    @staticmethod
    def of(in_node: InNode, count: int, data_type: str, itemsize: int) -> _Phases:
        sizes = slices(count, in_node.ranks, itemsize)
        return _Phases(sizes, in_node.scatters(sizes, data_type), in_node.gathers([size * itemsize for size in sizes]))


def _add(exchange: Exchange, slice_: torch.Tensor, how: str) -> None:
    if slice_.numel():  # the partners on all nodes have equal slices, so all skip an empty one
        exchange.add(slice_, slice_, how)


WHY_NOT_ALONE = "is the last phase in a node, and nodes of one rank have none"


class AllReduceAddRmsNormOverNodes(AllReduceAddRmsNorm):
    """Fused all-reduce + add + RMSNorm of one communicator over several nodes; arguments as in ``AllReduceOverNodes``.

    The last phase is the fused kernel of one node instead of an all-gather. For each slice, the rank that owns it
    passes the sum over all nodes. The other ranks pass -0.0, which does not change the kernel's sum. Norm and residual
    are therefore bitwise those that one node computes from the sum over all nodes.
    """

    def __init__(self, handle: CoreHandle, planner: Planner, hierarchy: Hierarchy) -> None:
        super().__init__(handle, planner)
        self._hierarchy = hierarchy

    def takes(self, count: int, element_size: int, row: int, dimensions: int, quantize: str | None) -> bool:
        return self._hierarchy.in_node.ranks > 1 and super().takes(count, element_size, row, dimensions, quantize)

    def _lay_out(self, count: int, row: int, dtype: torch.dtype, **parameters: float) -> Layout:
        planner, hierarchy = self._planner, self._hierarchy
        data_type = self._data_types[dtype]
        in_order = tuple(parameters[name] for name in self._info.parameters)
        problem = Problem(FUSED, count, row, data_type, planner.world_size, in_order)
        in_node, exchange = hierarchy.in_node, hierarchy.exchange
        nothing = hierarchy.without_phases(problem, planner, f"the norm {WHY_NOT_ALONE}" if in_node.ranks == 1 else "")
        if nothing is not None:
            return nothing
        norm = in_node.norms(count, row, data_type, in_order)
        if norm.launches is None:
            return norm
        sizes = slices(count, in_node.ranks, dtype.itemsize)
        scatter = in_node.scatters(sizes, data_type)
        between = hierarchy.rows.find(problem.message_bytes())

        def make(counter: _core.Counter) -> Run:
            scatters, norms = in_node.prepare(scatter), in_node.prepare(norm, counter)
            begin, mine = sum(sizes[: in_node.local_rank]), sizes[in_node.local_rank]

            def run(x: int, residual: int, weight: int, out: int, residual_out: int, *scales_and_stream: int) -> bool:
                *scales, stream = scales_and_stream
                total = hierarchy.empty(count, dtype).fill_(-0.0)
                slice_ = total[begin : begin + mine]
                if not scatters(x, address_of(slice_), stream):
                    return False
                if mine:  # the partners on all nodes have equal slices, so all skip an empty one
                    exchange.add(slice_, slice_, between.exchange)
                return norms(total.data_ptr(), residual, weight, out, residual_out, *scales, stream)

            return run

        others = ", ".join(f"{name} {value:g}" for name, value in parameters.items())
        what = f"{count} {data_type} in rows of {row}, {others}"
        return hierarchy.layout(FUSED, problem.message_bytes(), what, [scatter, hierarchy.between(between), norm], make)
