"""Closing, reopening and dropping communicators."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from harness import RankPool, make_communicator, nothing_leaked
from reference import assert_is_sum, contributions

from llm_comm import Communicator, CommunicatorError

X = torch.ones(10)
ROWS = torch.ones(2, 64, dtype=torch.bfloat16)
USES: dict[str, Callable[[Communicator], object]] = {
    "all_reduce": lambda comm: comm.all_reduce(X),
    "all_reduce in place": lambda comm: comm.all_reduce(X, out=X),
    "try_all_reduce": lambda comm: comm.try_all_reduce(X),
    "all_reduce of nothing": lambda comm: comm.all_reduce(X[:0]),
    "all_reduce of a new size": lambda comm: comm.all_reduce(X[:5]),
    "plan_fused": lambda comm: comm.plan_fused(ROWS, ROWS[0]),
    "accepts_fused": lambda comm: comm.accepts_fused(ROWS, ROWS[0]),
    "accepts_fused in a graph": lambda comm: torch.compile(comm.accepts_fused, backend="eager")(ROWS, ROWS[0]),
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
