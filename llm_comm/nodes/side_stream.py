"""A stream beside the one that calls go to: on it chunks are exchanged while the node works on others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch


class SideStream:
    """Of one communicator. On emulated GPUs, where a call returns when it is done, everything runs in the order in
    which it is enqueued.

    CUDA graphs capture what is on it: it begins behind the current stream, and ends before ``joined`` does. Kernels of
    the node and of NCCL run at the same time then. Neither keeps the other from ending: NCCL leaves multiprocessors
    free, so blocks of the node's kernels always start; and what those wait for is in their node alone.

    Args:
        device: Of the communicator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._has_begun = False

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """At its end, also by an exception, the current stream waits for all that is on this one: buffers may be given
        back then."""
        self._has_begun = False
        try:
            yield
        finally:
            # A stream on which nothing has begun is in no capture, which must not wait for it.
            if self._stream is not None and self._has_begun:
                torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def behind(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """Enqueues on this stream, behind what is on the current one so far.

        Returns:
            What has the current stream wait until that is done.
        """
        if self._stream is None:
            enqueue()
            return _nothing
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        self._has_begun = True
        with torch.cuda.stream(self._stream):
            enqueue()
        done = self._stream.record_event()
        return lambda: current.wait_event(done)


def _nothing() -> None:
    """It is done."""


#: No other stream, on any device.
IN_ORDER = SideStream(torch.device("cpu"))
