"""Errors that come without a further call, with what all ranks were doing; and ranks that are late or stay away."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, make_communicator, pidfds, unnamed
from reference import assert_is_sum, contributions

from llm_comm import Communicator, CommunicatorError, LaunchError, PeerTimeout, RendezvousError
from llm_comm.runtime.status import StatusBoard

HOST = socket.gethostname()
TIMEOUT_S = 2.0
# A busy machine may be slow; whoever waits so long waits for ever.
LIMIT_S = 30.0
X = torch.ones(20)


class Loss(NamedTuple):
    pid: int
    text: str
    peer: int


def sum_three_times(comm: Communicator) -> None:
    for _ in range(3):
        assert comm.all_reduce(X).eq(comm.world_size).all()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_to_launch(*_: int) -> bool:
    raise RuntimeError("launch of a collective: invalid device context")


def lose_a_launch(fused: bool, why: str) -> str:
    """On rank 1 an operation is not launched that the others launch. Returns what is raised."""
    x, weight = torch.ones(2, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    with make_communicator(timeout_s=30.0) as comm:

        def call() -> None:
            if fused:
                comm.all_reduce_add_rms_norm(x, None, weight, 1e-5)
            else:
                comm.all_reduce(x)

        call()
        fault: AbstractContextManager[Any] = nullcontext()
        if comm.rank == 1 and why == "not launched":
            calls = comm._operations.all_reduce_add_rms_norm if fused else comm._operations.all_reduce
            prepared = calls._prepared
            prepared.update({key: entry._replace(run=fail_to_launch) for key, entry in prepared.items()})
        elif comm.rank == 1:
            out_of_memory = torch.OutOfMemoryError("launch of a collective: invalid device context")
            if why == "no memory":
                fault = mock.patch("torch.empty_like", side_effect=out_of_memory)
            else:
                comm.use_table(comm.table)  # nothing is prepared any more
                broken = mock.Mock(wraps=comm._handle._core, prepare=mock.Mock(side_effect=out_of_memory))
                fault = mock.patch.object(comm._handle, "_core", broken)
        texts = []
        for _ in range(2):  # the second time nothing is tried any more
            with fault, pytest.raises(LaunchError) as caught:
                call()
            assert caught.value.peer == 1
            texts.append(str(caught.value))
        assert texts[0] == texts[1]
        with pytest.raises(LaunchError):
            comm.try_all_reduce(x)
        assert comm.try_all_reduce(x.t()) is None  # whoever sums it instead is not concerned
        return texts[0]


@pytest.mark.parametrize("reason", ["not launched", "no memory", "not prepared"])
@pytest.mark.parametrize("fused", [False, True])
def test_an_operation_that_is_not_launched_ends_the_communicator(ranks: RankPool, fused: bool, reason: str) -> None:
    why = "rank 1: an operation could not be launched (launch of a collective: invalid device context)"
    texts = ranks.run(3, lose_a_launch, fused, reason)
    assert unnamed(texts[1]).startswith(why)
    assert all(unnamed(texts[rank]).startswith(f"rank {rank} was notified: {why}") for rank in (0, 2))


def lose_the_watchdog() -> tuple[str, list[str]]:
    """That of rank 1 fails. What a rank is told by its next call, and its callback."""
    with make_communicator(timeout_s=LIMIT_S) as comm:
        told: list[str] = []
        heard = threading.Event()
        comm.on_error(lambda error: (told.append(str(error)), heard.set()))  # type: ignore[arg-type, return-value]
        sum_three_times(comm)
        dist.barrier()
        fault = mock.patch.object(StatusBoard, "look", side_effect=MemoryError("no page"))
        with fault if comm.rank == 1 else nullcontext():
            assert heard.wait(LIMIT_S)
        with pytest.raises(CommunicatorError) as caught:
            comm.all_reduce(X)
        return str(caught.value), told


def test_a_watchdog_that_fails_ends_the_communicator(ranks: RankPool) -> None:
    why = "rank 1: the watchdog of this communicator has failed (MemoryError: no page)"
    for (text, told), start in zip(ranks.run(2, lose_the_watchdog), (f"rank 0 was notified: {why}", why), strict=True):
        assert unnamed(text).startswith(start)
        assert told == [text]


def wait_in_vain(comm: Communicator) -> None:
    with pytest.raises(PeerTimeout):
        comm.all_reduce(X)


def told_of_error(comm: Communicator) -> Callable[[], CommunicatorError]:
    """A function that waits until ``on_error`` has been called back, and returns with what."""
    told = threading.Event()
    errors: list[CommunicatorError] = []

    def callback(error: CommunicatorError) -> None:
        errors.append(error)
        told.set()

    comm.on_error(callback)

    def wait() -> CommunicatorError:
        assert told.wait(LIMIT_S), "on_error was not called back"
        time.sleep(0.2)
        assert len(errors) == 1
        return errors[0]

    return wait


# ---- A rank that dies ------------------------------------------------------------------------------------------------


def lose_rank(victim: int, idle_rank: int, has_pidfds: bool) -> Loss:
    """Ranks wait for the victim in a thread that nobody asks; ``idle_rank`` makes no call at all."""
    # What the ranks have for hearing of each other is a share of it. Where they see who exits, nobody waits so long.
    with pidfds(has_pidfds):
        comm = make_communicator(timeout_s=20 * LIMIT_S if has_pidfds else 3 * TIMEOUT_S)
    sum_three_times(comm)
    if comm.rank == victim:
        time.sleep(0.3)  # its page is to have its last call
        die()
    error_of = told_of_error(comm)
    if comm.rank != idle_rank:
        threading.Thread(target=wait_in_vain, args=[comm]).start()
    error = error_of()
    with pytest.raises(PeerTimeout) as refused:
        comm.all_reduce(X)
    assert str(refused.value) == str(error), "the communicator refuses with another text"
    return Loss(os.getpid(), str(error), error.peer)


@pytest.mark.parametrize("has_pidfds", [True, False])
def test_all_ranks_are_told_without_a_further_call(mortal_ranks: RankPool, has_pidfds: bool) -> None:
    """Ranks 0 and 1 miss two others, of which one lives: what the ranks were doing tells which, or who has exited."""
    victim, idle = 3, 2
    losses = mortal_ranks.run(4, lose_rank, victim, idle, has_pidfds, dying=[victim])
    for rank in (0, 1, 2):
        loss = losses[rank]
        assert loss.peer == victim if has_pidfds else loss.peer in (victim, idle)
        head, *states = loss.text.splitlines()
        where = "a one-shot all-reduce of 80 bytes (operation 4 "
        blame = f"nothing came from rank {loss.peer} for 4.8 s in {where}"
        if has_pidfds:
            blame = f"the process of rank {victim} has exited, and {where}"
        who = ("rank 2 was notified: rank 0: ", "rank 2 was notified: rank 1: ") if rank == idle else f"rank {rank}: "
        assert unnamed(head).startswith(who)
        assert blame in unnamed(head)
        last = "last call: one-shot all-reduce of 20 fp32 (call {}); 3 operations ended on its device"
        waits = "alive; waited for rank "
        assert states[0] == "State of the ranks of group WORLD:"
        for other in (0, 1):
            assert states[1 + other].startswith(
                f"  rank {other} (global rank {other}, pid {losses[other].pid} on {HOST}): {waits}"
            )
            assert states[1 + other].endswith(last.format(4))
        assert unnamed(states[3]) == f"  rank 2: alive; {last.format(3)}"
        assert states[4].startswith("  rank 3 (global rank 3, pid ")
        assert (": its process has exited, no sign of life for " in states[4]) == has_pidfds
        assert states[4].endswith("last call seen: one-shot all-reduce of 20 fp32 (call 3)")


def outlive(victim: int, has_pidfds: bool, how: str) -> tuple[int, list[str]]:
    """Idle ranks lose one. Returns this rank's process and what the logger said on it."""
    records = said_by_the_logger()
    with pidfds(has_pidfds):
        comm: Communicator | None = make_communicator(timeout_s=LIMIT_S)
    assert comm is not None
    sum_three_times(comm)
    dist.barrier()
    if comm.rank == victim:
        if how == "closed":
            comm.close()
            dist.barrier()
        die()
    if how == "closed":
        dist.barrier()
        comm.close()
    elif how == "idle":
        wait_for_a_record(records)
        comm.check()  # nothing has failed yet
        comm.close()
    else:
        with pytest.raises(RuntimeError):  # as engines do, which then end this process
            dist.barrier()
        comm = None  # nothing else holds it
    return os.getpid(), records


