"""Reduce-scatter over nodes: each rank gets the node sums of its own part and of those of its partners, which hand each
other theirs and add them."""

from __future__ import annotations

import torch

from llm_comm import _core
from llm_comm.nodes.hierarchy import Hierarchy, Run
from llm_comm.nodes.in_node import address_of
from llm_comm.nodes.memory import bytes_at
from llm_comm.nodes.rows import Rows
from llm_comm.nodes.sums import sum_in_order
from llm_comm.operations.parts import Parts, ReduceScatter
from llm_comm.planning.plan import Problem, declined, without_kernel
from llm_comm.planning.planner import Planner
from llm_comm.planning.selection import Layout, why_not_served
from llm_comm.planning.tables import REDUCE_SCATTER
from llm_comm.runtime.core_handle import CoreHandle


class ReduceScatterOverNodes(ReduceScatter):
    """The reduce-scatters of one communicator; arguments as of ``AllReduceOverNodes``."""

    def __init__(self, handle: CoreHandle, planner: Planner, hierarchy: Hierarchy) -> None:
        super().__init__(handle, planner, hierarchy.placement.rank)
        self._hierarchy = hierarchy

    def _layout(self, parts: Parts, dtype: torch.dtype) -> Layout:
        planner, hierarchy = self._planner, self._hierarchy
        data_type = self._data_types[dtype]
        count = parts.rows * max(parts.row_sizes)
        in_row = tuple(map(float, parts.row_sizes))
        problem = Problem(REDUCE_SCATTER, count, 0, data_type, self.world_size, (float(parts.rows), *in_row))
        why = why_not_served(problem, planner.table, planner.config)
        if why:
            return Layout(declined(REDUCE_SCATTER, problem.message_bytes(), why), None)
        if count == 0:
            return Layout(without_kernel(REDUCE_SCATTER, "none", 0, "empty message"), None)
        in_node, placement = hierarchy.in_node, hierarchy.placement
        rows = Rows(parts, placement)
        phases: list[Layout | str] = []
        scatter = None
        if in_node.ranks > 1:
            of_place = [sum(rows.of(ranks[place]) for ranks in placement.nodes) for place in range(in_node.ranks)]
            scatter = in_node.scatters(of_place, data_type)
            phases.append(scatter)
        phases.append(f"all-to-all between the nodes by {hierarchy.exchange.transport.name}")
        return hierarchy.layout(
            REDUCE_SCATTER,
            problem.message_bytes(),
            f"{parts.rows} x {list(parts.row_sizes)} {data_type}",
            phases,
            lambda counter: self._make(rows, dtype, scatter, counter),
        )

    def _make(self, rows: Rows, dtype: torch.dtype, scatter: Layout | None, counter: _core.Counter) -> Run:
        hierarchy = self._hierarchy
        in_node, exchange = hierarchy.in_node, hierarchy.exchange
        scatters = None if scatter is None else in_node.prepare(scatter, counter)
        own = rows.of(hierarchy.placement.rank)
        of_partners = [rows.of(rank) for rank in hierarchy.placement.partners]

        def run(x: int, out: int, stream: int) -> bool:
            whole = bytes_at(x, rows.whole * dtype.itemsize, hierarchy.device).view(dtype)
            by_place = hierarchy.empty(rows.whole, dtype)
            rows.put_by_place(whole, by_place)
            node_sums = by_place
            if scatters is None:
                counter.add()
            else:
                node_sums = hierarchy.empty(sum(of_partners), dtype)
                if not scatters(by_place.data_ptr(), address_of(node_sums), stream):
                    return False
            if sum(of_partners):  # as on the other nodes
                parts = hierarchy.empty(hierarchy.nodes * own, dtype)
                exchange.scatter(parts, node_sums, own, of_partners)
                if own:
                    total = bytes_at(out, own * dtype.itemsize, hierarchy.device).view(dtype)
                    sum_in_order(parts.view(hierarchy.nodes, own), total)
            return True

        return run
