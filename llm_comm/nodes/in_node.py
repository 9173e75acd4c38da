"""In-node phases of hierarchical operations, and access to the device memory that they use."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence

import torch

from llm_comm import _core
from llm_comm.planning.planner import Planner
from llm_comm.planning.selection import Layout
from llm_comm.planning.tables import ALL_GATHER, FUSED, REDUCE_SCATTER
from llm_comm.runtime.core_handle import CoreHandle


class _OnDevice:
    """Minimal array object through which torch wraps GPU memory."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return a tensor [nbytes] of uint8 over existing memory. The caller keeps the memory alive.

    Args:
        address: Address of the first byte.
        nbytes: Size; 0 gives an empty tensor.
        device: Device of the memory.

    Raises:
        ValueError: The address is 0, as for a fake tensor.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if address == 0:
        raise ValueError("a tensor has no memory: it is a fake tensor or a wrapper of others")
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
    with torch.cuda.device(device):
        return torch.as_tensor(_OnDevice(address, nbytes), device=device)


# Non-zero address for an empty tensor. No kernel accesses it, since the tensor has no element.
_SPARE = 16


class InNode:
    """Calls of one communicator within a node: all-gather and reduce-scatter of flat tensors, and fused norms.

    Args:
        handle: Handle of the core that connects the ranks of this node.
        planner: Planner for the ranks of the node; it declines no size.
        local_rank: Rank of this process in its node.
    """

    def __init__(self, handle: CoreHandle, planner: Planner, local_rank: int) -> None:
        self._handle = handle
        self.planner = planner
        self.local_rank = local_rank
        self.ranks = planner.world_size

    def scatters(self, sizes: Sequence[int], data_type: str) -> Layout:
        """Plan a reduce-scatter of a flat tensor into ``sizes`` elements by local rank, not all 0."""
        return self._lay_out(REDUCE_SCATTER, sizes, data_type)

    def gathers(self, sizes: Sequence[int]) -> Layout:
        """Plan an all-gather of ``sizes`` bytes by local rank, not all 0."""
        return self._lay_out(ALL_GATHER, sizes, "byte")

    def norms(self, count: int, row: int, data_type: str, parameters: tuple[float, ...]) -> Layout:
        """Plan an all-reduce + residual add + RMSNorm of ``count`` elements. ``parameters``: those of the operation."""
        return self.planner.lay_out(FUSED, count, row, data_type, parameters)

    def prepare(self, layout: Layout, counter: _core.Counter | None = None) -> Callable[..., bool]:
        """Return a function that takes buffer addresses and a stream. It returns False if the communicator has failed.
        ``counter`` counts the calls."""
        assert layout.launches is not None
        call: Callable[..., bool] = self._handle.core().prepare(*layout.launches, None, counter, None)
        return call

    def _lay_out(self, operation: str, sizes: Sequence[int], data_type: str) -> Layout:
        return self.planner.lay_out(operation, max(sizes), 0, data_type, (1.0, *map(float, sizes)))


def address_of(buffer: torch.Tensor) -> int:
    """Return the address of a buffer for ``InNode.prepare``. An empty buffer, which has none, gets a placeholder."""
    return buffer.data_ptr() or _SPARE


def chunks(count: int, chunk_bytes: int, local_size: int, itemsize: int) -> list[int]:
    """Return the elements of each chunk of a message; one chunk if ``chunk_bytes`` is 0.

    Chunks are equal except for the last. They have whole lines for each local rank, so that slices are equal too.
    """
    if chunk_bytes == 0:
        return [count]
    step = math.lcm(16, itemsize) // itemsize * local_size
    chunk = max(1, chunk_bytes // itemsize // step) * step
    return [min(chunk, count - first) for first in range(0, count, chunk)]


def slices(count: int, local_size: int, itemsize: int) -> list[int]:
    """Return how many of ``count`` elements each local rank owns: slices of whole lines, equal except for the last."""
    in_line = math.lcm(16, itemsize) // itemsize
    slice_ = -(-count // (local_size * in_line)) * in_line
    return [min(slice_, max(0, count - local_rank * slice_)) for local_rank in range(local_size)]
