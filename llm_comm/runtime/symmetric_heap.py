"""The symmetric heap of a communicator: tensors that every rank has at the same place, and that all ranks have mapped.

Memory is given out alike on all ranks, so ranks agree on what is free. A tensor may die at another time on each rank:
what has died on all of them is found out, and given back, when the next tensor is asked for.
"""

from __future__ import annotations

import base64
import contextlib
import math
import operator
import traceback
from collections.abc import Callable, Sequence
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
from llm_comm.runtime.workspaces import share_segment

#: Of allocations, the oldest first, of which a rank can say in one message whether they have died.
_MAX_TOLD = 16_000


class SymmetricHeap:
    """The heap of one communicator. Empty, and without memory, until a tensor is asked for.

    Args:
        rendezvous: Of the ranks.
        handle: Of the core.
        use_ipc: Memory is shared by cudaIpc, as the workspaces are.
    """

    def __init__(self, rendezvous: Rendezvous, handle: CoreHandle, use_ipc: bool) -> None:
        self._rendezvous: Rendezvous | None = rendezvous
        self._handle = handle
        self._use_ipc = use_ipc
        self._layout = HeapLayout()
        self._loans: dict[int, _core.Loan] = {}

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """``Communicator.empty``."""
        rendezvous = self.meet("empty")
        request = rendezvous.collect("request for symmetric memory", lambda: self._request(shape, dtype))
        shapes = [f"{tuple(other['shape'])} of {other['dtype']}" for other in request]
        check_alike(rendezvous.names, "ask for different tensors of symmetric memory", shapes)
        size = tuple(request[rendezvous.rank]["shape"])
        nbytes = math.prod(size) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(size, dtype=dtype, device=self._handle.device)
        # Until all ranks have the tensor, nothing is changed that could not be changed back.
        layout = self._layout.copy()
        dead = _dead_on_all(layout, [other["dead"] for other in request])
        for number in dead:
            layout.free(number)
        allocation = layout.place(nbytes)
        new_segment = None
        if allocation is None:
            new_segment = layout.add_segment(nbytes)
            allocation = layout.place(nbytes)
            assert allocation is not None
        core = self._handle.core()
        try:
            if new_segment is not None:
                share_segment(rendezvous, core, new_segment, layout.segments()[new_segment], self._use_ipc)
            tensor, loan = rendezvous.attempt(
                "allocation of a tensor in symmetric memory",
                lambda: self._take(allocation, nbytes, bool(dead), size, dtype),
            )
        except BaseException as error:
            # Whoever keeps the error keeps the frames that it went through, and with them a tensor of this rank.
            traceback.clear_frames(error.__traceback__)
            if new_segment is not None:
                with contextlib.suppress(ValueError):  # this rank has nothing of it
                    core.unmap_segment(new_segment)
                    core.close_segment(new_segment)
            raise
        vacated = layout.empty_segments()
        for segment in vacated:
            layout.remove_segment(segment)
        self._layout = layout
        self._loans = {number: found for number, found in self._loans.items() if number not in dead}
        self._loans[allocation.number] = loan
        _close_segments(rendezvous, core, vacated)
        return tensor

    def _request(self, shape: Any, dtype: Any) -> dict[str, Any]:
        """What this rank asks for, and which of its allocations have died."""
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

    def place_of(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Segment of the heap, and offset in bytes, of a tensor that lies in the heap as a whole: the same on all ranks
        for the same tensor of ``empty``.

        Args:
            tensor: Contiguous, of any memory.

        Returns:
            None where it has no elements or lies elsewhere.

        Raises:
            RuntimeError: The communicator is closed.
        """
        if tensor.nbytes == 0:
            return None
        place: tuple[int, int] | None = self._handle.core().find(tensor.data_ptr(), tensor.nbytes)
        return place

    def meet(self, call: str) -> Rendezvous:
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
        """Of the ranks, as long as the heap is open."""
        assert self._rendezvous is not None
        return self._rendezvous

    def check_not_capturing(self, call: str) -> None:
        """Raises UnsupportedInputError where ``call``, which makes tensors, would be captured in a CUDA graph."""
        if is_capturing(self._handle.device):
            raise UnsupportedInputError(f"{call}: a CUDA graph is being captured: make the call before")

    def _dead(self) -> str:
        """A bit for each allocation, the oldest first."""
        # Graphs may still use what has no tensor any more.
        if self._handle.core().has_been_captured():
            return ""
        allocations = self._layout.allocations()[:_MAX_TOLD]
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
        # Work on any stream, to the memory of peers too, may still use what a tensor had that has died.
        if reuses and device.type == "cuda":
            torch.cuda.synchronize(device)
        index = -1 if device.type == "cpu" else device.index
        capsule, loan = core.lend(allocation.segment, allocation.offset, nbytes, index)
        with torch.inference_mode(False), torch.no_grad():
            storage = torch.utils.dlpack.from_dlpack(capsule).untyped_storage()
            without_gaps = torch.empty(size, device="meta").stride()
            tensor = torch.empty(0, dtype=dtype, device=device).set_(storage, 0, size, without_gaps)
        return tensor, loan

    def close(self) -> None:
        """Drops the group. What tensors hold stays theirs."""
        self._rendezvous = None
        self._loans.clear()


def _close_segments(rendezvous: Rendezvous, core: _core.Core, segments: Sequence[int]) -> None:
    """Gives segments back, which nothing uses on any rank."""

    def each(step: Callable[[int], None]) -> None:
        for segment in segments:
            step(segment)

    if segments:
        # Memory of cudaIpc must not go as long as a peer maps it.
        rendezvous.attempt("unmapping of symmetric memory", lambda: each(core.unmap_segment))
        rendezvous.attempt("return of symmetric memory", lambda: each(core.close_segment))


def _dead_on_all(layout: HeapLayout, said: Sequence[str]) -> set[int]:
    """The allocations that have died on all ranks, by what each rank has said."""
    common = -1
    for text in said:
        common &= int.from_bytes(base64.b85decode(text), "little")
    return {allocation.number for i, allocation in enumerate(layout.allocations()) if common >> i & 1}