def outlive_with_callback(loss: str, exits: bool, drops: bool) -> list[str]:
    """Rank 1 is lost, or not; nobody makes a call. Returns what the other's callback is told."""
    comm: Communicator | None = make_communicator()
    assert comm is not None
    sum_three_times(comm)
    told: list[str] = []
    comm.on_error(lambda error: told.append(str(error)), exits=exits)
    dist.barrier()
    if comm.rank == 1:
        if loss == "closed":
            comm.close()
        dist.barrier()
        die()
    dist.barrier()
    with pytest.raises(RuntimeError):
        dist.barrier()
    if drops:
        comm = None
    deadline = time.monotonic() + (3.0 if loss == "closed" or not exits else LIMIT_S)
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    if comm is None:
        return told
    if told:
        with pytest.raises(PeerTimeout) as refused:
            comm.all_reduce(X)
        assert str(refused.value) == told[0]
    comm.close()
    return told


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(
    ("loss", "exits", "is_told"), [("killed", True, True), ("killed", False, False), ("closed", True, False)]
)
def test_an_exit_is_an_error_for_those_who_want_it_so(
    mortal_ranks: RankPool, loss: str, exits: bool, is_told: bool, drops: bool
) -> None:
    """Though nobody waits: engines do, whose ranks may wait for the lost one in other ways, or drop theirs for it."""
    told, _ = mortal_ranks.run(2, outlive_with_callback, loss, exits, drops, dying=[1])
    assert len(told) == is_told
    for text in told:
        why = "rank 0: the process of rank 1 has exited without closing its communicator. This one can no longer "
        assert unnamed(text).startswith(why)
        assert "  rank 1 (global rank 1, pid " in text


