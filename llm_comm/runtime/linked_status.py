"""Fault reports between ranks on several hosts of an NVLink domain: one TCP connection for each two ranks.

``LinkedBoard`` does what ``StatusBoard`` does, which shares memory within a host. A rank sends its state to each peer
when it changes, and again as a heartbeat. The kernel closes the connections of a process that ends, however it ends,
so peers notice an exit at their next poll. A process that hangs and a network that is cut give no sign: then the
heartbeats stop, and waits of kernels end by their time limit.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import select
import socket
import struct
import time
import weakref
from dataclasses import asdict
from typing import Any

from llm_comm.runtime.descriptors import MAX_HELLO_BYTES, hello, sender_of
from llm_comm.runtime.rendezvous import Rendezvous
from llm_comm.runtime.status import PeerStatus, RankError, RankState, fitting

#: Length in bytes of the state that follows, as JSON.
_HEAD = struct.Struct("!I")
#: Seconds between two heartbeats. A rank without one for ``LIFE_S`` counts as silent.
_BEAT_S = 0.25
#: Bytes that are read at a time.
_PIECE_BYTES = 1 << 16
#: Connections that have not been accepted, or have sent no greeting.
_BACKLOG = 64
_SHORTEST_WAIT_S = 0.001
_SIOCGIFADDR = 0x8915  # linux/sockios.h


class _Link:
    """Connection to one peer, for one thread. Nothing here blocks."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._incoming = b""
        self._outgoing = b""
        self.state: RankState | None = None
        self.heard_at = time.monotonic()
        self.has_ended = False

    @property
    def has_exited(self) -> bool:
        """True if the connection has ended, and not because the peer has closed its communicator."""
        return self.has_ended and not (self.state is not None and self.state.is_closed)

    def send(self, message: bytes) -> None:
        """Send a message. It is dropped if the peer has not taken the one before; a later heartbeat repeats the
        state."""
        self._outgoing = self._outgoing or message
        try:
            sent = self._connection.send(self._outgoing)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # receive() notices the end, after what the peer has sent
            sent = len(self._outgoing)
        self._outgoing = self._outgoing[sent:]

    def receive(self) -> None:
        """Read what has arrived."""
        while not self.has_ended:
            try:
                data = self._connection.recv(_PIECE_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            self._incoming += data
            self.has_ended = not data
        while len(self._incoming) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(self._incoming)
            end = _HEAD.size + length
            if len(self._incoming) < end:
                break
            self.state, self.heard_at = _decode(self._incoming[_HEAD.size : end]), time.monotonic()
            self._incoming = self._incoming[end:]

    def close(self) -> None:
        """Close the connection. What has arrived is read first: a connection with unread data would be reset."""
        self.receive()
        self.abandon()

    def abandon(self) -> None:
        """Close the connection as it is."""
        self._connection.close()


class LinkedBoard:
    """States of all ranks, by connections between each two. For one thread.

    Args:
        rank: This rank.
        connections: Connection to each peer, by rank. The board takes ownership.
    """

    def __init__(self, rank: int, connections: dict[int, socket.socket]) -> None:
        self._rank = rank
        self._links = {peer: _Link(connection) for peer, connection in connections.items()}
        self._own: RankState | None = None
        self._sent_at = 0.0
        _boards.add(self)

    @classmethod
    def open(cls, rendezvous: Rendezvous) -> LinkedBoard:
        """Connect each two ranks. Collective.

        Raises:
            RendezvousError: The ranks cannot reach each other.
        """
        with rendezvous.attempt("socket for the states of ranks", _listen, undo=socket.socket.close) as server:
            secret = secrets.token_hex(16)
            said = rendezvous.collect(
                "addresses of the ranks", lambda: [_own_address(), server.getsockname()[1], secret]
            )
            connections = rendezvous.attempt(
                "connections between the ranks", lambda: _connect(rendezvous, server, said, secret), undo=_close_all
            )
        return cls(rendezvous.rank, connections)

    def publish(self, state: RankState) -> None:
        """Send the state of this rank to the peers, if it is new or a heartbeat is due."""
        now = time.monotonic()
        if state == self._own and now - self._sent_at < _BEAT_S:
            return
        self._own, self._sent_at = state, now
        text = json.dumps(asdict(fitting(state))).encode()
        for link in self._links.values():
            link.send(_HEAD.pack(len(text)) + text)

    def look(self) -> list[PeerStatus]:
        """Return the states of all ranks, by rank."""
        for link in self._links.values():
            link.receive()
        now = time.monotonic()
        found = {
            peer: PeerStatus(link.state, now - link.heard_at, link.has_exited) for peer, link in self._links.items()
        }
        found[self._rank] = PeerStatus(self._own, now - self._sent_at)
        return [found[rank] for rank in sorted(found)]

    def close(self) -> None:
        """Close the connections."""
        for link in self._links.values():
            link.close()


def _close_in_child() -> None:
    for board in _boards:
        for link in board._links.values():
            link.abandon()


#: Boards of this process. A forked child would keep their connections open after the end of this process.
_boards: weakref.WeakSet[LinkedBoard] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_in_child)


