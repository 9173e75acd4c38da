"""Closing, reopening and dropping communicators."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, make_communicator, nothing_leaked, store
from reference import assert_is_sum, contributions
from ucx_here import needs_ucx

from llm_comm import Communicator, CommunicatorError, UnsupportedInputError

X = torch.ones(10)
ROWS = torch.ones(2, 64, dtype=torch.bfloat16)
USES: dict[str, Callable[[Communicator], object]] = {
    "all_reduce": lambda comm: comm.all_reduce(X),
    "all_reduce in place": lambda comm: comm.all_reduce(X, out=X),
    "try_all_reduce": lambda comm: comm.try_all_reduce(X),
    "try_all_reduce_add_rms_norm": lambda comm: comm.try_all_reduce_add_rms_norm(ROWS, None, ROWS[0], 1e-5),
    "all_reduce of nothing": lambda comm: comm.all_reduce(X[:0]),
    "all_reduce of a new size": lambda comm: comm.all_reduce(X[:5]),
    "plan_all_reduce_add_rms_norm": lambda comm: comm.plan_all_reduce_add_rms_norm(ROWS, ROWS[0]),
    "accepts_all_reduce_add_rms_norm": lambda comm: comm.accepts_all_reduce_add_rms_norm(ROWS, ROWS[0]),
    "accepts_all_reduce_add_rms_norm in a graph": lambda comm: torch.compile(
        comm.accepts_all_reduce_add_rms_norm, backend="eager"
    )(ROWS, ROWS[0]),
    "on_error": lambda comm: comm.on_error(print),
    "check": lambda comm: comm.check(),
    "workspace_bytes": lambda comm: comm.workspace_bytes,
}


def use_after_close(use: str) -> None:
    comm = make_communicator()
    USES[use](comm)
    comm.close()
    with pytest.raises(RuntimeError, match="communicator is closed"):
        USES[use](comm)
    comm.close()  # again: no error


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("world", [1, 2])
def test_closed_communicator_says_so(ranks: RankPool, world: int, use: str) -> None:
    ranks.run(world, use_after_close, use)


def close_at_different_times() -> None:
    """A rank may close as soon as its own last operation has ended."""
    for call in range(20):
        inputs = contributions(3, 4000, torch.bfloat16, call)
        with make_communicator() as comm:
            assert comm.workspace_bytes == comm.config.workspace_bytes
            assert_is_sum(comm.all_reduce(inputs[comm.rank]), inputs, f"communicator {call}")


def test_new_communicator_after_close(ranks: RankPool) -> None:
    ranks.run(3, close_at_different_times)


def open_and_close(cycles: int) -> None:
    make_communicator().close()
    with nothing_leaked():
        for _ in range(cycles):
            with make_communicator() as comm:
                comm.all_reduce(torch.ones(100))


def test_nothing_is_left_of_closed_communicators(ranks: RankPool) -> None:
    ranks.run(3, open_and_close, 30)


def drop() -> None:
    make_communicator().close()
    with nothing_leaked():
        comm = make_communicator()
        comm.all_reduce(torch.ones(100))
        found = weakref.ref(comm)
        del comm
        gc.collect()
        assert found() is None


def test_nothing_is_left_of_dropped_communicators(ranks: RankPool) -> None:
    ranks.run(2, drop)


class Owner:
    def __init__(self) -> None:
        self.comm = make_communicator()
        self.comm.on_error(self.failed)

    def failed(self, _error: CommunicatorError) -> None:
        pass


def drop_owner() -> None:
    owner = Owner()
    found = weakref.ref(owner.comm)
    del owner
    gc.collect()
    assert found() is None


def test_a_callback_does_not_keep_the_communicator(ranks: RankPool) -> None:
    ranks.run(2, drop_owner)


def close_on_broken_device() -> None:
    comm = make_communicator()
    comm._handle.device = torch.device("cuda", 0)
    with mock.patch("torch.cuda.current_stream", side_effect=RuntimeError("an illegal memory access")):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            comm.close()
        comm.close()
    assert all(thread.name != "llm_comm watchdog" for thread in threading.enumerate())
    with pytest.raises(RuntimeError, match="communicator is closed"):
        comm.all_reduce(X)


def test_close_on_a_broken_device(ranks: RankPool) -> None:
    ranks.run(2, close_on_broken_device)


# ---- Forked children -----------------------------------------------------------------------------------------------

IN_CHILD: dict[str, Callable[[Communicator], object]] = {
    **{use: USES[use] for use in ("all_reduce", "all_reduce of nothing", "all_reduce of a new size", "on_error")},
    "check": lambda comm: comm.check(),
    "workspace_bytes": lambda comm: comm.workspace_bytes,
    "all_gather": lambda comm: comm.all_gather(X),
    "reduce_scatter": lambda comm: comm.reduce_scatter(X),
    "fused": lambda comm: comm.all_reduce_add_rms_norm(ROWS, ROWS, ROWS[0], 1e-6),
    "linear": lambda comm: comm.linear(ROWS, ROWS.new_ones(64, 64)),
}
IN_CHILD_OF_A_NODE: dict[str, Callable[[Communicator], object]] = {
    "empty": lambda comm: comm.empty(10),
    "channels": lambda comm: comm.channels(),
    "release": lambda comm: comm.release(),
    "restore": lambda comm: comm.restore(),
}


def not_refused(comm: Communicator) -> list[str]:
    """What a forked child may do with its parent's communicator, though it must not."""
    uses = IN_CHILD if comm.nodes > 1 else IN_CHILD | IN_CHILD_OF_A_NODE
    permitted = []
    for name, use in uses.items():
        try:
            use(comm)
        except RuntimeError as error:
            if "communicator belongs to" in str(error):
                continue
            permitted.append(f"{name}: {error}")
        else:
            permitted.append(name)
    return permitted


def wait_for_child(child: int) -> None:
    assert os.waitpid(child, 0)[1] == 0, "the child did more than it may, hung, or died"


def fork_beside_a_call(transport: str | None) -> None:
    """Rank 0 forks while a call of another thread waits for rank 1, with the lock of its communicator."""
    rank, x = dist.get_rank(), torch.ones(10)
    comm = make_communicator(**({} if transport is None else {"node": f"n{rank}", "node_transport": transport}))
    for use in IN_CHILD.values():
        with contextlib.suppress(UnsupportedInputError):
            use(comm)  # what it prepares the child has, too
    if rank == 0:
        spread, launches = comm._multi_node, comm.stats().progress.launches
        sums: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: sums.append(comm.all_reduce(x)))
        thread.start()
        while not (comm.stats().progress.launches > launches if spread is None else spread._hierarchy._is_in_call):
            time.sleep(0.001)
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # in place of a hang
            permitted = not_refused(comm)
            print(*permitted, sep="\n", file=sys.stderr, flush=True)
            os._exit(len(permitted))
        wait_for_child(child)
        store().set("the child has ended", "")
        thread.join()
        assert sums[0].eq(2).all()
        child = os.fork()
        if child == 0:  # one that drops what it has, and ends as an interpreter does
            signal.alarm(60)
            comm.close()
            del comm, spread
            gc.collect()
            atexit._run_exitfuncs()
            os._exit(0)
        wait_for_child(child)
    else:
        store().wait(["the child has ended"])
        comm.all_reduce(x)
    assert comm.all_reduce(x).eq(2).all()
    comm.close()


@pytest.mark.parametrize("transport", [None, "gloo", pytest.param("ucx", marks=needs_ucx)])
def test_forked_child_leaves_the_communicator_alone(ranks: RankPool, transport: str | None) -> None:
    ranks.run(2, fork_beside_a_call, transport)
