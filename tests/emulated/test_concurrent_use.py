"""One communicator used from two streams or threads, and several communicators at once."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import cores
import pytest
import torch
import torch.distributed as dist
from harness import RankPool, make_communicator, new_groups, store
from nodes_cases import Layout, make
from reference import assert_is_sum, contributions
from ucx_here import needs_ucx

import llm_comm
from llm_comm import Communicator, CommunicatorError, _core
from llm_comm.planning.node_rows import NodeRow

TESTS = Path(__file__).parents[1]
CSRC = TESTS.parent / "csrc"
# ErrorCause in csrc/include/llm_comm/wait.cuh.
NONE, TIMEOUT, MISMATCH, CONCURRENT_USE = range(-1, 3)


# ---- Streams, which an emulated Communicator does not have: kernels alone --------------------------------------------


def build(directory: Path, *more_flags: str) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    built = directory / "streams"
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-DLLM_COMM_EMULATOR", *more_flags]
    flags += [f"-I{CSRC}", f"-I{CSRC / 'include'}"]
    libraries = [f"-L{llm_comm.get_library_dir()}", "-lllm_comm_emulator", "-pthread"]
    source = TESTS / "concurrent_use" / "streams.cpp"
    subprocess.run(["g++", *flags, str(source), "-o", str(built), *libraries], check=True)
    return built


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("concurrent_use"))


def causes(program: Path, scenario: str) -> tuple[list[int], list[int], list[str]]:
    """Cause and peer of each rank's error, and what is printed of its sums."""
    done = subprocess.run([program, scenario], capture_output=True, text=True, timeout=60, check=True)
    lines = [line.split(", ", 2) for line in done.stdout.splitlines()]
    return (
        [int(a.rpartition(" ")[2]) for a, _, _ in lines],
        [int(b.split()[1]) for _, b, _ in lines],
        [c for _, _, c in lines],
    )


def test_operation_that_begins_within_another_one(program: Path) -> None:
    """The rank on which it happens says so; the other one does not wait for it until its time is up."""
    found, peers, sums = causes(program, "overlap")
    assert found == [CONCURRENT_USE, TIMEOUT]
    assert peers == [0, 0]
    assert sums == ["sums 2, right 0", "sums 1, right 0"]


def test_launches_in_another_order_on_each_rank(program: Path) -> None:
    found, peers, sums = causes(program, "order")
    assert found == [MISMATCH, MISMATCH]
    assert peers == [1, 1]
    assert sums == ["sums 2, right 0"] * 2


def test_streams_that_take_turns(program: Path) -> None:
    found, _, sums = causes(program, "ordered")
    assert found == [NONE, NONE]
    assert sums == ["sums 200, right 200"] * 2


