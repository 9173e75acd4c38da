"""Reference of the quantized all-reduce: codes, scales and sums computed by hand, and values at the ends of fp32."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llm_comm.bench.wire_reference import (
    FORMATS,
    KERNEL_BLOCK,
    SMALLEST_SCALE,
    dequantize,
    quantize,
    quantized_all_reduce,
    quantized_rows,
    quantized_sum,
    scale_factor,
    slice_elements,
)
from llm_comm.planning import selection

FLT_MAX = torch.finfo(torch.float32).max
every_wire = pytest.mark.parametrize("wire", FORMATS)
every_block = pytest.mark.parametrize("block", [32, 64, 128])


def codes_of(x: Tensor, wire: str, block: int = 32) -> list[int]:
    return quantize(x, wire, block).codes.view(torch.uint8).tolist()


def round_trip(x: Tensor, wire: str, block: int = 32) -> Tensor:
    return dequantize(quantize(x, wire, block), wire, block)


def ramp(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return values of both signs within +-2."""
    return ((torch.arange(count) * 7919 % 4001 - 2000) / 1024).to(dtype)


def assert_equal_bits(actual: Tensor, expected: Tensor) -> None:
    same = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}[actual.dtype]
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.view(same), expected.view(same))


@every_wire
def test_scale_factor_is_the_largest_fp32_that_is_not_above_the_inverse(wire: str) -> None:
    for largest in (FORMATS[wire].largest, FORMATS[wire].escape_largest):
        factor = scale_factor(largest)
        above = torch.nextafter(torch.tensor(factor), torch.tensor(1.0))
        assert factor * largest <= 1 < float(above) * largest


def test_codes_of_e4m3_by_hand() -> None:
    # The scale is 448 * scale_factor(448) = 1 - 2^-24, and its inverse 1 + 2^-23: 17 and 2^-10 lie just above a tie.
    x = torch.tensor([448.0, 1.0, -17.0, 2.0**-10, 2.0**-9, 0.0, -0.0, 2.0**-11])
    assert codes_of(x, "e4m3") == [0x7E, 0x38, 0x80 | 0x59, 0x01, 0x01, 0x00, 0x80, 0x00]
    quantized = quantize(x, "e4m3", 32)
    assert quantized.scales.tolist() == [1 - 2.0**-24]
    expected = torch.tensor([448.0, 1.0, -18.0, 2.0**-9, 2.0**-9, 0.0, -0.0, 0.0]) * (1 - 2.0**-24)
    assert_equal_bits(dequantize(quantized, "e4m3", 32), expected)


def test_codes_of_e4m3_round_ties_to_even() -> None:
    # An amax of 1.75 + 2^-23 gives a scale of exactly 2^-8.
    x = torch.tensor([1.75 + 2.0**-23, 17 * 2.0**-8, 19 * 2.0**-8, 2.0**-18, 1.5 * 2.0**-17])
    quantized = quantize(x, "e4m3", 32)
    assert quantized.scales.tolist() == [2.0**-8]
    assert dequantize(quantized, "e4m3", 32).tolist() == [1.75, 16 / 256, 20 / 256, 0.0, 2.0**-16]


def test_codes_of_int8_by_hand() -> None:
    x = torch.tensor([127.0, 2.5, 3.5, -2.5, -0.5, -0.0, 0.49, -126.6])
    quantized = quantize(x, "int8", 32)
    assert quantized.scales.tolist() == [1.0]
    assert quantized.codes.tolist() == [127, 2, 4, -2, 0, 0, 0, -127]
    assert not dequantize(quantized, "int8", 32).signbit()[[4, 5]].any(), "int8 has no -0"


def test_codes_of_e5m2_by_hand() -> None:
    x = torch.tensor([57344.0, 1.0, -1.25, 0.0, -0.0])
    assert codes_of(x, "e5m2") == [0x7B, 0x3C, 0x80 | 0x3D, 0x00, 0x80]


@every_wire
@every_block
def test_zeros_stay_zeros(wire: str, block: int) -> None:
    quantized = quantize(torch.zeros(300), wire, block)
    assert quantized.scales.tolist() == [SMALLEST_SCALE] * math.ceil(300 / block)
    assert_equal_bits(dequantize(quantized, wire, block), torch.zeros(300))
    assert_equal_bits(quantized_all_reduce([torch.zeros(300)] * 3, wire, block), torch.zeros(300))


