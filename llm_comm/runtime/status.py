"""Fault reports between the ranks of a communicator: one page of shared memory for each rank.

A rank writes its own page and reads the pages of its peers, so no rank waits for another. The page of a dead rank still
holds its last report. Whether a process has ended is read from a pidfd. Ranks exchange pidfds instead of process ids,
which have no meaning in another container's namespace.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import struct
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from llm_comm.errors import MissingRankError, RendezvousError
from llm_comm.runtime.rendezvous import Rendezvous

_PAGE_BYTES = 4096
_BEAT = struct.Struct("d")  # heartbeat: time.monotonic(), one clock for all processes of a machine
_HEAD = struct.Struct("II")  # length and checksum of the state after it: a reader may see a half-written one
_STATE_OFFSET = _BEAT.size + _HEAD.size
#: Bytes of JSON of an error's text, and of each of the other three texts of a state. Together they fit a page.
_MAX_TEXT, _MAX_WORDS = 2000, 500
#: Age in seconds of a heartbeat after which a rank counts as silent and is not waited for.
LIFE_S = 1.0


def report_wait_s(timeout_s: float) -> float:
    """Return how many seconds a rank waits for reports of others before it reports an error, by the time-out of a
    communicator."""
    return min(0.5, timeout_s / 20)


@dataclass(frozen=True)
class RankError:
    """Error of a rank.

    Attributes:
        kind: Name of a class in ``llm_comm.errors``.
        text: Full text of the error.
        brief: Short form for the list of the ranks' states.
        rank: Rank that failed.
        peer: Rank that caused it; ``rank`` itself if no other did.
    """

    kind: str
    text: str
    brief: str
    rank: int
    peer: int


@dataclass(frozen=True)
class RankState:
    """State that a rank publishes about itself.

    Attributes:
        last_call: Last kernel launch that the rank has enqueued or captured, in words, or "".
        operations_ended: Number of operations ended on its device, published only after a failure was noticed. None if
            unknown.
        error: Error of this rank.
        is_closed: The rank has closed its communicator.
        remark: Other activity, such as waiting for a rank of another node, or "".
    """

    last_call: str
    operations_ended: int | None = None
    error: RankError | None = None
    is_closed: bool = False
    remark: str = ""


@dataclass(frozen=True)
class PeerStatus:
    """State of a rank as another rank sees it.

    Attributes:
        state: Published state, None if the rank has published none.
        age_s: Age of the last heartbeat in seconds.
        has_exited: The process of the rank has ended; None if unknown.
    """

    state: RankState | None
    age_s: float
    has_exited: bool | None = None

    @property
    def is_closed(self) -> bool:
        """True if the rank has closed its communicator, or dropped it."""
        return self.state is not None and self.state.is_closed


class StatusBoard:
    """Status pages of all ranks, and pidfds of the peers' processes where the kernel has them. For one thread."""

    def __init__(self, rank: int, pages: Mapping[int, mmap.mmap], processes: Mapping[int, int] | None = None) -> None:
        self._own = pages[rank]
        self._pages = pages
        self._processes = processes or {}

    @classmethod
    def open(cls, rendezvous: Rendezvous) -> StatusBoard:
        """Create this rank's page and map the pages of the peers. Collective.

        Raises:
            RendezvousError: The ranks cannot exchange file descriptors.
        """
        pages: dict[int, mmap.mmap] = {}

        def make() -> int:
            descriptor = os.memfd_create("llm_comm_status", os.MFD_CLOEXEC)
            try:
                os.ftruncate(descriptor, _PAGE_BYTES)
                pages[rendezvous.rank] = mmap.mmap(descriptor, _PAGE_BYTES)
            except BaseException:
                os.close(descriptor)
                raise
            return descriptor

        def map_peers(peers: dict[int, int]) -> None:
            pages.update({rank: mmap.mmap(fd, _PAGE_BYTES, prot=mmap.PROT_READ) for rank, fd in peers.items()})

        rendezvous.share_descriptors("status page", make, "mapping of the status pages", map_peers)
        return cls(rendezvous.rank, pages, _exchange_processes(rendezvous))

    def publish(self, state: RankState) -> None:
        """Write the state of this rank and a new heartbeat."""
        text = encode(state)
        head = _HEAD.pack(len(text), zlib.crc32(text))
        self._own[_BEAT.size : _STATE_OFFSET + len(text)] = head + text
        # One slice assignment: peers read meanwhile, and pack_into would write zeros first.
        self._own[: _BEAT.size] = _BEAT.pack(time.monotonic())

    def look(self) -> list[PeerStatus]:
        """Return the states of all ranks, by rank."""
        now = time.monotonic()
        return [_read(self._pages[rank], now, self._has_exited(rank)) for rank in sorted(self._pages)]

    def _has_exited(self, rank: int) -> bool | None:
        process = self._processes.get(rank)
        if process is None:
            return None
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Unmap the pages and close the pidfds."""
        for page in self._pages.values():
            page.close()
        for process in self._processes.values():
            os.close(process)


def _exchange_processes(rendezvous: Rendezvous) -> dict[int, int]:
    """Exchange pidfds; return those of the peers by rank. Empty if a rank's kernel has none (Linux before 5.3, some
    sandboxes)."""
    try:
        own = rendezvous.attempt("pidfd", lambda: os.pidfd_open(os.getpid()), undo=os.close)
    except MissingRankError:
        raise
    except RendezvousError:  # raised on all ranks alike
        return {}
    try:
        return rendezvous.exchange_descriptors(own)
    finally:
        os.close(own)


def fit(text: str, most: int = _MAX_TEXT) -> str:
    """Cut a text so that its JSON, which writes non-ASCII characters as escapes, has at most ``most`` bytes."""
    while len(json.dumps(text)) > most:
        text = text[: len(text) * 9 // 10]
    return text


def encode(state: RankState) -> bytes:
    """Return a state as JSON that fits a page. Long texts are cut."""
    return json.dumps(asdict(_fitting(state))).encode()


def decode(text: bytes) -> RankState:
    """Return the state of ``encode``."""
    fields = json.loads(text)
    error = fields.pop("error")
    return RankState(**fields, error=error and RankError(**error))


def _fitting(state: RankState) -> RankState:
    """Cut the texts of a state so that it fits a page. Remarks and brief forms may name all ranks of other nodes."""
    error = state.error and replace(state.error, text=fit(state.error.text), brief=fit(state.error.brief, _MAX_WORDS))
    last_call, remark = fit(state.last_call, _MAX_WORDS), fit(state.remark, _MAX_WORDS)
    return replace(state, last_call=last_call, remark=remark, error=error)


def _read(page: mmap.mmap, now: float, has_exited: bool | None) -> PeerStatus:
    (beat,) = _BEAT.unpack_from(page, 0)
    for _ in range(3):  # retry if the writer was in the middle of its update
        length, checksum = _HEAD.unpack_from(page, _BEAT.size)
        text = page[_STATE_OFFSET : _STATE_OFFSET + length]
        if length > 0 and zlib.crc32(text) == checksum:
            return PeerStatus(decode(text), now - beat, has_exited)
    return PeerStatus(None, now - beat, has_exited)
