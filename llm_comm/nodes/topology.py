"""Topology: which ranks of a group are on which node; and the rendezvous of one node's ranks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from llm_comm import _core
from llm_comm.config import Config
from llm_comm.errors import RendezvousError
from llm_comm.runtime.links import fabric_domain
from llm_comm.runtime.rank_names import RankNames
from llm_comm.runtime.rendezvous import Failure, Rendezvous, host_identity


@dataclass(frozen=True)
class Topology:
    """Nodes of a group over several nodes with equally many ranks, and this rank's position.

    Attributes:
        nodes: Ranks of each node in ascending order. Nodes are in the order of their first ranks.
        hosts: Names of the nodes for messages: ``Config.node``, or the host name.
        rank: Rank of this process in the group.
        names: Names of the ranks for errors, with their nodes.
    """

    nodes: tuple[tuple[int, ...], ...]
    hosts: tuple[str, ...]
    rank: int
    names: RankNames

    @property
    def node(self) -> int:
        """Index of this rank's node."""
        return next(node for node, ranks in enumerate(self.nodes) if self.rank in ranks)

    @property
    def local_rank(self) -> int:
        """Index of this rank among the ranks of its node."""
        return self.ranks_here.index(self.rank)

    @property
    def ranks_here(self) -> tuple[int, ...]:
        """Ranks of this node."""
        return self.nodes[self.node]

    @property
    def partners(self) -> tuple[int, ...]:
        """Ranks with the same local rank in their nodes, this rank included, by node."""
        return tuple(ranks[self.local_rank] for ranks in self.nodes)

    def by_local_rank(self) -> list[int]:
        """Return all ranks in local-rank order: local rank 0 of all nodes, then local rank 1, and so on."""
        return [ranks[local_rank] for local_rank in range(len(self.nodes[0])) for ranks in self.nodes]

    @property
    def others(self) -> tuple[int, ...]:
        """Partners except this rank."""
        return tuple(rank for rank in self.partners if rank != self.rank)


def find_topology(
    rendezvous: Rendezvous, device: torch.device, config: Config, in_domains: bool = True
) -> Topology | None:
    """Determine which ranks are on which node; None if all are on one. Collective.

    A node is a machine, what option ``node`` names, or the hosts of an NVLink domain.

    Args:
        rendezvous: Rendezvous of all ranks. Its ``names`` and ``spans_hosts`` are set.
        device: Device of this rank.
        config: Options of this rank.
        in_domains: Whether several hosts of an NVLink domain are one node.

    Raises:
        RendezvousError: Nodes have different numbers of ranks, or one has too many; ``Config.node`` is set on some
            ranks only, or equal on different machines. Raised on all ranks alike.
    """
    said = rendezvous.collect(
        "comparison of nodes", lambda: {**host_identity(), "pid": os.getpid(), "node": config.node}
    )
    rendezvous.names = rendezvous.names.with_processes(said)
    domains = [""] * len(said)
    if in_domains and len({each["boot_id"] for each in said}) > 1:
        domains = rendezvous.collect("comparison of NVLink domains", lambda: fabric_domain(device))
    places = places_of(said, domains)
    rendezvous.spans_hosts = places != [each["boot_id"] for each in said]
    topology = topology_of(said, places, rendezvous.rank, rendezvous.names)
    if topology is not None:
        rendezvous.names = topology.names
    return topology


def places_of(said: Sequence[dict[str, Any]], domains: Sequence[str]) -> list[str]:
    """Return what makes ranks a node: their NVLink domains if these can be the nodes, else the boot ids of their hosts.

    All ranks must be in domains over several hosts, with equally many ranks in each that are few enough to share
    memory. Option ``node`` comes first.

    Args:
        said: The ``boot_id`` and ``node`` of each rank.
        domains: NVLink domain of each rank, or "".
    """
    hosts = [each["boot_id"] for each in said]
    sizes = Counter(domains)
    can_be_nodes = (
        "" not in sizes
        and len(set(sizes.values())) == 1
        and max(sizes.values()) <= _core.max_world_size
        and all(len({host for host, of in zip(hosts, domains, strict=True) if of == one}) > 1 for one in sizes)
        # Otherwise ranks of one host would be of several nodes.
        and len(set(zip(hosts, domains, strict=True))) == len(set(hosts))
        and all(each["node"] is None for each in said)
    )
    return list(domains) if can_be_nodes else hosts


