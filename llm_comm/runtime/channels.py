"""Channels of the user's own kernels: the device-side description, and the memory and semaphores that belong to it."""

from __future__ import annotations

import operator
from typing import Any

import torch

from llm_comm import _core, arrays
from llm_comm.errors import UnsupportedInputError, quoted
from llm_comm.runtime.comparison import check_alike, digest_of
from llm_comm.runtime.core_handle import CoreHandle
from llm_comm.runtime.symmetric_heap import SymmetricHeap

#: Bytes of the channels' memory if the caller passes none.
DEFAULT_BYTES = 1 << 20
MAX_SEMAPHORES = 1 << 16
#: Alignment in bytes of memory that kernels access: one 16-byte line.
_ALIGNMENT = 16
#: Alignment in bytes of the words of semaphores behind the channels.
_SEMAPHORE_ALIGNMENT = 32


class Channels:
    """Memory and port channels from this rank to every other rank, for kernels of the user.

    A kernel takes them as ``const llm_comm::Channels*`` (``llm_comm/channels.cuh``), the address in ``handle``. The
    address is valid while this object and its communicator exist. Kernels, and CUDA graphs that hold them, must not run
    later.

    Attributes:
        memory: Symmetric tensor of this rank. The channels of the peers write to it and read from it.
        semaphores: Number of semaphores of each pair of ranks for memory channels. Port channels have the same
            number in addition.
    """

    def __init__(
        self,
        handle: CoreHandle,
        memory: torch.Tensor,
        semaphores: int,
        private: torch.Tensor,
        symmetric_offsets: tuple[tuple[int, int], tuple[int, int]],
    ) -> None:
        self.memory = memory
        self.semaphores = semaphores
        #: (window, symmetric offset) of the memory, and of the words of the semaphores.
        self.symmetric_offsets = symmetric_offsets
        self._handle = handle
        self._private = private

    @property
    def handle(self) -> int:
        """Device address of the channels, for a kernel parameter of type ``const llm_comm::Channels*``.

        Raises:
            RuntimeError: The communicator is closed.
        """
        self._handle.check_open()
        return self._private.data_ptr()


def open_channels(
    heap: SymmetricHeap,
    handle: CoreHandle,
    memory: torch.Tensor | None,
    semaphores: int,
    code: str | bytes | None = None,
) -> Channels:
    """Implement ``Communicator.channels``. Collective."""
    rendezvous = heap.rendezvous_for("channels")
    said = rendezvous.collect("request for channels", lambda: _request(heap, handle, memory, semaphores, code))
    check_alike(rendezvous.names, "pass different kernel code for channels", [request.pop("code") for request in said])
    check_alike(rendezvous.names, "ask for different channels", [_in_words(request) for request in said])
    if memory is None:
        memory = heap.empty(DEFAULT_BYTES, torch.uint8)
    head = -(-_core.bytes_of_channels() // _SEMAPHORE_ALIGNMENT) * _SEMAPHORE_ALIGNMENT
    private = heap.empty(head + _core.bytes_of_semaphores(rendezvous.world_size, semaphores), torch.uint8)

    core = handle.core()
    window, offset = _symmetric_offset(heap, private)
    symmetric_offsets = _symmetric_offset(heap, memory), (window, offset + head)

    def fill() -> None:
        made = core.channels(symmetric_offsets[0], memory.nbytes, symmetric_offsets[1], semaphores)
        private.zero_()
        private[: len(made)].copy_(torch.frombuffer(bytearray(made), dtype=torch.uint8))
        if private.is_cuda:
            torch.cuda.current_stream(private.device).synchronize()

    # A peer may signal as soon as it has its channels. The step ends once all ranks have zeroed their semaphores.
    rendezvous.attempt("set-up of channels", fill)
    return Channels(handle, memory, semaphores, private, symmetric_offsets)


def _request(heap: SymmetricHeap, handle: CoreHandle, memory: Any, semaphores: Any, code: Any) -> dict[str, Any]:
    """Return what this rank asks for: semaphores, (window, offset, bytes) of the memory, and a digest of the kernel's
    code. The ranks compare these, since the memory must have the same symmetric offset everywhere."""
    handle.check()
    heap.check_not_capturing("channels")
    try:
        count = operator.index(semaphores)
    except TypeError:
        count = 0
    if not 1 <= count <= MAX_SEMAPHORES:
        raise UnsupportedInputError(
            f"channels: semaphores is {quoted(semaphores)}; it must be a whole number from 1 to {MAX_SEMAPHORES}"
        )
    if not isinstance(code, str | bytes | None):
        raise UnsupportedInputError(f"channels: code is {quoted(code)}; it must be a text or bytes")
    said = {"semaphores": count, "symmetric_offset": None, "code": None if code is None else digest_of(code)}
    if memory is None:
        return said
    if not isinstance(memory, torch.Tensor):
        raise UnsupportedInputError(f"channels: memory is {quoted(memory)}; it must be a tensor of Communicator.empty")
    why = arrays.why_not_plain(memory)
    if why:
        raise UnsupportedInputError(f"channels: memory: {why}")
    found = heap.symmetric_offset_of(memory) if memory.is_contiguous() else None
    if found is None or found[1] % _ALIGNMENT:
        raise UnsupportedInputError(
            "channels: memory must be a contiguous tensor of Communicator.empty, or a view of one that begins at a "
            f"multiple of {_ALIGNMENT} bytes; it is one of shape {tuple(memory.shape)} and {memory.dtype} elsewhere"
        )
    return {**said, "symmetric_offset": [*found, memory.nbytes]}


def _in_words(request: dict[str, Any]) -> str:
    where = "memory of their own"
    if request["symmetric_offset"] is not None:
        window, offset, nbytes = request["symmetric_offset"]
        where = f"{nbytes} bytes at offset {offset} of window {window}"
    return f"{request['semaphores']} semaphores and {where}"


def _symmetric_offset(heap: SymmetricHeap, tensor: torch.Tensor) -> tuple[int, int]:
    found = heap.symmetric_offset_of(tensor)
    assert found is not None
    return found