@pytest.mark.parametrize("wire", ["e4m3", "e5m2"])
def test_negative_zeros_survive_in_fp8(wire: str) -> None:
    zeros = -torch.zeros(1500)
    assert_equal_bits(quantized_all_reduce([zeros] * 4, wire, 64), zeros)


@every_wire
def test_denormals_give_finite_results(wire: str) -> None:
    x = torch.full((40,), 2.0**-149)
    x[0] = 2.0**-130
    back = round_trip(x, wire)
    assert back.isfinite().all()
    assert (back - x).abs().max() <= SMALLEST_SCALE / 2


@every_wire
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_equal_elements_lose_one_rounding_of_the_scale_at_most(wire: str, dtype: torch.dtype) -> None:
    for value in (1.0, -3.140625, 0.0546875):
        x = torch.full((1030,), value, dtype=dtype)
        actual = quantized_all_reduce([x] * 2, wire, 32).double()
        epsilon = torch.finfo(torch.float32).eps if dtype == torch.float32 else 0.0
        assert ((actual - 2 * x.double()).abs() <= abs(value) * 4 * epsilon).all()


@every_wire
@every_block
def test_an_outlier_costs_its_block_alone(wire: str, block: int) -> None:
    plain = [ramp(4096), ramp(4096).flip(0)]
    spoilt = [x.clone() for x in plain]
    place = 2000
    spoilt[1][place] = 1e4
    before, after = (quantized_all_reduce(inputs, wire, block) for inputs in (plain, spoilt))
    first = place // block * block
    outside = torch.ones(4096, dtype=torch.bool)
    outside[first : first + block] = False
    assert_equal_bits(after[outside], before[outside])
    assert after[place] == pytest.approx(1e4, rel=0.2)
    assert not torch.equal(after[~outside], before[~outside])


@every_wire
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_infinities_and_nan_survive_alone_in_their_places(wire: str, dtype: torch.dtype, rank: int) -> None:
    inputs = [ramp(1700, dtype) * (1 + r) for r in range(3)]
    special = {5: math.inf, 600: -math.inf, 601: math.nan, 1699: math.inf}
    for place, value in special.items():
        inputs[rank][place] = value
    actual = quantized_all_reduce(inputs, wire, 64)
    for place, value in special.items():
        assert actual[place] == value or (math.isnan(value) and actual[place].isnan())
    finite = torch.ones(1700, dtype=torch.bool)
    finite[list(special)] = False
    assert actual[finite].isfinite().all()
    exact = sum(x.double() for x in inputs)
    assert isinstance(exact, Tensor)
    assert ((actual.double() - exact)[finite].abs() <= 16 * (0.15 if wire == "e5m2" else 0.08)).all()


def test_codes_of_escape_blocks() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 1.0, -1.0, 0.5])
    assert codes_of(x, "e4m3") == [0x7E, 0xFE, 0x7F, 0x7D, 0xFD, 0x75]
    assert codes_of(x, "e5m2") == [0x7B, 0xFB, 0x7F, 0x7A, 0xFA, 0x76]
    assert quantize(x, "int8", 32).codes.tolist() == [127, -127, -128, 126, -126, 63]
    for wire, wire_format in FORMATS.items():
        scale = torch.tensor(scale_factor(wire_format.escape_largest))
        assert_equal_bits(quantize(x, wire, 32).scales, -scale.view(1))
        only = quantize(torch.full((32,), math.inf), wire, 32)
        assert only.scales.tolist() == [-SMALLEST_SCALE]
        assert dequantize(only, wire, 32).tolist() == [math.inf] * 32


@every_wire
def test_opposite_infinities_of_two_ranks_give_nan(wire: str) -> None:
    inputs = [torch.ones(600), torch.ones(600)]
    inputs[0][550], inputs[1][550] = math.inf, -math.inf
    assert quantized_all_reduce(inputs, wire, 32).isnan().nonzero().flatten().tolist() == [550]


@every_wire
def test_the_largest_fp16_stays_finite(wire: str) -> None:
    x = torch.zeros(700, dtype=torch.float16)
    x[3], x[640] = 65504.0, -65504.0
    actual = quantized_all_reduce([x, torch.zeros_like(x)], wire, 32)
    assert_equal_bits(actual, x)


