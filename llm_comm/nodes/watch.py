"""A thread by which nodes learn of each other's failures, through the store of the process group.

Kernels wait for ranks of their node alone, and the watchdog of a communicator sees these alone. What carries data
between nodes may wait without a word: NCCL in a graph that is replayed, for one. So a rank whose communicator fails
leaves a note, at which the ranks of other nodes end theirs; and the first rank of each node gives signs of life, for a
node that is gone as a whole leaves none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import weakref
from dataclasses import asdict
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from llm_comm.errors import CommunicatorError, PeerTimeout
from llm_comm.nodes.placement import Placement
from llm_comm.nodes.transport import Transport
from llm_comm.runtime.core_handle import CoreHandle
from llm_comm.runtime.status import RankError, fit

logger = logging.getLogger("llm_comm")

_NOTE, _CLOSED = "note", "closed"
_LONGEST_LOOK_S, _LOOK_SHARE = 0.2, 1 / 40
_LONGEST_HEAR_S, _HEAR_SHARE = 0.5, 1 / 20
_LONGEST_BEAT_S, _BEAT_SHARE = 1.0, 1 / 10
# Silence of a node that is an error, as a share of the time-out; the rest is for the others to hear of it.
_SILENCE_SHARE = 0.8
_LONGEST_STOP_S = 1.0


class NodeWatch(threading.Thread):
    """Of one communicator, until ``stop``, or until its handle is gone.

    Args:
        store: Of this communicator alone, for this thread alone.
        placement: Of its ranks.
        handle: Of its core; not kept alive.
        transport: Aborted when the communicator has failed; not kept alive.
        timeout_s: Bound in seconds of the silence of a node.
    """

    def __init__(
        self, store: Store, placement: Placement, handle: CoreHandle, transport: Transport, timeout_s: float
    ) -> None:
        super().__init__(name="llm_comm node watch", daemon=True)
        self._store = store
        self._placement = placement
        self._handle = weakref.ref(handle)
        self._transport = weakref.ref(transport)
        self._limit_s = timeout_s * _SILENCE_SHARE
        self._look_s = min(_LONGEST_LOOK_S, timeout_s * _LOOK_SHARE)
        self._hear_s = min(_LONGEST_HEAR_S, timeout_s * _HEAR_SHARE)
        self._beat_s = min(_LONGEST_BEAT_S, timeout_s * _BEAT_SHARE)
        self._is_first = placement.place == 0
        self._beats = 0
        self._next_beat = 0.0
        # Of each other node: its last sign of life, and when it was first seen; None once it has closed.
        now = time.monotonic()
        self._seen: dict[int, tuple[str, float] | None] = {
            node: ("", now) for node in range(len(placement.nodes)) if node != placement.node
        }
        self._has_heard = threading.Event()
        self._stopping = threading.Event()
        weakref.finalize(handle, self.stop)

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
        except Exception as error:  # the store went with the process that holds it
            logger.info("llm_comm: nodes learn nothing of each other any more (%s: %s)", type(error).__name__, error)
        finally:
            if self._is_first:
                with contextlib.suppress(Exception):
                    self._store.set(self._beat_of(self._placement.node), _CLOSED)
            del self._store  # and its connection, however long this object lives

    def _look(self) -> bool:
        """Whether there is anything left to look for."""
        handle = self._handle()
        if handle is None or not handle.is_open:
            return False
        error = _failure_of(handle)
        if error is None:
            error = self._hear() or (self._silent_node() if self._is_first else None)
            if error is None:
                return True
            handle.end_with(error)
            self._has_heard.set()
        self._tell(error)
        return False

    def _tell(self, error: RankError) -> None:
        """Leaves the first note, and ends what waits on this rank for other nodes."""
        try:
            # The first note is that of whoever knows best.
            self._store.compare_set(_NOTE, "", json.dumps(asdict(error)))
        finally:
            transport = self._transport()
            if transport is not None:
                with contextlib.suppress(Exception):  # it has ended by itself
                    transport.abort()

    def _hear(self) -> RankError | None:
        """The failure of another rank, if there was one, as one of this rank."""
        if not self._store.check([_NOTE]):
            return None
        note = RankError(**json.loads(self._store.get(_NOTE)))
        placement = self._placement
        culprit = "" if note.peer == note.rank else f" The culprit: {placement.describe(note.peer)}."
        text = (
            f"rank {placement.rank} has learnt from {placement.describe(note.rank)} of a failure.{culprit} It said: "
            f"{note.text}"
        )
        return RankError(note.kind, fit(text), note.brief, placement.rank, note.peer)

    def _silent_node(self) -> RankError | None:
        """The error of a node of which nothing is heard; gives a sign of life of this one."""
        now = time.monotonic()
        if now < self._next_beat:
            return None
        self._next_beat = now + self._beat_s
        self._beats += 1
        self._store.set(self._beat_of(self._placement.node), str(self._beats))
        for node, seen in self._seen.items():
            if seen is None:
                continue
            key = self._beat_of(node)
            beat = self._store.get(key).decode() if self._store.check([key]) else ""
            if beat == _CLOSED:
                self._seen[node] = None
            elif beat != seen[0]:
                self._seen[node] = (beat, time.monotonic())
            elif now - seen[1] > self._limit_s:
                return self._silence(node, now - seen[1])
        return None

    def _silence(self, node: int, silent_s: float) -> RankError:
        placement = self._placement
        ranks = ", ".join(map(str, placement.nodes[node]))
        text = (
            f"rank {placement.rank}: no sign of life from node {node}, {placement.hosts[node]}, with ranks {ranks}, "
            f"for {silent_s:.1f} s: it is gone, hangs, or cannot be reached. LLM_COMM_TIMEOUT_S sets the limit. This "
            "communicator cannot be used any more."
        )
        brief = f"heard nothing of node {node} any more"
        return RankError(PeerTimeout.__name__, fit(text), brief, placement.rank, placement.nodes[node][0])

    @staticmethod
    def _beat_of(node: int) -> str:
        return f"beat/{node}"


def _failure_of(handle: CoreHandle) -> RankError | None:
    """Why a communicator has failed, if it has."""
    try:
        handle.check()
    except CommunicatorError as error:
        return RankError(type(error).__name__, fit(str(error)), "has failed", error.rank, error.peer)
    except RuntimeError:  # it was closed just now
        return None
    return None


def store_of(group: dist.ProcessGroup, name: str, timeout_s: float) -> Store:
    """A store for one communicator over ``group``, with a connection of its own where stores have one: waits in the
    group's own would hold up signs of life."""
    shared = dist.distributed_c10d._get_process_group_store(group)
    own = shared.clone() if hasattr(shared, "clone") else shared
    own.set_timeout(timedelta(seconds=timeout_s))
    return PrefixStore(f"llm_comm/{name}", own)
