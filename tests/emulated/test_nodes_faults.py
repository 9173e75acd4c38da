"""Nodes, and ranks of them, that die, hang or make no calls: every other rank, of all nodes, gets an error in time that
names what is known."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, make_communicator, store, unnamed
from ucx_here import needs_ucx

import llm_comm
from llm_comm import CommunicatorError

TIMEOUT_S = 3.0
#: What a busy machine adds.
SLACK_S = 12.0
PLACES = 2
WORLD = 2 * PLACES


class ReportedError(NamedTuple):
    """What a rank was told, by an error."""

    kind: str
    text: str
    peer: int
    seconds: float


def _synchronize(name: str, count: int = WORLD) -> None:
    """Until so many ranks have come."""
    if store().add(name, 1) == count:
        store().set(f"{name}: all", "")
    store().wait([f"{name}: all"])


def _made(transport: str = "auto") -> llm_comm.Communicator:
    node = f"n{dist.get_rank() // PLACES}"
    comm = make_communicator(node=node, node_transport=transport, timeout_s=TIMEOUT_S)
    comm.all_reduce(torch.ones(5000))
    return comm


def _error_of(call: Callable[[], object], begin: float) -> ReportedError:
    while time.monotonic() - begin < TIMEOUT_S + SLACK_S:
        try:
            call()
        except CommunicatorError as error:
            return ReportedError(type(error).__name__, str(error), error.peer, time.monotonic() - begin)
    raise AssertionError("no error in time")


def calls_without(faulty_ranks: tuple[int, ...], dies: bool, transport: str = "auto") -> ReportedError | None:
    """What all-reduces tell a rank while others die, or make no more calls."""
    comm = _made(transport)
    _synchronize("begin")
    begin = time.monotonic()
    if comm.rank in faulty_ranks:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        store().wait([f"told {rank}" for rank in range(WORLD) if rank not in faulty_ranks])
        return None
    x = torch.ones(50_000)  # in chunks
    told = _error_of(lambda: comm.all_reduce(x), begin)
    store().set(f"told {comm.rank}", "")
    with pytest.raises(CommunicatorError):
        comm.all_gather(x)
    comm.close()
    return told


def hear_without_calls(faulty_ranks: tuple[int, ...], how: int, transport: str = "auto") -> ReportedError | None:
    """What ``on_error`` tells a rank that makes no call, while others get a signal."""
    comm = _made(transport)
    heard: list[CommunicatorError] = []
    has_heard = threading.Event()

    def hear(error: CommunicatorError) -> None:
        heard.append(error)
        has_heard.set()

    comm.on_error(hear, exits=True)
    store().set(f"process {comm.rank}", str(os.getpid()))
    _synchronize("begin")
    begin = time.monotonic()
    if comm.rank in faulty_ranks:
        os.kill(os.getpid(), how)
        time.sleep(60)
    assert has_heard.wait(TIMEOUT_S + SLACK_S), "no error in time"
    told = ReportedError(type(heard[0]).__name__, unnamed(str(heard[0])), heard[0].peer, time.monotonic() - begin)
    if store().add("told", 1) == WORLD - len(faulty_ranks) and how == signal.SIGSTOP:
        for rank in faulty_ranks:
            os.kill(int(store().get(f"process {rank}")), signal.SIGKILL)
    comm.close()
    return told


def test_a_rank_that_exits_is_told_on_all_nodes_without_a_call(mortal_ranks: RankPool) -> None:
    told = mortal_ranks.run(WORLD, hear_without_calls, (3,), signal.SIGKILL, dying=(3,))
    check(told, (3,))
    assert all("process of rank 3 has exited" in each.text for each in told if each)


def test_a_node_that_stops_is_told_without_a_call(mortal_ranks: RankPool) -> None:
    told = mortal_ranks.run(WORLD, hear_without_calls, (2, 3), signal.SIGSTOP, dying=(2, 3))
    for each in told[:2]:
        assert each is not None
        assert (each.kind, each.peer) == ("PeerTimeout", 2)
        assert "no sign of life from node 1, n1, with rank 2, rank 3, for " in each.text


def make_other_calls(call: str) -> tuple[str, str]:
    """What the ranks are told of which those of node 1 make another call."""
    with make_communicator(node=f"n{dist.get_rank() // PLACES}", timeout_s=20.0) as comm:
        x = torch.ones(64, dtype=torch.bfloat16)
        comm.all_reduce(x)
        is_odd = comm.rank >= PLACES
        calls: dict[str, Callable[[], object]] = {
            "size": lambda: comm.all_reduce(x[:8] if is_odd else x),
            "type": lambda: comm.all_reduce(x.half() if is_odd else x),
            "operation": lambda: comm.reduce_scatter(x) if is_odd else comm.all_reduce(x),
            "sizes": lambda: comm.all_gather(x, sizes=[64] * WORLD) if not is_odd else comm.all_gather(x.view(8, 8), 1),
        }
        with pytest.raises(CommunicatorError) as caught:
            calls[call]()
        with pytest.raises(CommunicatorError):
            comm.all_reduce(x)
    return type(caught.value).__name__, unnamed(str(caught.value))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("size", ("all_reduce of 64 bf16", "all_reduce of 8 bf16")),
        ("type", ("all_reduce of 64 bf16", "all_reduce of 64 fp16")),
        ("operation", ("all_reduce of 64 bf16", "reduce_scatter of 1 x [16, 16, 16, 16] bf16")),
        ("sizes", ("all_gather of 1 x [64, 64, 64, 64] elements", "all_gather of 8 x [8, 8, 8, 8] elements")),
    ],
)
def test_nodes_that_make_different_calls_are_told(ranks: RankPool, call: str, words: tuple[str, str]) -> None:
    for rank, (kind, text) in enumerate(ranks.run(WORLD, make_other_calls, call)):
        assert kind == "MismatchError"
        partner = (rank + PLACES) % WORLD
        of_node = {r: f"rank {r}: {words[r // PLACES]}" for r in (rank, partner)}
        assert all(each in text for each in of_node.values()) or "was notified" in text, text


def check(told: list[ReportedError | None], faulty_ranks: tuple[int, ...]) -> None:
    print(*(f"{rank}: {each}" for rank, each in enumerate(told)), sep="\n")
    for rank, each in enumerate(told):
        if rank in faulty_ranks:
            continue
        assert each is not None
        assert each.kind == "PeerTimeout"
        assert each.seconds < TIMEOUT_S + SLACK_S
        assert any(f"rank {faulty_rank}" in each.text for faulty_rank in faulty_ranks), each.text


@pytest.mark.parametrize("faulty_ranks", [(0,), (3,), (2, 3)], ids=["first rank", "last rank", "a node"])
def test_who_dies_is_told_on_all_nodes(mortal_ranks: RankPool, faulty_ranks: tuple[int, ...]) -> None:
    check(mortal_ranks.run(WORLD, calls_without, faulty_ranks, True, dying=faulty_ranks), faulty_ranks)


@pytest.mark.parametrize("faulty_ranks", [(1,), (2, 3)], ids=["a rank", "a node"])
def test_who_makes_no_calls_is_told_on_all_nodes(mortal_ranks: RankPool, faulty_ranks: tuple[int, ...]) -> None:
    check(mortal_ranks.run(WORLD, calls_without, faulty_ranks, False), faulty_ranks)


# ---- Over UCX ------------------------------------------------------------------------------------------------------


@needs_ucx
@pytest.mark.parametrize("faulty_ranks", [(3,), (2, 3)], ids=["a rank", "a node"])
def test_who_dies_is_told_over_ucx(mortal_ranks: RankPool, faulty_ranks: tuple[int, ...]) -> None:
    check(mortal_ranks.run(WORLD, calls_without, faulty_ranks, True, "ucx", dying=faulty_ranks), faulty_ranks)


@needs_ucx
def test_who_makes_no_calls_is_told_over_ucx(mortal_ranks: RankPool) -> None:
    check(mortal_ranks.run(WORLD, calls_without, (2, 3), False, "ucx"), (2, 3))


@needs_ucx
def test_a_rank_that_exits_is_told_over_ucx_without_a_call(mortal_ranks: RankPool) -> None:
    """Its partner learns it from the node of that rank, or on a busy machine from the connection that has ended."""
    told = mortal_ranks.run(WORLD, hear_without_calls, (3,), signal.SIGKILL, "ucx", dying=(3,))
    check(told, (3,))
    for each in told[:3]:
        assert each is not None
        of_connection = "the connection to rank 3 has ended" in each.text
        assert "process of rank 3 has exited" in each.text or of_connection, each.text


@needs_ucx
def test_a_node_that_exits_is_told_over_ucx_without_a_call(mortal_ranks: RankPool) -> None:
    told = mortal_ranks.run(WORLD, hear_without_calls, (2, 3), signal.SIGKILL, "ucx", dying=(2, 3))
    check(told, (2, 3))
    for rank, each in enumerate(told[:PLACES]):
        assert each is not None
        ended = f"by UCX failed: UCX: the connection to rank {rank + PLACES} has ended"
        assert ended in each.text or "was notified" in each.text
