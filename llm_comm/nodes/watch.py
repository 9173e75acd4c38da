"""Threads by which nodes learn of each other's failures, through the store of the process group.

Kernels wait for ranks of their node alone, and the watchdog of a communicator sees only these. A transport between
nodes may wait without a word: NCCL in a replayed graph, for one. So a rank whose communicator fails leaves a fault
report, at which the ranks of other nodes end theirs. The first rank of each node also gives signs of life: a node that
is gone as a whole leaves no report.
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
from llm_comm.nodes.topology import Topology
from llm_comm.nodes.transport import Transport
from llm_comm.runtime.core_handle import CoreHandle
from llm_comm.runtime.status import RankError, fit

logger = logging.getLogger("llm_comm")

_REPORT, _CLOSED = "report", "closed"
_LONGEST_BEAT_S, _BEAT_SHARE = 1.0, 1 / 10
_LONGEST_LOOK_S, _LOOK_SHARE = 0.2, 1 / 40
_LONGEST_HEAR_S, _HEAR_SHARE = 0.5, 1 / 20
# Of a transport that has failed without a call, before that is an error of this rank.
_LONGEST_PATIENCE_S, _PATIENCE_SHARE = 2.0, 1 / 5
# Silence of a node that is an error, as a share of the time-out; the rest is for the others to hear of it.
_SILENCE_SHARE = 0.8
_LONGEST_STOP_S = 1.0


def lost_partners(topology: Topology, transport: str, where: str, why: str) -> RankError:
    """Build the error of a communicator whose partners on other nodes are lost.

    Args:
        topology: Of the ranks.
        transport: By which they exchange.
        where: In what it has failed, as "in a hierarchical all_reduce"; or "".
        why: What the transport says.
    """
    names, rank, others = topology.names, topology.rank, topology.others
    failed = f"failed {where}" if where else "failed"
    text = (
        f"{names.in_group(rank)}: exchange with {names.each(others)} by {transport} {failed}: {why}. A node, or a "
        "rank of it, has died, hangs, makes other calls than this rank, or cannot be reached. This communicator cannot "
        "be used any more."
    )
    brief = f"lost {names.several(others)} between the nodes"
    return RankError(PeerTimeout.__name__, fit(text), brief, rank, others[0])


class Heartbeat(threading.Thread):
    """Connection of one rank to the store: sends and reads signs of life and the first fault report.

    A thread of its own, which hangs where the store cannot be reached. Other threads read its attributes at any time.

    Args:
        store: Store of the communicator, used by this thread alone.
        topology: Nodes of all ranks.
        look_s: Seconds between looks.
        timeout_s: Time-out of the communicator in seconds.
    """

    def __init__(self, store: Store, topology: Topology, look_s: float, timeout_s: float) -> None:
        super().__init__(name="llm_comm heartbeat of the nodes", daemon=True)
        self._store = store
        self._node = topology.node
        # The first rank of each node speaks for it.
        self._is_first = topology.place == 0
        self._look_s = look_s
        self._beat_s = min(_LONGEST_BEAT_S, timeout_s * _BEAT_SHARE)
        self._beats = 0
        self._next_beat = 0.0
        self._outgoing: RankError | None = None
        self._stopping = threading.Event()
        #: The first failure of a rank of any node, once there is one.
        self.report: RankError | None = None
        #: Whether nothing is heard any more, as the store went with the process that held it.
        self.is_lost = False
        now = time.monotonic()
        #: Of each other node: when it gave its last sign of life; None once it has closed. For its first rank only.
        self.alive_at: dict[int, float | None] = {
            node: now for node in range(len(topology.nodes)) if node != self._node and self._is_first
        }
        self._last_beats = dict.fromkeys(self.alive_at, "")

    def post(self, error: RankError) -> None:
        """Leave a fault report for all ranks, unless there is one."""
        self._outgoing = error

    def stop(self) -> None:
        """Says that this rank has closed its communicator, and ends, soon."""
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
            del self._store  # and its connection, however long this object lives

    def _exchange(self) -> None:
        self._send()
        if self.report is None and self._store.check([_REPORT]):
            self.report = RankError(**json.loads(self._store.get(_REPORT)))
        if self._is_first and time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + self._beat_s
            self._exchange_beats()

    def _send(self) -> None:
        if self._outgoing is not None:
            # The first report is from the rank that knows best.
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
    """A store for one communicator over ``group``, with a connection of its own where stores have one: waits in the
    group's own would hold up signs of life."""
    shared = dist.distributed_c10d._get_process_group_store(group)
    own = shared.clone() if hasattr(shared, "clone") else shared
    own.set_timeout(timedelta(seconds=timeout_s))
    return PrefixStore(f"llm_comm/{name}", own)


