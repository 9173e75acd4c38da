"""Failure reports between nodes, through the store of the process group.

Kernels wait only for ranks of their node, and a communicator's watchdog sees only these. A transport between nodes may
hang silently, such as NCCL in a replayed graph. A rank whose communicator fails therefore writes a fault report to the
store, and the ranks of other nodes end their communicators. The first rank of each node also sends heartbeats, since a
node that is lost as a whole writes no report.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import weakref
from dataclasses import asdict, replace
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from llm_comm.errors import CommunicatorError, PeerTimeout
from llm_comm.nodes.topology import Topology
from llm_comm.nodes.transport import Transport
from llm_comm.runtime.core_handle import CoreHandle
from llm_comm.runtime.status import RankError, fit, report_wait_s

logger = logging.getLogger("llm_comm")

_REPORT, _CLOSED = "report", "closed"
_LONGEST_BEAT_S, _BEAT_SHARE = 1.0, 1 / 10
_LONGEST_LOOK_S, _LOOK_SHARE = 0.2, 1 / 40
# Longest time in seconds from a transport's failure until it becomes the error of this rank: a report of another rank,
# with the cause, has precedence.
_LONGEST_PATIENCE_S, _PATIENCE_SHARE = 2.0, 1 / 5
# Silence of a node that counts as an error, as a share of the timeout. The rest is for notifying the other ranks.
_SILENCE_SHARE = 0.8
_LONGEST_STOP_S = 1.0


def lost_partners(topology: Topology, transport: str, where: str, why: str) -> RankError:
    """Build the error of a communicator that has lost its partners on other nodes.

    Args:
        topology: Topology of the ranks.
        transport: Name of the transport.
        where: Place of the failure, such as "in a hierarchical all_reduce"; or "".
        why: Message of the transport.
    """
    names, rank, others = topology.names, topology.rank, topology.others
    failed = f"failed {where}" if where else "failed"
    text = (
        f"{names.in_group(rank)}: exchange with {names.each(others)} by {transport} {failed}: {why}. A node, or a "
        "rank of it, has died, hangs, makes other calls than this rank, or cannot be reached. This communicator can "
        "no longer be used."
    )
    brief = f"lost {names.several(others)} between the nodes"
    return RankError(PeerTimeout.__name__, text, brief, rank, others[0])


class Heartbeat(threading.Thread):
    """Connection of one rank to the store: exchanges heartbeats and the first fault report.

    It is a thread of its own, because it hangs if the store is unreachable. Other threads may read its attributes at
    any time.

    Args:
        store: Store of the communicator, used by this thread only.
        topology: Nodes of all ranks.
        look_s: Seconds between polls.
        timeout_s: Timeout of the communicator in seconds.
    """

    def __init__(self, store: Store, topology: Topology, look_s: float, timeout_s: float) -> None:
        super().__init__(name="llm_comm heartbeat of the nodes", daemon=True)
        self._store = store
        self._node = topology.node
        # The first rank of each node sends its heartbeats.
        self._is_first = topology.local_rank == 0
        self._look_s = look_s
        self._beat_s = min(_LONGEST_BEAT_S, timeout_s * _BEAT_SHARE)
        self._beats = 0
        self._next_beat = 0.0
        self._outgoing: RankError | None = None
        self._stopping = threading.Event()
        #: First failure of a rank of any node, or None.
        self.report: RankError | None = None
        #: True after the store was lost, together with the process that held it.
        self.is_lost = False
        now = time.monotonic()
        #: Time of each other node's last heartbeat; None once it has closed. Empty except on the first rank of a node.
        self.alive_at: dict[int, float | None] = {
            node: now for node in range(len(topology.nodes)) if node != self._node and self._is_first
        }
        self._last_beats = dict.fromkeys(self.alive_at, "")

    def post(self, error: RankError) -> None:
        """Send a fault report to all ranks, unless there is one already. A long text is cut."""
        self._outgoing = replace(error, text=fit(error.text))

    def stop(self) -> None:
        """Stop the thread, within a second. The first rank of a node thereby reports that its node has closed."""
        self._stopping.set()
        if self.is_alive():
            self.join(_LONGEST_STOP_S)

    def run(self) -> None:
        try:
            while not self._stopping.wait(self._look_s):
                self._exchange()
            self._send()
        except Exception as error:
            self.is_lost = True
            logger.info(
                "multi-node heartbeat lost: failures on other nodes are no longer reported (%s: %s)",
                type(error).__name__,
                error,
            )
        finally:
            if self._is_first:
                with contextlib.suppress(Exception):
                    self._store.set(_beat_of(self._node), _CLOSED)
            del self._store  # also closes its connection, however long this object lives

    def _exchange(self) -> None:
        self._send()
        if self.report is None and self._store.check([_REPORT]):
            self.report = RankError(**json.loads(self._store.get(_REPORT)))
        if self._is_first and time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + self._beat_s
            self._exchange_beats()

    def _send(self) -> None:
        if self._outgoing is not None:
            # The first report wins: its rank is closest to the cause.
            self._store.compare_set(_REPORT, "", json.dumps(asdict(self._outgoing)))
            self._outgoing = None

    def _exchange_beats(self) -> None:
        self._beats += 1
        self._store.set(_beat_of(self._node), str(self._beats))
        for node, alive_at in self.alive_at.items():
            key = _beat_of(node)
            if alive_at is None or not self._store.check([key]):
                continue
            beat = self._store.get(key).decode()
            if beat == _CLOSED:
                self.alive_at[node] = None
            elif beat != self._last_beats[node]:
                self._last_beats[node] = beat
                self.alive_at[node] = time.monotonic()


def _beat_of(node: int) -> str:
    return f"beat/{node}"


def store_of(group: dist.ProcessGroup, name: str, timeout_s: float) -> Store:
    """Return a store for one communicator over ``group``. If possible it has its own connection: waits in the group's
    connection would delay heartbeats."""
    shared = dist.distributed_c10d._get_process_group_store(group)
    own = shared.clone() if hasattr(shared, "clone") else shared
    own.set_timeout(timedelta(seconds=timeout_s))
    return PrefixStore(f"llm_comm/{name}", own)


class NodeWatch(threading.Thread):
    """Watch of one communicator over the other nodes, until ``stop`` or until its handle is gone.

    Args:
        store: Store of this communicator, used by this object only.
        topology: Nodes of all ranks.
        handle: Handle of the core; weakly referenced.
        transport: Transport to abort when the communicator has failed; weakly referenced.
        timeout_s: Timeout of the communicator in seconds. A node may be silent for 0.8 of it.
    """

    def __init__(
        self, store: Store, topology: Topology, handle: CoreHandle, transport: Transport, timeout_s: float
    ) -> None:
        super().__init__(name="llm_comm node watch", daemon=True)
        self._topology = topology
        self._handle = weakref.ref(handle)
        self._transport = weakref.ref(transport)
        self._limit_s = timeout_s * _SILENCE_SHARE
        self._look_s = min(_LONGEST_LOOK_S, timeout_s * _LOOK_SHARE)
        self._report_wait_s = report_wait_s(timeout_s)
        self._heartbeat = Heartbeat(store, topology, self._look_s, timeout_s)
        # Wait for a report of the failed peer's own node, which knows more. No call of this rank is delayed by it.
        self._patience_s = min(_LONGEST_PATIENCE_S, timeout_s * _PATIENCE_SHARE)
        self._lost_at: float | None = None
        self._notified = threading.Event()
        self._stopping = threading.Event()
        handle.when_dropped(self.stop)

    def start(self) -> None:
        self._heartbeat.start()
        super().start()

    def stop(self) -> None:
        """Stop this thread and the heartbeat, within a second each."""
        self._stopping.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(_LONGEST_STOP_S)

    def is_notified(self) -> bool:
        """Return whether another rank has reported a failure. This communicator has then ended.

        Waits for a moment: a connection may have closed because the peer received the report earlier.
        """
        return self._notified.wait(2 * self._look_s + self._report_wait_s)

    def run(self) -> None:
        try:
            while not self._stopping.wait(self._look_s):
                if not self._look():
                    return
            self._look()  # a communicator closed because of a failure must still report it
        finally:
            self._heartbeat.stop()

    def _look(self) -> bool:
        """Poll once. Return False when there is nothing left to watch."""
        handle = self._handle()
        if handle is None or not handle.is_open:
            return False
        error = _failure_of(handle)
        if error is None:
            error = self._reported_error() or self._silent_node() or self._lost()
            if error is None:
                return True
            handle.end_with(error)
            self._notified.set()
        self._heartbeat.post(error)
        transport = self._transport()
        if transport is not None:  # abort calls of this rank that wait for other nodes
            with contextlib.suppress(Exception):  # already ended
                transport.abort()
        return False

    def _reported_error(self) -> RankError | None:
        """Return the reported failure of another rank, as an error of this rank, or None."""
        report = self._heartbeat.report
        if report is None:
            return None
        names, rank = self._topology.names, self._topology.rank
        failed_peer = "" if report.peer == report.rank else f" Failed peer: {names.full(report.peer)}."
        by = names.full(report.rank)
        text = f"{names.in_group(rank)} was notified of a failure by {by}.{failed_peer} Its error: {report.text}"
        return RankError(report.kind, text, report.brief, rank, report.peer)

    def _silent_node(self) -> RankError | None:
        """Return the error of a node without heartbeat for too long, or None. Without a store no node counts as
        silent."""
        now = time.monotonic()
        for node, alive_at in self._heartbeat.alive_at.items():
            if alive_at is not None and now - alive_at > self._limit_s and not self._heartbeat.is_lost:
                return self._silence(node, now - alive_at)
        return None

    def _lost(self) -> RankError | None:
        """Return the error of a transport that failed outside of a call, after other ranks had time to report the
        cause."""
        transport = self._transport()
        why = "" if transport is None else transport.look()
        if not why or transport is None:
            return None
        now = time.monotonic()
        if self._lost_at is None:
            self._lost_at = now
        if now - self._lost_at < self._patience_s:
            return None
        return lost_partners(self._topology, transport.name, "", why)

    def _silence(self, node: int, silent_s: float) -> RankError:
        topology, names = self._topology, self._topology.names
        ranks = topology.nodes[node]
        text = (
            f"{names.in_group(topology.rank)}: no sign of life from node {node}, {topology.hosts[node]}, with "
            f"{names.each(ranks)}, for {silent_s:.1f} s: it is gone, hangs, or cannot be reached. "
            "LLM_COMM_TIMEOUT_S sets the limit. This communicator can no longer be used."
        )
        brief = f"lost contact with node {node}"
        return RankError(PeerTimeout.__name__, text, brief, topology.rank, ranks[0])


def _failure_of(handle: CoreHandle) -> RankError | None:
    """Return the failure of a communicator, or None."""
    try:
        handle.check()
    except CommunicatorError as error:
        return RankError(type(error).__name__, str(error), "has failed", error.rank, error.peer)
    except RuntimeError:  # closed at this moment
        return None
    return None
