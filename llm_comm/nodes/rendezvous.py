"""Set-up steps of the ranks of a node, in step with those of the other nodes."""

from __future__ import annotations

from typing import Any

from llm_comm.nodes.placement import Placement
from llm_comm.runtime.messages import Failure
from llm_comm.runtime.rendezvous import Rendezvous


class NodeRendezvous(Rendezvous):
    """The ranks of each node meet by themselves, but what fails on one rank fails on all nodes: none goes on, to wait
    for operations that never come.

    Args:
        everyone: Of all ranks.
        placement: Of them.
    """

    def __init__(self, everyone: Rendezvous, placement: Placement) -> None:
        self.group = everyone.group
        self.rank, self.world_size = placement.place, len(placement.ranks_here)
        self.names = placement.names.part(placement.ranks_here)
        self._everyone = everyone
        self._ranks = placement.ranks_here
        self._timeout_s = everyone._timeout_s
        self._device = everyone._device

    def _meet(self, what: str, value: Any, failure: Failure | None, own_error: Exception | None = None) -> list[Any]:
        said = self._everyone._meet(what, value, failure, own_error)
        return [said[rank] for rank in self._ranks]