def topology_of(said: Sequence[dict[str, Any]], places: Sequence[str], rank: int, names: RankNames) -> Topology | None:
    """Compute the topology from the ``host``, ``boot_id`` and ``node`` of each rank, and from ``places_of`` them."""
    unnamed = [i for i, each in enumerate(said) if each["node"] is None]
    if 0 < len(unnamed) < len(said):
        named = (f"{names.full(i)}: {each['node']!r}" for i, each in enumerate(said) if each["node"] is not None)
        raise RendezvousError(
            f"option node is given on some ranks of {names.of_group} ({', '.join(named)}), but not on "
            f"{names.several(unnamed)}: set LLM_COMM_NODE on all ranks or on none"
        )
    nodes: dict[str, list[int]] = {}
    for i, each in enumerate(said):
        nodes.setdefault(places[i] if each["node"] is None else each["node"], []).append(i)
    for name, ranks in nodes.items():
        machines = {said[i]["boot_id"] for i in ranks}
        if len(machines) > 1 and said[ranks[0]]["node"] is not None:
            where = ", ".join(f"{names.full(i)}: {_host(said[i])}" for i in ranks)
            raise RendezvousError(
                f"ranks of {names.of_group} with option node {name!r} are on different machines: {where}. Give each "
                "machine names of its own"
            )
        if len(ranks) > _core.max_world_size:
            what = f"{names.of_group} has" if len(nodes) == 1 else f"{_host(said[ranks[0]])} has"
            raise RendezvousError(
                f"{what} {len(ranks)} ranks; llm_comm serves up to {_core.max_world_size} of a machine"
            )
    if len(nodes) == 1:
        return None
    if len({len(ranks) for ranks in nodes.values()}) > 1:
        where = ", ".join(f"{names.full(i)}: {_host(each)}" for i, each in enumerate(said))
        raise RendezvousError(
            f"the ranks of {names.of_group} are on {len(nodes)} nodes, and not as many on each: {where}. llm_comm "
            "serves groups that have equally many ranks on each node"
        )
    hosts = tuple(said[ranks[0]]["node"] or said[ranks[0]]["host"] for ranks in nodes.values())
    node_of = {
        i: f"node {node}{(said[i]['node'] and f' named {hosts[node]}') or ''}"
        for node, ranks in enumerate(nodes.values())
        for i in ranks
    }
    return Topology(tuple(map(tuple, nodes.values())), hosts, rank, names.with_nodes(node_of))


def _host(said: dict[str, Any]) -> str:
    by = f"boot id {said['boot_id']}" if said["node"] is None else f"node {said['node']!r}"
    return f"{said['host']} ({by})"


class NodeRendezvous(Rendezvous):
    """Rendezvous of the ranks of one node. Steps run on all nodes together, and a failure of one rank is raised on all
    nodes.

    Otherwise ranks of other nodes would continue and wait for operations that never come.

    Args:
        everyone: Rendezvous of all ranks.
        topology: Nodes of all ranks.
    """

    def __init__(self, everyone: Rendezvous, topology: Topology) -> None:
        super().__init__(everyone.group, everyone.timeout_s, everyone.device)
        self.rank, self.world_size = topology.local_rank, len(topology.ranks_here)
        self.names = topology.names.part(topology.ranks_here)
        self.spans_hosts = everyone.spans_hosts
        self._everyone = everyone
        self._ranks = topology.ranks_here

    def _synchronize(
        self, what: str, value: Any, failure: Failure | None, own_error: Exception | None = None
    ) -> list[Any]:
        said = self._everyone._synchronize(what, value, failure, own_error)
        return [said[rank] for rank in self._ranks]
