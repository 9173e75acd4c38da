"""Exchange of file descriptors between ranks, over unix sockets that every process of the machine can reach.

The socket names are public, so any process may connect, any number of times. The exchange guarantees nevertheless:

- Nothing is read from a process of another user, and nothing is sent to one.
- A descriptor counts only together with a secret that the ranks have exchanged through their process group.
- No connection blocks others: they are served as they come. Of silent connections only the last 64 are kept.
- A sender waits for an answer. If its connection is refused for a full queue or cut off earlier, it connects again. So
  a receiver may drop a connection at any time.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import re
import secrets
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from llm_comm.runtime.rank_names import RankNames

_ANSWER = b"+"
_DESCRIPTOR = struct.Struct("i")
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
#: Seconds between two attempts to connect to a full queue.
_RETRY_S = 0.005
#: Connections accepted in one round, before this rank continues with its own sends.
_ACCEPTED_AT_ONCE = 128
#: Silent connections that are kept. A rank sends its whole message right after connecting.
_MAX_SILENT = 64
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


#: Upper bound of a greeting's length in bytes.
MAX_HELLO_BYTES = 256


class Invitation(NamedTuple):
    """Socket name of a rank, and the secret that a peer must send to it."""

    name: str
    secret: str


def hello(secret: str, rank: int) -> bytes:
    """Return the greeting to a peer; ``secret`` is the one in the peer's invitation."""
    return f"{secret} {rank}".encode()


def sender_of(data: bytes, own_secret: str) -> int | None:
    """Return the rank that sent the greeting ``data``, or None if it does not hold this rank's secret."""
    secret, _, rank = data[:MAX_HELLO_BYTES].partition(b" ")
    is_ours = hmac.compare_digest(secret, own_secret.encode())
    # Only the canonical spelling of a number: int would also accept 01.
    return int(rank) if is_ours and re.fullmatch(rb"0|[1-9][0-9]{0,2}", rank) else None


