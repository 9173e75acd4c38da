"""The exchange of file descriptors: what becomes of connections that fail, say nothing, or are of somebody else."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from harness import names_of_world

from llm_comm.runtime import descriptors
from llm_comm.runtime.descriptors import Exchange, Invitation, close_all, hello, invite, listen

LIMIT_S = 60.0
NAMES = names_of_world(2)


class Ranks:
    """Ranks of one process, each with a file that holds its number."""

    def __init__(self, world: int) -> None:
        self._stack = ExitStack()
        self.servers = [self._stack.enter_context(listen()) for _ in range(world)]
        self.invitations = [invite(server) for server in self.servers]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def stranger(self, rank: int, message: bytes = b"", *files: int) -> socket.socket:
        """Somebody who connects to a rank, and stays."""
        connection = self._stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connection.connect(self.servers[rank].getsockname())
        if message:
            socket.send_fds(connection, [message], files)
        return connection

    def run(self, limit_s: float = LIMIT_S) -> list[Any]:
        """By rank, the ranks whose files it has got, or the error."""
        found: list[Any] = [None] * len(self.servers)

        def be(rank: int) -> None:
            own = os.memfd_create("rank")
            os.write(own, bytes([rank]))
            try:
                names = names_of_world(len(self.servers))
                received = Exchange(rank, self.servers[rank], self.invitations, own, limit_s, names).run()
                found[rank] = {peer: os.pread(file, 1, 0)[0] for peer, file in received.items()}
                assert not any(map(os.get_inheritable, received.values()))
                close_all(received.values())
            except OSError as error:
                found[rank] = error
            finally:
                os.close(own)

        threads = [threading.Thread(target=be, args=(rank,)) for rank in range(len(self.servers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


def everything(world: int) -> list[dict[int, int]]:
    return [{peer: peer for peer in range(world) if peer != rank} for rank in range(world)]


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("world", [2, 3, 8])
def test_every_rank_gets_the_file_of_every_other(world: int) -> None:
    with Ranks(world) as ranks:
        assert ranks.run() == everything(world)


def test_a_full_queue_is_tried_again() -> None:
    with Ranks(3) as ranks:
        ranks.servers[1].listen(0)
        ranks.stranger(1)
        late = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with late, pytest.raises(BlockingIOError):
            late.connect(ranks.servers[1].getsockname())
        assert ranks.run() == everything(3)


def test_of_silent_strangers_the_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    most: list[int] = []
    receive = Exchange._receive

    def receive_and_count(exchange: Exchange, connection: socket.socket) -> bool:
        most.append(len(exchange._silent))
        return receive(exchange, connection)

    monkeypatch.setattr(Exchange, "_receive", receive_and_count)
    with Ranks(2) as ranks:
        for _ in range(descriptors._MAX_SILENT + 20):
            ranks.stranger(0)
        assert ranks.run() == everything(2)
    assert max(most) == descriptors._MAX_SILENT


@pytest.mark.parametrize("times", [1, 3])
def test_who_is_cut_off_comes_again(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    left = [times]
    receive = Exchange._receive

    def receive_late(exchange: Exchange, connection: socket.socket) -> bool:
        if exchange._rank == 0 and left[0] > 0:
            left[0] -= 1
            return True  # it is closed unread
        return receive(exchange, connection)

    monkeypatch.setattr(Exchange, "_receive", receive_late)
    with Ranks(3) as ranks:
        assert ranks.run() == everything(3)
    assert left == [0]


def test_connections_of_other_users_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As seen by who accepts: the listener, seen by who connects, is of this user."""
    welcome = Exchange._welcome

    def welcome_others(exchange: Exchange, connection: socket.socket) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(descriptors, "_user_of", lambda _: 65534)
            patch.setattr(Exchange, "_receive", lambda *_: pytest.fail("it was read"))
            welcome(exchange, connection)

    # The other rank's exchange must not see the patch: one that calls nobody.
    with Ranks(2) as ranks:
        ranks.stranger(0, b"anything")
        exchange = Exchange(0, ranks.servers[0], ranks.invitations, 0, 0.3, NAMES)
        exchange._unsent.clear()
        monkeypatch.setattr(Exchange, "_welcome", welcome_others)
        with pytest.raises(
            TimeoutError, match=r"no file descriptor came from rank 1 .*other users were dropped \(1 of user 65534\)"
        ):
            exchange.run()


