"""Phases of a hierarchical operation within a node, and the device memory that they work on."""

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
    """What torch takes for an array of a GPU."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """A tensor [nbytes] of uint8 over memory that whoever calls keeps.

    Args:
        address: Of the first byte.
        nbytes: 0 is an empty tensor.
        device: That has the memory.

    Raises:
        ValueError: The address is 0: it is that of a fake tensor, say.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if address == 0:
        raise ValueError("a tensor has no memory: it is a fake tensor or a wrapper of others")
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
    with torch.cuda.device(device):
        return torch.as_tensor(_OnDevice(address, nbytes), device=device)


# An address that no kernel uses: it is of no element.
_SPARE = 16


class InNode:
    """Calls of one communicator within a node: all-gathers and reduce-scatters of flat tensors, and norms.

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


def chunks(count: int, chunk_bytes: int, places: int, itemsize: int) -> list[int]:
    """Elements of each chunk of a message, alike but for the last: of whole lines for each place, so that slices are
    alike too. One where ``chunk_bytes`` is 0."""
    if chunk_bytes == 0:
        return [count]
    step = math.lcm(16, itemsize) // itemsize * places
    chunk = max(1, chunk_bytes // itemsize // step) * step
    return [min(chunk, count - first) for first in range(0, count, chunk)]


def slices(count: int, places: int, itemsize: int) -> list[int]:
    """How many of ``count`` elements the rank of each place has: alike, of whole lines but for the last."""
    in_line = math.lcm(16, itemsize) // itemsize
    slice_ = -(-count // (places * in_line)) * in_line
    return [min(slice_, max(0, count - place * slice_)) for place in range(places)]
