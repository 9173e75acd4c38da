"""What the tuner times, on ranks of a real group: the candidate that a row says, with tensors of its kind.

Times are stubs: of emulated GPUs they would say nothing.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, make_communicator

from llm_comm import Communicator, Config
from llm_comm.bench import OPERATIONS, timing
from llm_comm.bench.measuring import Bench, schedule_of
from llm_comm.bench.tune_subjects import ELEMENT_BYTES, Subject, candidates, subjects_of

HIDDEN = 64


def kinds_that_run(comm: Communicator, subject: Subject, size: int) -> set[str]:
    """The protocols of a subject's candidates. Of each the first is called, as often as the tuner does: each call takes
    the emulator a while."""
    group: Any = dist.group.WORLD
    bench = Bench(comm, group, subject, size, schedule_of("aligned", 2, 1))
    run = bench.bound.call
    ran: dict[tuple[str, str], int] = {}

    def call() -> None:
        ((row,),) = comm.table.rows.values()
        kind = row.algorithm, row.protocol
        ran[kind] = ran.get(kind, 0) + 1
        if ran[kind] == 1:
            run()

    bench.bound = dataclasses.replace(bench.bound, call=call, nccl=None)  # gloo has not all of NCCL's calls
    with mock.patch.object(timing, "time_graph", return_value=SimpleNamespace(us=1.0)):
        at_size = bench.candidates(lambda _: None)
    comm.check()
    assert at_size.refusals == ()
    problem = subject.problem(size, comm.world_size)
    expected = list(candidates(problem, comm.limits, subject.is_symmetric, wire=subject.wire))
    assert {row.algorithm for row in expected} == {name for name, _ in ran}
    assert sum(ran.values()) == len(at_size.measured) <= len(expected)
    return {f"symmetric {protocol}" if subject.is_symmetric else protocol for _, protocol in ran}


def check(name: str, size: int, kinds: set[str], wire: str = "none") -> None:
    with make_communicator(workspace_bytes=64 << 20, wire=wire) as comm:
        subjects = subjects_of([name], HIDDEN, size, comm.world_size, config=comm.config)
        found = [kinds_that_run(comm, s, size) for s in subjects if size in s.sizes(size, size)]
    assert set().union(*found) == kinds


@pytest.mark.parametrize("name", OPERATIONS)
def test_small_messages(name: str, ranks: RankPool) -> None:
    ranks.run(2, check, name, 4 * HIDDEN * ELEMENT_BYTES, {"LL"})


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        (
            "all-reduce",
            {"LL", "HB", "symmetric HB", "symmetric CE"},
        ),  # not Port: nobody chooses it who does not name it
        ("all-gather", {"LL", "HB", "symmetric HB", "symmetric CE"}),
        ("reduce-scatter", {"LL", "HB"}),
    ],
)
def test_large_messages(name: str, kinds: set[str], ranks: RankPool) -> None:
    ranks.run(2, check, name, 4 << 20, kinds)


@pytest.mark.parametrize(
    ("name", "wire", "shards"),
    [
        ("all-reduce", "fp8", 1),
        ("all-reduce", "int8", 1),
        ("fused", "fp8", 1),
        ("all-gather", "fp8", 2),
        ("reduce-scatter", "fp8", 2),
    ],
)
def test_quantized_messages(name: str, wire: str, shards: int, ranks: RankPool) -> None:
    ranks.run(2, check, name, Config.load({}).wire_min_bytes // shards, {"HB"}, wire)


def check_separate() -> None:
    size = 1 << 20
    with make_communicator(workspace_bytes=64 << 20) as comm:
        table = comm.table
        (subject,) = subjects_of(["fused"], HIDDEN, size, comm.world_size, config=comm.config, table=table)
        group: Any = dist.group.WORLD
        assert subject.bind(comm, group, size // 2).separate is None
        bound = subject.bind(comm, group, size)
        assert bound.separate is not None
        call, prepare = bound.separate
        comm.use_table(table._replace(max_message_bytes=0))
        prepare()
        assert comm.table == table
        for one, other in zip(call(), bound.call(), strict=True):  # type: ignore[call-overload]
            torch.testing.assert_close(one, other)


def test_fused_messages_are_compared_with_two_kernels(ranks: RankPool) -> None:
    ranks.run(2, check_separate)
