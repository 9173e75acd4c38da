"""Two to four nodes in network namespaces of their own, over gloo and over UCX: right results, also where the network
is slow or loses packets; an outage that ends in time; and a cable that is cut."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import harness
import node_networks
import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from node_networks import Networks, Place
from nodes_cases import Layout, calls_of, make, run_random_cases
from ucx_here import needs_ucx

import llm_comm

pytestmark = pytest.mark.skipif(bool(node_networks.why_not()), reason=node_networks.why_not() or "-")

PORT = 29717  # each network has all ports for itself
CASES = 10
MOST = 20_000
TIMEOUT_S = 4.0
SLACK_S = 15.0

over_each_transport = pytest.mark.parametrize("transport", ["gloo", pytest.param("ucx", marks=needs_ucx)])


def move_to(places: list[Place], layout: Layout) -> Place:
    """Takes this rank to its node, and its group with it: from now on ranks of other nodes, and the store, are reached
    by the cable alone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    place = places[layout.node_of(rank)]
    place.enter()
    os.environ.update(GLOO_SOCKET_IFNAME=place.cable, UCX_NET_DEVICES=place.cable, UCX_TLS="tcp")
    is_first = rank == 0
    if not is_first:
        harness.store().wait(["the store of the network is there"])  # whoever has to try again waits for seconds
    store = dist.TCPStore(place.first_address, PORT, is_master=is_first, wait_for_workers=False)
    if is_first:
        harness.store().set("the store of the network is there", "")
    harness.join_group(store, rank, world)
    return place


# ---- Results -------------------------------------------------------------------------------------------------------


def run_calls(places: list[Place], layout: Layout, transport: str) -> dict[str, int]:
    move_to(places, layout)
    counts = run_random_cases(layout, 3, CASES, MOST, node_transport=transport)
    dist.barrier()  # rank 0 has the store
    return counts


def check_calls(networks: Networks, ranks: RankPool, layout: Layout, transport: str) -> None:
    first, *others = ranks.run(layout.world, run_calls, networks.places(), layout, transport)
    assert all(counts == first for counts in others)
    assert set(first) == {call.__name__ for call in calls_of(layout)}


@over_each_transport
@pytest.mark.parametrize("layout", [Layout(4, 2), Layout(2, 4), Layout(3, 2, alternate=True)], ids=str)
def test_random_calls(mortal_ranks: RankPool, layout: Layout, transport: str) -> None:
    with Networks(layout.nodes) as networks:
        check_calls(networks, mortal_ranks, layout, transport)


@dataclass(frozen=True)
class Trouble:
    """What a network does to packets.

    Attributes:
        name: Of the case.
        begin: Begins it. Returns why it is not possible here, or "".
        sign: The counter that shows that it has happened.
        layout: Of the nodes.
    """

    name: str
    begin: Callable[[Networks], str]
    sign: str
    layout: Layout


TROUBLES = [
    # Packets wait for each other, and are dropped where the queue is full.
    Trouble("slow", lambda networks: networks.queue(node_networks.SLOW), "overlimits", Layout(2, 2)),
    Trouble("loses packets", lambda networks: networks.lose(0.02), "dropped", Layout(3, 2)),
    # It delays, loses, doubles and reorders.
    Trouble("unruly", lambda networks: networks.queue(node_networks.UNRULY), "dropped", Layout(2, 2)),
]


@over_each_transport
@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.name)
def test_a_network_in_trouble(mortal_ranks: RankPool, trouble: Trouble, transport: str) -> None:
    with Networks(trouble.layout.nodes) as networks:
        why_not = trouble.begin(networks)
        if why_not:
            pytest.skip(why_not)
        check_calls(networks, mortal_ranks, trouble.layout, transport)
        assert networks.counted(trouble.sign) > 0


# ---- Cables --------------------------------------------------------------------------------------------------------


def call_during_an_outage(places: list[Place], layout: Layout, transport: str, seconds: float) -> int:
    """Returns how many calls have ended by the time that a call begun after the outage has."""
    place = move_to(places, layout)
    calls = 0
    # On a busy machine the cable may stay cut for longer, and TCP waits twice as long each time before it tries again.
    with make(layout, node_transport=transport, timeout_s=60.0) as comm:
        comm.all_reduce(torch.ones(1000))
        dist.barrier()
        outage = place.cut(seconds) if comm.rank == layout.world - 1 else None
        is_over = False
        while not is_over:
            has_ended = outage is not None and outage.poll() is not None
            # The last element tells all ranks at once.
            x = torch.cat([torch.full((1000,), float(calls % 7)), torch.tensor([float(has_ended)])])
            total = comm.all_reduce(x)
            assert total[:-1].eq(layout.world * (calls % 7)).all(), calls
            is_over = bool(total[-1] > 0)
            calls += 1
        assert outage is None or outage.returncode == 0
        comm.check()
    dist.barrier()
    return calls


@over_each_transport
def test_an_outage_that_ends_in_time_fails_no_call(mortal_ranks: RankPool, transport: str) -> None:
    layout = Layout(2, 2)
    with Networks(layout.nodes) as networks:
        calls = mortal_ranks.run(layout.world, call_during_an_outage, networks.places(), layout, transport, 1.0)
    assert len(set(calls)) == 1


def told_of_a_cut(places: list[Place], layout: Layout, transport: str, makes_calls: bool) -> tuple[str, float]:
    """What a rank is told when a cable is cut, with or without calls, and after how many seconds."""
    place = move_to(places, layout)
    comm = make(layout, node_transport=transport, timeout_s=TIMEOUT_S)
    _left_open.append(comm)
    x = torch.ones(1000)
    comm.all_reduce(x)
    has_failed = threading.Event()
    said: list[str] = []

    def hear(error: llm_comm.CommunicatorError) -> None:
        said.append(" ".join(f"{type(error).__name__}: {error}".split()))
        has_failed.set()

    comm.on_error(hear)
    # Not a barrier: some would wait for ever for a message that was on its way when the cable was cut.
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    store.set(f"ready {rank}", "")
    begin = time.monotonic()
    if rank == layout.world - 1:
        store.wait([f"ready {other}" for other in range(layout.world)])
        assert place.cut().wait() == 0
    while not has_failed.is_set() and time.monotonic() - begin < 60:
        if makes_calls:
            try:
                comm.all_reduce(x)
            except llm_comm.CommunicatorError:
                break
        has_failed.wait(0.01)
    has_failed.wait(5)
    return said[0] if said else "nothing", time.monotonic() - begin


#: The store is out of reach, so nothing can be closed.
_left_open: list[llm_comm.Communicator] = []


@over_each_transport
@pytest.mark.parametrize("makes_calls", [True, False], ids=["calls", "idle"])
def test_a_cable_that_is_cut_is_told_on_both_sides(mortal_ranks: RankPool, transport: str, makes_calls: bool) -> None:
    layout = Layout(2, 2)
    with Networks(layout.nodes) as networks:
        told = mortal_ranks.run(layout.world, told_of_a_cut, networks.places(), layout, transport, makes_calls)
    for rank, (text, seconds) in enumerate(told):
        elsewhere = 1 - layout.node_of(rank)
        named = [
            f"no sign of life from node {elsewhere}",
            *(f"waits for rank {r} " for r in layout.ranks_of(elsewhere)),
        ]
        assert text.startswith("PeerTimeout: "), text
        assert any(words in text for words in named), text
        assert seconds < TIMEOUT_S + SLACK_S
