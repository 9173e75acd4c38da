"""What an error says of the operation that it is about: which one, of how many bytes, in which phase, and whose fault.

Cores without processes: each rank is a thread. So waits of the kernels themselves can be looked at too, which otherwise
come behind the comparison of calls.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest
import torch

from llm_comm import _core, registry
from llm_comm.planning.tables import ALL_REDUCE, FUSED

HIDDEN = 64
ROWS = 2  # of a launch
BF16 = tuple(registry.data_types()).index("bf16")
ALGORITHMS = [(a.operation, a.name) for name in (ALL_REDUCE, FUSED) for a in registry.operations()[name].algorithms]
every_algorithm = pytest.mark.parametrize(("operation", "algorithm"), ALGORITHMS)


def connected(world: int, check_calls: bool, timeout_s: float = 0.5) -> list[_core.Core]:
    options = [
        _core.CoreOptions(
            rank=rank,
            world_size=world,
            slot_bytes=1 << 16,
            timeout_s=timeout_s,
            dependent_launch=False,
            check_calls=check_calls,
        )
        for rank in range(world)
    ]
    cores = [_core.make_emulated_core(of_rank) for of_rank in options]
    handles = [core.create_workspace(False) for core in cores]
    for rank, core in enumerate(cores):
        for peer, handle in enumerate(handles):
            if peer != rank:
                core.map_peer(peer, *handle)
    for fd, _ in handles:
        os.close(fd)
    return cores


def prepared(
    core: _core.Core, world: int, operation: str, algorithm: str, launches: int, rows: int = ROWS
) -> Callable[[], bool]:
    """A call of so many launches of ``rows`` rows each, the last of one."""
    is_fused = operation == FUSED
    count = ((launches - 1) * rows + 1) * HIDDEN if launches > 1 else rows * HIDDEN
    problem = _core.Problem(
        count=count,
        row=HIDDEN if is_fused else 0,
        data_type=BF16,
        world_size=world,
        parameters=(1e-5, 0) if is_fused else (),
    )
    launch_units = rows * (1 if is_fused else HIDDEN)
    tiling = _core.Tiling(blocks=1, tile_lines=8, cluster=1, depth=0, launch_units=launch_units)
    number = next(a.number for a in registry.operations()[operation].algorithms if a.name == algorithm)
    run = core.prepare(number, problem, tiling)
    x, out, residual = (
        torch.ones(count, dtype=torch.bfloat16),
        torch.empty(count, dtype=torch.bfloat16),
        torch.empty(count),
    )
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16)

    def call() -> bool:
        if is_fused:
            return run(x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), residual.data_ptr(), 0, 0)
        return run(x.data_ptr(), out.data_ptr(), 0)

    return call


def together(*calls: Callable[[], bool]) -> list[bool]:
    """Each in a thread of its own."""
    results: dict[int, bool] = {}

    def run(number: int) -> None:
        results[number] = calls[number]()

    threads = [threading.Thread(target=run, args=[number]) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(len(calls))]


@every_algorithm
@pytest.mark.parametrize("check_calls", [False, True])
@pytest.mark.parametrize("missed", [1, 2])
def test_a_launch_that_a_peer_does_not_make(operation: str, algorithm: str, check_calls: bool, missed: int) -> None:
    """Of three, the last of them shorter. The error is about that launch, not about the whole call."""
    cores = connected(2, check_calls)
    whole = prepared(cores[0], 2, operation, algorithm, 3)
    others = [prepared(cores[1], 2, operation, algorithm, 1) for _ in range(missed)]
    assert together(whole, lambda: all(other() for other in others)) == [False, True]
    error = cores[0].error()
    assert error is not None
    assert (error.cause, error.rank, error.peer) == ("timeout", 0, 1)
    assert error.phase == (-1 if check_calls else 0)
    assert error.sequence == missed
    assert error.bytes == (ROWS if missed < 2 else 1) * HIDDEN * 2
    assert error.operation == next(a.title for a in registry.operations()[operation].algorithms if a.name == algorithm)
    assert cores[1].operations_ended() == missed


@pytest.mark.parametrize("lost", [1, 2])
def test_a_process_that_has_exited(lost: int) -> None:
    """Both peers are missing; one is known to have exited. That ends the wait long before the time-out, and is told."""
    cores = connected(3, False, timeout_s=600.0)
    call = prepared(cores[0], 3, ALL_REDUCE, "one_shot", 1)

    def tell() -> bool:
        time.sleep(0.2)
        cores[0].peer_exited(lost)
        return True

    assert together(call, tell) == [False, True]
    error = cores[0].error()
    assert error is not None
    assert (error.cause, error.peer, error.sequence, error.bytes) == ("peer exited", lost, 0, ROWS * HIDDEN * 2)


@pytest.mark.parametrize(("rows", "odd_one"), [((2, 4, 6), 1), ((2, 2, 4), 2), ((4, 2, 2), 1), ((2, 4, 4), 1)])
def test_ranks_that_disagree_name_the_first_that_differs_from_rank_0(rows: tuple[int, ...], odd_one: int) -> None:
    cores = connected(3, True, timeout_s=60.0)
    calls = [prepared(core, 3, FUSED, "one_shot", 1, of_rank) for core, of_rank in zip(cores, rows, strict=True)]
    assert together(*calls) == [False] * 3
    for rank, core in enumerate(cores):
        error = core.error()
        assert error is not None
        assert (error.cause, error.rank, error.peer) == ("mismatch", rank, odd_one)
        assert (error.phase, error.sequence, error.bytes) == (-1, 0, rows[rank] * HIDDEN * 2)
        assert [(call.count, call.row, call.number) for call in error.calls] == [(n * HIDDEN, HIDDEN, 1) for n in rows]