def outlive_one_that_had_closed() -> tuple[str, float]:
    """Rank 1 closes its communicator, as the end of an interpreter does, and exits. The other one waits for it."""
    comm = make_communicator(timeout_s=20 * LIMIT_S)
    sum_three_times(comm)
    if comm.rank == 1:
        comm.close()
        die()
    start = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        comm.all_reduce(X)
    return str(caught.value), time.monotonic() - start


def test_a_rank_that_has_exited_is_not_waited_for_though_it_had_closed(mortal_ranks: RankPool) -> None:
    (text, seconds), _ = mortal_ranks.run(2, outlive_one_that_had_closed, dying=[1])
    assert unnamed(text).startswith("rank 0: the process of rank 1 has exited, and a one-shot all-reduce of 80 bytes ")
    assert seconds < LIMIT_S


def lose_nobody() -> None:
    with make_communicator() as comm:
        for rank in (-1, comm.world_size):
            with pytest.raises(ValueError, match=f"there is no rank {rank} among 2"):
                comm._handle.core().peer_exited(rank)
        sum_three_times(comm)


def test_a_rank_that_there_is_not_cannot_exit(ranks: RankPool) -> None:
    ranks.run(2, lose_nobody)


def said_of(rank: int, records: list[str]) -> list[str]:
    """The log may speak of others too: of a rank that gets no CPU time for a second, on a machine with other work."""
    return [text for text in records if text.startswith(f"llm_comm: group WORLD, rank {rank} ")]


@pytest.mark.parametrize("how", ["idle", "dropped"])
def test_the_log_says_whose_process_has_exited(mortal_ranks: RankPool, how: str) -> None:
    """Also where an engine ends the other processes at once, for a reason that names nobody."""
    found = mortal_ranks.run(3, outlive, 1, True, how, dying=[1])
    for rank in (0, 2):
        (said,) = said_of(1, found[rank][1])
        words = rf"llm_comm: rank 1 has exited without closing its communicator \(noticed by rank {rank}\)\. .*"
        assert re.fullmatch(words, unnamed(said))
        assert re.search(rf"rank 1 \(global rank 1, pid \d+ on {re.escape(HOST)}\) has exited", said)


def test_a_rank_of_which_no_more_is_known_is_silent(mortal_ranks: RankPool) -> None:
    found = mortal_ranks.run(3, outlive, 1, False, "dropped", dying=[1])
    for rank in (0, 2):
        (said,) = said_of(1, found[rank][1])
        assert re.match(r"llm_comm: rank 1 has died or hangs: no sign of life for [1-9]\.\d s \(", unnamed(said))


def test_nothing_is_said_of_a_rank_that_had_closed(mortal_ranks: RankPool) -> None:
    found = mortal_ranks.run(2, outlive, 1, True, "closed", dying=[1])
    assert found[0][1] == []


# ---- Ranks that stay away or come late -------------------------------------------------------------------------------


