"""A thread that notices when a communicator fails, whether or not anybody calls it, and says what the ranks were doing.

It also notices that a rank's process has exited. Kernels that wait for it end at once, in place of the time-out. That
alone ends nothing else, as what the rank has sent is there, unless a callback asks for it. The log says which rank has
exited without closing its communicator: an engine or launcher may be about to end this process too, in other words.

A CUDA graph is replayed without Python, and a rank may wait for its GPU, so somebody else has to look. A look reads a
few words of host memory.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

from llm_comm import _core
from llm_comm.errors import CommunicatorError, LaunchError, PeerTimeout
from llm_comm.runtime.failures import (
    AS_CONNECTED,
    as_exception,
    call_in_words,
    describe_ranks,
    explain,
    root_cause,
)
from llm_comm.runtime.status import LIFE_S, RankError, RankState, Sighting, StatusBoard, fit

logger = logging.getLogger("llm_comm")

#: What a kernel waits for a peer, as a share of ``timeout_s``. The rest is for the ranks to agree whom they miss
#: (1/16 of it, ``record_wait_in_vain`` in wait.cuh), for a look of this thread, and for it to hear from the others.
KERNEL_SHARE_OF_TIMEOUT = 0.8
_LOOK_SHARE, _LONGEST_LOOK_S = 1 / 40, 0.05
#: From one look at the order of operations to the next: each reads a few words of every rank's GPU.
_ORDER_LOOK_S = 1.0
_HEAR_SHARE, _LONGEST_HEAR_S = 1 / 20, 0.5
#: How long it takes a process that gives no sign of life to exit: the driver frees its memory first.
_LONGEST_DEATH_S = 2.5
#: After an exit that is an error by itself: for kernels that wait for the rank, and the engine, to say so first.
_EXIT_GRACE_S = 1.0
#: What a communicator that is collected waits for its thread. The collection may have come upon the holder of a lock
#: that the thread wants, of a handler of logging for one.
_LONGEST_STOP_S = 3.0


_Callback = Callable[[CommunicatorError], None]
_CallbackRef = Callable[[], _Callback | None]


def _reference(callback: _Callback) -> _CallbackRef:
    # The object of a bound method often holds the communicator, whose watchdog is not to keep it alive in turn.
    return weakref.WeakMethod(callback) if inspect.ismethod(callback) else lambda: callback


def operations_ended(core: _core.Core) -> int | None:
    """How many operations the device has ended; None if it does not answer soon, or has an error of its own."""
    try:
        return core.operations_ended()
    except RuntimeError:
        return None


class Watchdog(threading.Thread):
    """Watches one communicator until ``stop``. It holds the core, not the communicator, which may be dropped.

    Args:
        core: What to watch.
        rank: Of this process among those that are connected.
        board: What the ranks know of each other, or None. Belongs to the watchdog from now on.
        ranks: The numbers by which the user knows those that are connected: of a group on several nodes, the ranks of
            this one.
    """

    def __init__(
        self,
        core: _core.Core,
        rank: int,
        timeout_s: float,
        board: StatusBoard | None,
        ranks: Sequence[int] = AS_CONNECTED,
    ) -> None:
        super().__init__(name="llm_comm watchdog", daemon=True)
        self._core = core
        self._rank = rank
        self._ranks = ranks
        self._number = ranks[rank]
        self._timeout_s = timeout_s
        self._board = board
        self._look_s = min(_LONGEST_LOOK_S, timeout_s * _LOOK_SHARE)
        self._hear_s = min(_LONGEST_HEAR_S, timeout_s * _HEAR_SHARE)
        self._stopping = threading.Event()
        self._has_failed = threading.Event()
        self._lock = threading.Lock()
        self._error: RankError | None = None  # with the state of all ranks, once _has_failed is set
        #: What the others are to know of this rank beside its calls, as of ``RankState``. Any thread may set it.
        self.remark = ""
        self._other_error: RankError | None = None  # what the device knows nothing of
        self._callbacks: list[_CallbackRef] = []  # each returns the callback, or None once it is gone
        self._lost: set[int] = set()  # ranks of which the log has said that they are gone
        self._exited: set[int] = set()  # ranks of which the kernels know that their processes have exited
        self._first_exit: tuple[int, float] | None = None  # the rank, not closed before, and when it was seen
        self._fails_on_exit = False
        self._is_abandoned = False
        self._next_look_at_order = 0.0
        self._last_launch = (0, 0.0)  # its number, and when it was first seen

    # ---- For the communicator -----------------------------------------------------------------------------------

    def failure(self) -> CommunicatorError | None:
        """The error of the communicator, always with the same text. Waits for the other ranks' states if it is new."""
        if self._error is None:
            found = self._own_error()
            if found is None:
                return None
            if not self._has_failed.wait(self._look_s + self._hear_s + LIFE_S):  # this thread got no CPU time
                return as_exception(found)
        assert self._error is not None
        return as_exception(self._error)

    def end(self, why: str) -> CommunicatorError:
        """Ends the communicator, on all ranks, because an operation could not be launched here. Returns the error."""
        text = (
            f"rank {self._number}: an operation could not be launched ({why}), and other ranks may have launched "
            "theirs. This communicator cannot be used any more."
        )
        kind, brief = LaunchError.__name__, "could not launch an operation"
        return self.end_with(RankError(kind, fit(text), brief, self._number, self._number))

    def end_with(self, why: RankError) -> CommunicatorError:
        """The same because of what the device knows nothing of. From any thread. Returns the error of the communicator,
        which may be an earlier one."""
        self._other_error = self._other_error or why
        self._core.abort()  # nothing is enqueued from now on, and what waits for this rank learns of it by its page
        error = self.failure()
        assert error is not None
        return error

    def look_at_order(self) -> None:
        """Ends the communicator if operations of graphs have run beside others, as far as that shows. Calls outside of
        graphs wait for each other."""
        with contextlib.suppress(RuntimeError):  # the device has an error of its own
            if self._core.has_been_captured():
                self._core.check_order()

    def idle_s(self) -> float | None:
        """Seconds since the last launch was enqueued or captured, as far as looks tell; None if there was none."""
        number, seen = self._seen(self._core.last_call())
        return time.monotonic() - seen if number else None

    def kind_of_error(self) -> str:
        """Class of the communicator's error, or "". Waits for nobody."""
        error = self._error or self._own_error()
        return "" if error is None else error.kind

    def on_error(self, callback: _Callback, exits: bool) -> None:
        """Calls ``callback`` once with the error: from this thread, or now if there is one already. ``exits``: see
        ``Communicator.on_error``."""
        with self._lock:
            self._fails_on_exit |= exits
            if self._error is None:
                self._callbacks.append(_reference(callback))
                return
        callback(as_exception(self._error))

    def stop(self, longest_s: float | None = None) -> None:
        """Returns once nothing is looked at any more, or after a while."""
        self._stopping.set()
        if self.ident is None and self._board is not None:  # the thread never started
            self._board.close()
            self._board = None
        # A communicator can be collected, and with it its watchdog stopped, in any thread.
        if self.is_alive() and threading.current_thread() is not self:
            self.join(longest_s)

    def abandon(self) -> None:
        """The same for a communicator that nobody has closed, because it was dropped or the process ends. That may be
        for the loss of a rank, so the thread sees to it first that the log says which: for up to 2.5 s."""
        self._is_abandoned = True
        self.stop(_LONGEST_STOP_S)

    # ---- The thread ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._watch()
        except Exception as error:
            logger.exception("llm_comm: the watchdog of rank %d failed", self._number)
            text = (
                f"rank {self._number}: nobody watches this communicator any more ({type(error).__name__}: {error}). It "
                "cannot be used any more."
            )
            failure = RankError(CommunicatorError.__name__, fit(text), "has no watchdog", self._number, self._number)
            with contextlib.suppress(Exception):  # else the others learn of it when they wait for this rank
                self._publish(replace(self._state(), error=failure))
            self._tell(failure)
        finally:
            if self._board is not None:
                self._board.close()

    def _watch(self) -> None:
        state = self._state()
        self._publish(state)
        while not self._stopping.wait(self._look_s):
            if self._error is None:
                state = self._state()
                sightings = self._look()
                self._note_the_lost(sightings)
                if time.monotonic() >= self._next_look_at_order:
                    self._next_look_at_order = time.monotonic() + _ORDER_LOOK_S
                    # Memory of a rank that has closed may be gone.
                    if not any(s.is_closed or s.has_exited for s in sightings):
                        self.look_at_order()
                if self._own_error() is not None or any(s.state and s.state.error for s in sightings):
                    state = self._fail()
                elif self._has_failed_by_exit():
                    error = self._exit_as_error()
                    state = replace(state, error=error)
                    self._publish(state)
                    self._tell(error, sightings)
            self._publish(state)  # a sign of life, also after an error
        if self._error is None and self._own_error() is not None:  # since the last look
            state = self._fail()
        if self._error is None:
            if self._is_abandoned:
                self._wait_for_the_silent(state)
            state = self._state()
        self._publish(replace(state, is_closed=True))
        if self._error is None and self._is_abandoned and self._first_exit is not None:
            # A wait that lasts is in vain, and would hold up for the time-out whoever frees the memory, the end of the
            # process for one. So could kernels of other libraries that wait for that rank, without end.
            self._tell(self._exit_as_error(), self._look(), quietly=not self._fails_on_exit)

    def _note_the_lost(self, sightings: Sequence[Sighting], life_s: float | None = None) -> None:
        """Tells the kernels of a rank whose process has exited. Says once in the log that it has, if it had not closed
        its communicator; with ``life_s``, also that it has been silent for longer."""
        for rank, sighting in enumerate(sightings):
            if sighting.has_exited and rank not in self._exited:
                self._exited.add(rank)
                self._core.peer_exited(rank)
                if not sighting.is_closed and self._first_exit is None:
                    self._first_exit = rank, time.monotonic()
            if sighting.is_closed:
                continue
            is_silent = life_s is not None and self._silent_for(rank, sighting) > life_s
            if rank in self._lost or not (sighting.has_exited or is_silent):
                continue
            self._lost.add(rank)
            pid = "" if sighting.state is None else f" (pid {sighting.state.pid})"
            logger.warning(
                "llm_comm: rank %d%s %s. What waits for it ends with PeerTimeout",
                self._ranks[rank],
                pid,
                "has exited without closing its communicator"
                if sighting.has_exited
                else f"has died or hangs: no sign of life for {sighting.age_s:.1f} s",
            )

    def _has_failed_by_exit(self) -> bool:
        if not self._fails_on_exit or self._first_exit is None:
            return False
        return time.monotonic() - self._first_exit[1] > _EXIT_GRACE_S

    def _exit_as_error(self) -> RankError:
        assert self._first_exit is not None
        peer = self._ranks[self._first_exit[0]]
        text = (
            f"rank {self._number}: the process of rank {peer} has exited without closing its communicator. This one "
            "cannot be used any more."
        )
        brief = f"saw that the process of rank {peer} has exited"
        return RankError(PeerTimeout.__name__, text, brief, self._number, peer)

    def _wait_for_the_silent(self, state: RankState) -> None:
        """Until every other rank has given a sign of life from now on, or has closed, has exited, or was silent for too
        long; for a while longer where it can be told whether a silent one exits."""
        begin = time.monotonic()
        while True:
            elapsed = time.monotonic() - begin  # before the look: no sign of life gets younger by a pause behind it
            self._publish(state)
            sightings = self._look()
            self._note_the_lost(sightings, LIFE_S)
            left = (rank for rank in range(len(sightings)) if rank not in self._lost)
            may_exit = elapsed < _LONGEST_DEATH_S and any(sightings[rank].has_exited is False for rank in self._lost)
            if not may_exit and all(self._silent_for(rank, sightings[rank]) <= elapsed for rank in left):
                return
            time.sleep(self._look_s / 2)

    def _silent_for(self, rank: int, sighting: Sighting) -> float:
        """Seconds without a sign of life from a peer that owes some: it has given one, and has not closed."""
        owes_none = rank == self._rank or sighting.state is None or sighting.is_closed
        return 0.0 if owes_none else sighting.age_s

    def _state(self) -> RankState:
        call = self._core.last_call()
        self._seen(call)
        return RankState(os.getpid(), call_in_words(call) if call.number else "", remark=self.remark)

    def _seen(self, call: _core.Call) -> tuple[int, float]:
        """The number of the last launch, and when it was first seen. From any thread."""
        if call.number > self._last_launch[0]:
            self._last_launch = (call.number, time.monotonic())
        return self._last_launch

    def _fail(self) -> RankState:
        """Finds out what happened, ends the communicator and tells those who asked for it."""
        state, sightings = self._hear()
        error = root_cause(self._number, state.error, sightings)
        if error is None:
            return state
        self._tell(error, sightings)
        return state

    def _tell(self, error: RankError, sightings: Sequence[Sighting] = (), quietly: bool = False) -> None:
        """Ends the communicator with the first error that it is given, and what the ranks were doing. If ``quietly``,
        nobody hears of it."""
        error = replace(error, text=error.text + describe_ranks(sightings, self._ranks))
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            callbacks = [callback for reference in self._callbacks if (callback := reference()) is not None]
        self._has_failed.set()
        self._core.abort()  # where another rank has failed, nothing that waits for it comes to an end
        if quietly:
            return
        if not callbacks:
            logger.error("%s", error.text)
        for callback in callbacks:
            try:
                callback(as_exception(error))
            except BaseException:  # SystemExit too: a thread that it ends leaves no word, and no process ends
                logger.exception("a callback of on_error failed (to end the process, use os._exit)")

    def _hear(self) -> tuple[RankState, list[Sighting]]:
        """This rank's state, and the states of all ranks once those that live have an error too, or after a while."""
        state = replace(self._state(), operations_ended=operations_ended(self._core))
        deadline = time.monotonic() + self._hear_s
        while True:
            if state.error is None:
                state = replace(state, error=self._own_error())
            self._publish(state)
            sightings = self._look()
            self._note_the_lost(sightings)
            have_errors = all(
                s.state is None or s.state.error is not None or s.is_closed or s.has_exited or s.age_s > LIFE_S
                for s in sightings
            )
            if (have_errors and state.error is not None) or time.monotonic() > deadline:
                return state, sightings
            time.sleep(0.002)

    def _own_error(self) -> RankError | None:
        found = self._core.error()
        if found is None:
            return self._other_error
        return explain(found, self._timeout_s * KERNEL_SHARE_OF_TIMEOUT, self._ranks)

    def _publish(self, state: RankState) -> None:
        if self._board is not None:
            self._board.publish(state)

    def _look(self) -> list[Sighting]:
        return [] if self._board is None else self._board.look()
