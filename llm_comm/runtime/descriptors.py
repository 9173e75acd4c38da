"""File descriptors from rank to rank, over unix sockets that every process of the machine can reach.

Their names are public, so anybody may connect, as often as he likes. What is certain in spite of that:

- Nothing is read from a process of another user, and nothing is sent to one.
- A descriptor counts only with the word that the ranks have told each other through their process group.
- Nobody is waited for: connections are served as they come, and of those that say nothing only the last ones are kept.
- A full queue is tried again. Whoever sends waits for an answer, and connects once more if it was cut off before that;
  so a connection can be dropped at any time.
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
#: How often a rank knocks at a full queue.
_RETRY_S = 0.005
#: Connections that are taken before this rank looks after its own again.
_ACCEPTED_AT_ONCE = 128
#: Connections that have said nothing yet. A rank says all in the moment in which it connects.
_MAX_SILENT = 64
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


#: More than the greeting on a socket has.
MAX_HELLO_BYTES = 256


class Invitation(NamedTuple):
    """Where a rank listens, and the word that whoever comes has to know."""

    name: str
    secret: str


def hello(secret: str, rank: int) -> bytes:
    """What a rank says first on the socket of a peer; ``secret`` is what that one has told the group."""
    return f"{secret} {rank}".encode()


def sender_of(data: bytes, own_secret: str) -> int | None:
    """The rank that said ``hello`` with this rank's secret; None if nobody did."""
    secret, _, rank = data[:MAX_HELLO_BYTES].partition(b" ")
    is_ours = hmac.compare_digest(secret, own_secret.encode())
    # Digits in one spelling only: 1 and not 01, which int takes too.
    return int(rank) if is_ours and re.fullmatch(rb"0|[1-9][0-9]{0,2}", rank) else None


def listen() -> socket.socket:
    """A socket that peers of this machine can connect to."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # Abstract sockets leave nothing behind in the file system, whatever becomes of the process.
        server.bind(f"\0llm_comm-{secrets.token_hex(16)}")
        server.listen(4096)  # the kernel takes less where net.core.somaxconn says so
    except BaseException:
        server.close()
        raise
    return server


def invite(server: socket.socket) -> Invitation:
    """What the peers have to know of a socket that listens."""
    return Invitation(server.getsockname()[1:].decode(), secrets.token_hex(16))


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class Exchange:
    """Sends a descriptor to every peer and receives one from each.

    Args:
        rank: This one.
        server: Of ``listen``.
        invitations: Of all ranks; the sockets listen.
        descriptor: What the peers are to get.
        limit_s: After which it fails.
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
        self._poll = select.poll()  # unlike epoll it takes no descriptor
        self._outgoing: socket.socket | None = None
        self._silent: dict[int, socket.socket] = {}  # by descriptor, the oldest first
        self._strangers: Counter[int] = Counter()  # connections of other users

    def run(self) -> dict[int, int]:
        """Returns the peers' descriptors by rank, for the caller to close.

        Raises:
            OSError: Descriptors or memory have run out, or a peer was too slow.
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
            self._call(self._unsent[0])
        wait_s = _RETRY_S if self._outgoing is None and self._unsent else left
        for number, _ in self._poll.poll(min(left, wait_s) * 1000):
            if number == self._server.fileno():
                self._accept()
            elif self._outgoing is not None and number == self._outgoing.fileno():
                self._hear_answer()
            elif number in self._silent:
                self._listen_to(self._forget(number))

    # ---- To the peers -------------------------------------------------------------------------------------------

    def _call(self, peer: int) -> None:
        """Connects and sends, or leaves it to the next round."""
        name, secret = self._invitations[peer]
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            connection.connect("\0" + name)
            owner = _user_of(connection)
            if owner != self._user:
                whose = self._names.full(peer)
                raise PermissionError(f"the socket of {whose} belongs to user {owner}, this rank to {self._user}")
            socket.send_fds(connection, [hello(secret, self._rank)], [self._descriptor])
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):  # a full queue, or cut off
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

    def _hear_answer(self) -> None:
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

    # ---- From the peers, and from anybody -----------------------------------------------------------------------

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
        """Takes what a peer has sent, and drops what is not from a peer that is still to come."""
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
        """Whether there was anything to receive."""
        try:
            data, descriptors, flags = _hear(connection)
        except BlockingIOError:
            return False
        except OSError:  # it was cut off
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
        with contextlib.suppress(OSError):  # a peer that has given up says so in the vote
            connection.send(_ANSWER)
        return True

    def _forget(self, number: int) -> socket.socket:
        self._poll.unregister(number)
        return self._silent.pop(number)

    def _drop_silent(self) -> bool:
        """Makes room. Whether there was anybody to drop."""
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


def _hear(connection: socket.socket) -> tuple[bytes, list[int], int]:
    """What has been sent: bytes, at most one descriptor, which children do not inherit, and the flags of the message.

    Not ``socket.recv_fds``, whose flags Python 3.11 for one does not pass on: its descriptors are inherited.
    """
    room = socket.CMSG_LEN(_DESCRIPTOR.size)
    data, others, flags, _ = connection.recvmsg(MAX_HELLO_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    rights = (content for level, kind, content in others if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS))
    whole = (content[: len(content) - len(content) % _DESCRIPTOR.size] for content in rights)
    return data, [descriptor for content in whole for (descriptor,) in _DESCRIPTOR.iter_unpack(content)], flags


def _user_of(connection: socket.socket) -> int:
    """The effective user of the process at the other end, when it connected or began to listen."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(credentials)[1]
    return user
