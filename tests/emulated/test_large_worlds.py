"""Worlds above 8, whose kernels take the number of ranks at run time: the promised bits of every operation.

The emulator's threads make these ranks slow, so each operation has few calls. The deterministic schedules have more.
"""

from __future__ import annotations

import pytest
import torch
from fused_reference import assert_normed, canonical, check_call, exact_norm, new_residual_of, operands_of, rows_of
from harness import RankPool, make_communicator
from reference import DTYPES, assert_bitwise_equal, assert_is_sum, contributions, rank_order_sum
from shards_reference import ANY_DTYPES, SHARD_ALGORITHMS, Division
from test_all_gather import gather
from test_all_to_all import expected, sent
from test_linear import operands
from test_reduce_scatter import scatter

from llm_comm.bench.wire_reference import FORMAT_OF_WIRE, quantized_all_reduce

BF16 = torch.bfloat16
large_worlds = pytest.mark.parametrize("world", [9, 11, 12, 16])
some_large_worlds = pytest.mark.parametrize("world", [11, 16])


def check_all_reduce() -> None:
    for algorithm in ("one_shot", "two_shot", "two_shot_hb", "port"):
        with make_communicator(algorithm=algorithm) as comm:
            for number, count in enumerate((1, 65, 1027, 20_011)):
                inputs = contributions(comm.world_size, count, DTYPES[number % len(DTYPES)])
                x, what = inputs[comm.rank].clone(), f"{algorithm}, {count} elements"
                assert comm.plan(x).algorithm == algorithm
                for _ in range(2):  # both slots
                    assert_is_sum(comm.all_reduce(x), inputs, what)
                assert_is_sum(comm.all_reduce(x, out=x), inputs, f"{what}: in place")


@large_worlds
def test_all_reduce(ranks: RankPool, world: int) -> None:
    ranks.run(world, check_all_reduce)


def check_default_choice() -> None:
    """Without options and with messages that take several launches; ordinary tensors and symmetric ones."""
    with make_communicator(workspace_bytes=1 << 20) as comm:
        for count in (8, 4096, 100_000):
            inputs = contributions(comm.world_size, count, BF16)
            symmetric = comm.empty(count, BF16).copy_(inputs[comm.rank])
            assert_is_sum(comm.all_reduce(inputs[comm.rank]), inputs, f"{count} elements")
            assert_is_sum(comm.all_reduce(symmetric, out=symmetric), inputs, f"{count} elements, symmetric")
            whole = comm.empty(comm.world_size * count, BF16)
            comm.all_gather(inputs[comm.rank], out=whole)
            assert_bitwise_equal(whole, torch.cat(inputs), f"{count} elements, gathered")


@some_large_worlds
def test_default_choice(ranks: RankPool, world: int) -> None:
    ranks.run(world, check_default_choice)


def check_fused() -> None:
    for algorithm in ("one_shot", "two_shot", "two_shot_hb"):
        with make_communicator(algorithm=algorithm) as comm:
            for dtype, rows, hidden in ((BF16, 1, 8), (torch.float16, 3, 520), (BF16, 5, 2880)):
                inputs = rows_of(comm.world_size, rows, hidden, dtype)
                residual, weight = operands_of(rows, hidden, dtype)
                what = f"{algorithm}, {rows} rows of {hidden}"
                assert comm.plan_all_reduce_add_rms_norm(inputs[0], weight).algorithm == algorithm
                for _ in range(2):
                    check_call(comm, inputs, residual, weight, what)


@large_worlds
def test_fused(ranks: RankPool, world: int) -> None:
    ranks.run(world, check_fused)


def divisions_of(world: int) -> list[Division]:
    uneven = tuple((5 * rank + 1) % 7 * 3 for rank in range(world))
    return [
        Division((130 * world,), 0, (130,) * world),
        Division((3, sum(uneven), 5), 1, uneven),
        Division((40,), 0, (0,) * (world - 1) + (40,)),
    ]


def check_shards() -> None:
    for algorithm in SHARD_ALGORITHMS:
        with make_communicator(algorithm=algorithm) as comm:
            for number, division in enumerate(divisions_of(comm.world_size)):
                gather(comm, division, ANY_DTYPES[number], number, algorithm)
                scatter(comm, division, DTYPES[number], number, algorithm)
            for number, part in enumerate(((1,), (130,), (7, 3), (300, 8))):
                x = sent(comm, comm.rank, part, BF16, number)
                found = comm.all_to_all(x)
                assert_bitwise_equal(found, expected(comm, part, BF16, number), f"all-to-all, {algorithm}, {part}")


@large_worlds
def test_shards(ranks: RankPool, world: int) -> None:
    ranks.run(world, check_shards)


def check_linear() -> None:
    with make_communicator() as comm:
        for tokens, inputs, outputs in ((1, 64, 64), (9, 128, 192)):
            x, weight = operands(comm.rank, tokens, inputs, outputs, BF16)
            layers = [comm.linear(*operands(rank, tokens, inputs, outputs, BF16)) for rank in range(comm.world_size)]
            what = f"{tokens} tokens"
            assert_bitwise_equal(comm.linear_all_reduce(x, weight), rank_order_sum(layers), what)
            residual, norm_weight = operands_of(tokens, outputs, BF16)
            normed, new_residual = comm.linear_all_reduce_add_rms_norm(x, weight, residual, norm_weight, 1e-5)
            assert_bitwise_equal(canonical(new_residual), new_residual_of(layers, residual), f"{what}: the residual")
            assert_normed(normed, exact_norm(new_residual, norm_weight, 1e-5, 0.0), what)


@large_worlds
def test_linear(ranks: RankPool, world: int) -> None:
    ranks.run(world, check_linear)


def check_wire(wire: str) -> None:
    with make_communicator(wire=wire, wire_min_bytes=0) as comm:
        for dtype, count in ((BF16, 4097), (torch.float32, 3001)):
            inputs = contributions(comm.world_size, count, dtype)
            assert comm.plan(inputs[0]).algorithm == f"two_shot_{wire}_hb"
            found = comm.all_reduce(inputs[comm.rank])
            assert_bitwise_equal(found, quantized_all_reduce(inputs, FORMAT_OF_WIRE[wire]), f"{wire}, {count} {dtype}")


@some_large_worlds
@pytest.mark.parametrize("wire", ["fp8", "int8"])
def test_quantized_all_reduce(ranks: RankPool, world: int, wire: str) -> None:
    ranks.run(world, check_wire, wire)
