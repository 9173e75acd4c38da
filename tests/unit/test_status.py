"""Status pages as bytes: what a reader makes of one that is being written, or never was."""

from __future__ import annotations

import mmap
import os
import subprocess
import threading
import time
from dataclasses import replace
from unittest import mock

import pytest
from harness import names_of_world

from llm_comm.runtime import watchdog as watchdogs
from llm_comm.runtime.status import PeerStatus, RankError, RankState, StatusBoard, fit
from llm_comm.runtime.watchdog import Watchdog

STATE = RankState(last_call="one-shot all-reduce of 8 bf16 (call 3)")


@pytest.fixture
def page() -> mmap.mmap:
    return mmap.mmap(-1, 4096)


def look(page: mmap.mmap) -> RankState | None:
    return StatusBoard(0, {0: page}).look()[0].state


def test_page_that_was_never_written(page: mmap.mmap) -> None:
    assert look(page) is None


def test_state_comes_back_as_it_was(page: mmap.mmap) -> None:
    error = RankError("PeerTimeout", "rank 0: „…“", "waited", 0, 1)
    for state in (STATE, replace(STATE, operations_ended=2, error=error, is_closed=True)):
        StatusBoard(0, {0: page}).publish(state)
        assert look(page) == state


def test_signs_of_life_have_an_age(page: mmap.mmap) -> None:
    board = StatusBoard(0, {0: page})
    board.publish(STATE)
    first = board.look()[0].age_s
    assert 0 <= first <= board.look()[0].age_s


def test_ranks_are_seen_in_their_order() -> None:
    """Whatever the order in which their pages have come; the own one comes last."""
    pages = {rank: mmap.mmap(-1, 4096) for rank in (2, 1, 0)}
    for rank in pages:
        StatusBoard(rank, pages).publish(replace(STATE, remark=str(rank)))
    board = StatusBoard(0, pages)
    assert [status.state and status.state.remark for status in board.look()] == ["0", "1", "2"]
    board.close()
    assert all(page.closed for page in pages.values())


def test_a_process_that_has_exited(page: mmap.mmap) -> None:
    process = subprocess.Popen(["sleep", "60"])
    board = StatusBoard(0, {0: page, 1: mmap.mmap(-1, 4096)}, {1: os.pidfd_open(process.pid)})
    assert [status.has_exited for status in board.look()] == [None, False]
    process.kill()
    process.wait()
    assert [status.has_exited for status in board.look()] == [None, True]
    board.close()


@pytest.mark.parametrize("offset", [8, 12, 16, 60])
def test_page_that_is_being_written(page: mmap.mmap, offset: int) -> None:
    """Whatever byte is not there yet: no state rather than a wrong one."""
    StatusBoard(0, {0: page}).publish(STATE)
    page[offset] ^= 0xFF
    assert look(page) is None


def test_states_are_whole_while_another_process_writes(page: mmap.mmap) -> None:
    """Texts of all lengths that a page takes, each twice in its state."""
    writer = os.fork()
    if writer == 0:
        for number in range(20000):
            text = str(number) * (number % 90 + 1)
            StatusBoard(0, {0: page}).publish(replace(STATE, last_call=text, remark=text))
        os._exit(0)
    seen = set()
    while os.waitpid(writer, os.WNOHANG) == (0, 0):
        state = look(page)
        if state is not None:
            assert state.last_call == state.remark
            seen.add(state.last_call)
    assert len(seen) > 1


def test_longest_texts_fit(page: mmap.mmap) -> None:
    """No caller has to bound what it says: remarks and brief forms may name hundreds of ranks."""
    for letter in "e", "é", "\n", "\0", "\N{GRINNING FACE}":  # JSON writes all but the first at length
        error = RankError("MismatchError", letter * 100_000, letter * 100_000, 7, 6)
        long = RankState(letter * 100_000, 2**63, error, True, letter * 100_000)
        StatusBoard(0, {0: page}).publish(long)
        found = look(page)
        assert found is not None
        assert found.error is not None
        texts = found.last_call, found.remark, found.error.text, found.error.brief
        assert all(text and set(text) == {letter} for text in texts)
        assert (found.operations_ended, found.is_closed, found.error.peer) == (2**63, True, 6)
    assert fit("short") == "short"


class HeldUp(StatusBoard):
    """Whoever has looked is not let go on for a while, as on a machine that has much to do."""

    def look(self) -> list[PeerStatus]:
        seen = super().look()
        time.sleep(0.3)
        return seen


def abandon(how: str, kind_of_board: type[StatusBoard] = StatusBoard) -> mock.Mock:
    """The core of a rank whose communicator is dropped when its peer has closed, has exited without, is silent, or is
    so for a while before it exits."""
    peer = subprocess.Popen(["sleep", "60"])
    pages = {rank: mmap.mmap(-1, 4096) for rank in (0, 1)}
    StatusBoard(1, pages).publish(replace(STATE, is_closed=how == "closed"))
    core = mock.Mock(**{"error.return_value": None, "last_call.return_value.number": 0})
    watchdog = Watchdog(core, 0, 60.0, kind_of_board(0, pages, {1: os.pidfd_open(peer.pid)}), names_of_world(2))
    watchdog.start()
    if how in ("closed", "exited"):
        peer.kill()
        peer.wait()
    elif how == "dying":
        threading.Timer(1.5, peer.kill).start()
    with mock.patch.object(watchdogs, "_LONGEST_DEATH_S", 20.0 if how == "dying" else 1.5):
        watchdog.abandon()
        watchdog.join(30)
    assert not watchdog.is_alive()
    peer.kill()
    peer.wait()
    return core


def test_kernels_of_a_dropped_communicator_do_not_wait_for_a_rank_that_has_exited() -> None:
    assert abandon("exited").abort.called
    assert not abandon("closed").abort.called
    assert not abandon("silent").abort.called


def test_kernels_are_told_once_of_a_rank_that_has_exited() -> None:
    assert abandon("exited").peer_exited.mock_calls == [mock.call(1)]
    assert abandon("closed").peer_exited.mock_calls == [mock.call(1)]  # whoever waits for it nevertheless
    assert not abandon("silent").peer_exited.called


@pytest.mark.parametrize("kind_of_board", [StatusBoard, HeldUp])
def test_a_process_that_takes_its_time_to_exit_is_waited_for(kind_of_board: type[StatusBoard]) -> None:
    """Its sockets are closed, which an engine may notice first, before the driver has freed its memory."""
    core = abandon("dying", kind_of_board)
    assert core.peer_exited.mock_calls == [mock.call(1)]
    assert core.abort.called
