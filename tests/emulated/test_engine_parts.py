"""What engines gather and scatter by (``integrations/gather_scatter.py``), without an engine."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import RankPool, make_communicator

from llm_comm import Communicator
from llm_comm.integrations.gather_scatter import EngineGatherScatter

both_worlds = pytest.mark.parametrize("world", [2, 3])


class Lines(logging.Handler):
    """What a logger is told."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def parts_of(comm: Communicator) -> tuple[EngineGatherScatter, Lines]:
    lines, log = Lines(), logging.Logger("engine")
    log.addHandler(lines)
    member: Any = SimpleNamespace(communicator=comm, group_name="dp:0", close=comm.close)
    return EngineGatherScatter(member, log), lines


def of_rank(rank: int, rows: int, columns: int = 8) -> torch.Tensor:
    return (torch.arange(rows * columns).reshape(rows, columns) % 13 + 16 * rank).to(torch.bfloat16)


def sum_of(world: int, rows: int) -> torch.Tensor:
    return torch.stack([of_rank(rank, rows).float() for rank in range(world)]).sum(0).to(torch.bfloat16)


def exchange_in_any_layout() -> None:
    """Ranks with one row have nothing but contiguous tensors, the others none."""
    with make_communicator() as comm:
        parts, _ = parts_of(comm)
        sizes = list(range(1, comm.world_size + 1))
        mine = of_rank(comm.rank, sizes[comm.rank])[:, ::2]
        whole = torch.cat([of_rank(rank, size)[:, ::2] for rank, size in enumerate(sizes)])
        gathered = parts.all_gather("gather", mine, 0, sizes)
        assert gathered is not None
        assert torch.equal(gathered, whole)
        total = sum_of(comm.world_size, sum(sizes)).split(sizes)[comm.rank]
        wide = torch.stack([of_rank(comm.rank, sum(sizes))] * 2, -1)[..., 0]
        scattered = parts.reduce_scatter("scatter", wide, 0, sizes)
        assert scattered is not None
        assert torch.equal(scattered, total)
        # Outputs with gaps, where a rank has several rows.
        for call, x, expected in ((parts.all_gather, mine, whole), (parts.reduce_scatter, wide, total)):
            out = torch.zeros(len(expected), 2 * expected.shape[1], dtype=torch.bfloat16)[:, ::2]
            assert call("into", x, 0, sizes, out) is out
            assert torch.equal(out, expected)


@both_worlds
def test_layouts_part_nobody(ranks: RankPool, world: int) -> None:
    ranks.run(world, exchange_in_any_layout)


def exchange_into_memory_of_the_input() -> None:
    with make_communicator() as comm:
        parts, _ = parts_of(comm)
        world, rows = comm.world_size, 2 * comm.world_size
        for begin in (2 * comm.rank, 1):  # this rank's part of the input, and some other place in it
            memory = of_rank(comm.rank, rows)
            out = memory[begin : begin + 2]
            assert parts.reduce_scatter("scatter", memory, out=out) is out
            assert torch.equal(out, sum_of(world, rows).split(2)[comm.rank])
            memory = torch.zeros(rows + 1, 8, dtype=torch.bfloat16)
            memory[begin : begin + 2] = of_rank(comm.rank, 2)
            assert parts.all_gather("gather", memory[begin : begin + 2], out=memory[:rows]) is not None
            assert torch.equal(memory[:rows], torch.cat([of_rank(rank, 2) for rank in range(world)]))


@both_worlds
def test_outputs_may_lie_in_the_input(ranks: RankPool, world: int) -> None:
    ranks.run(world, exchange_into_memory_of_the_input)


def quantize_if_permitted() -> None:
    with make_communicator(wire="fp8", wire_min_bytes=0) as comm:
        parts, _ = parts_of(comm)
        x = torch.rand(8, 8, generator=torch.Generator().manual_seed(comm.rank)).to(torch.bfloat16)
        out = x.new_empty(8 * comm.world_size, 8)
        for given in (None, out):
            for lossy in (False, True):
                gathered = parts.all_gather("gather", x, out=given, lossy=lossy)
                assert gathered is not None
                assert torch.equal(gathered, comm.all_gather(x, lossy=lossy))
                assert torch.equal(gathered, comm.all_gather(x)) != lossy


def test_lossy_gathers_are_quantized(ranks: RankPool) -> None:
    ranks.run(2, quantize_if_permitted)


def say_the_first_of_each_kind() -> None:
    with make_communicator() as comm:
        parts, lines = parts_of(comm)
        for _ in range(2):
            parts.all_gather("all_gatherv", of_rank(comm.rank, 2), 0, [2, 2])
            parts.all_gather("all_gatherv", of_rank(comm.rank, 1 + comm.rank), 0, [1, 2])
            parts.reduce_scatter("reduce_scatter", of_rank(comm.rank, 4), 0)
            assert parts.reduce_scatter("declined", torch.ones(4, dtype=torch.int64), 0) is None
            assert parts.all_gather("declined", torch.ones(2, 3), 0, [3, 3]) is None
            out = torch.full((2,), 7)
            assert parts.reduce_scatter("declined", torch.ones(4, dtype=torch.int64), 0, None, out) is None
            assert out.eq(7).all()
    said = [
        "llm_comm: first all_gatherv of group dp:0 (2 ranks, shape (2, 8))",
        "llm_comm: first all_gatherv of group dp:0 (2 ranks, shape (1, 8), sizes [1, 2])",
        "llm_comm: first reduce_scatter of group dp:0 (2 ranks, shape (4, 8))",
    ]
    assert lines.said == (said if comm.rank == 0 else [])


def test_the_first_call_of_each_kind_is_told(ranks: RankPool) -> None:
    ranks.run(2, say_the_first_of_each_kind)


def obey_the_options() -> None:
    for gathers in (True, False):
        with make_communicator(all_gather=gathers, reduce_scatter=not gathers) as comm:
            parts, _ = parts_of(comm)
            assert (parts.gathers, parts.scatters) == (gathers, not gathers)
            x, out = of_rank(comm.rank, 4), torch.empty(8, 8, dtype=torch.bfloat16)
            assert (parts.all_gather("gather", x) is not None) == gathers
            assert (parts.all_gather("gather", x, out=out) is not None) == gathers
            assert (parts.all_gather("gather", x, lossy=True) is not None) == gathers
            assert (parts.reduce_scatter("scatter", x) is not None) != gathers
            assert (parts.reduce_scatter("scatter", x, out=out[:2]) is not None) != gathers
            parts.leave()
            assert parts.all_gather("gather", x) is None
            assert parts.all_gather("gather", x, lossy=True) is None
            assert parts.reduce_scatter("scatter", x) is None
            assert not comm._handle.is_open


def test_each_is_switched_alone(ranks: RankPool) -> None:
    ranks.run(2, obey_the_options)