def _decode(text: bytes) -> RankState:
    fields = json.loads(text)
    error = fields.pop("error")
    return RankState(**fields, error=error and RankError(**error))


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=_BACKLOG)


def _own_address() -> str:
    """Return the address by which other hosts reach this one: of the interface ``GLOO_SOCKET_IFNAME``, else of the host
    name, as gloo's."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if not interface:
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24])


def _connect(
    rendezvous: Rendezvous, server: socket.socket, said: list[Any], own_secret: str
) -> dict[int, socket.socket]:
    """Connect to all lower ranks, and accept a connection from each higher one."""
    # Half of the time limit: a rank that failed early waits in the next vote for timeout_s only.
    deadline = time.monotonic() + rendezvous.timeout_s / 2
    found: dict[int, socket.socket] = {}
    try:
        for peer in range(rendezvous.rank):
            address, port, secret = said[peer]
            found[peer] = socket.create_connection((address, port), max(deadline - time.monotonic(), _SHORTEST_WAIT_S))
            found[peer].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found[peer].sendall(hello(secret, rendezvous.rank).ljust(MAX_HELLO_BYTES))
        awaited = set(range(rendezvous.rank + 1, rendezvous.world_size))
        _accept(server, own_secret, awaited, found, deadline)
        if awaited:
            raise TimeoutError(f"no connection came from {rendezvous.names.each(sorted(awaited))}")
    except BaseException:
        _close_all(found)
        raise
    return found


def _accept(
    server: socket.socket, own_secret: str, awaited: set[int], found: dict[int, socket.socket], deadline: float
) -> None:
    """Move ranks whose connection has come from ``awaited`` to ``found``, until ``deadline``. Any process may connect:
    a connection counts by its greeting, and of those without one the latest are kept."""
    silent: dict[socket.socket, bytes] = {}
    try:
        while awaited:
            ready, _, _ = select.select([server, *silent], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                return
            for each in ready:
                if each is server:
                    if len(silent) == _BACKLOG:
                        oldest = next(iter(silent))
                        del silent[oldest]
                        oldest.close()
                    connection, _ = server.accept()
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connection.setblocking(False)
                    silent[connection] = b""
                elif each in silent:
                    _read_greeting(each, own_secret, silent, awaited, found)
    finally:
        for connection in silent:
            connection.close()


def _read_greeting(
    connection: socket.socket,
    own_secret: str,
    silent: dict[socket.socket, bytes],
    awaited: set[int],
    found: dict[int, socket.socket],
) -> None:
    data = b""
    with contextlib.suppress(OSError):
        data = connection.recv(MAX_HELLO_BYTES - len(silent[connection]))
    silent[connection] += data
    if data and len(silent[connection]) < MAX_HELLO_BYTES:
        return
    sender = sender_of(silent.pop(connection).rstrip(), own_secret)
    if sender is None or sender not in awaited:
        connection.close()
    else:
        awaited.remove(sender)
        found[sender] = connection


def _close_all(connections: dict[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()
