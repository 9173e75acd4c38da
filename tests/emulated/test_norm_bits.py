"""The bits of normed rows: rounded once, with epsilon, and FP8 by the operations that the interface names.

An ulp too much here and there passes ``test_fused.py``. So these rows are ones whose norm is known to the bit, or so
many that a second rounding shows in how often an element is off.
"""

from __future__ import annotations

import math

import pytest
import torch
from fused_reference import (
    EPS,
    FP8,
    FUSED_DTYPES,
    LARGEST_FP8,
    exact_norm,
    new_residual_of,
    operands_of,
    places,
    quantized,
    row_scales,
    rows_of,
)
from harness import RankPool, make_communicator
from reference import ALGORITHMS

from llm_comm import Communicator

every_dtype = pytest.mark.parametrize("dtype", FUSED_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
#: A power of two, so that means of squares are exact.
HIDDEN = 512
WORLD = 3


def run_with_all(check: str, dtype: torch.dtype) -> None:
    """On a rank: ``check`` with every algorithm."""
    for algorithm in ALGORITHMS:
        with make_communicator(algorithm=algorithm) as comm:
            globals()[check](comm, dtype)


def check_rounding(comm: Communicator, dtype: torch.dtype) -> None:
    """What fp32 loses before the one rounding, 2^-22 or so, moves an element in a thousand across the middle between
    two values; another rounding on the way, or a factor that is half an ulp off, moves a good part of them."""
    inputs = rows_of(comm.world_size, 4, 8192, dtype)
    residual, weight = operands_of(4, 8192, dtype)
    for given in (residual, None):
        normed, _ = comm.all_reduce_add_rms_norm(inputs[comm.rank], given, weight, EPS)
        expected = exact_norm(new_residual_of(inputs, given), weight, EPS).to(dtype)
        off = (places(normed) - places(expected)).abs()
        assert off.max() <= 1
        assert int((off > 0).sum()) <= off.numel() // 200, "normed rows are rounded more than once"


@every_dtype
def test_norms_are_rounded_once(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(WORLD, run_with_all, "check_rounding", dtype)


def signs(rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of 1 and -1."""
    return torch.tensor([1.0, -1.0]).repeat(rows, HIDDEN // 2).to(dtype)


def norm_signs(
    comm: Communicator, weight: torch.Tensor, eps: float, has_residual: bool, rows: int = 2, **options: object
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The norm of rows whose new residual is 1 and -1, which is ``weight`` with these signs over sqrt(1 + eps), and
    what a call returns."""
    total = signs(rows, weight.dtype)
    x = total if comm.rank == comm.world_size - 1 else torch.zeros_like(total)
    residual = None
    if has_residual:
        x, residual = (2 * x, -total)
    results = comm.all_reduce_add_rms_norm(x, residual, weight, eps, **options)  # type: ignore[arg-type]
    assert torch.equal(results[1], total)
    return total * (weight.float() / math.sqrt(1 + eps)).to(weight.dtype), results


def check_epsilon(comm: Communicator, dtype: torch.dtype) -> None:
    weight = operands_of(1, HIDDEN, dtype)[1]
    scale = torch.tensor([0.125])
    for eps in (0.0, 3.0, 15.0):  # 1 + eps has a root that is exact
        for has_residual in (False, True):
            expected, (normed, _) = norm_signs(comm, weight, eps, has_residual)
            assert torch.equal(normed, expected), f"epsilon {eps}, residual {has_residual}"
            expected, (found, _) = norm_signs(comm, weight, eps, has_residual, quantize="static", scale=scale)
            assert torch.equal(found.float(), quantized(expected, "static", scale).float())
            expected, (found, _, scales) = norm_signs(comm, weight, eps, has_residual, quantize="dynamic")
            assert torch.equal(scales, row_scales(expected))
            assert torch.equal(found.float(), quantized(expected, "dynamic", scales).float())


@every_dtype
def test_epsilon_counts_with_and_without_residual_and_fp8(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(WORLD, run_with_all, "check_epsilon", dtype)


def fp8_values_and_middles() -> torch.Tensor:
    """All values of FP8 from 0 up, subnormal ones too, and what lies halfway between neighbours: [254]."""
    values = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    return torch.stack([values, (values + torch.cat([values[1:], values[-1:] + 32])) / 2], dim=1).flatten()


def weight_of(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Padded by zeros to a row."""
    return torch.cat([values, torch.zeros(HIDDEN - len(values))]).to(dtype)


#: Times 3, 5 and 7 all halves between FP8 values are numbers of both types, and 1/3, 1/5 and 1/7 are none of fp32.
SCALES = (1.0, 3.0, 5.0, 7.0, 0.0371)


def check_static(comm: Communicator, dtype: torch.dtype) -> None:
    told_apart = 0
    for value in SCALES:
        scale = torch.tensor([value])
        weight = weight_of(fp8_values_and_middles() * value, dtype)
        for has_residual in (False, True):
            normed, (found, _) = norm_signs(comm, weight, 0.0, has_residual, quantize="static", scale=scale)
            assert torch.equal(found.float(), quantized(normed, "static", scale).float()), f"scale {value}"
        told_apart += int(
            (quantized(normed, "static", scale).float() != quantized(normed, "dynamic", scale).float()).sum()
        )
    assert told_apart > 0, "a division would pass"


@every_dtype
def test_static_fp8_multiplies_by_the_reciprocal(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(WORLD, run_with_all, "check_static", dtype)


def check_dynamic(comm: Communicator, dtype: torch.dtype) -> None:
    told_apart = scales_told_apart = 0
    for value in SCALES:
        weight = weight_of(fp8_values_and_middles()[:-1] * value, dtype)  # the largest is 448 times the scale
        normed, (found, _, scale) = norm_signs(comm, weight, 0.0, False, quantize="dynamic")
        assert torch.equal(scale, row_scales(normed))
        assert torch.equal(found.float(), quantized(normed, "dynamic", scale).float())
        told_apart += int(
            (quantized(normed, "static", scale).float() != quantized(normed, "dynamic", scale).float()).sum()
        )
    for largest in range(256, 384, 2):
        normed, (_, _, scale) = norm_signs(
            comm, weight_of(torch.tensor([1.0, largest]), dtype), 0.0, False, quantize="dynamic"
        )
        assert torch.equal(scale, row_scales(normed))
        scales_told_apart += int((scale != largest * (torch.tensor(1.0) / LARGEST_FP8)).sum())
    assert told_apart > 0, "a multiplication by the reciprocal would pass"
    assert scales_told_apart > 0, "a scale made by the reciprocal would pass"


@every_dtype
def test_dynamic_fp8_divides(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(WORLD, run_with_all, "check_dynamic", dtype)


def check_least_scale(comm: Communicator, dtype: torch.dtype) -> None:
    least = torch.tensor(1.0) / torch.tensor(LARGEST_FP8 * 512)
    for largest in (0.0, 2.0**-11, 2.0**-9, 2.0**-8):
        weight = weight_of(torch.full([HIDDEN], largest), dtype)
        normed, (found, _, scale) = norm_signs(comm, weight, 0.0, False, quantize="dynamic")
        assert torch.equal(scale, row_scales(normed))
        assert bool((scale >= least).all())
        assert torch.equal(found.float(), quantized(normed, "dynamic", scale).float())


@every_dtype
def test_small_rows_have_the_least_scale(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(WORLD, run_with_all, "check_least_scale", dtype)
