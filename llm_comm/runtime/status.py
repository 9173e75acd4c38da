"""What the ranks of a communicator know of each other when one of them fails: a page of shared memory each.

A rank writes its own page and reads those of the others, so nobody waits for anybody, and the page of a rank that has
died still says what it did last. That its process has ended tells a pidfd, which ranks give each other rather than
their process numbers: those of another container say nothing here.
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
from dataclasses import asdict, dataclass

from llm_comm.errors import MissingRankError, RendezvousError
from llm_comm.runtime.rendezvous import Rendezvous

_PAGE_BYTES = 4096
_BEAT = struct.Struct("d")  # time.monotonic(), which the processes of a machine share
_HEAD = struct.Struct("II")  # length and checksum of the state behind it, which may be read while it is written
_STATE_OFFSET = _BEAT.size + _HEAD.size
_MAX_TEXT = 2000
#: A rank that gave no sign of life for so long is not waited for.
LIFE_S = 1.0


@dataclass(frozen=True)
class RankError:
    """Why a rank has given up: a class of ``llm_comm.errors`` by name, what goes into it, and the same in brief."""

    kind: str
    text: str
    brief: str
    rank: int
    peer: int


@dataclass(frozen=True)
class RankState:
    """What a rank says of itself.

    Attributes:
        last_call: The last kernel launch that it has enqueued or captured, in words, or "".
        operations_ended: On its device, when it noticed that a rank has failed; else None, or where that is not known.
        error: Its own error.
        is_closed: It has closed its communicator.
        remark: What else it does, such as to wait for a rank of another node, or "".
    """

    last_call: str
    operations_ended: int | None = None
    error: RankError | None = None
    is_closed: bool = False
    remark: str = ""


@dataclass(frozen=True)
class Sighting:
    """What is seen of a rank.

    Attributes:
        state: What it says of itself, None where it has written nothing.
        age_s: Seconds since it last gave a sign of life.
        has_exited: Its process has ended; None where that cannot be told.
    """

    state: RankState | None
    age_s: float
    has_exited: bool | None = None

    @property
    def is_closed(self) -> bool:
        """Whether it has closed its communicator, or dropped it."""
        return self.state is not None and self.state.is_closed


class StatusBoard:
    """The pages of all ranks, and pidfds of the peers' processes where there are any. Use it from one thread."""

    def __init__(self, rank: int, pages: Mapping[int, mmap.mmap], processes: Mapping[int, int] | None = None) -> None:
        self._own = pages[rank]
        self._pages = pages
        self._processes = processes or {}

    @classmethod
    def open(cls, rendezvous: Rendezvous) -> StatusBoard:
        """Makes this rank's page and maps those of the peers. Collective.

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
        """Says what this rank does, and that it lives."""
        text = json.dumps(asdict(state)).encode()
        head = _HEAD.pack(len(text), zlib.crc32(text))
        self._own[_BEAT.size : _STATE_OFFSET + len(text)] = head + text
        # In one piece, for others read it meanwhile: pack_into would write zeros first.
        self._own[: _BEAT.size] = _BEAT.pack(time.monotonic())

    def look(self) -> list[Sighting]:
        """The ranks' states, by rank."""
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
        for page in self._pages.values():
            page.close()
        for process in self._processes.values():
            os.close(process)


def _exchange_processes(rendezvous: Rendezvous) -> dict[int, int]:
    """pidfds of the peers, by rank; none where a kernel has no such thing (Linux before 5.3, some sandboxes)."""
    try:
        own = rendezvous.attempt("pidfd", lambda: os.pidfd_open(os.getpid()), undo=os.close)
    except MissingRankError:
        raise
    except RendezvousError:  # the same on all ranks
        return {}
    try:
        return rendezvous.exchange_descriptors(own)
    finally:
        os.close(own)


def fit(text: str) -> str:
    """What of an error text fits a page, where JSON writes other characters than those of ASCII at length."""
    while len(json.dumps(text)) > _MAX_TEXT:
        text = text[: len(text) * 9 // 10]
    return text


def _read(page: mmap.mmap, now: float, has_exited: bool | None) -> Sighting:
    (beat,) = _BEAT.unpack_from(page, 0)
    for _ in range(3):  # another try where the writer was in the middle of it
        length, checksum = _HEAD.unpack_from(page, _BEAT.size)
        text = page[_STATE_OFFSET : _STATE_OFFSET + length]
        if length > 0 and zlib.crc32(text) == checksum:
            fields = json.loads(text)
            error = fields.pop("error")
            return Sighting(RankState(**fields, error=error and RankError(**error)), now - beat, has_exited)
    return Sighting(None, now - beat, has_exited)
