"""Symmetric heap of a communicator: tensors with the same symmetric offset on every rank, mapped by all ranks.

Every rank allocates in the same order, so all ranks agree on the free memory. Tensors may be dropped at different times
on each rank. The next allocation finds the tensors that all ranks have dropped, and reuses their memory.
"""

from __future__ import annotations

import base64
import contextlib
import math
import operator
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils.dlpack

from llm_comm import _core
from llm_comm.errors import UnsupportedInputError, quoted
from llm_comm.runtime.comparison import check_alike
from llm_comm.runtime.core_handle import CoreHandle
from llm_comm.runtime.devices import is_capturing
from llm_comm.runtime.heap_layout import MAX_BYTES, Allocation, HeapLayout
from llm_comm.runtime.rendezvous import Rendezvous
from llm_comm.runtime.workspaces import share_memory

#: Number of allocations, oldest first, whose state fits one message: one bit each.
_MAX_LISTED = 16_000


class SymmetricHeap:
    """Heap of one communicator. It has no memory until the first tensor is allocated.

    Args:
        rendezvous: Rendezvous of the ranks.
        handle: Handle of the core.
        sharing: How peers get the memory of the workspaces, and so of the heap.
    """

    def __init__(self, rendezvous: Rendezvous, handle: CoreHandle, sharing: _core.Sharing) -> None:
        self._rendezvous: Rendezvous | None = rendezvous
        self._handle = handle
        self._sharing = sharing
        self._layout = HeapLayout()
        self._loans: dict[int, _core.Loan] = {}

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Implement ``Communicator.empty``. Collective."""
        rendezvous = self.rendezvous_for("empty")
        request = rendezvous.collect("request for symmetric memory", lambda: self._request(shape, dtype))
        shapes = [f"{tuple(other['shape'])} of {other['dtype']}" for other in request]
        check_alike(rendezvous.names, "ask for different tensors of symmetric memory", shapes)
        size = tuple(request[rendezvous.rank]["shape"])
        nbytes = math.prod(size) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(size, dtype=dtype, device=self._handle.device)
        # Work on a copy of the layout: until all ranks have the tensor, every change must be reversible.
        layout = self._layout.copy()
        dead = _dead_on_all(layout, [other["dead"] for other in request])
        for number in dead:
            layout.free(number)
        allocation = layout.place(nbytes)
        new_window = None
        if allocation is None:
            new_window = layout.add_window(nbytes)
            allocation = layout.place(nbytes)
            assert allocation is not None
        core = self._handle.core()
        try:
            if new_window is not None:
                self._share_window(rendezvous, new_window, layout.windows()[new_window])
            tensor, loan = rendezvous.attempt(
                "allocation of a tensor in symmetric memory",
                lambda: self._take(allocation, nbytes, bool(dead), size, dtype),
            )
        except BaseException as error:
            # A caller that keeps the exception would keep its frames, and with them the tensor of this rank.
            traceback.clear_frames(error.__traceback__)
            if new_window is not None:
                with contextlib.suppress(ValueError):  # this rank has no memory of the window
                    core.unmap_window(new_window)
                    core.close_window(new_window)
            raise
        vacated = layout.empty_windows()
        for window in vacated:
            layout.remove_window(window)
        self._layout = layout
        self._loans = {number: found for number, found in self._loans.items() if number not in dead}
        self._loans[allocation.number] = loan
        _close_windows(rendezvous, core, vacated)
        return tensor

    def _share_window(self, rendezvous: Rendezvous, window: int, nbytes: int) -> None:
        """Allocate a window on every rank and map those of the peers. After an error, the caller closes what this rank
        has of it."""
        core = self._handle.core()
        steps = f"allocation of {nbytes} bytes of symmetric memory", "mapping of the peers' symmetric memory"
        create, map_peer = partial(core.create_window, window, nbytes), partial(core.map_window, window)
        share_memory(rendezvous, self._sharing, steps, create, map_peer)

    def _request(self, shape: Any, dtype: Any) -> dict[str, Any]:
        """Validate this rank's request, and add which of its allocations have been dropped."""
        self._handle.check()
        self.check_not_capturing("empty")
        if not isinstance(dtype, torch.dtype):
            raise UnsupportedInputError(f"empty: dtype is {quoted(dtype)}; it must be a torch.dtype")
        try:
            size = [operator.index(shape)] if not isinstance(shape, Sequence) else [operator.index(n) for n in shape]
        except TypeError:
            raise UnsupportedInputError(f"empty: shape is {quoted(shape)}; it must be whole numbers") from None
        if any(n < 0 for n in size) or math.prod(size) * dtype.itemsize > MAX_BYTES:
            raise UnsupportedInputError(f"empty: shape is {quoted(size)}: no memory has that")
        return {"shape": size, "dtype": str(dtype), "dead": self._dead()}

    def symmetric_offset_of(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return (window, symmetric offset in bytes) of a tensor in the heap. Equal on all ranks for one tensor of
        ``empty``.

        Args:
            tensor: Contiguous tensor in any memory.

        Returns:
            None if the tensor is empty or not wholly in the heap.

        Raises:
            RuntimeError: The communicator is closed.
        """
        if tensor.nbytes == 0:
            return None
        found: tuple[int, int] | None = self._handle.core().find(tensor.data_ptr(), tensor.nbytes)
        return found

    def rendezvous_for(self, call: str) -> Rendezvous:
        """Return the rendezvous of the ranks for a collective call.

        Raises:
            RuntimeError: The communicator is closed.
            UnsupportedInputError: The rendezvous uses a CUDA stream that is being captured.
        """
        self._handle.check_open()
        rendezvous = self.rendezvous()
        if rendezvous.is_on_device:
            self.check_not_capturing(call)
        return rendezvous

    def rendezvous(self) -> Rendezvous:
        """Return the rendezvous of the ranks. The heap must be open."""
        assert self._rendezvous is not None
        return self._rendezvous

    def check_not_capturing(self, call: str) -> None:
        """Raise UnsupportedInputError if the stream is being captured. ``call`` names the caller, which allocates
        tensors."""
        if is_capturing(self._handle.device):
            raise UnsupportedInputError(f"{call}: a CUDA graph is being captured: make the call before")

    def _dead(self) -> str:
        """Encode which allocations this rank has dropped: one bit each, oldest first."""
        # After a capture nothing is reported: graphs may use memory whose tensor is gone.
        if self._handle.core().has_been_captured():
            return ""
        allocations = self._layout.allocations()[:_MAX_LISTED]
        bits = sum(1 << i for i, a in enumerate(allocations) if self._loans[a.number].has_ended())
        return base64.b85encode(bits.to_bytes(-(-bits.bit_length() // 8), "little")).decode()

    def _take(
        self,
        allocation: Allocation,
        nbytes: int,
        reuses: bool,
        size: tuple[int, ...],
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, _core.Loan]:
        core, device = self._handle.core(), self._handle.device
        # Work of any stream, and of the peers, may still use the memory of a dropped tensor.
        if reuses and device.type == "cuda":
            torch.cuda.synchronize(device)
        index = -1 if device.type == "cpu" else device.index
        capsule, loan = core.lend(allocation.window, allocation.offset, nbytes, index)
        with torch.inference_mode(False), torch.no_grad():
            storage = torch.utils.dlpack.from_dlpack(capsule).untyped_storage()
            without_gaps = torch.empty(size, device="meta").stride()
            tensor = torch.empty(0, dtype=dtype, device=device).set_(storage, 0, size, without_gaps)
        return tensor, loan

    def close(self) -> None:
        """Drop the process group. Tensors keep their memory."""
        self._rendezvous = None
        self._loans.clear()


def _close_windows(rendezvous: Rendezvous, core: _core.Core, windows: Sequence[int]) -> None:
    """Free windows that no rank uses. Collective."""

    def each(step: Callable[[int], None]) -> None:
        for window in windows:
            step(window)

    if windows:
        # A rank must not free cudaIpc memory while a peer has it mapped.
        rendezvous.attempt("unmapping of symmetric memory", lambda: each(core.unmap_window))
        rendezvous.attempt("return of symmetric memory", lambda: each(core.close_window))


def _dead_on_all(layout: HeapLayout, said: Sequence[str]) -> set[int]:
    """Return the allocations that all ranks have dropped; ``said`` holds the bits of each rank (``_dead``)."""
    common = -1
    for text in said:
        common &= int.from_bytes(base64.b85decode(text), "little")
    return {allocation.number for i, allocation in enumerate(layout.allocations()) if common >> i & 1}
