"""The core of a rank as its operations see it: open or closed, right or failed."""

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
from llm_comm.runtime.statistics import Progress, Stats, Tallies
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
    """A connected core and the watchdog over it. Whoever drops the handle without closing it ends both.

    Args:
        core: Of this rank.
        device: That it works on.
        watchdog: Over the core, started; None where there is one rank, which waits for nobody.
    """

    def __init__(self, core: _core.Core, device: torch.device, watchdog: Watchdog | None) -> None:
        self.device = device
        self.is_open = True
        #: The workspaces have no memory: calls are errors until they have it again (release.py).
        self.is_released = False
        #: What calls are counted into.
        self.tallies = Tallies()
        self._last_progress = Progress()
        self._is_in_graphs = False
        self._core: _core.Core | None = core
        self._watchdog = watchdog
        self._finalizers: list[weakref.finalize[..., CoreHandle]] = []
        self._stop_watching = None if watchdog is None else self.when_dropped(watchdog.abandon)
        self._maker = os.getpid()
        _handles.add(self)

    def when_dropped(self, call: Callable[[], None]) -> weakref.finalize[..., CoreHandle]:
        """Call ``call`` once nobody holds this handle, or when the process ends, but not in a forked child."""
        finalizer = weakref.finalize(self, call)
        self._finalizers.append(finalizer)
        return finalizer

    def leave_to_parent(self) -> None:
        """Refuse every call, in a process that was forked from the one that made the communicator.

        A call from here would take the parent's turn in memory that the ranks share. No lock may be waited for: a
        thread of the parent may have held any when the process forked.
        """
        self.is_open = False
        for finalizer in self._finalizers:
            finalizer.detach()
        self._core = self._watchdog = self._stop_watching = None

    @property
    def is_of_parent(self) -> bool:
        """Whether this process was forked from the one that made the communicator."""
        return self._maker != os.getpid()

    def core(self) -> _core.Core:
        """The core.

        Raises:
            RuntimeError: The communicator is closed or released.
        """
        self.check_open()
        assert self._core is not None
        return self._core

    def core_of_released(self) -> _core.Core:
        """The core, also while the communicator is released.

        Raises:
            RuntimeError: The communicator is closed.
        """
        self._check_not_closed()
        assert self._core is not None
        return self._core

    def check_open(self) -> None:
        """Raises RuntimeError if the communicator is closed or released."""
        self._check_not_closed()
        if self.is_released:
            raise RuntimeError("this communicator is released: its workspace has no memory. Call restore() first")

    def _check_not_closed(self) -> None:
        if not self.is_open:
            if self.is_of_parent:
                raise RuntimeError(
                    f"this communicator belongs to process {self._maker}, and this is process {os.getpid()}, forked "
                    "from it: no rank waits for a call from here. Make a communicator in this process"
                )
            replays = "; operations of it in CUDA graphs do nothing any more" if self._is_in_graphs else ""
            raise RuntimeError(f"this communicator is closed{replays}")

    def check(self, look_at_order: bool = False) -> None:
        """Raises the CommunicatorError of an earlier call, if one has failed; costs no synchronization.

        Args:
            look_at_order: Ask the GPUs too whether operations of graphs have run beside others.
        """
        self.check_open()
        if look_at_order and self._watchdog is not None:
            self._watchdog.look_at_order()
        error = None if self._watchdog is None else self._watchdog.failure()
        if error is not None:
            raise error

    def end_for(self, error: RuntimeError | ValueError) -> None:
        """Ends the communicator because an operation that this rank accepts could not be launched, for want of memory
        for one. Others may have launched theirs: the next ones, of other numbers, would meet, and give wrong sums. In a
        capture nothing runs, and nothing has to end.

        Raises:
            LaunchError: It has ended.
        """
        if self._watchdog is None or is_capturing(self.device):
            return
        raise self._watchdog.end(str(error)) from error

    def fail(self, why: str) -> None:
        """Ends the communicator, on all ranks. ``why``: for its error."""
        if self._watchdog is not None:
            self._watchdog.end(why)
            self.is_released = False  # from now on calls raise that error

    def end_with(self, error: RankError) -> None:
        """Ends the communicator, on all ranks of the node, because of what the device knows nothing of. From any
        thread."""
        if self._watchdog is not None:
            self._watchdog.end_with(error)

    def remark(self, words: str) -> None:
        """Lets the ranks of the node know what this one does beside its calls, for their errors; "" for nothing."""
        if self._watchdog is not None:
            self._watchdog.remark = words

    def on_error(self, callback: Callable[[CommunicatorError], None], exits: bool) -> None:
        """See ``Communicator.on_error``."""
        self.check_open()
        if self._watchdog is not None:
            self._watchdog.on_error(callback, exits)

    def stats(self) -> Stats:
        """See ``Communicator.stats``. From any thread."""
        return Stats(self.tallies.calls(), self.tallies.declined(), self._progress())

    def _progress(self) -> Progress:
        core, watchdog = self._core, self._watchdog  # which another thread may be letting go of
        if core is None:
            return self._last_progress
        progress = Progress(core.last_call().number, operations_ended(core))
        if watchdog is None:
            return progress
        return replace(progress, idle_s=watchdog.idle_s(), error=watchdog.kind_of_error())

    def close(self) -> None:
        """Stops the watchdog and lets go of the core; more than once is no error."""
        self.is_open = False
        try:
            if self._core is not None and self.device.type == "cuda":
                self._core.wait_for(torch.cuda.current_stream(self.device).cuda_stream)
                self._is_in_graphs = self._core.has_been_captured()
        finally:  # also where the CUDA context is broken
            self._last_progress = self._progress()
            if self._stop_watching is not None and self._stop_watching.detach() and self._watchdog is not None:
                self._watchdog.stop()
            self._stop_watching = self._watchdog = self._core = None
