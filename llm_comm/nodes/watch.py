"""A thread by which nodes learn of each other's failures.

Kernels wait for ranks of their node alone, and the watchdog of a communicator sees these alone. What carries data
between nodes may wait without a word: NCCL in a graph that is replayed, for one. So a rank whose communicator fails
leaves a note, at which the ranks of other nodes end theirs; and the first rank of each node gives signs of life, for a
node that is gone as a whole leaves no note.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref

from torch._C._distributed_c10d import Store

from llm_comm.errors import CommunicatorError, PeerTimeout
from llm_comm.nodes.lost import lost_partners
from llm_comm.nodes.mail import Mail
from llm_comm.nodes.placement import Placement
from llm_comm.nodes.transport import Transport
from llm_comm.runtime.core_handle import CoreHandle
from llm_comm.runtime.status import RankError, fit

_LONGEST_LOOK_S, _LOOK_SHARE = 0.2, 1 / 40
_LONGEST_HEAR_S, _HEAR_SHARE = 0.5, 1 / 20
# Of a transport that has failed without a call, before that is an error of this rank.
_LONGEST_PATIENCE_S, _PATIENCE_SHARE = 2.0, 1 / 5
# Silence of a node that is an error, as a share of the time-out; the rest is for the others to hear of it.
_SILENCE_SHARE = 0.8
_LONGEST_STOP_S = 1.0


class NodeWatch(threading.Thread):
    """Of one communicator, until ``stop``, or until its handle is gone.

    Args:
        store: Of this communicator alone, for this object alone.
        placement: Of its ranks.
        handle: Of its core; not kept alive.
        transport: Aborted when the communicator has failed; not kept alive.
        timeout_s: Bound in seconds of the silence of a node.
    """

    def __init__(
        self, store: Store, placement: Placement, handle: CoreHandle, transport: Transport, timeout_s: float
    ) -> None:
        super().__init__(name="llm_comm node watch", daemon=True)
        self._placement = placement
        self._handle = weakref.ref(handle)
        self._transport = weakref.ref(transport)
        self._limit_s = timeout_s * _SILENCE_SHARE
        self._look_s = min(_LONGEST_LOOK_S, timeout_s * _LOOK_SHARE)
        self._hear_s = min(_LONGEST_HEAR_S, timeout_s * _HEAR_SHARE)
        self._mail = Mail(store, placement, self._look_s, timeout_s)
        # For what the culprit's own node has to say, which is more. No call of this rank waits for it.
        self._patience_s = min(_LONGEST_PATIENCE_S, timeout_s * _PATIENCE_SHARE)
        self._lost_at: float | None = None
        self._has_heard = threading.Event()
        self._stopping = threading.Event()
        handle.when_dropped(self.stop)

    def start(self) -> None:
        self._mail.start()
        super().start()

    def stop(self) -> None:
        """Says that this rank has closed its communicator, and ends, soon."""
        self._stopping.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(_LONGEST_STOP_S)

    def hears(self) -> bool:
        """Whether another rank knows of a failure, at which the communicator has ended then. Waits for it a moment:
        connections also end because those at their other ends have heard of it earlier."""
        return self._has_heard.wait(2 * self._look_s + self._hear_s)

    def run(self) -> None:
        try:
            while not self._stopping.wait(self._look_s):
                if not self._look():
                    return
            self._look()  # whoever closes a communicator because it has failed still tells the others
        finally:
            self._mail.stop()

    def _look(self) -> bool:
        """Whether there is anything left to look for."""
        handle = self._handle()
        if handle is None or not handle.is_open:
            return False
        error = _failure_of(handle)
        if error is None:
            error = self._heard() or self._silent_node() or self._lost()
            if error is None:
                return True
            handle.end_with(error)
            self._has_heard.set()
        self._mail.post(error)
        transport = self._transport()
        if transport is not None:  # what waits for other nodes on this rank
            with contextlib.suppress(Exception):  # it has ended by itself
                transport.abort()
        return False

    def _heard(self) -> RankError | None:
        """The failure of another rank, if there was one, as one of this rank."""
        note = self._mail.note
        if note is None:
            return None
        names, rank = self._placement.names, self._placement.rank
        culprit = "" if note.peer == note.rank else f" The culprit: {names.full(note.peer)}."
        by = names.full(note.rank)
        text = f"{names.in_group(rank)} was notified of a failure by {by}.{culprit} Its error: {note.text}"
        return RankError(note.kind, fit(text), note.brief, rank, note.peer)

    def _silent_node(self) -> RankError | None:
        """The error of a node of which nothing is heard for too long, though there is a store."""
        now = time.monotonic()
        for node, alive_at in self._mail.alive_at.items():
            if alive_at is not None and now - alive_at > self._limit_s and not self._mail.is_lost:
                return self._silence(node, now - alive_at)
        return None

    def _lost(self) -> RankError | None:
        """The error of a transport that has failed without a call, unless another rank has had the time to say why."""
        transport = self._transport()
        why = "" if transport is None else transport.look()
        if not why or transport is None:
            return None
        now = time.monotonic()
        if self._lost_at is None:
            self._lost_at = now
        if now - self._lost_at < self._patience_s:
            return None
        return lost_partners(self._placement, transport.name, "", why)

    def _silence(self, node: int, silent_s: float) -> RankError:
        placement, names = self._placement, self._placement.names
        ranks = placement.nodes[node]
        text = (
            f"{names.in_group(placement.rank)}: no sign of life from node {node}, {placement.hosts[node]}, with "
            f"{names.each(ranks)}, for {silent_s:.1f} s: it is gone, hangs, or cannot be reached. "
            "LLM_COMM_TIMEOUT_S sets the limit. This communicator cannot be used any more."
        )
        brief = f"heard nothing of node {node} any more"
        return RankError(PeerTimeout.__name__, fit(text), brief, placement.rank, ranks[0])


def _failure_of(handle: CoreHandle) -> RankError | None:
    """Why a communicator has failed, if it has."""
    try:
        handle.check()
    except CommunicatorError as error:
        return RankError(type(error).__name__, fit(str(error)), "has failed", error.rank, error.peer)
    except RuntimeError:  # it was closed just now
        return None
    return None
