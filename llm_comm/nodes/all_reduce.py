"""All-reduce over nodes: reduce-scatter in the node, the sum of each slice between nodes, all-gather in the node."""

from __future__ import annotations

import torch

from llm_comm import _core
from llm_comm.nodes.hierarchy import Hierarchy, Run, slices
from llm_comm.nodes.in_node import address_of
from llm_comm.nodes.memory import bytes_at
from llm_comm.operations.all_reduce import AllReduce
from llm_comm.planning.plan import Problem, declined, without_kernel
from llm_comm.planning.planner import Planner
from llm_comm.planning.selection import Layout, why_not_served
from llm_comm.planning.tables import ALL_REDUCE
from llm_comm.runtime.core_handle import CoreHandle


class AllReduceOverNodes(AllReduce):
    """The all-reduces of one communicator.

    Args:
        planner: Of all ranks.
        hierarchy: Of the same communicator.
    """

    def __init__(self, handle: CoreHandle, planner: Planner, hierarchy: Hierarchy) -> None:
        super().__init__(handle, planner)
        self._hierarchy = hierarchy

    def _layout(self, count: int, dtype: torch.dtype) -> Layout:
        planner, hierarchy = self._planner, self._hierarchy
        data_type, nbytes = self._data_types[dtype], count * dtype.itemsize
        problem = Problem(ALL_REDUCE, count, 0, data_type, planner.world_size)
        why = why_not_served(problem, planner.table, planner.config)
        if why:
            return Layout(declined(ALL_REDUCE, nbytes, why), None)
        if count == 0:
            return Layout(without_kernel(ALL_REDUCE, "none", 0, "empty message"), None)
        in_node, exchange = hierarchy.in_node, hierarchy.exchange
        sizes = slices(count, in_node.ranks, dtype.itemsize)
        what = f"{count} {data_type}"
        between = exchange.describe(sizes[0] * dtype.itemsize)
        if in_node.ranks == 1:
            return hierarchy.layout(
                ALL_REDUCE, nbytes, what, [between], lambda counter: self._alone(nbytes, dtype, counter)
            )
        scatter = in_node.scatters(sizes, data_type)
        gather = in_node.gathers([size * dtype.itemsize for size in sizes])

        def make(counter: _core.Counter) -> Run:
            scatters, gathers = in_node.prepare(scatter), in_node.prepare(gather, counter)
            mine = sizes[in_node.place]

            def run(x: int, out: int, stream: int) -> bool:
                slice_ = hierarchy.empty(mine, dtype)
                if not scatters(x, address_of(slice_), stream):
                    return False
                if mine:  # as on the other nodes
                    exchange.add(slice_, slice_)
                return gathers(address_of(slice_), out, stream)

            return run

        return hierarchy.layout(ALL_REDUCE, nbytes, what, [scatter, between, gather], make)

    def _alone(self, nbytes: int, dtype: torch.dtype, counter: _core.Counter) -> Run:
        """The same where each node has one rank."""
        hierarchy = self._hierarchy

        def run(x: int, out: int, stream: int) -> bool:
            own, total = (bytes_at(address, nbytes, hierarchy.device).view(dtype) for address in (x, out))
            hierarchy.exchange.add(own, total)
            counter.add()
            return True

        return run
