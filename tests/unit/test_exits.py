"""What a watchdog makes of processes that exit: whose exit it tells, to whom, and when. Ranks are made up here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from harness import names_of_world, unnamed

from llm_comm.runtime import watchdog as watchdogs
from llm_comm.runtime.status import PeerStatus, RankError, RankState
from llm_comm.runtime.watchdog import Watchdog

PEERS = (1, 2, 3)


def alive(rank: int) -> PeerStatus:
    return PeerStatus(RankState(str(rank)), 0.0, False)


def exited(rank: int, is_closed: bool = False) -> PeerStatus:
    return PeerStatus(RankState(str(rank), is_closed=is_closed), 0.0, True)


class Scene:
    """A watchdog of rank 0 that nobody has started, and what it says."""

    def __init__(self) -> None:
        self.core = mock.Mock(**{"error.return_value": None, "last_call.return_value.number": 0})
        self.watchdog = Watchdog(self.core, 0, 60.0, None, names_of_world(4))

    def see(self, *gone: PeerStatus) -> None:
        """A look at ranks of which ``gone`` have exited."""
        by_rank = {int(status.state.last_call): status for status in gone if status.state is not None}
        self.watchdog._record_lost_peers([by_rank.get(rank, alive(rank)) for rank in (0, *PEERS)])

    def told(self) -> list[int]:
        """Of whose exits the kernels have heard, in order."""
        return [call.args[0] for call in self.core.peer_exited.mock_calls]


@pytest.mark.parametrize(("first", "later"), [(1, 2), (3, 1), (2, 3)])
def test_the_first_exit_is_the_one_that_is_told(first: int, later: int) -> None:
    """Those that follow are its consequences: an engine ends the others."""
    scene = Scene()
    scene.see(exited(first))
    scene.see(exited(first), exited(later))
    error = scene.watchdog._exit_as_error()
    assert error.peer == first
    assert f"the process of rank {first} has exited" in unnamed(error.text)
    assert scene.told() == [first, later]


def test_a_rank_that_had_closed_is_no_first_exit() -> None:
    scene = Scene()
    scene.see(exited(1, is_closed=True))
    assert scene.watchdog._first_exit is None
    assert scene.told() == [1]  # whoever waits for it nevertheless
    scene.see(exited(1, is_closed=True), exited(2))
    assert scene.watchdog._exit_as_error().peer == 2


def test_an_exit_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    with caplog.at_level(logging.WARNING, logger="llm_comm"):
        for _ in range(3):
            scene.see(exited(2))
    assert scene.told() == [2]
    assert [unnamed(record.getMessage()) for record in caplog.records] == [
        "llm_comm: rank 2 has exited without closing its communicator (noticed by rank 0). What waits for it ends with "
        "PeerTimeout"
    ]


@pytest.mark.parametrize(
    ("asked", "is_error"),
    [((), False), ((False,), False), ((True,), True), ((True, False), True), ((False, True), True)],
)
def test_an_exit_is_an_error_where_anybody_wants_it_so(asked: Sequence[bool], is_error: bool) -> None:
    """Also where somebody else asks to be told who does not; and not at once."""
    scene = Scene()
    for exits in asked:
        scene.watchdog.on_error(lambda error: None, exits)
    with mock.patch.object(watchdogs.time, "monotonic", return_value=100.0) as clock:
        assert not scene.watchdog._has_failed_by_exit()
        scene.see(exited(1))
        for age_s, is_over in ((0.0, False), (watchdogs._EXIT_GRACE_S, False), (watchdogs._EXIT_GRACE_S + 0.1, True)):
            clock.return_value = 100.0 + age_s
            assert scene.watchdog._has_failed_by_exit() == (is_error and is_over)


def test_the_first_error_is_the_one_that_stays() -> None:
    scene = Scene()
    told: list[Any] = []
    scene.watchdog.on_error(told.append, False)
    errors = [RankError("PeerTimeout", f"text {n}", "brief", 0, n) for n in PEERS]
    for error in errors:
        scene.watchdog._report(error)
    assert [(str(error), error.peer) for error in told] == [("text 1", 1)]
    failure = scene.watchdog.failure()
    assert failure is not None
    assert str(failure) == "text 1"
    assert scene.core.abort.called  # nothing that waits for another rank comes to an end by itself


def test_a_time_out_tells_how_long_kernels_wait() -> None:
    """Which is less than the time-out of the communicator: the rest is for the ranks to hear of each other."""
    scene = Scene()
    scene.core.error.return_value = SimpleNamespace(
        cause="timeout", rank=0, peer=2, operation="one-shot all-reduce", phase=0, sequence=4, bytes=16, calls=[]
    )
    error = scene.watchdog._own_error()
    assert error is not None
    assert unnamed(error.text).startswith(
        "rank 0: nothing came from rank 2 for 48 s in a one-shot all-reduce of 16 bytes"
    )
