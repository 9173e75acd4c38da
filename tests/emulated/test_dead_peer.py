"""A rank that dies: the others stop in time, know whom they lost, and can go on without it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, make_communicator, pidfds, regroup, unnamed
from reference import ALGORITHMS, assert_is_sum, contributions

from llm_comm import Communicator, PeerTimeout

TIMEOUT_S = 2.0
# Of ranks that see who exits: longer than what follows.
LONG_TIMEOUT_S = 300.0
# A kernel looks at the clock once in many polls, and the ranks share few CPUs.
SLACK_S = 10.0
WORLD = 4
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
# On one line two-shot has work for the owner of slice 0 alone; 40000 elements are many tiles for every rank.
every_count = pytest.mark.parametrize("count", [4, 40_000])
# Without pidfds, the ranks find out by their waits alone who is missing.
with_and_without_pidfds = pytest.mark.parametrize("has_pidfds", [True, False])


@dataclass(frozen=True)
class Loss:
    """How a rank learnt of a death."""

    rank: int
    peer: int
    text: str
    seconds: float


def make_mortal(algorithm: str, has_pidfds: bool) -> Communicator:
    with pidfds(has_pidfds):
        return make_communicator(algorithm=algorithm, timeout_s=LONG_TIMEOUT_S if has_pidfds else TIMEOUT_S)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def reduce_until_lost(comm: Communicator, count: int, calls: int = 1_000_000) -> Loss:
    x = torch.ones(count)
    for _ in range(calls):
        start = time.monotonic()
        try:
            out = comm.all_reduce(x)
        except PeerTimeout as error:
            return Loss(error.rank, error.peer, str(error), time.monotonic() - start)
        if not out.eq(comm.world_size).all():
            raise AssertionError(f"a wrong sum came back without an error: {out}")
    raise AssertionError(f"{calls} all-reduces without the dead rank succeeded")


def check_aftermath(comm: Communicator, loss: Loss, victim: int) -> None:
    """The communicator raises at once from now on; a new one of the survivors works."""
    again = reduce_until_lost(comm, 100, calls=1)
    assert again.peer == loss.peer
    assert again.seconds < TIMEOUT_S / 2, "a communicator that has lost a peer waits again"
    with pytest.raises(PeerTimeout):
        comm.check()
    survivors = [rank for rank in range(dist.get_world_size()) if rank != victim]
    regroup("survivors", survivors)
    inputs = contributions(len(survivors), 1000, torch.bfloat16)
    with make_communicator() as fresh:
        assert_is_sum(fresh.all_reduce(inputs[fresh.rank]), inputs, "the sum of the survivors")


def lose(
    algorithm: str,
    count: int,
    victim: int,
    has_pidfds: bool,
    meet_death: Callable[[Communicator, int], None],
    late_rank: int = -1,
) -> Loss:
    """On a rank: some all-reduces, then the death of ``victim``, which ``meet_death`` brings about there."""
    comm = make_mortal(algorithm, has_pidfds)
    for _ in range(3):
        comm.all_reduce(torch.ones(count))
    if comm.rank == victim:
        meet_death(comm, count)
    if comm.rank == late_rank:
        time.sleep(TIMEOUT_S / 2)
    loss = reduce_until_lost(comm, count)
    check_aftermath(comm, loss, victim)
    return loss


def die_between_calls(_comm: Communicator, _count: int) -> None:
    die()


def die_at_any_moment(_comm: Communicator, _count: int) -> None:
    threading.Timer(0.3, die).start()


def die_after_serving_some_peers(comm: Communicator, count: int) -> None:
    """Dies in an operation to which rank 0 got no contribution, all others the whole one."""
    nowhere = os.memfd_create("nowhere")
    os.ftruncate(nowhere, comm.workspace_bytes)
    comm._handle.core().map_peer(0, nowhere, b"")
    comm._operations.all_reduce.forget()  # the calls so far were laid out for the old address
    threading.Timer(0.3, die).start()
    comm.all_reduce(torch.ones(count))
    time.sleep(60)


def check_losses(losses: list[Loss | None], victim: int, has_pidfds: bool) -> None:
    survivors = {rank: loss for rank, loss in enumerate(losses) if loss is not None}
    assert set(survivors) == set(range(len(losses))) - {victim}
    assert {rank: loss.peer for rank, loss in survivors.items()} == dict.fromkeys(survivors, victim)
    for rank, loss in survivors.items():
        assert loss.rank == rank
        why = f"the process of rank {victim} has exited, and " if has_pidfds else f"nothing came from rank {victim} "
        assert f"rank {rank}: {why}" in unnamed(loss.text)
        assert loss.seconds < TIMEOUT_S + SLACK_S


@every_algorithm
@every_count
@pytest.mark.parametrize("victim", [0, 3])
@with_and_without_pidfds
def test_death_between_calls(mortal_ranks: RankPool, algorithm: str, count: int, victim: int, has_pidfds: bool) -> None:
    losses = mortal_ranks.run(WORLD, lose, algorithm, count, victim, has_pidfds, die_between_calls, dying=[victim])
    check_losses(losses, victim, has_pidfds)


@every_algorithm
@with_and_without_pidfds
def test_death_in_the_middle_of_a_loop(mortal_ranks: RankPool, algorithm: str, has_pidfds: bool) -> None:
    losses = mortal_ranks.run(8, lose, algorithm, 3000, 5, has_pidfds, die_at_any_moment, dying=[5])
    check_losses(losses, 5, has_pidfds)


@every_algorithm
@with_and_without_pidfds
def test_death_after_serving_some_peers(mortal_ranks: RankPool, algorithm: str, has_pidfds: bool) -> None:
    """Ranks 1 and 2 get one operation further than rank 0, and wait for it too: it must not be blamed."""
    losses = mortal_ranks.run(WORLD, lose, algorithm, 3000, 3, has_pidfds, die_after_serving_some_peers, dying=[3])
    check_losses(losses, 3, has_pidfds)


@every_algorithm
@every_count
def test_death_that_a_rank_meets_late(mortal_ranks: RankPool, algorithm: str, count: int) -> None:
    """The others wait for rank 0 too, and give up before it would: it is late, but it comes."""
    arguments = (algorithm, count, 3, False, die_between_calls, 0)
    check_losses(mortal_ranks.run(WORLD, lose, *arguments, dying=[3]), 3, has_pidfds=False)


def lose_in_fused(algorithm: str, rows: int, victim: int, at_once: bool) -> Loss:
    """On a rank: fused calls whose blocks share rows in clusters, and the death of ``victim``."""
    comm = make_mortal(algorithm, has_pidfds=not at_once)
    x, weight = torch.ones(rows, 1024, dtype=torch.bfloat16), torch.ones(1024, dtype=torch.bfloat16)
    assert comm.plan_all_reduce_add_rms_norm(x, weight).cluster > 1
    if comm.rank == victim:
        threading.Timer(0.0 if at_once else 0.3, die).start()
        if at_once:
            time.sleep(60)
    for _ in range(1_000_000):
        start = time.monotonic()
        try:
            normed, total = comm.all_reduce_add_rms_norm(x, None, weight, 0.0)
        except PeerTimeout as error:
            loss = Loss(error.rank, error.peer, str(error), time.monotonic() - start)
            check_aftermath(comm, loss, victim)
            return loss
        if not (total.eq(comm.world_size).all() and normed.eq(1).all()):
            raise AssertionError(f"a wrong result came back without an error: {total}, {normed}")
    raise AssertionError("fused calls without the dead rank succeeded")


@every_algorithm
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("at_once", [True, False])
def test_death_in_fused_calls(mortal_ranks: RankPool, algorithm: str, rows: int, at_once: bool) -> None:
    losses = mortal_ranks.run(WORLD, lose_in_fused, algorithm, rows, 3, at_once, dying=[3])
    check_losses(losses, 3, has_pidfds=not at_once)
    shot = algorithm.replace("_", "-")
    assert all(f"{shot} all-reduce + RMSNorm of " in loss.text for loss in losses if loss is not None)


def call_more_often_than_the_others(calls: int) -> str | None:
    with make_communicator(timeout_s=TIMEOUT_S) as comm:
        for _ in range(calls):
            comm.all_reduce(torch.ones(10))
        if comm.rank == 1:
            return reduce_until_lost(comm, 10, calls=1).text
    return None


def test_rank_that_makes_fewer_calls_is_like_a_dead_one(mortal_ranks: RankPool) -> None:
    _, text = mortal_ranks.run(2, call_more_often_than_the_others, 4)
    assert text is not None
    assert unnamed(text).startswith("rank 1: nothing came from rank 0 ")
    assert "all-reduce of 40 bytes (operation 5 of this communicator" in text
    assert "LLM_COMM_TIMEOUT_S" in text
