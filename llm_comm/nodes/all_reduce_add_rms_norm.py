"""All-reduce + residual add + RMSNorm over nodes: the last phase, an all-gather of the slices, is the fused kernel of
one node.

It adds up what the ranks of the node give it: of each slice the sum over all nodes, from the rank that has it, and -0
from the others, which changes no value. So norm and residual have the bits that one node makes of that sum.
"""

from __future__ import annotations

import torch

from llm_comm import _core
from llm_comm.nodes.hierarchy import Hierarchy, Run, slices
from llm_comm.nodes.in_node import address_of
from llm_comm.operations.all_reduce_add_rms_norm import AllReduceAddRmsNorm
from llm_comm.planning.plan import Problem, declined, without_kernel
from llm_comm.planning.planner import Planner
from llm_comm.planning.selection import Layout, why_not_served
from llm_comm.planning.tables import FUSED
from llm_comm.runtime.core_handle import CoreHandle

WHY_NOT_ALONE = "is the last phase in a node, and nodes of one rank have none"


class AllReduceAddRmsNormOverNodes(AllReduceAddRmsNorm):
    """The fused calls of one communicator; arguments as of ``AllReduceOverNodes``."""

    def __init__(self, handle: CoreHandle, planner: Planner, hierarchy: Hierarchy) -> None:
        super().__init__(handle, planner)
        self._hierarchy = hierarchy

    def takes(self, count: int, element_size: int, row: int, dimensions: int, quantize: str | None) -> bool:
        return self._hierarchy.ranks_of_node > 1 and super().takes(count, element_size, row, dimensions, quantize)

    def _lay_out(self, count: int, row: int, dtype: torch.dtype, **parameters: float) -> Layout:
        planner, hierarchy = self._planner, self._hierarchy
        data_type = self._data_types[dtype]
        in_order = tuple(parameters[name] for name in self._info.parameters)
        problem = Problem(FUSED, count, row, data_type, planner.world_size, in_order)
        why = why_not_served(problem, planner.table, planner.config)
        in_node, exchange = hierarchy.in_node, hierarchy.exchange
        if not why and in_node.ranks == 1:
            why = f"the norm {WHY_NOT_ALONE}"
        if why:
            return Layout(declined(FUSED, problem.message_bytes(), why), None)
        if count == 0:
            return Layout(without_kernel(FUSED, "none", 0, "no rows", row), None)
        norm = in_node.norms(count, row, data_type, in_order)
        if norm.launches is None:
            return norm
        sizes = slices(count, in_node.ranks, dtype.itemsize)
        scatter = in_node.scatters(sizes, data_type)
        between = hierarchy.rows.find(problem.message_bytes())

        def make(counter: _core.Counter) -> Run:
            scatters, norms = in_node.prepare(scatter), in_node.prepare(norm, counter)
            begin, mine = sum(sizes[: in_node.place]), sizes[in_node.place]

            def run(x: int, residual: int, weight: int, out: int, residual_out: int, scale: int, stream: int) -> bool:
                total = hierarchy.empty(count, dtype).fill_(-0.0)
                slice_ = total[begin : begin + mine]
                if not scatters(x, address_of(slice_), stream):
                    return False
                if mine:  # as on the other nodes
                    exchange.add(slice_, slice_, between.exchange)
                return norms(total.data_ptr(), residual, weight, out, residual_out, scale, stream)

            return run

        others = ", ".join(f"{name} {value:g}" for name, value in parameters.items())
        what = f"{count} {data_type} in rows of {row}, {others}"
        return hierarchy.layout(FUSED, problem.message_bytes(), what, [scatter, hierarchy.between(between), norm], make)