def said_by_the_logger() -> list[str]:
    """What it says from now on, in this process."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("llm_comm").addHandler(handler)
    return records


def wait_for_a_record(records: list[str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not records and time.monotonic() < deadline:
        time.sleep(0.01)


def stay_away(how: str) -> list[str]:
    """Rank 1 makes a call less. Returns what the logger said on this rank."""
    records = said_by_the_logger()
    comm = make_communicator(timeout_s=TIMEOUT_S)
    sum_three_times(comm)
    if comm.rank == 1 and how == "closed":
        comm.close()
    elif comm.rank == 1:
        wait_for_a_record(records)
        with pytest.raises(PeerTimeout):
            comm.check()
    else:
        with pytest.raises(PeerTimeout):
            comm.all_reduce(X)
        time.sleep(0.2)
    comm.close()
    with make_communicator() as fresh:
        inputs = contributions(fresh.world_size, 1000, torch.bfloat16)
        assert_is_sum(fresh.all_reduce(inputs[fresh.rank]), inputs, "the sum of a new communicator")
    return records


def test_errors_are_logged_where_nobody_asked_to_be_told(ranks: RankPool) -> None:
    first, second = ranks.run(2, stay_away, "stalled")
    assert len(first) == len(second) == 1
    assert unnamed(first[0]).startswith("rank 0: nothing came from rank 1 ")
    assert unnamed(second[0]).startswith("rank 1 was notified: rank 0: nothing came from rank 1 ")


def test_rank_that_has_closed(ranks: RankPool) -> None:
    first, second = ranks.run(2, stay_away, "closed")
    assert "): has closed its communicator; last call: one-shot" in first[0]
    assert second == []


def come_late(delay_s: float) -> None:
    with make_communicator(timeout_s=LIMIT_S) as comm:
        sum_three_times(comm)
        if comm.rank == 1:
            time.sleep(delay_s)
        sum_three_times(comm)
        comm.check()


def test_rank_that_is_late_is_waited_for(ranks: RankPool) -> None:
    ranks.run(3, come_late, 1.5)


# ---- Callbacks -------------------------------------------------------------------------------------------------------


def fail_with_callbacks() -> None:
    comm = make_communicator(timeout_s=TIMEOUT_S)
    told: list[str] = []

    def clumsy(error: CommunicatorError) -> None:
        told.append("clumsy")
        raise ValueError("of the callback")

    def desperate(error: CommunicatorError) -> None:
        told.append("desperate")
        sys.exit("which ends a thread, not the process")

    comm.on_error(clumsy)
    comm.on_error(desperate)
    comm.on_error(lambda error: told.append(str(error)))
    if comm.rank == 0:
        with pytest.raises(PeerTimeout) as caught:
            comm.all_reduce(X)
        text = str(caught.value)
    deadline = time.monotonic() + LIMIT_S
    while len(told) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    if comm.rank == 0:
        assert told == ["clumsy", "desperate", text]
    late: list[str] = []
    comm.on_error(lambda error: late.append(str(error)))
    assert late == told[2:]


def test_callbacks(ranks: RankPool) -> None:
    """One that raises does not keep the others from being called, and one that comes late is called at once."""
    ranks.run(2, fail_with_callbacks)


# ---- Without status pages --------------------------------------------------------------------------------------------


def fail_without_pages(victim: int) -> str:
    with mock.patch.object(StatusBoard, "open", side_effect=RendezvousError("no descriptors here")):
        comm = make_communicator(timeout_s=TIMEOUT_S)
    sum_three_times(comm)
    if comm.rank == victim:
        die()
    error_of = told_of_error(comm)
    wait_in_vain(comm)
    return str(error_of())


def test_error_where_ranks_cannot_share_pages(mortal_ranks: RankPool) -> None:
    texts = mortal_ranks.run(3, fail_without_pages, 1, dying=[1])
    for rank in (0, 2):
        assert unnamed(texts[rank]).startswith(f"rank {rank}: nothing came from rank 1 ")
        assert "State of the ranks" not in texts[rank]


# ---- Threads ---------------------------------------------------------------------------------------------------------


def watchdogs() -> int:
    return sum(thread.name == "llm_comm watchdog" for thread in threading.enumerate())


def count_threads() -> None:
    gc.collect()
    before = watchdogs()
    closed, dropped = make_communicator(), make_communicator()
    assert watchdogs() == before + 2
    closed.close()
    assert watchdogs() == before + 1
    del dropped
    gc.collect()
    assert watchdogs() == before


def test_watchdog_ends_with_its_communicator(ranks: RankPool) -> None:
    ranks.run(2, count_threads)


def has_no_watchdog() -> None:
    with make_communicator() as comm:
        comm.on_error(lambda error: None)
        comm.check()
        assert watchdogs() == 0
        assert dist.get_world_size() == 1


def test_rank_alone_has_none(ranks: RankPool) -> None:
    ranks.run(1, has_no_watchdog)