def test_numbers_that_two_operations_had(program: Path) -> None:
    """What the host finds without debug: two operations of one number; and another order than on a peer that has ended
    as many. What it reads while an operation counts itself proves nothing."""
    done = subprocess.run([program, "numbers"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [
        "at once: 9 operations, settled 0, overlap 1, differs 0",
        "in turn: 9 operations, settled 1, overlap 0, differs 0",
        "without the last: 9 operations, settled 0, overlap 0, differs 0",
        "with the next: 8 operations, settled 0, overlap 0, differs 0",
        "in the other order: 9 operations, settled 1, overlap 0, differs 1",
        "one less: 8 operations, settled 1, overlap 0, differs 0",
    ]


@pytest.mark.parametrize("orders", [((0, 1), (0, 1)), ((0, 1), (1, 0))], ids=["one order", "two orders"])
def test_calls_in_another_order_without_debug(orders: tuple[tuple[int, ...], ...]) -> None:
    """As of a graph that is replayed beside eager calls: the sums are wrong without an error, and the host finds it."""
    ranks = cores.connected(2)
    x = [torch.full((64,), 1.0, dtype=dtype) for dtype in (torch.float16, torch.bfloat16)]
    number = cores.number_of("all_reduce", "one_shot")
    tiling = _core.Tiling(blocks=1, tile_lines=8, cluster=1, depth=0, launch_units=64)

    def call_in(rank: int) -> None:
        out = torch.empty_like(x[0])
        for i in orders[rank]:
            call = ranks[rank].prepare(number, cores.problem_of(x[i], 2), tiling)
            assert call(x[i].data_ptr(), out.data_ptr(), 0)

    in_threads(lambda: call_in(0), lambda: call_in(1))
    for rank, core in enumerate(ranks):
        assert core.error() is None
        core.check_order()
        error = core.error()
        if orders[0] == orders[1]:
            assert error is None
        else:
            assert (error.cause, error.rank, error.peer, error.sequence) == ("order", rank, 1 - rank, 2)


class Captured:
    """A core of which graphs hold launches."""

    def __init__(self, core: _core.Core) -> None:
        self.core = core
        self.looks = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.core, name)

    def has_been_captured(self) -> bool:
        return True

    def check_order(self) -> None:
        self.looks += 1
        self.core.check_order()
        raise RuntimeError("the device has an error of its own")


def check_with_graphs() -> None:
    with make_communicator() as comm:
        reduce_often(comm, 64, 3)
        watchdog = comm._handle._watchdog
        watchdog._core = Captured(watchdog._core)
        comm.check()
        assert watchdog._core.looks >= 1


def test_check_asks_the_gpus_where_there_are_graphs(ranks: RankPool) -> None:
    ranks.run(2, check_with_graphs)


def test_kernels_without_bounded_waits(tmp_path: Path) -> None:
    """The build that measures what the bound costs does the same work."""
    found, _, sums = causes(build(tmp_path, "-DLLM_COMM_UNBOUNDED_WAITS"), "ordered")
    assert found == [NONE, NONE]
    assert sums == ["sums 200, right 200"] * 2


# ---- Threads ---------------------------------------------------------------------------------------------------------


def in_threads(*work: Callable[[], None]) -> None:
    """Runs all at once; raises what one of them raised."""
    errors: list[BaseException] = []

    def run(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[one]) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def reduce_often(comm: Communicator, count: int, calls: int, seed: int = 0) -> None:
    inputs = contributions(comm.world_size, count, torch.bfloat16, seed)
    for call in range(calls):
        assert_is_sum(comm.all_reduce(inputs[comm.rank]), inputs, f"call {call}")


def share_a_communicator(threads: int, calls: int) -> None:
    with make_communicator() as comm:
        in_threads(*[lambda: reduce_often(comm, 3000, calls)] * threads)


def test_threads_take_turns(ranks: RankPool) -> None:
    """All calls are alike: which thread's comes first on which rank is up to chance."""
    ranks.run(2, share_a_communicator, 3, 40)


def repeat(call: Callable[[], torch.Tensor], expected: torch.Tensor, what: str) -> None:
    for _ in range(4):
        assert torch.equal(call(), expected), what


def share_over_nodes(transport: str, places: int) -> None:
    """Each kind of call with what it returns where one thread alone makes it."""
    with make(Layout(2, places), node_transport=transport) as comm:
        # Of whole messages and in chunks.
        for chunk_bytes in (0, 1 << 14)[:places]:
            row = NodeRow(2, 1 << 40, "all_to_all", chunk_bytes, is_faster=True)
            comm.use_table(comm.table_of_node._replace(nodes=(row,)))
            x = torch.arange(9000, dtype=torch.float32) * (comm.rank + 1)
            rows = x[:1024].view(16, 64).bfloat16()
            calls: list[Callable[[], torch.Tensor]] = [
                lambda x=x: comm.all_reduce(x),
                lambda x=x: comm.all_gather(x),
                lambda x=x: comm.reduce_scatter(x),
            ]
            if places > 1:
                calls.append(lambda rows=rows: comm.all_reduce_add_rms_norm(rows, rows, rows[0], 1e-6)[0])
            for number, call in enumerate(calls):
                again = partial(repeat, call, call(), f"call {number}")
                in_threads(again, again)
                dist.barrier()  # calls of both threads are alike


@pytest.mark.parametrize(("transport", "places"), [("gloo", 2), pytest.param("ucx", 1, marks=needs_ucx)])
def test_threads_take_turns_over_nodes(ranks: RankPool, transport: str, places: int) -> None:
    ranks.run(2 * places, share_over_nodes, transport, places)


class AnnouncedLock:
    """A lock that sets an event when somebody comes to it, before it is held."""

    def __init__(self, lock: threading.RLock, reached: threading.Event) -> None:
        self._lock = lock
        self._reached = reached

    def __enter__(self) -> None:
        self._reached.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def close_beside_a_call() -> None:
    """Of a rank whose partner does not come to the call before the rank closes."""
    comm = make(Layout(2, 1))
    if comm.rank == 0:
        nodes = comm._multi_node
        hierarchy = nodes._hierarchy
        in_call = threading.Thread(target=reduce_often, args=[comm, 3000, 1])
        in_call.start()
        while not hierarchy._is_in_call:
            time.sleep(0.001)
        closes_or_waits = threading.Event()
        ended_within_a_call = []
        stop = nodes._watch.stop

        def note_and_stop() -> None:
            ended_within_a_call.append(hierarchy._is_in_call)
            closes_or_waits.set()
            stop()

        nodes._watch.stop = note_and_stop
        hierarchy.call_lock = AnnouncedLock(hierarchy.call_lock, closes_or_waits)
        closes = threading.Thread(target=comm.close)
        closes.start()
        assert closes_or_waits.wait(30)
        store().set("called", "")
        in_call.join()
        closes.join()
        assert ended_within_a_call == [False]
        with pytest.raises(RuntimeError, match="communicator is closed"):
            reduce_often(comm, 3000, 1)
    else:
        store().wait(["called"])
        reduce_often(comm, 3000, 1)
        comm.close()


def leave_a_call(how: str) -> str:
    """What both ranks are told where a signal handler of rank 0 comes between two phases of a call, and makes a call of
    its own or raises."""
    with make(Layout(2, 1)) as comm:
        x = torch.ones(300)
        if comm.rank == 0:
            exchange = comm._multi_node._hierarchy.exchange

            def handle(*_: object) -> None:
                if how == "raises":
                    raise KeyboardInterrupt
                comm.all_reduce(x)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(exchange, "add", handle)
                with pytest.raises(KeyboardInterrupt if how == "raises" else CommunicatorError):
                    comm.all_reduce(x)
        with pytest.raises(CommunicatorError) as caught:
            comm.all_reduce(x)
    return str(caught.value)


def test_close_waits_for_a_call_over_nodes(ranks: RankPool) -> None:
    ranks.run(2, close_beside_a_call)


@pytest.mark.parametrize(
    ("how", "words"),
    [("raises", "KeyboardInterrupt interrupted all_reduce"), ("calls", "called within another operation")],
)
def test_call_over_nodes_that_is_left_ends_the_communicator(ranks: RankPool, how: str, words: str) -> None:
    assert all(words in text for text in ranks.run(2, leave_a_call, how))


def communicators_at_once(memberships: list[list[int]], calls: list[int]) -> None:
    rank = dist.get_rank()
    groups = new_groups(memberships)
    mine = {n: make_communicator(group) for n, group in enumerate(groups) if rank in memberships[n]}
    in_threads(*[lambda n=n, comm=comm: reduce_often(comm, 500 * (n + 1), calls[n], n) for n, comm in mine.items()])
    for comm in mine.values():
        comm.close()


def test_overlapping_groups_at_once_with_unequal_call_counts(ranks: RankPool) -> None:
    """Tensor parallel pairs, an expert parallel group across them, and all: each group in a thread of its own."""
    memberships = [[0, 1], [2, 3], [1, 2], [0, 1, 2, 3]]
    ranks.run(4, communicators_at_once, memberships, [90, 40, 20, 60])
