"""Nodes, and ranks of them, that die, hang or make no calls: every other rank, of all nodes, gets an error in time that
names what is known."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, make_communicator, store

import llm_comm
from llm_comm import CommunicatorError

TIMEOUT_S = 3.0
#: What a busy machine adds.
SLACK_S = 12.0
PLACES = 2
WORLD = 2 * PLACES


class Told(NamedTuple):
    """What a rank was told, by an error."""

    kind: str
    text: str
    peer: int
    seconds: float


def _die(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _meet(name: str, count: int = WORLD) -> None:
    """Until so many ranks have come."""
    if store().add(name, 1) == count:
        store().set(f"{name}: all", "")
    store().wait([f"{name}: all"])


def _made() -> llm_comm.Communicator:
    comm = make_communicator(node=f"n{dist.get_rank() // PLACES}", timeout_s=TIMEOUT_S)
    comm.all_reduce(torch.ones(5000))
    return comm


def _told_by(call: Callable[[], object], begin: float) -> Told:
    while time.monotonic() - begin < TIMEOUT_S + SLACK_S:
        try:
            call()
        except CommunicatorError as error:
            return Told(type(error).__name__, str(error), error.peer, time.monotonic() - begin)
    raise AssertionError("no error in time")


def calls_without(culprits: tuple[int, ...], dies: bool) -> Told | None:
    """What all-reduces tell a rank while others die, or make no more calls."""
    comm = _made()
    _meet("begin")
    begin = time.monotonic()
    if comm.rank in culprits:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        store().wait([f"told {rank}" for rank in range(WORLD) if rank not in culprits])
        return None
    x = torch.ones(5000)
    told = _told_by(lambda: comm.all_reduce(x), begin)
    store().set(f"told {comm.rank}", "")
    with pytest.raises(CommunicatorError):
        comm.all_gather(x)
    comm.close()
    return told


def check(told: list[Told | None], culprits: tuple[int, ...]) -> None:
    print(*(f"{rank}: {each}" for rank, each in enumerate(told)), sep="\n")
    for rank, each in enumerate(told):
        if rank in culprits:
            continue
        assert each is not None
        assert each.kind == "PeerTimeout"
        assert each.seconds < TIMEOUT_S + SLACK_S
        assert any(f"rank {culprit}" in each.text for culprit in culprits), each.text


@pytest.mark.parametrize("culprits", [(0,), (3,), (2, 3)], ids=["first rank", "last rank", "a node"])
def test_who_dies_is_told_on_all_nodes(mortal_ranks: RankPool, culprits: tuple[int, ...]) -> None:
    check(mortal_ranks.run(WORLD, calls_without, culprits, True, dying=culprits), culprits)


@pytest.mark.parametrize("culprits", [(1,), (2, 3)], ids=["a rank", "a node"])
def test_who_makes_no_calls_is_told_on_all_nodes(mortal_ranks: RankPool, culprits: tuple[int, ...]) -> None:
    check(mortal_ranks.run(WORLD, calls_without, culprits, False), culprits)
