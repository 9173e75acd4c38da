"""Messages of several launches: each has its own part of every tensor, and the last one the grid that it needs.

A grid with blocks that have nothing to do would count an operation that has not ended, or end one twice: what comes
next meets lines of another one.
"""

from __future__ import annotations

import pytest
import torch
from fused_reference import EPS, FP8, operands_of, rows_of
from harness import RankPool, make_communicator
from reference import ALGORITHMS, assert_bitwise_equal, assert_is_sum, contributions
from tables import fused_row, plain_row

from llm_comm import Communicator

#: The least there is: 480 KiB a slot.
SMALL = 1 << 20
HIDDEN = 2048
#: Many blocks: more than a last launch of one row or element has tiles.
BLOCKS = 16
ways = pytest.mark.parametrize(("world", "is_one_tile_a_block"), [(2, False), (2, True), (5, False)])


def make(algorithm: str, workspace_bytes: int, is_one_tile_a_block: bool) -> Communicator:
    comm = make_communicator(workspace_bytes=workspace_bytes)
    blocks = 4096 if is_one_tile_a_block else BLOCKS
    rows = (
        plain_row(1 << 30, algorithm, blocks=blocks, tile_lines=16, depth=0 if is_one_tile_a_block else 1),
        fused_row(1 << 30, algorithm, blocks=blocks, threads=128, cluster=2, depth=0 if is_one_tile_a_block else 1),
    )
    comm.use_table(comm.table.with_rows(*rows))
    return comm


def launches_counted(comm: Communicator) -> int:
    ended = comm._handle.core().operations_ended()
    assert ended is not None
    return ended


def check_count(comm: Communicator, before: int, launches: int, last_elements: int) -> None:
    core = comm._handle.core()
    assert launches > 1
    assert launches_counted(comm) == before + launches
    assert core.last_call().count == last_elements


def check_plain(is_one_tile_a_block: bool) -> None:
    for algorithm in ALGORITHMS:
        with make(algorithm, SMALL, is_one_tile_a_block) as comm:
            for dtype, more in ((torch.bfloat16, 1), (torch.float32, 700)):
                count = comm.plan(torch.empty(1, dtype=dtype)).chunk_elements + more
                inputs = contributions(comm.world_size, count, dtype)
                plan = comm.plan(inputs[0])
                assert plan.algorithm == algorithm
                before = launches_counted(comm)
                out = torch.full([count + 16], 77.0, dtype=dtype)
                comm.all_reduce(inputs[comm.rank], out[:count])
                assert_is_sum(out[:count], inputs, f"{algorithm}, {count} elements")
                assert bool(out[count:].eq(77.0).all()), "wrote behind the output"
                last = count - (plan.chunks - 1) * plan.chunk_elements
                check_count(comm, before, plan.chunks, last)


@ways
def test_sums(ranks: RankPool, world: int, is_one_tile_a_block: bool) -> None:
    ranks.run(world, check_plain, is_one_tile_a_block)


def fused(
    comm: Communicator, rows: int, quantize: str | None, in_place: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The normed rows, the new residual and the scales, each followed by what must stay as it is."""
    x = rows_of(comm.world_size, rows, HIDDEN, torch.bfloat16)[comm.rank].clone()
    residual, weight = operands_of(rows, HIDDEN, torch.bfloat16)
    normed = torch.full([rows + 2, HIDDEN], 77.0).to(torch.bfloat16 if quantize is None else FP8)
    new_residual = torch.full([rows + 2, HIDDEN], 77.0, dtype=torch.bfloat16)
    new_residual[:rows] = residual
    scale = torch.full([rows + 2 if quantize == "dynamic" else 1], 0.125)
    comm.all_reduce_add_rms_norm(
        x,
        new_residual[:rows] if in_place else residual,
        weight,
        EPS,
        out=normed[:rows],
        residual_out=new_residual[:rows],
        quantize=quantize,
        scale=None if quantize is None else scale[:rows] if quantize == "dynamic" else scale,
    )
    return normed, new_residual, scale


def check_fused(is_one_tile_a_block: bool) -> None:
    """As in one launch, to the bit, and nothing behind it."""
    for algorithm in ALGORITHMS:
        with make(algorithm, SMALL, is_one_tile_a_block) as comm, make(algorithm, 64 << 20, True) as large:
            row = torch.empty(1, HIDDEN, dtype=torch.bfloat16)
            most = comm.plan_fused(row, row[0]).chunk_rows
            rows = most + 1
            plan = comm.plan_fused(row.expand(rows, HIDDEN).contiguous(), row[0])
            for quantize, in_place in ((None, True), ("static", False), ("dynamic", True)):
                before = launches_counted(comm)
                found = fused(comm, rows, quantize, in_place)
                check_count(comm, before, plan.chunks, HIDDEN)
                expected = fused(large, rows, quantize, in_place)
                what = f"{algorithm}, {rows} rows, {quantize}, in place {in_place}"
                assert torch.equal(found[0].float(), expected[0].float()), what
                assert_bitwise_equal(found[1], expected[1], what)
                assert torch.equal(found[2], expected[2]), what


@ways
def test_norms(ranks: RankPool, world: int, is_one_tile_a_block: bool) -> None:
    ranks.run(world, check_fused, is_one_tile_a_block)
