"""State of a rank's core (`_core.Core`) as operations see it: open, released, failed or closed."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from llm_comm import _core
from llm_comm.errors import CommunicatorError
from llm_comm.runtime.devices import is_capturing
from llm_comm.runtime.statistics import Progress, StatisticsCollector, Stats
from llm_comm.runtime.status import RankError
from llm_comm.runtime.watchdog import Watchdog, operations_ended

_handles: weakref.WeakSet[CoreHandle] = weakref.WeakSet()
_kept: weakref.WeakSet[Any] = weakref.WeakSet()


def keep_in_child(kept: Any) -> None:
    """Never destroy ``kept`` in a forked child: its destructor waits for threads that only the parent has."""
    _kept.add(kept)


def _in_child() -> None:
    for kept in _kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    for handle in list(_handles):
        handle.leave_to_parent()


os.register_at_fork(after_in_child=_in_child)


class CoreHandle:
    """Own a connected core and its watchdog. Dropping the handle without ``close`` stops both.

    Args:
        core: Core of this rank.
        device: Device of the core.
        watchdog: Started watchdog of the core; None in a group of one rank, which waits for nobody.
    """

    def __init__(self, core: _core.Core, device: torch.device, watchdog: Watchdog | None) -> None:
        self.device = device
        self.is_open = True
        #: The workspaces have no memory (release.py). Calls raise until ``restore``.
        self.is_released = False
        #: Counters of calls and declined inputs.
        self.statistics = StatisticsCollector()
        self._last_progress = Progress()
        self._is_in_graphs = False
        self._core: _core.Core | None = core
        self._watchdog = watchdog
        self._finalizers: list[weakref.finalize[..., CoreHandle]] = []
        self._stop_watching = None if watchdog is None else self.when_dropped(watchdog.abandon)
        self._owner = os.getpid()
        _handles.add(self)

    def when_dropped(self, call: Callable[[], None]) -> weakref.finalize[..., CoreHandle]:
        """Call ``call`` once nobody holds this handle, or when the process ends, but not in a forked child."""
        finalizer = weakref.finalize(self, call)
        self._finalizers.append(finalizer)
        return finalizer

    def leave_to_parent(self) -> None:
        """Refuse every call in a process that was forked from the owner of the communicator.

        A call of the child would advance the call number, and the parent and its peers would disagree. This function
        takes no lock: a thread of the parent may have held it when the process forked.
        """
        self.is_open = False
        for finalizer in self._finalizers:
            finalizer.detach()
        self._core = self._watchdog = self._stop_watching = None

    @property
    def is_of_parent(self) -> bool:
        """True if this process was forked from the one that made the communicator."""
        return self._owner != os.getpid()

    def core(self) -> _core.Core:
        """Return the core.

        Raises:
            RuntimeError: The communicator is closed or released.
        """
        self.check_open()
        assert self._core is not None
        return self._core

    def core_of_released(self) -> _core.Core:
        """Return the core, also while the communicator is released.

        Raises:
            RuntimeError: The communicator is closed.
        """
        self._check_not_closed()
        assert self._core is not None
        return self._core

    def check_open(self) -> None:
        """Raise RuntimeError if the communicator is closed or released."""
        self._check_not_closed()
        if self.is_released:
            raise RuntimeError("this communicator is released: its workspace has no memory. Call restore() first")

    def _check_not_closed(self) -> None:
        if not self.is_open:
            if self.is_of_parent:
                raise RuntimeError(
                    f"this communicator belongs to process {self._owner}, and this is process {os.getpid()}, forked "
                    "from it: no rank waits for a call from here. Make a communicator in this process"
                )
            replays = "; its operations in CUDA graphs do nothing" if self._is_in_graphs else ""
            raise RuntimeError(f"this communicator is closed{replays}")

    def check(self, look_at_order: bool = False) -> None:
        """Raise the CommunicatorError of an earlier call that failed. Does not synchronize with the device.

        Args:
            look_at_order: Also read from the GPUs whether graph replays overlapped with other operations.
        """
        self.check_open()
        if look_at_order and self._watchdog is not None:
            self._watchdog.look_at_order()
        error = None if self._watchdog is None else self._watchdog.failure()
        if error is not None:
            raise error

    def end_after_launch_error(self, error: RuntimeError | ValueError) -> None:
        """End the communicator because an accepted operation could not be launched here, for lack of memory for
        example.

        Peers may have launched theirs. Their next operation would synchronize with this rank's next one under another
        number and compute wrong results. During a capture nothing runs, so the communicator stays usable.

        Raises:
            LaunchError: The communicator has ended.
        """
        if self._watchdog is None or is_capturing(self.device):
            return
        raise self._watchdog.end(str(error)) from error

    def fail(self, why: str) -> None:
        """End the communicator on all ranks. ``why`` goes into its error."""
        if self._watchdog is not None:
            self._watchdog.end(why)
            self.is_released = False  # calls must raise the watchdog's error, not "released"

    def end_with(self, error: RankError) -> None:
        """End the communicator on all ranks of the node, for an error that was found on the host. Any thread may call
        this."""
        if self._watchdog is not None:
            self._watchdog.end_with(error)

    def remark(self, words: str) -> None:
        """Publish what this rank does besides its calls, for the errors of the node's ranks; "" clears it."""
        if self._watchdog is not None:
            self._watchdog.remark = words

    def on_error(self, callback: Callable[[CommunicatorError], None], exits: bool) -> None:
        """See ``Communicator.on_error``."""
        self.check_open()
        if self._watchdog is not None:
            self._watchdog.on_error(callback, exits)

    def stats(self) -> Stats:
        """See ``Communicator.stats``. From any thread."""
        counted = self.statistics
        return Stats(counted.calls(), counted.declined(), self._progress(), counted.bytes_saved())

    def _progress(self) -> Progress:
        # local references: ``close`` on another thread may clear the attributes
        core, watchdog = self._core, self._watchdog
        if core is None:
            return self._last_progress
        progress = Progress(core.last_call().number, operations_ended(core))
        if watchdog is None:
            return progress
        return replace(progress, idle_s=watchdog.idle_s(), error=watchdog.kind_of_error())

    def close(self) -> None:
        """Stop the watchdog and drop the core. Further calls have no effect."""
        self.is_open = False
        try:
            if self._core is not None and self.device.type == "cuda":
                self._core.wait_for(torch.cuda.current_stream(self.device).cuda_stream)
                self._is_in_graphs = self._core.has_been_captured()
        finally:  # also if the CUDA context is broken
            self._last_progress = self._progress()
            if self._stop_watching is not None and self._stop_watching.detach() and self._watchdog is not None:
                self._watchdog.stop()
            self._stop_watching = self._watchdog = self._core = None
