"""The bits of normed rows: rounded once, with epsilon and weight_bias, and FP8 by the operations that the interface
names.

An ulp too much here and there passes ``test_fused.py``. So these rows are ones whose norm is known to the bit, or so
many that a second rounding shows in how often an element is off.
"""

from __future__ import annotations

import math

import pytest
import torch
from cores import connected, number_of, problem_of, run_on_all, tiling_of
from fused_reference import (
    EPS,
    FP8,
    FUSED_DTYPES,
    GROUP_SIZE,
    GROUPS,
    LARGEST_FP8,
    canonical,
    exact_norm,
    group_scales,
    new_residual_of,
    operands_of,
    places,
    quantized,
    row_scales,
    rows_of,
)
from reference import ALGORITHMS

from llm_comm.operations.fp8 import CODES, makes_scales
from llm_comm.planning.tables import FUSED

every_dtype = pytest.mark.parametrize("dtype", FUSED_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
#: A power of two, so that means of squares are exact.
HIDDEN = 512
WORLD = 3


every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
GROUPS_OF_ROW = HIDDEN // GROUP_SIZE


def call(
    algorithm: str,
    inputs: list[torch.Tensor],
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    quantize: str | None = None,
    scale: torch.Tensor | None = None,
    weight_bias: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The normed rows, the new residual and the scales of a fused call: the same on all ranks."""
    x = inputs[0]
    buffers = [
        (
            given,
            residual,
            weight,
            torch.empty_like(x, dtype=x.dtype if quantize is None else FP8),
            torch.empty_like(x),
            torch.empty(len(x), GROUPS_OF_ROW if quantize in GROUPS else 1) if makes_scales(quantize) else scale,
            None,
        )
        for given in inputs
    ]
    problem = problem_of(x, len(inputs), eps, CODES[quantize], weight_bias)
    tiling = tiling_of(len(x), blocks=2 * len(x), cluster=2, tile_lines=16 if quantize in GROUPS else 8)
    run_on_all(connected(len(inputs)), number_of(FUSED, algorithm), problem, tiling, buffers)
    for results in buffers[1:]:
        for found, first in zip(results[3:5], buffers[0][3:5], strict=True):
            assert torch.equal(found.float().nan_to_num(1e9), first.float().nan_to_num(1e9))
    return buffers[0][3:6]


@every_dtype
@every_algorithm
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("weight_bias", [0.0, 1.0, 0.5])
def test_norms_are_rounded_once(algorithm: str, dtype: torch.dtype, has_residual: bool, weight_bias: float) -> None:
    """What fp32 loses before the one rounding, 2^-22 or so, moves an element in a thousand across the middle between
    two values; another rounding on the way, or a factor that is half an ulp off, moves a good part of them."""
    inputs = rows_of(WORLD, 2, 8192, dtype)
    residual, weight = operands_of(2, 8192, dtype)
    given = residual if has_residual else None
    normed, _, _ = call(algorithm, inputs, given, weight, EPS, weight_bias=weight_bias)
    expected = exact_norm(new_residual_of(inputs, given), weight, EPS, weight_bias).to(dtype)
    off = (places(normed) - places(expected)).abs()
    assert off.max() <= 1
    assert int((off > 0).sum()) <= off.numel() // 200, "normed rows are rounded more than once"


def signs(rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of 1 and -1."""
    return torch.tensor([1.0, -1.0]).repeat(rows, HIDDEN // 2).to(dtype)


def norm_signs(
    algorithm: str,
    weight: torch.Tensor,
    eps: float,
    has_residual: bool,
    quantize: str | None = None,
    scale: torch.Tensor | None = None,
    weight_bias: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The norm of rows whose new residual is 1 and -1, which is ``weight + weight_bias`` with these signs over
    sqrt(1 + eps); what a call makes of it; and its scales."""
    total = signs(2, weight.dtype)
    inputs = [torch.zeros_like(total)] * (WORLD - 1) + [2 * total if has_residual else total]
    found, new_residual, scales = call(
        algorithm, inputs, -total if has_residual else None, weight, eps, quantize, scale, weight_bias
    )
    assert torch.equal(new_residual, total)
    return (
        total * ((weight.float() + weight_bias) / math.sqrt(1 + eps)).to(weight.dtype),
        found,
        torch.zeros(0) if scales is None else scales,
    )


@every_dtype
@every_algorithm
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("eps", [0.0, 3.0, 15.0])  # 1 + eps has a root that is exact
def test_epsilon_counts_with_and_without_residual_and_fp8(
    algorithm: str, dtype: torch.dtype, has_residual: bool, eps: float
) -> None:
    weight = operands_of(1, HIDDEN, dtype)[1]
    scale = torch.tensor([0.125])
    normed, found, _ = norm_signs(algorithm, weight, eps, has_residual)
    assert torch.equal(found, normed)
    normed, found, _ = norm_signs(algorithm, weight, eps, has_residual, "static", scale)
    assert torch.equal(found.float(), quantized(normed, "static", scale).float())
    normed, found, scales = norm_signs(algorithm, weight, eps, has_residual, "dynamic")
    assert torch.equal(scales, row_scales(normed))
    assert torch.equal(found.float(), quantized(normed, "dynamic", scales).float())


@every_dtype
@every_algorithm
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("weight_bias", [1.0, 0.5, -(2.0**-30), 1000.0])
def test_weight_bias_is_added_in_fp32_with_and_without_fp8(
    algorithm: str, dtype: torch.dtype, has_residual: bool, weight_bias: float
) -> None:
    weight = operands_of(1, HIDDEN, dtype)[1]
    scale = torch.tensor([0.125])
    normed, found, _ = norm_signs(algorithm, weight, 3.0, has_residual, weight_bias=weight_bias)
    assert torch.equal(found, normed)
    for quantize in ("static", "dynamic", "group", "group_column_major_ue8m0"):
        given = scale if quantize == "static" else None
        normed, found, scales = norm_signs(algorithm, weight, 3.0, has_residual, quantize, given, weight_bias)
        if quantize == "static":
            scales = scale
        elif quantize == "dynamic":
            assert torch.equal(scales, row_scales(normed))
        else:
            scales = scales.flatten().view(GROUPS_OF_ROW, -1).t() if "column" in quantize else scales
            assert torch.equal(scales, group_scales(normed, quantize.endswith("_ue8m0")))
        assert torch.equal(found.float(), quantized(normed, quantize, scales).float()), quantize


@every_dtype
@every_algorithm
def test_without_weight_bias_weights_keep_their_bits(algorithm: str, dtype: torch.dtype) -> None:
    """The sign of zero, the smallest and the largest number, and what is none."""
    info = torch.finfo(dtype)
    values = torch.tensor([-0.0, 0.0, info.smallest_normal * info.eps, info.max, torch.inf, -torch.inf, torch.nan])
    weight = values.repeat(HIDDEN // 4)[:HIDDEN].to(dtype)
    for weight_bias in (0.0, -0.0):
        _, found, _ = norm_signs(algorithm, weight, 0.0, False, weight_bias=weight_bias)
        expected = signs(2, dtype) * weight
        assert torch.equal(canonical(found).view(torch.int16), canonical(expected).view(torch.int16))


def fp8_values_and_middles() -> torch.Tensor:
    """All values of FP8 from 0 up, subnormal ones too, and what lies halfway between neighbours: [254]."""
    values = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    return torch.stack([values, (values + torch.cat([values[1:], values[-1:] + 32])) / 2], dim=1).flatten()


def weight_of(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Padded by zeros to a row."""
    return torch.cat([values, torch.zeros(HIDDEN - len(values))]).to(dtype)


#: Times 3, 5 and 7 all halves between FP8 values are numbers of both types, and 1/3, 1/5 and 1/7 are none of fp32.
SCALES = (1.0, 3.0, 5.0, 7.0, 0.0371)


def differ(normed: torch.Tensor, scale: torch.Tensor) -> int:
    """Elements that a division and a multiplication by the reciprocal tell apart."""
    return int((quantized(normed, "static", scale).float() != quantized(normed, "dynamic", scale).float()).sum())


@every_dtype
@every_algorithm
@pytest.mark.parametrize("has_residual", [False, True])
def test_static_fp8_multiplies_by_the_reciprocal(algorithm: str, dtype: torch.dtype, has_residual: bool) -> None:
    told_apart = 0
    for value in SCALES:
        scale = torch.tensor([value])
        weight = weight_of(fp8_values_and_middles() * value, dtype)
        normed, found, _ = norm_signs(algorithm, weight, 0.0, has_residual, "static", scale)
        assert torch.equal(found.float(), quantized(normed, "static", scale).float()), f"scale {value}"
        told_apart += differ(normed, scale)
    assert told_apart > 0, "a division would pass"


@every_dtype
@every_algorithm
def test_dynamic_fp8_divides(algorithm: str, dtype: torch.dtype) -> None:
    told_apart = 0
    for value in SCALES:
        weight = weight_of(fp8_values_and_middles()[:-1] * value, dtype)  # the largest is 448 times the scale
        normed, found, scale = norm_signs(algorithm, weight, 0.0, False, "dynamic")
        assert torch.equal(scale, row_scales(normed))
        assert torch.equal(found.float(), quantized(normed, "dynamic", scale).float())
        told_apart += differ(normed, scale)
    assert told_apart > 0, "a multiplication by the reciprocal would pass"


@every_dtype
@every_algorithm
def test_scales_are_divided_by_448(algorithm: str, dtype: torch.dtype) -> None:
    told_apart = 0
    for largest in range(256, 384, 8):
        weight = weight_of(torch.tensor([1.0, largest]), dtype)
        normed, _, scale = norm_signs(algorithm, weight, 0.0, False, "dynamic")
        assert torch.equal(scale, row_scales(normed))
        told_apart += int((scale != largest * (torch.tensor(1.0) / LARGEST_FP8)).sum())
    assert told_apart > 0, "a multiplication by the reciprocal would pass"


@every_dtype
@every_algorithm
@pytest.mark.parametrize("largest", [0.0, 2.0**-11, 2.0**-9, 2.0**-8])
def test_small_rows_have_the_least_scale(algorithm: str, dtype: torch.dtype, largest: float) -> None:
    least = torch.tensor(1.0) / torch.tensor(LARGEST_FP8 * 512)
    weight = weight_of(torch.full([HIDDEN], largest), dtype)
    normed, found, scale = norm_signs(algorithm, weight, 0.0, False, "dynamic")
    assert torch.equal(scale, row_scales(normed))
    assert bool((scale >= least).all())
    assert torch.equal(found.float(), quantized(normed, "dynamic", scale).float())


@every_dtype
@every_algorithm
def test_values_beyond_fp8(algorithm: str, dtype: torch.dtype) -> None:
    """Saturated with their sign; NaN stays NaN."""
    scale = torch.tensor([0.5])
    weight = weight_of(torch.tensor([math.nan, math.inf, 6e4, 225.0, 224.0, -math.inf, -6e4, 1.0]), dtype)
    normed, found, _ = norm_signs(algorithm, weight, 0.0, False, "static", scale)
    assert torch.equal(found.float().isnan(), normed.isnan())
    assert torch.equal(found.float().nan_to_num(0.0), quantized(normed, "static", scale).float().nan_to_num(0.0))
    assert found.float()[0, 1:6].tolist() == [-448.0, 448.0, -448.0, 448.0, 448.0]


# ---- Groups ----------------------------------------------------------------------------------------------------------


def groups_of(values: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A row whose groups hold some of the values, each with one of ``largest`` as its last element: [HIDDEN]"""
    row = torch.zeros(GROUPS_OF_ROW, GROUP_SIZE)
    parts = values.split(GROUP_SIZE - 1)
    for group, part in enumerate(parts):
        row[group, : len(part)] = part
    row[:, -1] = largest
    return row.flatten().to(dtype)


@every_dtype
@every_algorithm
def test_groups_are_divided(algorithm: str, dtype: torch.dtype) -> None:
    told_apart = 0
    for value in SCALES:
        weight = groups_of(fp8_values_and_middles()[:-1] * value, torch.tensor(448.0 * value), dtype)
        normed, found, scales = norm_signs(algorithm, weight, 0.0, False, "group")
        assert torch.equal(scales, group_scales(normed, ue8m0=False))
        assert torch.equal(found.float(), quantized(normed, "group", scales).float())
        reciprocal = normed.float() * (1 / scales).repeat_interleave(GROUP_SIZE, -1)
        told_apart += int((reciprocal.to(FP8).float() != found.float()).sum())
    assert told_apart > 0, "a multiplication by the reciprocal would pass"


@every_dtype
@every_algorithm
@pytest.mark.parametrize("quantize", ["group", "group_ue8m0"])
def test_scales_of_groups(algorithm: str, dtype: torch.dtype, quantize: str) -> None:
    """Divided by 448, and each of its own group."""
    told_apart = 0
    for first in range(256, 384, 32):
        largest = torch.arange(first, first + 32, 8).float()
        normed, found, scales = norm_signs(algorithm, groups_of(torch.ones(1), largest, dtype), 0.0, False, quantize)
        assert torch.equal(scales, group_scales(normed, quantize == "group_ue8m0"))
        assert torch.equal(found.float(), quantized(normed, quantize, scales).float())
        told_apart += int((scales != largest * (torch.tensor(1.0) / LARGEST_FP8)).sum())
    assert told_apart > 0, "a multiplication by the reciprocal would pass"


@every_dtype
@every_algorithm
def test_powers_of_two(algorithm: str, dtype: torch.dtype) -> None:
    """448 times a power of two has that power for its scale, the next larger number the next one."""
    for exponent in (-12, -3, 0, 5):
        exact = torch.tensor(448.0 * 2.0**exponent, dtype=dtype)
        above, below = (torch.nextafter(exact, torch.tensor(end, dtype=dtype)) for end in (torch.inf, 0.0))
        largest = torch.stack([exact, above, below, 2 * exact]).float()
        _, _, scales = norm_signs(algorithm, groups_of(torch.zeros(1), largest, dtype), 0.0, False, "group_ue8m0")
        expected = [2.0**exponent, 2.0 ** (exponent + 1), 2.0**exponent, 2.0 ** (exponent + 1)]
        assert scales.tolist() == [expected, expected]


@every_dtype
@every_algorithm
def test_the_least_scales_of_groups(algorithm: str, dtype: torch.dtype) -> None:
    """Those of zeros, and of what is smaller than 1e-10: eps of vLLM's and SGLang's functions."""
    weight = groups_of(torch.zeros(1), torch.tensor([0.0, 2.0**-40, 2.0**-24, 1.0]), dtype)
    for quantize, least in (("group", torch.tensor(1e-10) / LARGEST_FP8), ("group_ue8m0", torch.tensor(2.0**-33))):
        normed, found, scales = norm_signs(algorithm, weight, 0.0, False, quantize)
        assert torch.equal(scales[:, :2], least.expand(2, 2))
        assert torch.equal(scales, group_scales(normed, quantize == "group_ue8m0"))
        assert torch.equal(found.float(), quantized(normed, quantize, scales).float())
