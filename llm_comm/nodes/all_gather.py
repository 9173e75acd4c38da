"""All-gather over nodes: each part goes to the ranks with the same place in their nodes, and from there to the others
of each node."""

from __future__ import annotations

import torch

from llm_comm import _core
from llm_comm.nodes.hierarchy import Hierarchy, Run
from llm_comm.nodes.in_node import address_of
from llm_comm.nodes.memory import bytes_at
from llm_comm.nodes.rows import Rows
from llm_comm.operations.parts import AllGather, Parts
from llm_comm.planning.plan import Problem, declined, without_kernel
from llm_comm.planning.planner import Planner
from llm_comm.planning.selection import Layout, why_not_served
from llm_comm.planning.tables import ALL_GATHER
from llm_comm.runtime.core_handle import CoreHandle

# What elements are copied as, by their bytes: whatever they are, their bits stay.
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class AllGatherOverNodes(AllGather):
    """The all-gathers of one communicator; arguments as of ``AllReduceOverNodes``."""

    def __init__(self, handle: CoreHandle, planner: Planner, hierarchy: Hierarchy) -> None:
        super().__init__(handle, planner, hierarchy.placement.rank)
        self._hierarchy = hierarchy

    def _layout(self, parts: Parts, dtype: torch.dtype) -> Layout:
        planner, hierarchy = self._planner, self._hierarchy
        in_bytes = tuple(float(size * dtype.itemsize) for size in parts.row_sizes)
        longest = parts.rows * int(max(in_bytes))
        problem = Problem(ALL_GATHER, longest, 0, "byte", self.world_size, (float(parts.rows), *in_bytes))
        why = why_not_served(problem, planner.table, planner.config)
        if why:
            return Layout(declined(ALL_GATHER, longest, why), None)
        if longest == 0:
            return Layout(without_kernel(ALL_GATHER, "none", 0, "empty message"), None)
        in_node, placement = hierarchy.in_node, hierarchy.placement
        unit = _UNITS[dtype.itemsize]
        rows = Rows(parts, placement, dtype.itemsize // unit.itemsize)
        # The parts of a place, one of each node, get as much room as the longest of them needs.
        room = [max(rows.of(ranks[place]) for ranks in placement.nodes) for place in range(in_node.ranks)]
        phases: list[Layout | str] = [f"all-gather between the nodes by {hierarchy.exchange.transport.name}"]
        gather = None
        if in_node.ranks > 1:
            gather = in_node.gathers([hierarchy.nodes * each * unit.itemsize for each in room])
            phases.append(gather)
        return hierarchy.layout(
            ALL_GATHER,
            longest,
            f"{parts.rows} x {list(parts.row_sizes)} elements of {dtype.itemsize} bytes",
            phases,
            lambda counter: self._make(rows, unit, room, gather, counter),
        )

    def _make(
        self, rows: Rows, unit: torch.dtype, room: list[int], gather: Layout | None, counter: _core.Counter
    ) -> Run:
        hierarchy = self._hierarchy
        nodes, in_node, exchange = hierarchy.nodes, hierarchy.in_node, hierarchy.exchange
        gathers = None if gather is None else in_node.prepare(gather, counter)
        own, own_room = rows.of(hierarchy.placement.rank), room[in_node.place]

        def run(x: int, out: int, stream: int) -> bool:
            of_place = hierarchy.empty(nodes * own_room, unit)
            if own_room:  # as on the other nodes
                part = bytes_at(x, own * unit.itemsize, hierarchy.device).view(unit)
                if own < own_room:
                    padded = hierarchy.empty(own_room, unit)
                    padded[:own].copy_(part)
                    part = padded
                exchange.gather(of_place, part)
            by_place = of_place
            if gathers is None:
                counter.add()
            else:
                by_place = hierarchy.empty(nodes * sum(room), unit)
                if not gathers(address_of(of_place), address_of(by_place), stream):
                    return False
            whole = bytes_at(out, rows.whole * unit.itemsize, hierarchy.device).view(unit)
            rows.put_in_rank_order(by_place, room, whole)
            return True

        return run
