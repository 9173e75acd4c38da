"""All-gather and reduce-scatter over nodes.

All-gather: partners, the ranks with the same index in their nodes, exchange their shards. Then each node gathers them.
Reduce-scatter: each rank receives the node sums of its own shard and of its partners' shards. Partners then exchange
and sum these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from llm_comm import _core
from llm_comm.nodes.exchange import sum_in_order
from llm_comm.nodes.hierarchy import Hierarchy, Run
from llm_comm.nodes.in_node import address_of, bytes_at
from llm_comm.nodes.topology import Topology
from llm_comm.operations.shards import AllGather, ReduceScatter, Shards
from llm_comm.planning.plan import Problem
from llm_comm.planning.planner import Planner
from llm_comm.planning.selection import Layout
from llm_comm.planning.tables import ALL_GATHER, REDUCE_SCATTER
from llm_comm.runtime.core_handle import CoreHandle


class Rows:
    """Shards of a contiguous tensor in rank order, and in local-rank order.

    The local rank of a rank is its index in its node. Local-rank order: the ranks with local rank 0 of all nodes, then
    those with local rank 1, and so on.

    Args:
        shards: Division of the tensor among the ranks along a dimension.
        topology: Nodes of all ranks.
        scale: Copied units in each element that ``shards`` counts.
    """

    def __init__(self, shards: Shards, topology: Topology, scale: int = 1) -> None:
        self._rows = shards.rows
        self._sizes = [size * scale for size in shards.row_sizes]
        self._nodes = topology.nodes
        local_size = len(topology.nodes[0])
        in_blocks = all(
            ranks == tuple(range(n * local_size, (n + 1) * local_size)) for n, ranks in enumerate(topology.nodes)
        )
        # With equal shards and contiguous ranks in each node, one strided copy suffices.
        self._is_regular = in_blocks and len(set(shards.row_sizes)) == 1

    @property
    def whole(self) -> int:
        """Number of elements of the tensor."""
        return self._rows * sum(self._sizes)

    def of(self, rank: int) -> int:
        """Return the number of elements of a rank's shard."""
        return self._rows * self._sizes[rank]

    def put_in_rank_order(self, by_local_rank: torch.Tensor, room: Sequence[int], whole: torch.Tensor) -> None:
        """Copy shards from local-rank order to rank order.

        Args:
            by_local_rank: [elements]: shards in local-rank order, each in a slot of ``room[local_rank]`` elements.
            room: Elements of a slot, by local rank.
            whole: [elements]: output in rank order.
        """
        for of_whole, shard in self._pairs(whole, by_local_rank, room):
            of_whole.copy_(shard)

    def put_by_local_rank(self, whole: torch.Tensor, by_local_rank: torch.Tensor) -> None:
        """Copy the shards of ``whole`` to ``by_local_rank`` in local-rank order, without gaps."""
        for of_whole, shard in self._pairs(whole, by_local_rank, None):
            shard.copy_(of_whole)

    def _pairs(
        self, whole: torch.Tensor, by_local_rank: torch.Tensor, room: Sequence[int] | None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pairs of views, of equal shapes, with the same elements of both tensors."""
        if self._is_regular:
            nodes, local_size = len(self._nodes), len(self._nodes[0])
            shard = (self._rows, self._sizes[0])
            in_rank_order = whole.view(self._rows, nodes, local_size, self._sizes[0])
            yield in_rank_order.permute(2, 1, 0, 3), by_local_rank.view(local_size, nodes, *shard)
            return
        wide, at = whole.view(self._rows, sum(self._sizes)), 0
        for local_rank in range(len(self._nodes[0])):
            for ranks in self._nodes:
                rank = ranks[local_rank]
                size = self._sizes[rank]
                if self._rows * size:
                    part_of_whole = wide.narrow(1, sum(self._sizes[:rank]), size)
                    yield part_of_whole, by_local_rank[at : at + self._rows * size].view(self._rows, size)
                at += self.of(rank) if room is None else room[local_rank]


# Integer types for copies, by element size: a copy of integers changes no bit.
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class AllGatherOverNodes(AllGather):
    """All-gather of one communicator over several nodes; arguments as in ``AllReduceOverNodes``."""

    def __init__(self, handle: CoreHandle, planner: Planner, hierarchy: Hierarchy) -> None:
        super().__init__(handle, planner, hierarchy.topology.rank)
        self._hierarchy = hierarchy

    def _layout(self, shards: Shards, dtype: torch.dtype) -> Layout:
        planner, hierarchy = self._planner, self._hierarchy
        in_bytes = tuple(float(size * dtype.itemsize) for size in shards.row_sizes)
        longest = shards.rows * int(max(in_bytes))
        problem = Problem(ALL_GATHER, longest, 0, "byte", self.world_size, (float(shards.rows), *in_bytes))
        nothing = hierarchy.without_phases(problem, planner)
        if nothing is not None:
            return nothing
        in_node, topology = hierarchy.in_node, hierarchy.topology
        unit = _UNITS[dtype.itemsize]
        rows = Rows(shards, topology, dtype.itemsize // unit.itemsize)
        # Each slot of a local rank has the size of its largest shard over the nodes.
        room = [max(rows.of(ranks[local_rank]) for ranks in topology.nodes) for local_rank in range(in_node.ranks)]
        phases: list[Layout | str] = [f"all-gather between the nodes by {hierarchy.exchange.transport.name}"]
        gather = None
        if in_node.ranks > 1:
            gather = in_node.gathers([hierarchy.nodes * each * unit.itemsize for each in room])
            phases.append(gather)
        return hierarchy.layout(
            ALL_GATHER,
            longest,
            f"{shards.rows} x {list(shards.row_sizes)} elements of {dtype.itemsize} bytes",
            phases,
            lambda counter: self._make(rows, unit, room, gather, counter),
        )

    def _make(
        self, rows: Rows, unit: torch.dtype, room: list[int], gather: Layout | None, counter: _core.Counter
    ) -> Run:
        hierarchy = self._hierarchy
        nodes, in_node, exchange = hierarchy.nodes, hierarchy.in_node, hierarchy.exchange
        gathers = None if gather is None else in_node.prepare(gather, counter)
        own, own_room = rows.of(hierarchy.topology.rank), room[in_node.local_rank]

        def run(x: int, out: int, stream: int) -> bool:
            of_local_rank = hierarchy.empty(nodes * own_room, unit)
            if own_room:  # room is equal on all nodes, so all skip an empty exchange
                shard = bytes_at(x, own * unit.itemsize, hierarchy.device).view(unit)
                if own < own_room:
                    padded = hierarchy.empty(own_room, unit)
                    padded[:own].copy_(shard)
                    shard = padded
                exchange.gather(of_local_rank, shard)
            by_local_rank = of_local_rank
            if gathers is None:
                counter.add()
            else:
                by_local_rank = hierarchy.empty(nodes * sum(room), unit)
                if not gathers(address_of(of_local_rank), address_of(by_local_rank), stream):
                    return False
            whole = bytes_at(out, rows.whole * unit.itemsize, hierarchy.device).view(unit)
            rows.put_in_rank_order(by_local_rank, room, whole)
            return True

        return run


class ReduceScatterOverNodes(ReduceScatter):
    """Reduce-scatter of one communicator over several nodes; arguments as in ``AllReduceOverNodes``."""

    def __init__(self, handle: CoreHandle, planner: Planner, hierarchy: Hierarchy) -> None:
        super().__init__(handle, planner, hierarchy.topology.rank)
        self._hierarchy = hierarchy

    def _layout(self, shards: Shards, dtype: torch.dtype) -> Layout:
        planner, hierarchy = self._planner, self._hierarchy
        data_type = self._data_types[dtype]
        count = shards.rows * max(shards.row_sizes)
        in_row = tuple(map(float, shards.row_sizes))
        problem = Problem(REDUCE_SCATTER, count, 0, data_type, self.world_size, (float(shards.rows), *in_row))
        nothing = hierarchy.without_phases(problem, planner)
        if nothing is not None:
            return nothing
        in_node, topology = hierarchy.in_node, hierarchy.topology
        rows = Rows(shards, topology)
        phases: list[Layout | str] = []
        scatter = None
        if in_node.ranks > 1:
            of_local_rank = [
                sum(rows.of(ranks[local_rank]) for ranks in topology.nodes) for local_rank in range(in_node.ranks)
            ]
            scatter = in_node.scatters(of_local_rank, data_type)
            phases.append(scatter)
        phases.append(f"all-to-all between the nodes by {hierarchy.exchange.transport.name}")
        return hierarchy.layout(
            REDUCE_SCATTER,
            problem.message_bytes(),
            f"{shards.rows} x {list(shards.row_sizes)} {data_type}",
            phases,
            lambda counter: self._make(rows, dtype, scatter, counter),
        )

    def _make(self, rows: Rows, dtype: torch.dtype, scatter: Layout | None, counter: _core.Counter) -> Run:
        hierarchy = self._hierarchy
        in_node, exchange = hierarchy.in_node, hierarchy.exchange
        scatters = None if scatter is None else in_node.prepare(scatter, counter)
        own = rows.of(hierarchy.topology.rank)
        of_partners = [rows.of(rank) for rank in hierarchy.topology.partners]

        def run(x: int, out: int, stream: int) -> bool:
            whole = bytes_at(x, rows.whole * dtype.itemsize, hierarchy.device).view(dtype)
            by_local_rank = hierarchy.empty(rows.whole, dtype)
            rows.put_by_local_rank(whole, by_local_rank)
            node_sums = by_local_rank
            if scatters is None:
                counter.add()
            else:
                node_sums = hierarchy.empty(sum(of_partners), dtype)
                if not scatters(by_local_rank.data_ptr(), address_of(node_sums), stream):
                    return False
            if sum(of_partners):  # the partners' sizes are known on all nodes, so all skip an empty exchange
                shards = hierarchy.empty(hierarchy.nodes * own, dtype)
                exchange.scatter(shards, node_sums, own, of_partners)
                if own:
                    total = bytes_at(out, own * dtype.itemsize, hierarchy.device).view(dtype)
                    sum_in_order(shards.view(hierarchy.nodes, own), total)
            return True

        return run