def test_nothing_is_sent_to_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "_user_of", lambda _: 65534)
    monkeypatch.setattr(socket, "send_fds", lambda *_: pytest.fail("it was sent"))
    with Ranks(2) as ranks, pytest.raises(PermissionError, match=r"the socket of rank 1 .* belongs to user 65534"):
        Exchange(0, ranks.servers[0], ranks.invitations, 0, LIMIT_S, NAMES).run()


def test_nobody_guesses_the_word_of_a_rank() -> None:
    with Ranks(3) as ranks:
        secrets = [invitation.secret for invitation in ranks.invitations]
        assert len(set(secrets)) == 3
        assert all(len(secret) == 32 and secret not in name for name, secret in ranks.invitations)


def test_files_of_strangers_are_closed() -> None:
    """Whatever they say; and those of ranks that have come already, or are none."""
    with Ranks(2) as ranks, open("/dev/null", "rb") as file:
        secret = ranks.invitations[0].secret
        for word in (
            b"",
            b"x",
            b"x 1",
            hello("0" * 32, 1),
            hello(secret, 0),
            hello(secret, 2),
            hello(secret, 1) + b"0",
        ):
            ranks.stranger(0, word, file.fileno())
        assert ranks.run() == everything(2)


def test_of_silent_strangers_the_first_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "_MAX_SILENT", 3)
    with Ranks(2) as ranks:
        connections = [ranks.stranger(0) for _ in range(5)]
        exchange = Exchange(0, ranks.servers[0], ranks.invitations, 0, LIMIT_S, NAMES)
        exchange._accept()
        assert len(exchange._silent) == 3
        for connection in connections[:2]:
            assert connection.recv(1, socket.MSG_DONTWAIT) == b"", "it has not been let go"
        for connection in connections[2:]:
            with pytest.raises(BlockingIOError):
                connection.recv(1, socket.MSG_DONTWAIT)
        exchange._drop_silent()


def test_a_file_for_which_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who say nothing make room for it, and its rank comes again; else it is an error."""
    with Ranks(2) as ranks:
        word = hello(ranks.invitations[0].secret, 1)
        exchange = Exchange(0, ranks.servers[0], ranks.invitations, 0, LIMIT_S, NAMES)
        ranks.stranger(0)
        exchange._accept()
        monkeypatch.setattr(descriptors, "_receive_message", lambda _: (word, [], socket.MSG_CTRUNC))
        ours, theirs = socket.socketpair()
        with ours, theirs:
            assert exchange._receive(ours)
            assert not exchange._silent
            with pytest.raises(OSError, match=r"no room for the file descriptor of rank 1 .*: raise RLIMIT_NOFILE"):
                exchange._receive(ours)


def no_room(*_: object) -> None:
    raise OSError(24, "Too many open files")


def test_strangers_make_room_when_descriptors_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with Ranks(2) as ranks:
        ranks.stranger(0)
        exchange = Exchange(0, ranks.servers[0], ranks.invitations, 0, LIMIT_S, NAMES)
        exchange._accept()
        assert len(exchange._silent) == 1
        full: list[Callable[..., Any]] = [no_room]

        class Server:
            def accept(self) -> Any:
                return full.pop()() if full else ranks.servers[0].accept()

        exchange._server = Server()  # type: ignore[assignment]
        exchange._accept()
        assert not exchange._silent
        full.append(no_room)
        with pytest.raises(OSError, match="Too many open files"):
            exchange._accept()


@pytest.mark.parametrize("wrong", [Invitation("no such socket", ""), Invitation("x" * 200, ""), Invitation("a\0b", "")])
def test_an_invitation_that_leads_nowhere(wrong: Invitation) -> None:
    with Ranks(2) as ranks, pytest.raises(OSError):  # noqa: PT011 (which one depends on the name)
        Exchange(0, ranks.servers[0], [ranks.invitations[0], wrong], 0, LIMIT_S, NAMES).run()


def test_where_nobody_listens_it_is_said_what_that_may_be() -> None:
    with (
        Ranks(2) as ranks,
        pytest.raises(
            ConnectionRefusedError, match=r"^\[Errno 111\] nobody listens .* rank 1 \(.*\): .* network namespace"
        ),
    ):
        Exchange(0, ranks.servers[0], [ranks.invitations[0], Invitation("no such socket", "")], 0, LIMIT_S, NAMES).run()
