"""Fault reports between ranks on several hosts of an NVLink domain: one TCP connection for each two ranks.

``LinkedBoard`` does what ``StatusBoard`` does, which shares memory within a host. A rank sends its state to each peer
when it changes, and again as a heartbeat. The kernel closes the connections of a process that ends, however it ends,
so peers notice an exit at their next poll. A process that hangs and a network that is cut give no sign: then the
heartbeats stop, and waits of kernels end by their time limit.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import select
import socket
import struct
import time
import weakref
from typing import Any

from llm_comm.runtime.descriptors import MAX_HELLO_BYTES, hello, sender_of
from llm_comm.runtime.rendezvous import Rendezvous
from llm_comm.runtime.status import PeerStatus, RankState, decode, encode

#: Length in bytes of the state that follows, as JSON.
_HEAD = struct.Struct("!I")
#: Seconds between two heartbeats. A rank without one for ``LIFE_S`` counts as silent.
_BEAT_S = 0.25
#: Bytes that are read at a time.
_PIECE_BYTES = 1 << 16
#: Connections that have not been accepted, or have sent no greeting.
_BACKLOG = 64
#: Limits in seconds of a connection to one address, and of all connections.
_LONGEST_TRY_S, _LONGEST_CONNECTING_S = 3.0, 20.0
_SHORTEST_WAIT_S = 0.001
_ANSWER = b"+"
_SIOCGIFADDR = 0x8915  # linux/sockios.h
#: Address for documentation (RFC 5737). No packet is sent to it.
_ELSEWHERE = ("192.0.2.1", 9)

#: Connections of this process. A forked child would keep them open after the end of this process.
_connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: _close_all(list(_connections)))


class _Link:
    """Connection to one peer, for one thread. Nothing here blocks."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._incoming = b""
        #: A message of which a part has been sent, and the message after it.
        self._outgoing, self._next = b"", b""
        self.state: RankState | None = None
        self.heard_at = time.monotonic()
        #: The peer sends nothing more.
        self.has_ended = False
        self._is_lost = False
        #: The peer has no process; None if the connection was lost for another reason.
        self.has_exited: bool | None = False

    def send(self, message: bytes) -> None:
        """Send a message. If the peer does not read, the last message waits for the next call."""
        self._next = message
        while not self._is_lost and (self._outgoing or self._next):
            if not self._outgoing:
                self._outgoing, self._next = self._next, b""
            try:
                self._outgoing = self._outgoing[self._connection.send(self._outgoing) :]
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.receive()  # what came before, which may say that the peer has closed
                self._lose(error)

    def receive(self) -> None:
        """Read what has arrived."""
        while not self.has_ended:
            try:
                data = self._connection.recv(_PIECE_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self._lose(error)
                break
            self._incoming += data
            self.has_ended = not data
        self._decode()
        # A peer that has closed its communicator sends nothing more, but its process goes on.
        if self.has_ended and not self._is_lost and not (self.state is not None and self.state.is_closed):
            self.has_exited = True

    def _lose(self, error: OSError) -> None:
        self.has_ended = self._is_lost = True
        # The kernel of the peer refuses what comes for a process that has ended. Any other error is of the network.
        self.has_exited = True if isinstance(error, ConnectionResetError | BrokenPipeError) else None

    def _decode(self) -> None:
        while len(self._incoming) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(self._incoming)
            end = _HEAD.size + length
            if len(self._incoming) < end:
                break
            self.state, self.heard_at = decode(self._incoming[_HEAD.size : end]), time.monotonic()
            self._incoming = self._incoming[end:]

    def shut(self) -> bool:
        """End what is sent. Return whether the peer has ended too, so that the connection can be closed."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        self.receive()
        return self.has_ended

    def close(self) -> None:
        self._connection.close()


#: Connections of closed boards, whose peers have not ended. They tell the peers when this process exits.
_kept: set[_Link] = set()


def _close_ended() -> None:
    for link in [link for link in _kept if link.shut()]:
        link.close()
        _kept.discard(link)


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
        _close_ended()

    @classmethod
    def open(cls, rendezvous: Rendezvous) -> LinkedBoard:
        """Connect each two ranks. Collective.

        Raises:
            RendezvousError: The ranks cannot reach each other.
        """
        with rendezvous.attempt("socket for the states of ranks", _listen, undo=socket.socket.close) as server:
            secret = secrets.token_hex(16)
            said = rendezvous.collect(
                "addresses of the ranks", lambda: [_own_addresses(), server.getsockname()[1], secret]
            )
            connections = rendezvous.attempt(
                "connections between the ranks",
                lambda: _connect(rendezvous, server, said, secret),
                undo=lambda made: _close_all(made.values()),
            )
        return cls(rendezvous.rank, connections)

    def publish(self, state: RankState) -> None:
        """Send the state of this rank to the peers, if it is new or a heartbeat is due."""
        now = time.monotonic()
        if state == self._own and now - self._sent_at < _BEAT_S:
            return
        self._own, self._sent_at = state, now
        text = encode(state)
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
        """Send nothing more. Connections stay open until the peers have closed theirs, or this process exits."""
        _kept.update(self._links.values())
        _close_ended()


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        server = socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    else:
        server = socket.create_server(("", 0), backlog=_BACKLOG)
    server.setblocking(False)
    return server


def _own_addresses() -> list[str]:
    """Return addresses by which other hosts may reach this one: of the interface ``GLOO_SOCKET_IFNAME``, or else those
    of the host name and of the default route, those of this host alone last."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        if interface:
            request = struct.pack("256s", interface.encode()[:15])
            return [socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24])]
        found = []
        with contextlib.suppress(OSError):
            found = [
                str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
            ]
        with contextlib.suppress(OSError):
            any_socket.connect(_ELSEWHERE)
            found.append(any_socket.getsockname()[0])
    unique = [address for address in dict.fromkeys(found) if not address.lower().startswith("fe80")]
    return sorted(unique or ["127.0.0.1"], key=lambda address: address.startswith("127.") or address == "::1")


