"""What the ranks of different nodes tell each other, by the store of the process group: who has failed, and that a node
is alive. In a thread of its own, which hangs where the store cannot be reached."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from dataclasses import asdict
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from llm_comm.nodes.placement import Placement
from llm_comm.runtime.status import RankError

logger = logging.getLogger("llm_comm")

_NOTE, _CLOSED = "note", "closed"
_LONGEST_BEAT_S, _BEAT_SHARE = 1.0, 1 / 10
_LONGEST_STOP_S = 1.0


class Mail(threading.Thread):
    """Of one rank, until ``stop``. Others read its attributes at any time.

    Args:
        store: Of the communicator alone, for this thread alone.
        placement: Of the ranks.
        look_s: Seconds between looks.
        timeout_s: Of the communicator.
    """

    def __init__(self, store: Store, placement: Placement, look_s: float, timeout_s: float) -> None:
        super().__init__(name="llm_comm mail of the nodes", daemon=True)
        self._store = store
        self._node = placement.node
        # The first rank of each node speaks for it.
        self._is_first = placement.place == 0
        self._look_s = look_s
        self._beat_s = min(_LONGEST_BEAT_S, timeout_s * _BEAT_SHARE)
        self._beats = 0
        self._next_beat = 0.0
        self._outgoing: RankError | None = None
        self._stopping = threading.Event()
        #: The first failure of a rank of any node, once there is one.
        self.note: RankError | None = None
        #: Whether nothing is heard any more, as the store went with the process that held it.
        self.is_lost = False
        now = time.monotonic()
        #: Of each other node: when it gave its last sign of life; None once it has closed. For its first rank only.
        self.alive_at: dict[int, float | None] = {
            node: now for node in range(len(placement.nodes)) if node != self._node and self._is_first
        }
        self._last_beats = dict.fromkeys(self.alive_at, "")

    def post(self, error: RankError) -> None:
        """Leaves a note for all ranks, unless there is one."""
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
            logger.info("llm_comm: nodes learn nothing of each other any more (%s: %s)", type(error).__name__, error)
        finally:
            if self._is_first:
                with contextlib.suppress(Exception):
                    self._store.set(_beat_of(self._node), _CLOSED)
            del self._store  # and its connection, however long this object lives

    def _exchange(self) -> None:
        self._send()
        if self.note is None and self._store.check([_NOTE]):
            self.note = RankError(**json.loads(self._store.get(_NOTE)))
        if self._is_first and time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + self._beat_s
            self._exchange_beats()

    def _send(self) -> None:
        if self._outgoing is not None:
            # The first note is that of whoever knows best.
            self._store.compare_set(_NOTE, "", json.dumps(asdict(self._outgoing)))
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
