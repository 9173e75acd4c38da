"""Algorithms by SwitchChannel, each rank a process. Whole numbers, whose sums do not depend on an order."""

from __future__ import annotations

import os
import random

import pytest
import torch
from fused_reference import EPS, assert_normed, exact_norm, operands_of
from harness import RankPool, make_communicator
from reference import DTYPES, assert_bitwise_equal

from llm_comm import Communicator, _core

COUNTS = (1, 2, 7, 64, 1000, 5001, 40_000)
SUMS = "two_shot_switch", "two_shot_ld_reduce", "one_shot_ld_reduce"
SWITCHED_OFF = _core.multicast_switched_off(
    {name: os.environ[name] for name in _core.multicast_switches if name in os.environ}
)

pytestmark = pytest.mark.skipif(bool(SWITCHED_OFF), reason=f"this machine forbids NVLink multicast: {SWITCHED_OFF}")


def make_by_switch(algorithm: str) -> Communicator:
    return make_communicator(algorithm=algorithm, multicast="1", sum="any")


def numbers(count: int, dtype: torch.dtype, rank: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-8, 9, (count,), generator=generator).to(dtype)


def misaligned(x: torch.Tensor, by: int) -> torch.Tensor:
    return torch.cat([x.new_zeros(by), x])[by:]


def all_reduces(algorithm: str, seed: int) -> None:
    draw = random.Random(seed)  # the same on all ranks
    with make_by_switch(algorithm) as comm:
        assert comm.plan(torch.ones(100)).algorithm == algorithm
        for number in range(25):
            count, dtype = draw.choice(COUNTS), draw.choice(DTYPES)
            inputs = [numbers(count, dtype, rank, 100 * seed + number) for rank in range(comm.world_size)]
            x = misaligned(inputs[comm.rank], draw.randrange(8) * comm.rank % 8)
            out = x if draw.random() < 0.3 else None
            expected = sum(x.float() for x in inputs).to(dtype)  # type: ignore[union-attr]
            assert_bitwise_equal(comm.all_reduce(x, out), expected, f"call {number} of {count} {dtype}")


def odd_values(algorithm: str) -> None:
    """Infinities, NaN, and what LL lines treat in a way of their own."""
    with make_by_switch(algorithm) as comm:
        assert comm.plan(torch.ones(1001)).algorithm == algorithm
        for dtype in DTYPES:
            x = torch.zeros(1001, dtype=dtype)
            x[3] = float("inf")
            x[4] = float("inf") if comm.rank else -float("inf")
            x[5] = float("nan")
            x.view(torch.int16 if x.element_size() == 2 else torch.int32)[7] = -1
            sums = comm.all_reduce(x)
            assert sums[3] == float("inf")
            assert sums[[4, 5, 7]].isnan().all()
            assert sums.nan_to_num(0.0, 0.0, 0.0).count_nonzero() == 0


def fused(algorithm: str, seed: int) -> None:
    draw = random.Random(seed)
    with make_by_switch(algorithm) as comm:
        for number in range(12):
            rows, hidden = draw.randint(1, 9), 8 * draw.choice((1, 5, 64, 200))
            inputs = [
                numbers(rows * hidden, torch.bfloat16, rank, number).view(rows, hidden)
                for rank in range(comm.world_size)
            ]
            weight = operands_of(1, hidden, torch.bfloat16)[1]
            bias = draw.choice((0.0, 1.0, 0.5))
            assert comm.plan_all_reduce_add_rms_norm(inputs[comm.rank], weight).algorithm == algorithm
            normed, total = comm.all_reduce_add_rms_norm(inputs[comm.rank], None, weight, EPS, weight_bias=bias)
            assert_bitwise_equal(total, sum(x.float() for x in inputs).to(torch.bfloat16), f"call {number}")  # type: ignore[union-attr]
            assert_normed(normed, exact_norm(total, weight, EPS, bias), f"call {number}, weight_bias {bias}")


def parts(seed: int) -> None:
    draw = random.Random(seed)
    with (
        make_by_switch("push_switch") as gathering,
        make_by_switch("ld_reduce") as scattering,
    ):
        assert gathering.plan_all_gather(torch.ones(100)).algorithm == "push_switch"
        assert scattering.plan_reduce_scatter(torch.ones(2400)).algorithm == "ld_reduce"
        world, rank = gathering.world_size, gathering.rank
        for number in range(20):
            sizes = [draw.randrange(700) for _ in range(world)]
            sizes[draw.randrange(world)] += 1
            whole = numbers(sum(sizes), torch.float16, 99, number)
            own = misaligned(whole.split(sizes)[rank], rank % 8)
            assert_bitwise_equal(gathering.all_gather(own, 0, sizes), whole, f"gather {number} of {sizes}")
            inputs = [numbers(sum(sizes), torch.bfloat16, r, number) for r in range(world)]
            expected = sum(x.float() for x in inputs).to(torch.bfloat16).split(sizes)[rank]  # type: ignore[union-attr]
            result = scattering.reduce_scatter(inputs[rank], 0, sizes)
            assert_bitwise_equal(result, expected, f"scatter {number} of {sizes}")


@pytest.mark.parametrize("world", [2, 3, 5, 8])
@pytest.mark.parametrize("algorithm", SUMS)
def test_all_reduce(ranks: RankPool, world: int, algorithm: str) -> None:
    ranks.run(world, all_reduces, algorithm, world)


@pytest.mark.parametrize("algorithm", SUMS)
def test_all_reduce_of_odd_values(ranks: RankPool, algorithm: str) -> None:
    ranks.run(3, odd_values, algorithm)


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("algorithm", SUMS[:2])
def test_fused(ranks: RankPool, world: int, algorithm: str) -> None:
    ranks.run(world, fused, algorithm, world)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_parts(ranks: RankPool, world: int) -> None:
    ranks.run(world, parts, world)
