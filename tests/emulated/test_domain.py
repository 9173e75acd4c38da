"""Hosts of one NVLink domain: ranks that share memory by fabric handles alone, with what goes wrong between hosts.

A fabric handle of an emulated GPU names a descriptor of its process. Ranks say of themselves that they are on several
hosts. In some tests these are network namespaces, between which no descriptor can be passed.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import node_networks
import pytest
import torch
import torch.distributed as dist
from harness import RankPool, make_communicator, unnamed
from node_networks import Networks, Place
from nodes_cases import Layout
from reference import ALGORITHMS, assert_is_sum, contributions
from test_nodes_networks import move_to
from test_rendezvous import same_on_all

from llm_comm import Communicator, PeerTimeout, _core
from llm_comm.config import EngineOptions
from llm_comm.integrations.joining import NotJoinedError, join
from llm_comm.nodes import topology
from llm_comm.runtime import linked_status
from llm_comm.runtime.status import RankState

TWO_HOSTS = Layout(2, 2)
KIND = "POSIX shared memory by name"
TIMEOUT_S = 4.0
SLACK_S = 10.0
needs_networks = pytest.mark.skipif(bool(node_networks.why_not()), reason=node_networks.why_not() or "-")


@contextmanager
def as_hosts(layout: Layout, domain: str = "cluster/1") -> Iterator[None]:
    """Has this rank say that it is on a host of the layout, and in an NVLink domain."""
    node = layout.node_of(dist.get_rank())
    identity = {"host": f"host{node}", "boot_id": f"boot{node}"}
    with (
        mock.patch.object(topology, "host_identity", return_value=identity),
        mock.patch.object(topology, "fabric_domain", return_value=domain),
    ):
        yield


def make(layout: Layout = TWO_HOSTS, domain: str = "cluster/1", **options: Any) -> Communicator:
    with as_hosts(layout, domain):
        return make_communicator(**options)


# ---- Results -------------------------------------------------------------------------------------------------------


def check_calls(comm: Communicator) -> None:
    world, rank = comm.world_size, comm.rank
    for count in (1, 1000, 40_000):
        for dtype in (torch.bfloat16, torch.float32):
            inputs = contributions(world, count, dtype)
            assert_is_sum(comm.all_reduce(inputs[rank]), inputs, f"{count} {dtype}")
    x = torch.full((3,), float(rank))
    assert comm.all_gather(x).tolist() == [float(peer) for peer in range(world) for _ in range(3)]
    rows, weight = torch.ones(4, 256).bfloat16(), torch.full((256,), 2.0).bfloat16()
    normed, total = comm.all_reduce_add_rms_norm(rows, rows, weight, 1e-5)[:2]
    assert total.eq(world + 1).all()
    assert normed.eq(2).all()
    symmetric = comm.empty(5000, torch.float32)
    symmetric.fill_(rank + 1)
    assert comm.all_reduce(symmetric).eq(world * (world + 1) / 2).all()
    comm.check()


def serve(layout: Layout, algorithm: str) -> str:
    with make(layout, algorithm=algorithm) as comm:
        assert (comm.nodes, comm.world_size) == (1, layout.world)
        check_calls(comm)
        comm.release()
        comm.restore()
        check_calls(comm)
        return comm.memory_kind


@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])
@pytest.mark.parametrize("layout", [TWO_HOSTS, Layout(3, 1), Layout(2, 2, alternate=True)], ids=str)
def test_ranks_of_a_domain_are_one_group(ranks: RankPool, layout: Layout, algorithm: str) -> None:
    assert set(ranks.run(layout.world, serve, layout, algorithm)) == {KIND}


def serve_in(places: list[Place], layout: Layout) -> None:
    move_to(places, layout)
    with make(layout) as comm:
        check_calls(comm)
    dist.barrier()  # rank 0 has the store


@needs_networks
def test_hosts_with_networks_of_their_own(mortal_ranks: RankPool) -> None:
    with Networks(TWO_HOSTS.nodes) as networks:
        mortal_ranks.run(TWO_HOSTS.world, serve_in, networks.places(), TWO_HOSTS)


def descriptors_left(layout: Layout) -> int:
    make(layout).close()  # what is opened once
    gc.collect()  # and what earlier tests of this process have left
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(6):
        with make(layout) as comm:
            comm.all_reduce(torch.ones(10))
    del comm
    return len(os.listdir("/proc/self/fd")) - before


def test_little_stays_open(ranks: RankPool) -> None:
    # The connections of the last communicator, until the peers have closed theirs.
    assert max(ranks.run(TWO_HOSTS.world, descriptors_left, TWO_HOSTS)) < TWO_HOSTS.world


# ---- Ranks that are not one group ----------------------------------------------------------------------------------


def nodes_of(domain_of_host: list[str]) -> int:
    layout = Layout(2, 2)
    with make(layout, domain_of_host[layout.node_of(dist.get_rank())]) as comm:
        check_sum(comm)
        return comm.nodes


def check_sum(comm: Communicator) -> None:
    assert comm.all_reduce(torch.full((2000,), comm.rank + 1.0)).eq(comm.world_size * (comm.world_size + 1) / 2).all()


@pytest.mark.parametrize(
    ("domains", "nodes"), [(["a/1", "a/1"], 1), (["a/1", "a/2"], 2), (["", ""], 2), (["a/1", ""], 2)]
)
def test_hosts_of_other_domains_are_other_nodes(ranks: RankPool, domains: list[str], nodes: int) -> None:
    assert set(ranks.run(4, nodes_of, domains)) == {nodes}


@contextmanager
def failing(step: str, rank: int) -> Iterator[None]:
    """A step of the set-up by fabric handles fails on one rank, as where IMEX does not permit it."""
    original = getattr(_core.Core, step)

    def fail(core: Any, *arguments: Any) -> Any:
        if arguments[0] == "fabric" or (step == "map_peer" and arguments[2]):
            raise RuntimeError("operation not permitted")
        return original(core, *arguments)

    if dist.get_rank() != rank:
        yield
        return
    with mock.patch.object(_core.Core, step, fail):
        yield


def go_on_as_nodes(step: str) -> tuple[int, str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("llm_comm").addHandler(handler)
    with failing(step, 1), as_hosts(TWO_HOSTS), make_communicator() as comm:
        check_sum(comm)
        nodes = comm.nodes
    logging.getLogger("llm_comm").removeHandler(handler)
    found = [text for text in said if "each host is a node of its own" in text]
    assert len(found) == (dist.get_rank() == 0), said
    return nodes, "".join(found)


@pytest.mark.parametrize("step", ["create_workspace", "map_peer"])
def test_without_fabric_handles_hosts_are_nodes(ranks: RankPool, step: str) -> None:
    told = ranks.run(TWO_HOSTS.world, go_on_as_nodes, step)
    assert {nodes for nodes, _ in told} == {2}
    assert "rank 1" in told[0][1]
    assert "operation not permitted" in told[0][1]


def join_as_an_engine(multi_node: bool) -> str:
    with as_hosts(TWO_HOSTS):
        try:
            with join(
                dist.group.WORLD, torch.device("cpu"), lambda: EngineOptions.load({}, multi_node=multi_node)
            ) as comm:
                check_sum(comm)
                return comm.memory_kind
        except NotJoinedError as error:
            return str(error)


def test_an_engine_uses_a_domain_on_request(ranks: RankPool) -> None:
    assert set(ranks.run(TWO_HOSTS.world, join_as_an_engine, True)) == {KIND}
    text = same_on_all(ranks.run(TWO_HOSTS.world, join_as_an_engine, False))
    assert "the ranks are on several hosts of an NVLink domain, and multi_node is false" in text


# ---- States of ranks -----------------------------------------------------------------------------------------------


def watch_without_connections() -> float:
    """No rank hears of the others, because one cannot listen."""
    why = OSError("no ports left") if dist.get_rank() == 1 else None
    with mock.patch.object(linked_status, "_listen", side_effect=why, wraps=linked_status._listen):
        comm = make(timeout_s=TIMEOUT_S)
    assert comm._handle._watchdog is not None
    assert comm._handle._watchdog._board is None
    with comm:
        check_sum(comm)
        dist.barrier()
        begin = time.monotonic()
        if comm.rank == 0:
            with pytest.raises(PeerTimeout):
                comm.all_reduce(torch.ones(10))
        return time.monotonic() - begin


def test_without_connections_waits_are_bounded(ranks: RankPool) -> None:
    assert ranks.run(TWO_HOSTS.world, watch_without_connections)[0] < TIMEOUT_S + SLACK_S


class Pair:
    """The two ends of a connection, as boards of two ranks."""

    def __init__(self) -> None:
        self.sockets = socket.socketpair()
        self.boards = [linked_status.LinkedBoard(rank, {1 - rank: end}) for rank, end in enumerate(self.sockets)]


def test_a_board_shows_what_was_published_last() -> None:
    pair = Pair()
    first, second = pair.boards
    assert first.look()[1].state is None
    assert first.look()[1].has_exited is False
    for number in range(3):
        second.publish(RankState(f"call {number}"))
    seen = first.look()[1]
    assert (seen.state, seen.has_exited) == (RankState("call 2"), False)
    second.publish(RankState("call 2"))  # a heartbeat that is not due
    time.sleep(linked_status._BEAT_S)
    before = first.look()[1].age_s
    second.publish(RankState("call 2"))
    assert first.look()[1].age_s < before
    second.publish(RankState("call 2", is_closed=True))
    second.close()
    seen = first.look()[1]
    assert (seen.is_closed, seen.has_exited) == (True, False)
    # The process of the other rank ends: its connection with it.
    (kept,) = linked_status._kept
    kept.close()
    linked_status._kept.clear()
    first.publish(RankState("to nobody"))
    seen = first.look()[1]
    assert (seen.is_closed, seen.has_exited) == (True, True)
    first.close()
    assert not linked_status._kept


def test_a_board_notices_an_end_without_a_last_state() -> None:
    first, second = Pair().boards
    second.publish(RankState("the last call"))
    for link in second._links.values():
        link.close()
    seen = first.look()[1]
    assert (seen.state, seen.has_exited) == (RankState("the last call"), True)


@pytest.mark.parametrize("call", ["send", "recv"])
def test_a_network_that_fails_is_no_exit(call: str) -> None:
    first, second = Pair().boards
    second.publish(RankState("alive"))
    (link,) = first._links.values()
    failing_call = mock.Mock(side_effect=OSError(errno.ETIMEDOUT, "timed out"))
    real = link._connection
    link._connection = mock.Mock(wraps=real, **{call: failing_call})
    first.publish(RankState("anything"))
    for _ in range(2):
        assert first.look()[1].has_exited is None
        first.publish(RankState("more"))
    real.close()


def test_a_board_does_not_wait_for_a_peer_that_does_not_read() -> None:
    first, second = Pair().boards
    begin = time.monotonic()
    for number in range(3000):
        first.publish(RankState("x" * 400 + str(number)))
    assert time.monotonic() - begin < SLACK_S
    seen = second.look()[0].state
    assert seen is not None
    assert seen.last_call.startswith("x" * 400)
    first.publish(RankState("last"))
    second.look()
    first.publish(RankState("last of all"))
    assert second.look()[0].state in (RankState("last"), RankState("last of all"))


def test_strangers_are_not_ranks(ranks: RankPool) -> None:
    ranks.run(2, connect_among_strangers)


def connect_among_strangers() -> None:
    original = linked_status._connect

    def connect(rendezvous: Any, server: socket.socket, said: list[Any], secret: str) -> Any:
        strangers = [socket.create_connection(("127.0.0.1", server.getsockname()[1])) for _ in range(5)]
        strangers[0].sendall(b"x" * 300)
        strangers[1].sendall(b"GET / HTTP/1.1\r\n")
        strangers[2].close()
        try:
            return original(rendezvous, server, said, secret)
        finally:
            for each in strangers:
                each.close()

    with mock.patch.object(linked_status, "_connect", connect), make(Layout(2, 1)) as comm:
        assert comm._handle._watchdog is not None
        assert comm._handle._watchdog._board is not None
        check_sum(comm)


# ---- Drills --------------------------------------------------------------------------------------------------------


def drill(places: list[Place], victim: int, how: signal.Signals) -> tuple[str, float]:
    """What a rank is told when another one, on another host, dies or hangs, and seconds until then."""
    move_to(places, TWO_HOSTS)
    comm = make(timeout_s=60.0 if how == signal.SIGKILL else TIMEOUT_S)
    check_sum(comm)
    has_failed = threading.Event()
    said: list[str] = []

    def hear(error: Exception) -> None:
        said.append(f"{type(error).__name__}: {error}")
        has_failed.set()

    comm.on_error(hear, exits=how == signal.SIGKILL)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"process {comm.rank}", str(os.getpid()))
    processes = [int(store.get(f"process {rank}")) for rank in range(TWO_HOSTS.world)]
    if comm.rank == victim:
        os.kill(os.getpid(), how)
    begin = time.monotonic()
    with contextlib.suppress(PeerTimeout):
        while time.monotonic() - begin < SLACK_S:
            comm.all_reduce(torch.ones(1000))
    seconds = time.monotonic() - begin
    assert has_failed.wait(5)
    if comm.rank == 0 and how == signal.SIGSTOP:
        os.kill(processes[victim], signal.SIGCONT)
    comm.close()
    return said[0], seconds


@needs_networks
@pytest.mark.parametrize("victim", [1, 3])
def test_a_death_is_known_on_the_other_host_at_once(mortal_ranks: RankPool, victim: int) -> None:
    with Networks(TWO_HOSTS.nodes) as networks:
        told = mortal_ranks.run(TWO_HOSTS.world, drill, networks.places(), victim, signal.SIGKILL, dying=[victim])
    for rank, answer in enumerate(told):
        if rank != victim:
            text, seconds = answer
            assert f"the process of rank {victim} has exited" in unnamed(text), text
            assert seconds < SLACK_S


@needs_networks
def test_a_rank_that_hangs_is_named_after_the_time_limit(mortal_ranks: RankPool) -> None:
    victim = 3
    with Networks(TWO_HOSTS.nodes) as networks:
        told = mortal_ranks.run(TWO_HOSTS.world, drill, networks.places(), victim, signal.SIGSTOP)
    for text, seconds in told[:victim]:
        assert f"rank {victim}" in unnamed(text), text
        assert text.startswith("PeerTimeout: "), text
        assert seconds < TIMEOUT_S + SLACK_S


def talk_through_an_outage(places: list[Place]) -> None:
    """The network between the hosts is cut. Sums need the domain alone."""
    place = move_to(places, TWO_HOSTS)
    with make(timeout_s=TIMEOUT_S) as comm:
        check_sum(comm)
        # Not a barrier: some would wait for a message that was on its way when the cable was cut.
        store, outage = dist.distributed_c10d._get_default_store(), None
        store.set(f"ready {comm.rank}", "")
        if comm.rank == TWO_HOSTS.world - 1:
            store.wait([f"ready {rank}" for rank in range(TWO_HOSTS.world)])
            outage = place.cut(1.5 * TIMEOUT_S)
        end = time.monotonic() + 1.2 * TIMEOUT_S
        while comm.all_reduce(torch.tensor([float(time.monotonic() < end)])).item() > 0:
            check_sum(comm)
        comm.check()
        assert outage is None or outage.wait() == 0
        dist.barrier()


@needs_networks
def test_a_cut_network_stops_no_sum(mortal_ranks: RankPool) -> None:
    with Networks(TWO_HOSTS.nodes) as networks:
        mortal_ranks.run(TWO_HOSTS.world, talk_through_an_outage, networks.places())