def listen() -> socket.socket:
    """Create a listening socket that processes of this machine can connect to."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # The kernel removes a name of the abstract namespace with the process, however it ends.
        server.bind(f"\0llm_comm-{secrets.token_hex(16)}")
        server.listen(4096)  # the kernel clips it to net.core.somaxconn
    except BaseException:
        server.close()
        raise
    return server


def invite(server: socket.socket) -> Invitation:
    """Return the invitation to a listening socket, with a new secret."""
    return Invitation(server.getsockname()[1:].decode(), secrets.token_hex(16))


def close_all(descriptors: Iterable[int]) -> None:
    """Close all ``descriptors``."""
    for descriptor in descriptors:
        os.close(descriptor)


class Exchange:
    """Send a descriptor to every peer and receive one from each.

    Args:
        rank: This rank.
        server: Result of ``listen``.
        invitations: Invitations of all ranks. Their sockets already listen.
        descriptor: Descriptor to send to the peers.
        limit_s: Time limit in seconds.
        names: Names of the ranks for errors.
    """

    def __init__(
        self,
        rank: int,
        server: socket.socket,
        invitations: list[Invitation],
        descriptor: int,
        limit_s: float,
        names: RankNames,
    ) -> None:
        self._names = names
        self._rank = rank
        self._server = server
        self._invitations = invitations
        self._descriptor = descriptor
        self._deadline = time.monotonic() + limit_s
        self._limit_s = limit_s
        self._user = os.geteuid()
        self._awaited = set(range(len(invitations))) - {rank}
        self._unsent = sorted(self._awaited)
        self._received: dict[int, int] = {}
        self._poll = select.poll()  # unlike epoll, poll needs no descriptor of its own
        self._outgoing: socket.socket | None = None
        self._silent: dict[int, socket.socket] = {}  # by file descriptor, oldest first
        self._strangers: Counter[int] = Counter()  # connections by another user, counted by user id

    def run(self) -> dict[int, int]:
        """Run the exchange. Return the peers' descriptors by rank; the caller must close them.

        Raises:
            OSError: Descriptors or memory have run out, a peer was too slow (TimeoutError), is not listening, or is of
                another user.
        """
        try:
            self._poll.register(self._server, select.POLLIN)
            while self._awaited or self._unsent:
                self._round()
        except BaseException:
            close_all(self._received.values())
            raise
        finally:
            self._drop_silent()
            self._hang_up()
        return self._received

    def _round(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(self._what_is_missing())
        if self._outgoing is None and self._unsent:
            self._connect_and_send(self._unsent[0])
        wait_s = _RETRY_S if self._outgoing is None and self._unsent else left
        for number, _ in self._poll.poll(min(left, wait_s) * 1000):
            if number == self._server.fileno():
                self._accept()
            elif self._outgoing is not None and number == self._outgoing.fileno():
                self._receive_answer()
            elif number in self._silent:
                self._listen_to(self._forget(number))

    # ---- Sending ------------------------------------------------------------------------------------------------

    def _connect_and_send(self, peer: int) -> None:
        """Connect to ``peer`` and send, or leave it to the next round if its queue is full."""
        name, secret = self._invitations[peer]
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            connection.connect("\0" + name)
            owner = _user_of(connection)
            if owner != self._user:
                whose = self._names.full(peer)
                raise PermissionError(f"the socket of {whose} belongs to user {owner}, this rank to {self._user}")
            socket.send_fds(connection, [hello(secret, self._rank)], [self._descriptor])
        # the queue is full, or the connection was cut off
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            connection.close()
            return
        except ConnectionRefusedError as error:
            connection.close()
            raise ConnectionRefusedError(
                error.errno,
                f"nobody listens at the socket of {self._names.full(peer)}: it has given up, or is in another network "
                "namespace, as containers without a common network are",
            ) from error
        except BaseException:
            connection.close()
            raise
        self._outgoing = connection
        self._poll.register(connection, select.POLLIN)

    def _receive_answer(self) -> None:
        assert self._outgoing is not None
        try:
            answer = self._outgoing.recv(len(_ANSWER))
        except BlockingIOError:
            return
        except OSError:
            answer = b""
        self._hang_up()
        if answer == _ANSWER:
            del self._unsent[0]

    def _hang_up(self) -> None:
        if self._outgoing is not None:
            self._poll.unregister(self._outgoing)
            self._outgoing.close()
            self._outgoing = None

    # ---- Receiving, from peers and other processes ---------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._server.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in _NO_ROOM and self._drop_silent():
                    continue
                raise
            self._welcome(connection)

    def _welcome(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            user = _user_of(connection)
        except BaseException:
            connection.close()
            raise
        if user != self._user:
            connection.close()
            self._strangers[user] += 1
        else:
            self._listen_to(connection)

    def _listen_to(self, connection: socket.socket) -> None:
        """Read from a connection. Close it afterwards, or keep it in the list of silent ones if it has sent nothing
        yet."""
        has_spoken = True
        try:
            has_spoken = self._receive(connection)
        finally:
            if has_spoken:
                connection.close()
        if not has_spoken:
            if len(self._silent) == _MAX_SILENT:
                self._forget(next(iter(self._silent))).close()
            self._silent[connection.fileno()] = connection
            self._poll.register(connection, select.POLLIN)

    def _receive(self, connection: socket.socket) -> bool:
        """Read the message of a connection and keep its descriptor. Return False if nothing has arrived yet."""
        try:
            data, descriptors, flags = _receive_message(connection)
        except BlockingIOError:
            return False
        except OSError:  # the connection was cut off
            return True
        sender = sender_of(data, self._invitations[self._rank].secret)
        if sender not in self._awaited or len(descriptors) != 1:
            close_all(descriptors)
            if sender in self._awaited and flags & socket.MSG_CTRUNC and not self._drop_silent():
                whose = self._names.full(sender)
                raise OSError(errno.EMFILE, f"no room for the file descriptor of {whose}: raise RLIMIT_NOFILE")
            return True
        self._received[sender] = descriptors[0]
        self._awaited.remove(sender)
        with contextlib.suppress(OSError):  # a peer that gave up reports its error in the next step
            connection.send(_ANSWER)
        return True

    def _forget(self, number: int) -> socket.socket:
        self._poll.unregister(number)
        return self._silent.pop(number)

    def _drop_silent(self) -> bool:
        """Close all silent connections to free descriptors. Return whether there were any."""
        numbers = list(self._silent)
        for number in numbers:
            self._forget(number).close()
        return bool(numbers)

    def _what_is_missing(self) -> str:
        awaited, unsent = (self._names.each(sorted(ranks)) for ranks in (self._awaited, self._unsent))
        what = [f"no file descriptor came from {awaited}"] if self._awaited else []
        what += [f"{unsent} did not take that of this rank"] if self._unsent else []
        text = f"{' and '.join(what)} within {self._limit_s:g} s"
        if self._strangers:
            users = ", ".join(f"{count} of user {user}" for user, count in self._strangers.most_common(3))
            text += f". Connections of other users were dropped ({users}): all ranks must run as one user"
        return text


def _receive_message(connection: socket.socket) -> tuple[bytes, list[int], int]:
    """Receive data, at most one file descriptor (close-on-exec), and the flags of the message.

    ``socket.recv_fds`` does not serve: Python 3.11 and others ignore its flags, so child processes would inherit the
    descriptor.
    """
    room = socket.CMSG_LEN(_DESCRIPTOR.size)
    data, others, flags, _ = connection.recvmsg(MAX_HELLO_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    rights = (content for level, kind, content in others if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS))
    whole = (content[: len(content) - len(content) % _DESCRIPTOR.size] for content in rights)
    return data, [descriptor for content in whole for (descriptor,) in _DESCRIPTOR.iter_unpack(content)], flags


def _user_of(connection: socket.socket) -> int:
    """Return the effective user id of the peer process, as of its connect or listen call."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(credentials)[1]
    return user