@every_wire
@pytest.mark.parametrize("escape", [False, True])
def test_the_largest_fp32_stays_finite(wire: str, escape: bool) -> None:
    x = torch.tensor([FLT_MAX, -FLT_MAX, 1.0, math.nan if escape else 0.0])
    back = round_trip(x, wire)
    assert back[:2].isfinite().all()
    assert back[0].item() == pytest.approx(FLT_MAX, rel=1e-6)
    reduced = quantized_all_reduce([x, torch.zeros(4)], wire, 32)
    assert reduced[:3].isfinite().all()


@every_wire
def test_a_sum_that_overflows_is_infinite(wire: str) -> None:
    x = torch.full((40,), 1.0)
    x[7] = FLT_MAX
    assert quantized_all_reduce([x, x], wire, 32)[7] == math.inf


def test_slices() -> None:
    assert [slice_elements(count, 8, 64) for count in (1, 4096, 4097, 8 * 8192)] == [64, 512, 576, 8192]
    assert slice_elements(0, 8, 64) == 0


@every_wire
@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 31, 33, 511, 513, 1024, 5000])
def test_owners_add_in_rank_order_and_take_their_own_part_unquantized(wire: str, world: int, count: int) -> None:
    inputs = [ramp(count + rank)[rank:] * (rank + 1) for rank in range(world)]
    part = slice_elements(count, world, 32)
    expected = torch.empty(count)
    for owner in range(world):
        own = slice(owner * part, (owner + 1) * part)
        total = None
        for rank, x in enumerate(inputs):
            addend = x[own] if rank == owner else round_trip(x, wire)[own]
            total = addend if total is None else total + addend
        assert total is not None
        expected[own] = total
    assert_equal_bits(quantized_sum(inputs, wire, 32), expected)
    assert_equal_bits(quantized_all_reduce(inputs, wire, 32), round_trip(expected, wire))
    if count:
        assert_equal_bits(quantized_all_reduce(torch.stack(inputs), wire, 32), round_trip(expected, wire))


@every_wire
@pytest.mark.parametrize("world", [2, 3])
def test_slices_of_another_length(wire: str, world: int) -> None:
    """The last rank adds what is left. Ranks behind it add nothing."""
    inputs = [ramp(300 + rank)[rank:] * (rank + 1) for rank in range(world)]
    for part in (32, 128, 192, 320):
        addends = [round_trip(x, wire) for x in inputs]
        for rank, x in enumerate(inputs):
            own = slice(rank * part, (rank + 1) * part)
            addends[rank][own] = x[own]
        expected = addends[0]
        for addend in addends[1:]:
            expected = expected + addend
        assert_equal_bits(quantized_sum(inputs, wire, 32, part), expected)
        assert_equal_bits(quantized_all_reduce(inputs, wire, 32, part), round_trip(expected, wire))


@every_wire
@pytest.mark.parametrize(
    ("rows", "hidden", "part", "rows_of_tile"),
    [(5, 64, 64, 2), (7, 72, 128, 3), (4, 72, 64, 1), (1, 72, 512, 14), (3, 4096, 2048, 1), (0, 64, 64, 2)],
)
def test_tiles_of_rows_are_messages_of_their_own(
    wire: str, rows: int, hidden: int, part: int, rows_of_tile: int
) -> None:
    inputs = [ramp(rows * hidden + rank, torch.bfloat16)[rank:].view(rows, hidden) for rank in range(2)]
    found = quantized_rows(inputs, wire, part)
    assert (found.shape, found.dtype) == (inputs[0].shape, inputs[0].dtype)
    for first in range(0, rows, rows_of_tile):
        tile = [x[first : first + rows_of_tile] for x in inputs]
        expected = quantized_all_reduce(tile, wire, elements_of_slice=part)
        assert torch.equal(found[first : first + rows_of_tile], expected)


def test_results_have_the_shape_and_dtype_of_a_contribution() -> None:
    x = ramp(6 * 100, torch.bfloat16).view(6, 100)
    actual = quantized_all_reduce([x, x], "e4m3", 128)
    assert (actual.shape, actual.dtype) == (x.shape, x.dtype)


def test_blocks_are_those_of_the_kernels() -> None:
    source = (Path(__file__).parents[2] / "csrc/algorithms/quantized.cuh").read_text(encoding="utf-8")
    assert f"kQuantizedBlock = {KERNEL_BLOCK};" in source
    assert selection.QUANTIZED_BYTES == 1 + 4 / KERNEL_BLOCK
