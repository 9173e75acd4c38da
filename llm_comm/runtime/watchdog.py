"""Watchdog thread of a communicator: detects failures without any call from the user, and reports what each rank did.

CUDA graphs are replayed without Python, and a rank may block on its GPU, so a thread of its own polls. A poll reads a
few words of host memory.

The watchdog also detects that a peer's process has exited. Kernels that wait for that peer end at once instead of after
the timeout. Other kernels continue, since data that the peer has sent is complete, unless a callback asked for failure
on exit. The log names the peer that exited without closing its communicator: an engine or launcher may end this process
next, with a message of its own.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

from llm_comm import _core
from llm_comm.errors import CommunicatorError, LaunchError, PeerTimeout
from llm_comm.runtime.failures import (
    as_exception,
    call_in_words,
    describe_ranks,
    explain,
    root_cause,
)
from llm_comm.runtime.linked_status import LinkedBoard
from llm_comm.runtime.rank_names import RankNames
from llm_comm.runtime.status import LIFE_S, PeerStatus, RankError, RankState, StatusBoard, report_wait_s

logger = logging.getLogger("llm_comm")

#: Time limit of a wait in a kernel, as a share of ``timeout_s``. The rest is for three steps: the ranks agree on the
#: missing peer (1/16 of it, ``record_wait_in_vain`` in wait.cuh), this thread polls, and it reads the peers' reports.
KERNEL_SHARE_OF_TIMEOUT = 0.8
_LOOK_SHARE, _LONGEST_LOOK_S = 1 / 40, 0.05
#: Seconds between two checks of the operations' order. Each check reads a few words of every rank's GPU.
_ORDER_LOOK_S = 1.0
#: Longest time in seconds that a silent process takes to exit: the driver frees its memory first.
_LONGEST_DEATH_S = 2.5
#: Seconds from a peer's exit until the exit itself becomes the error. Waiting kernels and the engine report first.
_EXIT_GRACE_S = 1.0
#: Time limit in seconds for joining the thread of a garbage-collected communicator. Collection may interrupt the holder
#: of a lock that the thread needs, such as the lock of a logging handler.
_LONGEST_STOP_S = 3.0


_Callback = Callable[[CommunicatorError], None]
_CallbackRef = Callable[[], _Callback | None]


def _reference(callback: _Callback) -> _CallbackRef:
    # A weak reference: the object of a bound method often holds the communicator, which the watchdog must not keep
    # alive.
    return weakref.WeakMethod(callback) if inspect.ismethod(callback) else lambda: callback


def operations_ended(core: _core.Core) -> int | None:
    """Return how many operations the device has ended; None if it does not answer soon or has an error of its own."""
    try:
        return core.operations_ended()
    except RuntimeError:
        return None


class Watchdog(threading.Thread):
    """Watch one communicator until ``stop``. The thread holds the core and not the communicator, which the user may
    drop.

    Args:
        core: Core to watch.
        rank: Index of this process among the connected ranks.
        timeout_s: Option ``timeout_s``, in seconds.
        board: Status pages of the ranks, or None. The watchdog takes ownership.
        names: Names of the connected ranks. In a group over several nodes: the ranks of this node.
    """

    def __init__(
        self,
        core: _core.Core,
        rank: int,
        timeout_s: float,
        board: StatusBoard | LinkedBoard | None,
        names: RankNames,
    ) -> None:
        super().__init__(name="llm_comm watchdog", daemon=True)
        self._core = core
        self._rank = rank
        self._names = names
        self._this = names.in_group(rank)
        self._number = names.number(rank)
        self._timeout_s = timeout_s
        self._board = board
        self._look_s = min(_LONGEST_LOOK_S, timeout_s * _LOOK_SHARE)
        self._report_wait_s = report_wait_s(timeout_s)
        self._stopping = threading.Event()
        self._has_failed = threading.Event()
        self._lock = threading.Lock()
        self._error: RankError | None = None  # with the states of all ranks; set before _has_failed
        #: ``RankState.remark`` of this rank. Any thread may set it.
        self.remark = ""
        self._other_error: RankError | None = None  # an error found on the host, which the core does not report
        self._callbacks: list[_CallbackRef] = []  # each returns the callback, or None after its object was collected
        self._lost: set[int] = set()  # ranks whose loss has been logged
        self._exited: set[int] = set()  # ranks whose exit has been passed to the kernels
        # first rank that exited without closing, and the time of the poll that saw it
        self._first_exit: tuple[int, float] | None = None
        self._fails_on_exit = False
        self._is_abandoned = False
        self._next_look_at_order = 0.0
        self._last_launch = (0, 0.0)  # number of the last launch, and when it was first seen

    # ---- Calls of the communicator ------------------------------------------------------------------------------

    def failure(self) -> CommunicatorError | None:
        """Return the error of the communicator, or None. A new error waits for the reports of the peers, so the text is
        final."""
        if self._error is None:
            found = self._own_error()
            if found is None:
                return None
            if not self._has_failed.wait(self._look_s + self._report_wait_s + LIFE_S):  # this thread got no CPU time
                return as_exception(found)
        assert self._error is not None
        return as_exception(self._error)

    def end(self, why: str) -> CommunicatorError:
        """End the communicator on all ranks because an operation could not be launched here. Return the error."""
        text = (
            f"{self._this}: an operation could not be launched ({why}), and other ranks may have launched "
            "theirs. This communicator can no longer be used."
        )
        kind, brief = LaunchError.__name__, "could not launch an operation"
        return self.end_with(RankError(kind, text, brief, self._number, self._number))

    def end_with(self, why: RankError) -> CommunicatorError:
        """End the communicator on all ranks for an error found on the host. Any thread may call this.

        Returns:
            The error of the communicator, which may be an earlier one.
        """
        self._other_error = self._other_error or why
        self._core.abort()  # nothing is enqueued after this; peers that wait for this rank read its status page
        error = self.failure()
        assert error is not None
        return error

    def look_at_order(self) -> None:
        """End the communicator if a check finds that operations of graph replays overlapped with other operations.

        Eager calls need no check: they wait for each other.
        """
        with contextlib.suppress(RuntimeError):  # the device has an error of its own
            if self._core.has_been_captured():
                self._core.check_order()

    def idle_s(self) -> float | None:
        """Return the seconds since the last launch was enqueued or captured, with the resolution of polls; None before
        one."""
        number, seen = self._seen(self._core.last_call())
        return time.monotonic() - seen if number else None

    def kind_of_error(self) -> str:
        """Return the class name of the communicator's error, or "". Does not wait."""
        error = self._error or self._own_error()
        return "" if error is None else error.kind

    def on_error(self, callback: _Callback, exits: bool) -> None:
        """Register ``callback``. It is called once with the error: by this thread, or at once if there is an error
        already.

        ``exits``: see ``Communicator.on_error``.
        """
        with self._lock:
            self._fails_on_exit |= exits
            if self._error is None:
                self._callbacks.append(_reference(callback))
                return
        callback(as_exception(self._error))

    def stop(self, longest_s: float | None = None) -> None:
        """Stop the thread. Return after its last poll, or after ``longest_s`` seconds."""
        self._stopping.set()
        if self.ident is None and self._board is not None:  # the thread never started
            self._board.close()
            self._board = None
        # Garbage collection can run this in any thread, also in the watchdog itself.
        if self.is_alive() and threading.current_thread() is not self:
            self.join(longest_s)

    def abandon(self) -> None:
        """Stop the thread of a communicator that was dropped without ``close``, or whose process ends.

        The cause may be the loss of a peer. The thread therefore takes up to 2.5 s to find and log which peer has
        exited.
        """
        self._is_abandoned = True
        self.stop(_LONGEST_STOP_S)

    # ---- The thread ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Watch until ``stop``. A failure of the watchdog itself ends the communicator too."""
        try:
            self._watch()
        except Exception as error:
            logger.exception("llm_comm: the watchdog of %s failed", self._this)
            text = (
                f"{self._this}: the watchdog of this communicator has failed ({type(error).__name__}: {error}). The "
                "communicator can no longer be used."
            )
            failure = RankError(CommunicatorError.__name__, text, "has no watchdog", self._number, self._number)
            with contextlib.suppress(Exception):  # peers then detect the failure by their timeout
                self._publish(replace(self._state(), error=failure))
            self._report(failure)
        finally:
            if self._board is not None:
                self._board.close()

    def _watch(self) -> None:
        state = self._state()
        self._publish(state)
        while not self._stopping.wait(self._look_s):
            if self._error is None:
                state = self._state()
                statuses = self._look()
                self._record_lost_peers(statuses)
                if time.monotonic() >= self._next_look_at_order:
                    self._next_look_at_order = time.monotonic() + _ORDER_LOOK_S
                    # The GPU memory of a rank that has closed may be unmapped.
                    if not any(s.is_closed or s.has_exited for s in statuses):
                        self.look_at_order()
                if self._own_error() is not None or any(s.state and s.state.error for s in statuses):
                    state = self._fail()
                elif self._has_failed_by_exit():
                    error = self._exit_as_error()
                    state = replace(state, error=error)
                    self._publish(state)
                    self._report(error, statuses)
            self._publish(state)  # heartbeat, also after an error
        if self._error is None and self._own_error() is not None:  # an error later than the last poll
            state = self._fail()
        if self._error is None:
            if self._is_abandoned:
                self._wait_for_the_silent(state)
            state = self._state()
        self._publish(replace(state, is_closed=True))
        if self._error is None and self._is_abandoned and self._first_exit is not None:
            # A kernel that waits for the exited peer would delay the free of the memory, or the exit of this process,
            # until the timeout. Kernels of other libraries could wait for the peer without end.
            self._report(self._exit_as_error(), self._look(), quietly=not self._fails_on_exit)

    def _record_lost_peers(self, statuses: Sequence[PeerStatus], life_s: float | None = None) -> None:
        """Notify the kernels of peers whose process has exited, and log each lost peer once.

        A peer is lost if it exited without closing its communicator. With ``life_s``, a peer without heartbeat for
        longer than that many seconds is lost too.
        """
        for rank, status in enumerate(statuses):
            if status.has_exited and rank not in self._exited:
                self._exited.add(rank)
                self._core.peer_exited(rank)
                if not status.is_closed and self._first_exit is None:
                    self._first_exit = rank, time.monotonic()
            if status.is_closed:
                continue
            is_silent = life_s is not None and self._silent_for(rank, status) > life_s
            if rank in self._lost or not (status.has_exited or is_silent):
                continue
            self._lost.add(rank)
            logger.warning(
                "llm_comm: %s %s (noticed by %s). What waits for it ends with PeerTimeout",
                self._names.in_group(rank),
                "has exited without closing its communicator"
                if status.has_exited
                else f"has died or hangs: no sign of life for {status.age_s:.1f} s",
                self._names.short(self._rank),
            )

    def _has_failed_by_exit(self) -> bool:
        if not self._fails_on_exit or self._first_exit is None:
            return False
        return time.monotonic() - self._first_exit[1] > _EXIT_GRACE_S

    def _exit_as_error(self) -> RankError:
        assert self._first_exit is not None
        names, index = self._names, self._first_exit[0]
        text = (
            f"{self._this}: the process of {names.full(index)} has exited without closing its communicator. This one "
            "can no longer be used."
        )
        brief = f"saw that the process of {names.short(index)} has exited"
        return RankError(PeerTimeout.__name__, text, brief, self._number, names.number(index))

    def _wait_for_the_silent(self, state: RankState) -> None:
        """Wait until every peer has given a new heartbeat, has closed, has exited, or is silent for too long.

        If pidfds exist, wait up to 2.5 s more for the exit of a silent peer.
        """
        begin = time.monotonic()
        while True:
            # read before the poll: a pause after it must not make a heartbeat look newer
            elapsed = time.monotonic() - begin
            self._publish(state)
            statuses = self._look()
            self._record_lost_peers(statuses, LIFE_S)
            left = (rank for rank in range(len(statuses)) if rank not in self._lost)
            may_exit = elapsed < _LONGEST_DEATH_S and any(statuses[rank].has_exited is False for rank in self._lost)
            if not may_exit and all(self._silent_for(rank, statuses[rank]) <= elapsed for rank in left):
                return
            time.sleep(self._look_s / 2)

    def _silent_for(self, rank: int, status: PeerStatus) -> float:
        """Return the age in seconds of a peer's heartbeat; 0 for this rank, and for peers that have closed or published
        nothing."""
        owes_none = rank == self._rank or status.state is None or status.is_closed
        return 0.0 if owes_none else status.age_s

    def _state(self) -> RankState:
        call = self._core.last_call()
        self._seen(call)
        return RankState(call_in_words(call) if call.number else "", remark=self.remark)

    def _seen(self, call: _core.Call) -> tuple[int, float]:
        """Return the number of the last launch, and the time at which it was first seen. Any thread may call this."""
        if call.number > self._last_launch[0]:
            self._last_launch = (call.number, time.monotonic())
        return self._last_launch

    def _fail(self) -> RankState:
        """Find the cause of a failure, end the communicator, and notify the callbacks. Return the published state."""
        state, statuses = self._collect_statuses()
        error = root_cause(self._this, state.error, statuses)
        if error is None:
            return state
        self._report(error, statuses)
        return state

    def _report(self, error: RankError, statuses: Sequence[PeerStatus] = (), quietly: bool = False) -> None:
        """End the communicator with ``error`` and the states of all ranks. Only the first error counts.

        If ``quietly``, neither log nor call callbacks.
        """
        error = replace(error, text=error.text + describe_ranks(statuses, self._names))
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            callbacks = [callback for reference in self._callbacks if (callback := reference()) is not None]
        self._has_failed.set()
        self._core.abort()  # after a peer's failure, kernels that wait for it would never end
        if quietly:
            return
        if not callbacks:
            logger.error("%s", error.text)
        for callback in callbacks:
            try:
                callback(as_exception(error))
            except BaseException:  # also SystemExit: it would end only this thread, without a message
                logger.exception("a callback of on_error failed (to end the process, use os._exit)")

    def _collect_statuses(self) -> tuple[RankState, list[PeerStatus]]:
        """Collect the states of all ranks. Wait until each living rank has reported an error.

        The wait lasts at most ``_report_wait_s`` seconds.
        """
        state = replace(self._state(), operations_ended=operations_ended(self._core))
        deadline = time.monotonic() + self._report_wait_s
        while True:
            if state.error is None:
                state = replace(state, error=self._own_error())
            self._publish(state)
            statuses = self._look()
            self._record_lost_peers(statuses)
            have_errors = all(
                s.state is None or s.state.error is not None or s.is_closed or s.has_exited or s.age_s > LIFE_S
                for s in statuses
            )
            if (have_errors and state.error is not None) or time.monotonic() > deadline:
                return state, statuses
            time.sleep(0.002)

    def _own_error(self) -> RankError | None:
        found = self._core.error()
        if found is None:
            return self._other_error
        return explain(found, self._timeout_s * KERNEL_SHARE_OF_TIMEOUT, self._names)

    def _publish(self, state: RankState) -> None:
        if self._board is not None:
            self._board.publish(state)

    def _look(self) -> list[PeerStatus]:
        return [] if self._board is None else self._board.look()