class NodeWatch(threading.Thread):
    """Watch of one communicator over the other nodes, until ``stop`` or until its handle is gone.

    Args:
        store: Store of this communicator, used by this object alone.
        topology: Nodes of all ranks.
        handle: Handle of the core; not kept alive.
        transport: Aborted when the communicator has failed; not kept alive.
        timeout_s: Bound in seconds of the silence of a node.
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
        self._hear_s = min(_LONGEST_HEAR_S, timeout_s * _HEAR_SHARE)
        self._heartbeat = Heartbeat(store, topology, self._look_s, timeout_s)
        # For what the culprit's own node has to say, which is more. No call of this rank waits for it.
        self._patience_s = min(_LONGEST_PATIENCE_S, timeout_s * _PATIENCE_SHARE)
        self._lost_at: float | None = None
        self._has_heard = threading.Event()
        self._stopping = threading.Event()
        handle.when_dropped(self.stop)

    def start(self) -> None:
        self._heartbeat.start()
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
            self._heartbeat.stop()

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
        self._heartbeat.post(error)
        transport = self._transport()
        if transport is not None:  # what waits for other nodes on this rank
            with contextlib.suppress(Exception):  # it has ended by itself
                transport.abort()
        return False

    def _heard(self) -> RankError | None:
        """The failure of another rank, if there was one, as one of this rank."""
        report = self._heartbeat.report
        if report is None:
            return None
        names, rank = self._topology.names, self._topology.rank
        culprit = "" if report.peer == report.rank else f" The culprit: {names.full(report.peer)}."
        by = names.full(report.rank)
        text = f"{names.in_group(rank)} was notified of a failure by {by}.{culprit} Its error: {report.text}"
        return RankError(report.kind, fit(text), report.brief, rank, report.peer)

    def _silent_node(self) -> RankError | None:
        """The error of a node of which nothing is heard for too long, though there is a store."""
        now = time.monotonic()
        for node, alive_at in self._heartbeat.alive_at.items():
            if alive_at is not None and now - alive_at > self._limit_s and not self._heartbeat.is_lost:
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
        return lost_partners(self._topology, transport.name, "", why)

    def _silence(self, node: int, silent_s: float) -> RankError:
        topology, names = self._topology, self._topology.names
        ranks = topology.nodes[node]
        text = (
            f"{names.in_group(topology.rank)}: no sign of life from node {node}, {topology.hosts[node]}, with "
            f"{names.each(ranks)}, for {silent_s:.1f} s: it is gone, hangs, or cannot be reached. "
            "LLM_COMM_TIMEOUT_S sets the limit. This communicator cannot be used any more."
        )
        brief = f"heard nothing of node {node} any more"
        return RankError(PeerTimeout.__name__, fit(text), brief, topology.rank, ranks[0])


def _failure_of(handle: CoreHandle) -> RankError | None:
    """Why a communicator has failed, if it has."""
    try:
        handle.check()
    except CommunicatorError as error:
        return RankError(type(error).__name__, fit(str(error)), "has failed", error.rank, error.peer)
    except RuntimeError:  # it was closed just now
        return None
    return None
