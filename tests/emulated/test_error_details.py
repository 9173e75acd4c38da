"""What an error says of the operation that it is about: which one, of how many bytes, in which phase, and whose fault.

With and without the comparison of calls before each operation, in which ranks of emulated GPUs wait otherwise.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cores import connected, number_of, problem_of, symmetric, tiling_of, together, with_window

from llm_comm import _core, registry
from llm_comm.planning.tables import ALL_REDUCE, FUSED

HIDDEN = 64
ROWS = 2  # of a launch
ALGORITHMS = [a for name in (ALL_REDUCE, FUSED) for a in registry.operations()[name].algorithms]
OF_ANY, OF_SYMMETRIC = ([a for a in ALGORITHMS if a.is_symmetric == is_symmetric] for is_symmetric in (False, True))


def each_of(algorithms: list[registry.Algorithm]) -> pytest.MarkDecorator:
    names = [(a.operation, a.name) for a in algorithms]
    return pytest.mark.parametrize(("operation", "algorithm"), names)


def algorithm_of(operation: str, name: str) -> registry.Algorithm:
    return next(a for a in ALGORITHMS if (a.operation, a.name) == (operation, name))


def prepared(
    core: _core.Core,
    world: int,
    operation: str,
    algorithm: str,
    launches: int = 1,
    rows: int = ROWS,
    hidden: int = HIDDEN,
    dtype: torch.dtype = torch.bfloat16,
) -> Callable[[], bool]:
    """A call of so many launches of ``rows`` rows each; of several, the last of one. Where it has to be, of tensors in
    window 0."""
    is_fused = operation == FUSED
    found = algorithm_of(operation, algorithm)
    x = torch.ones((launches - 1) * rows + 1 if launches > 1 else rows, hidden, dtype=dtype)
    out, residual, weight = torch.empty_like(x), torch.empty_like(x), torch.ones(hidden, dtype=dtype)
    if found.is_symmetric:
        x, out = symmetric(core, 0, x), symmetric(core, 1 << 16, out)
    problem = problem_of(x, world, *((1e-5, 0) if is_fused else ()))
    depth = max(1, found.ranges["depth"].least) if "depth" in found.ranges else 0
    tile_lines = max(8, found.ranges["tile_lines"].least) if "tile_lines" in found.ranges else 8
    tiling = tiling_of(rows if is_fused else rows * hidden, blocks=1, tile_lines=tile_lines, depth=depth)
    run = core.prepare(found.number, problem, tiling)

    def call() -> bool:
        if is_fused:
            return run(x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), residual.data_ptr(), 0, 0, 0)
        return run(x.data_ptr(), out.data_ptr(), 0)

    return call


@each_of(OF_ANY)
@pytest.mark.parametrize("check_calls", [False, True])
@pytest.mark.parametrize("missed", [1, 2])
def test_a_launch_that_a_peer_does_not_make(operation: str, algorithm: str, check_calls: bool, missed: int) -> None:
    """Of three, the last of them shorter. The error is about that launch, not about the whole call."""
    cores = connected(2, check_calls, timeout_s=0.5)
    whole = prepared(cores[0], 2, operation, algorithm, 3)
    others = [prepared(cores[1], 2, operation, algorithm, 1) for _ in range(missed)]
    assert together(whole, lambda: all(other() for other in others)) == [False, True]
    error = cores[0].error()
    assert error is not None
    assert (error.cause, error.rank, error.peer) == ("timeout", 0, 1)
    assert error.phase == (-1 if check_calls else 0)
    assert error.sequence == missed
    assert error.bytes == (ROWS if missed < 2 else 1) * HIDDEN * 2
    assert error.calls == []
    assert error.operation == algorithm_of(operation, algorithm).title
    assert cores[1].operations_ended() == missed


def operations_of_a_call(algorithm: str) -> int:
    """Grids that have a number: where copies stand in the stream, one before them and one behind, and one that sums."""
    return {"direct_ce": 2, "two_shot_ce": 3}.get(algorithm, 1)


@each_of(OF_SYMMETRIC)
@pytest.mark.parametrize("check_calls", [False, True])
def test_a_call_of_symmetric_tensors_that_a_peer_does_not_make(
    operation: str, algorithm: str, check_calls: bool
) -> None:
    """The second; each is one launch."""
    cores = with_window(connected(2, check_calls, timeout_s=0.5))
    with pytest.raises(ValueError, match="the message takes one launch"):
        prepared(cores[0], 2, operation, algorithm, 2)
    calls = [prepared(core, 2, operation, algorithm) for core in cores]
    assert together(*calls) == [True, True]
    assert not calls[0]()
    error = cores[0].error()
    assert error is not None
    assert (error.cause, error.rank, error.peer) == ("timeout", 0, 1)
    assert error.phase == (-1 if check_calls else 0)
    assert (error.sequence, error.bytes) == (operations_of_a_call(algorithm), ROWS * HIDDEN * 2)
    assert error.operation == algorithm_of(operation, algorithm).title


@pytest.mark.parametrize("lost", [1, 2])
def test_a_process_that_has_exited(lost: int) -> None:
    """Both peers are missing; one is known to have exited. That ends the wait long before the time-out, and is told."""
    cores = connected(3, False, timeout_s=600.0)
    call = prepared(cores[0], 3, ALL_REDUCE, "one_shot")

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
    calls = [prepared(core, 3, FUSED, "one_shot", rows=of_rank) for core, of_rank in zip(cores, rows, strict=True)]
    assert together(*calls) == [False] * 3
    for rank, core in enumerate(cores):
        error = core.error()
        assert error is not None
        assert (error.cause, error.rank, error.peer) == ("mismatch", rank, odd_one)
        assert (error.phase, error.sequence, error.bytes) == (-1, 0, rows[rank] * HIDDEN * 2)
        assert [(call.count, call.row, call.number) for call in error.calls] == [(n * HIDDEN, HIDDEN, 1) for n in rows]


@pytest.mark.parametrize(
    ("operation", "algorithm", "odd"),
    [
        (ALL_REDUCE, "two_shot", {}),
        (FUSED, "one_shot", {}),
        (ALL_REDUCE, "one_shot", {"dtype": torch.float16}),
        (ALL_REDUCE, "one_shot", {"rows": 1}),
        (FUSED, "two_shot", {"rows": 1, "hidden": 2 * HIDDEN}),
    ],
    ids=["algorithm", "operation", "type", "count", "rows"],
)
def test_calls_that_differ_in_one_thing_alone(operation: str, algorithm: str, odd: dict[str, Any]) -> None:
    usual = (operation, algorithm) if odd else (ALL_REDUCE, "one_shot")
    cores = connected(2, True)
    calls = prepared(cores[0], 2, *usual), prepared(cores[1], 2, operation, algorithm, **odd)
    assert together(*calls) == [False, False]
    for core in cores:
        error = core.error()
        assert error is not None
        assert (error.cause, error.peer) == ("mismatch", 1)
        assert error.calls[0].number == error.calls[1].number == 1


def test_an_optional_buffer_that_the_call_before_had() -> None:
    """A prepared call says what it is given now, not what it was given once."""
    cores = connected(2, True)
    x, weight, residual = torch.ones(ROWS, HIDDEN, dtype=torch.bfloat16), torch.ones(HIDDEN), torch.zeros(ROWS, HIDDEN)
    weight, residual = weight.bfloat16(), residual.bfloat16()
    problem, tiling = problem_of(x, 2, 1e-5, 0), tiling_of(ROWS, blocks=1)
    runs = [core.prepare(number_of(FUSED, "one_shot"), problem, tiling) for core in cores]
    outputs = [(torch.empty_like(x), torch.empty_like(x)) for _ in cores]

    def calls(of_rank: tuple[bool, bool]) -> list[Callable[[], bool]]:
        return [
            lambda run=run, out=out, has=has: run(
                x.data_ptr(), residual.data_ptr() * has, weight.data_ptr(), *(t.data_ptr() for t in out), 0, 0, 0
            )
            for run, out, has in zip(runs, outputs, of_rank, strict=True)
        ]

    assert together(*calls((True, True))) == [True, True]
    assert together(*calls((True, False))) == [False, False]
    for core in cores:
        error = core.error()
        assert error is not None
        assert error.cause == "mismatch"
        assert [dict(call.details)["residual"] for call in error.calls] == ["with residual", "without residual"]


#: Of CommState in csrc/include/llm_comm/workspace_layout.h.
OFFSET_OF_CLAIM = 16


def test_two_operations_at_once() -> None:
    """The rank on which another launch has the communicator says so; the other one learns that there is no going on."""
    cores = [core_of(rank) for rank in range(2)]
    descriptors = [core.create_workspace("descriptor")[0] for core in cores]
    for rank, core in enumerate(cores):
        core.map_peer(1 - rank, descriptors[1 - rank], b"")
    with mmap.mmap(descriptors[0], mmap.PAGESIZE) as state:
        state[OFFSET_OF_CLAIM : OFFSET_OF_CLAIM + 4] = (77).to_bytes(4, "little")
    for descriptor in descriptors:
        os.close(descriptor)
    assert together(*(prepared(core, 2, ALL_REDUCE, "one_shot") for core in cores)) == [False, False]
    own, of_peer = (core.error() for core in cores)
    assert own is not None
    assert of_peer is not None
    assert (own.cause, own.rank, own.peer, own.phase, own.calls) == ("concurrent use", 0, 0, -1, [])
    assert (of_peer.cause, of_peer.rank, of_peer.peer) == ("timeout", 1, 0)


def core_of(rank: int) -> _core.Core:
    options = _core.CoreOptions(
        rank=rank, world_size=2, slot_bytes=1 << 16, timeout_s=60.0, dependent_launch=False, check_calls=True
    )
    return _core.make_emulated_core(options)


@each_of(ALGORITHMS)
def test_what_a_rank_has_enqueued_last(operation: str, algorithm: str) -> None:
    cores = with_window(connected(2))
    assert (cores[0].last_call().number, cores[0].last_call().count) == (0, 0)
    title = algorithm_of(operation, algorithm).title
    for number, dtype in enumerate((torch.bfloat16, torch.float16), start=1):
        calls = (prepared(core, 2, operation, algorithm, dtype=dtype) for core in cores)
        assert together(*calls) == [True, True]
        last = cores[0].last_call()
        assert (last.operation, last.data_type) == (title, {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype])
        operations = number * operations_of_a_call(algorithm)
        assert (last.row, last.count, last.number) == (HIDDEN if operation == FUSED else 0, ROWS * HIDDEN, operations)


def test_an_exit_that_nobody_waits_for_ends_no_call() -> None:
    """Rank 0 is told of its own, for which it does not wait."""
    cores = connected(2, timeout_s=20.0)
    cores[0].peer_exited(0)
    assert together(*(prepared(core, 2, ALL_REDUCE, "two_shot") for core in cores)) == [True, True]
    assert cores[0].error() is None
