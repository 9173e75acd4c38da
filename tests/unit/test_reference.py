"""The reference of the other tests: it must tell right sums from the usual wrong ones."""

from __future__ import annotations

import itertools

import pytest
import torch
from reference import (
    DTYPES,
    assert_bitwise_equal,
    assert_close_to_float64,
    assert_is_sum,
    bits,
    contributions,
    from_bits,
    rank_order_sum,
    special_patterns,
)

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def rounded_at_every_step(inputs: list[torch.Tensor]) -> torch.Tensor:
    total = inputs[0]
    for contribution in inputs[1:]:
        total = total + contribution
    return total


def summed_from_zero(inputs: list[torch.Tensor]) -> torch.Tensor:
    return rank_order_sum([torch.zeros_like(inputs[0]), *inputs])


@every_dtype
def test_contributions_differ_everywhere_and_are_reproducible(dtype: torch.dtype) -> None:
    first, again = contributions(8, 1000, dtype), contributions(8, 1000, dtype)
    for a, b in zip(first, again, strict=True):
        assert_bitwise_equal(a, b, "the same call")
    assert not torch.equal(first[0], contributions(8, 1000, dtype, seed=1)[0])
    neighbours = [*itertools.pairwise(first), (first[0][1:], first[0][:-1])]
    for a, b in neighbours:
        assert (a == b).float().mean() < 0.05


@every_dtype
@pytest.mark.parametrize("world", [3, 8])
def test_order_and_rounding_show(world: int, dtype: torch.dtype) -> None:
    inputs = contributions(world, 2000, dtype)
    wrong = {"another order": rank_order_sum(inputs[::-1]), "a rank twice": rank_order_sum([*inputs[:-1], inputs[0]])}
    if dtype != torch.float32:
        wrong["rounded at every step"] = rounded_at_every_step(inputs)
    for what, total in wrong.items():
        with pytest.raises(AssertionError, match="elements are wrong"):
            assert_bitwise_equal(total, rank_order_sum(inputs), what)
    assert_is_sum(rank_order_sum(inputs), inputs, "the sum itself")


@every_dtype
def test_float64_bound_is_tight(dtype: torch.dtype) -> None:
    inputs = contributions(4, 2000, dtype)
    total = rank_order_sum(inputs)
    for wrong in (from_bits(bits(total).long() + 16, dtype), rank_order_sum(inputs[:-1])):
        with pytest.raises(AssertionError, match="more than rounding explains"):
            assert_close_to_float64(wrong, inputs, "wrong")


@every_dtype
def test_special_values(dtype: torch.dtype) -> None:
    patterns = special_patterns(dtype)
    values = from_bits(patterns, dtype)
    assert len(set(patterns.tolist())) == 24
    assert torch.equal(bits(values).long() & (1 << 8 * dtype.itemsize) - 1, patterns)
    assert values.isnan().sum() == 2 * 4
    assert values.isinf().sum() == 2
    assert (values == 0).sum() == 2
    assert torch.finfo(dtype).max in values
    assert torch.finfo(dtype).smallest_normal in values
    nans = bits(rank_order_sum([values, values]))[values.isnan()]
    assert (nans == torch.iinfo(nans.dtype).max).all()


@every_dtype
def test_negative_zero_is_not_zero(dtype: torch.dtype) -> None:
    inputs = [torch.full((4,), -0.0, dtype=dtype)] * 3
    assert_bitwise_equal(rank_order_sum(inputs), inputs[0], "-0.0")
    with pytest.raises(AssertionError, match="element 0 is 0x0"):
        assert_bitwise_equal(summed_from_zero(inputs), inputs[0], "from +0.0")


def test_shape_and_type_count() -> None:
    for other in (torch.ones(4, 1), torch.ones(4, dtype=torch.float16)):
        with pytest.raises(AssertionError, match="expected"):
            assert_bitwise_equal(other, torch.ones(4), "x")