def _connect(
    rendezvous: Rendezvous, server: socket.socket, said: list[Any], own_secret: str
) -> dict[int, socket.socket]:
    """Connect to all lower ranks, and accept a connection from each higher one. Each lower rank has accepted when this
    rank waits for its answer, or will do so once ranks below it have answered."""
    # Half of the time limit at most: a rank that failed early waits in the next vote for timeout_s only.
    deadline = time.monotonic() + min(rendezvous.timeout_s / 2, _LONGEST_CONNECTING_S)
    found: dict[int, socket.socket] = {}
    try:
        for peer in range(rendezvous.rank):
            addresses, port, secret = said[peer]
            greeting = hello(secret, rendezvous.rank)
            found[peer] = _reach(rendezvous.names.full(peer), addresses, port, greeting, deadline)
        awaited = set(range(rendezvous.rank + 1, rendezvous.world_size))
        _accept(server, own_secret, awaited, found, deadline)
        if awaited:
            raise TimeoutError(f"no connection came from {rendezvous.names.each(sorted(awaited))}")
    except BaseException:
        _close_all(found.values())
        raise
    return found


def _reach(name: str, addresses: list[str], port: int, greeting: bytes, deadline: float) -> socket.socket:
    """Connect to the first of a peer's addresses at which it answers."""
    errors = []
    for address in addresses:
        left = max(deadline - time.monotonic(), _SHORTEST_WAIT_S)
        try:
            connection = socket.create_connection((address, port), min(left, _LONGEST_TRY_S))
        except OSError as error:
            errors.append(f"{address}: {error}")
            continue
        _connections.add(connection)
        try:
            connection.settimeout(left)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(greeting.ljust(MAX_HELLO_BYTES))
            # Another process may listen there, say if the address is of another host too.
            if connection.recv(1) == _ANSWER:
                return connection
            errors.append(f"{address}: another process answers")
        except OSError as error:
            errors.append(f"{address}: {error}")
        connection.close()
    raise ConnectionError(f"{name} cannot be reached at port {port}: {'; '.join(errors)}")


def _accept(
    server: socket.socket, own_secret: str, awaited: set[int], found: dict[int, socket.socket], deadline: float
) -> None:
    """Move ranks whose connection has come from ``awaited`` to ``found``, until ``deadline``. Any process may connect:
    a connection counts by its greeting, and of those without one the latest are kept."""
    silent: dict[int, tuple[socket.socket, bytes]] = {}
    poll = select.poll()
    poll.register(server, select.POLLIN)
    try:
        while awaited and time.monotonic() < deadline:
            for number, _ in poll.poll((deadline - time.monotonic()) * 1000):
                if number == server.fileno():
                    with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
                        connection, _ = server.accept()
                        _connections.add(connection)
                        connection.setblocking(False)
                        if len(silent) == _BACKLOG:
                            oldest = next(iter(silent))
                            poll.unregister(oldest)
                            silent.pop(oldest)[0].close()
                        silent[connection.fileno()] = connection, b""
                        poll.register(connection, select.POLLIN)
                elif number in silent:
                    _read_greeting(poll, number, silent, own_secret, awaited, found)
    finally:
        _close_all(connection for connection, _ in silent.values())


def _read_greeting(
    poll: select.poll,
    number: int,
    silent: dict[int, tuple[socket.socket, bytes]],
    own_secret: str,
    awaited: set[int],
    found: dict[int, socket.socket],
) -> None:
    connection, before = silent[number]
    data = b""
    with contextlib.suppress(OSError):
        data = connection.recv(MAX_HELLO_BYTES - len(before))
    silent[number] = connection, before + data
    if data and len(before + data) < MAX_HELLO_BYTES:
        return
    poll.unregister(number)
    del silent[number]
    sender = sender_of((before + data).rstrip(), own_secret)
    if sender is None or sender not in awaited:
        connection.close()
        return
    with contextlib.suppress(OSError):  # the board notices a peer that has gone
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.send(_ANSWER)
    awaited.remove(sender)
    found[sender] = connection


def _close_all(connections: Any) -> None:
    for connection in connections:
        connection.close()
