"""The part of a hierarchical operation within a node: all-gathers and reduce-scatters of flat tensors, and norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from llm_comm import _core
from llm_comm.planning.planner import Planner
from llm_comm.planning.selection import Layout
from llm_comm.planning.tables import ALL_GATHER, FUSED, REDUCE_SCATTER
from llm_comm.runtime.core_handle import CoreHandle

# An address that no kernel uses: it is of no element.
_SPARE = 16


class InNode:
    """Of one communicator.

    Args:
        handle: Of the core that is connected within the node.
        planner: For the ranks of the node; it declines no size.
        place: Of this rank in its node.
    """

    def __init__(self, handle: CoreHandle, planner: Planner, place: int) -> None:
        self._handle = handle
        self.planner = planner
        self.place = place
        self.ranks = planner.world_size

    def scatters(self, sizes: Sequence[int], data_type: str) -> Layout:
        """A reduce-scatter of a flat tensor: so many elements for each place, not all 0."""
        return self._lay_out(REDUCE_SCATTER, sizes, data_type)

    def gathers(self, sizes: Sequence[int]) -> Layout:
        """An all-gather of so many bytes from each place, not all 0."""
        return self._lay_out(ALL_GATHER, sizes, "byte")

    def norms(self, count: int, row: int, data_type: str, parameters: tuple[float, ...]) -> Layout:
        """An all-reduce + residual add + RMSNorm of so many elements; ``parameters`` are the operation's own."""
        return self.planner.lay_out(FUSED, count, row, data_type, parameters)

    def prepare(self, layout: Layout, counter: _core.Counter | None = None) -> Callable[..., bool]:
        """What takes the addresses of the buffers, and a stream. False: the communicator has failed. ``counter`` counts
        the calls."""
        assert layout.launches is not None
        call: Callable[..., bool] = self._handle.core().prepare(*layout.launches, None, counter, None)
        return call

    def _lay_out(self, operation: str, sizes: Sequence[int], data_type: str) -> Layout:
        return self.planner.lay_out(operation, max(sizes), 0, data_type, (1.0, *map(float, sizes)))


def address_of(buffer: torch.Tensor) -> int:
    """Of a buffer for ``InNode.prepare``, which may be empty, and has no address then."""
    return buffer.data_ptr() or _SPARE
