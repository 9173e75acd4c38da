"""NVFP4 and MXFP8 on emulated GPUs: bitwise what FlashInfer's formulas make of the normed rows that a call without
quantization returns."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from cores import connected, number_of, problem_of, tiling_of
from fused_reference import (
    BLOCKS,
    E2M1,
    EPS,
    FP8,
    canonical,
    fp4_codes,
    in_blocks,
    in_tiles,
    operands_of,
    rows_of,
    special_rows,
)
from fused_worlds import communicators, every_dtype, types_and_worlds
from harness import RankPool, make_communicator
from reference import assert_bitwise_equal
from tables import fused_rows

from llm_comm import Communicator, UnsupportedInputError
from llm_comm.operations.fp8 import CODES
from llm_comm.planning.tables import FUSED, Row

#: (rows, hidden): one block, blocks and rows that are no multiple of a tile of scales, and rows of a model.
SHAPES = ((1, 32), (3, 96), (130, 160), (5, 1024), (1, 7168), (2, 2208))
GUARD = 0xA5


def global_scale_of(quantize: str, value: float = 37.5) -> torch.Tensor | None:
    return torch.tensor([value]) if quantize.startswith("nvfp4") else None


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """Bytes of quantized values, with one NaN of FP8."""
    raw = values.view(torch.uint8)
    return torch.where(raw == 0xFF, 0x7F, raw) if values.dtype == FP8 else raw


def check_blocks(
    comm: Communicator,
    inputs: list[torch.Tensor],
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    quantize: str,
    what: str,
    global_scale: torch.Tensor | None = None,
) -> None:
    x = inputs[comm.rank]
    if global_scale is None:
        global_scale = global_scale_of(quantize)
    normed, plain_residual = comm.all_reduce_add_rms_norm(x, residual, weight, EPS)
    is_fp4 = global_scale is not None
    values, scales = in_blocks(normed, quantize, global_scale)
    wanted = scales if quantize.endswith("_linear") else in_tiles(scales)
    scale = torch.full_like(wanted, GUARD).view(FP8 if is_fp4 else torch.uint8)  # all of it is written, padding too
    call = {"quantize": quantize, "global_scale": global_scale, "scale": scale}
    found, new_residual, _ = comm.all_reduce_add_rms_norm(x, residual, weight, EPS, **call)
    assert_bitwise_equal(canonical(new_residual), canonical(plain_residual), what)
    assert found.dtype == (torch.uint8 if is_fp4 else FP8), what
    assert torch.equal(as_bytes(scale), wanted), what
    assert torch.equal(as_bytes(found), torch.where(values == 0xFF, 0x7F, values) if not is_fp4 else values), what


def check_shapes(dtype: torch.dtype) -> None:
    for comm, algorithm in communicators():
        for number, (rows, hidden) in enumerate(SHAPES):
            inputs = rows_of(comm.world_size, rows, hidden, dtype)
            residual, weight = operands_of(rows, hidden, dtype)
            for quantize in BLOCKS:
                assert comm.plan_all_reduce_add_rms_norm(inputs[0], weight, quantize).algorithm == algorithm
                what = f"{algorithm}, {rows} rows of {hidden}, {quantize}"
                check_blocks(comm, inputs, None if number % 2 else residual, weight, quantize, what)
        for quantize in BLOCKS:
            zeros = torch.zeros(rows, hidden, dtype=dtype)
            check_blocks(comm, [zeros] * comm.world_size, None, weight, quantize, f"{algorithm}, zeros, {quantize}")


@types_and_worlds
def test_values_and_scales(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    ranks.run(world, check_shapes, dtype)


def check_variants(rows: int, hidden: int) -> None:
    inputs = rows_of(dist.get_world_size(), rows, hidden, torch.bfloat16)
    residual, weight = operands_of(rows, hidden, torch.bfloat16)
    with make_communicator() as comm:
        for row in fused_rows():
            comm.use_table(comm.table.with_rows(row))
            for quantize in ("nvfp4", "mxfp8"):
                check_blocks(comm, inputs, residual, weight, quantize, f"{row}, {quantize}")


@pytest.mark.parametrize(
    ("world", "rows", "hidden"), [(2, 5, 1024), (3, 7, 896), (4, 5, 1184), (8, 3, 2304), (12, 3, 1056), (16, 3, 2304)]
)
def test_every_launch(ranks: RankPool, world: int, rows: int, hidden: int) -> None:
    ranks.run(world, check_variants, rows, hidden)


#: hidden, rows, blocks, tile_lines, depth.
TILES = ((4096, 27, 2, 512, 2), (8192, 9, 1, 100, 2), (96, 75, 3, 24, 2), (2880, 40, 2, 368, 3))


def check_tiles(algorithm: str, wire: str) -> None:
    for hidden, rows, blocks, tile_lines, depth in TILES:
        with make_communicator(algorithm="auto" if wire else algorithm, wire=wire or "none", wire_min_bytes=0) as comm:
            row = Row(1 << 30, FUSED, algorithm, "HB", blocks=blocks, tile_lines=tile_lines, depth=depth)
            comm.use_table(comm.table.with_rows(row))
            inputs = rows_of(comm.world_size, rows, hidden, torch.bfloat16)
            residual, weight = operands_of(rows, hidden, torch.bfloat16)
            assert comm.plan_all_reduce_add_rms_norm(inputs[0], weight, "nvfp4").algorithm == algorithm
            for quantize in BLOCKS:
                check_blocks(comm, inputs, residual, weight, quantize, f"{algorithm}, {rows} rows of {hidden}")


@pytest.mark.parametrize("world", [2, 3, 8, 12, 16])
@pytest.mark.parametrize(("algorithm", "wire"), [("two_shot_hb", ""), ("two_shot_fp8_hb", "fp8")])
def test_tiles_of_rows(ranks: RankPool, world: int, algorithm: str, wire: str) -> None:
    ranks.run(world, check_tiles, algorithm, wire)


def check_launches() -> None:
    """Of messages larger than a slot: each writes the scales of its rows, in tiles that two launches share."""
    for comm, algorithm in communicators(workspace_bytes=1 << 20):
        hidden = 4096
        residual, weight = operands_of(1, hidden, torch.bfloat16)
        rows = 2 * comm.plan_all_reduce_add_rms_norm(residual, weight, "nvfp4").chunk_rows + 3
        inputs = rows_of(comm.world_size, rows, hidden, torch.bfloat16)
        residual, weight = operands_of(rows, hidden, torch.bfloat16)
        assert comm.plan_all_reduce_add_rms_norm(inputs[0], weight, "mxfp8").chunks >= 3  # 4 where a slot has 2 rows
        for quantize in BLOCKS:
            check_blocks(comm, inputs, residual, weight, quantize, f"{algorithm}, {rows} rows, {quantize}")


@pytest.mark.parametrize("world", [2, 3, 8, 12, 16])
def test_message_larger_than_a_slot(ranks: RankPool, world: int) -> None:
    ranks.run(world, check_launches)


def check_special_values(dtype: torch.dtype) -> None:
    for comm, algorithm in communicators():
        inputs = special_rows(comm.world_size, dtype, 256)
        residual, weight = operands_of(len(inputs[0]), 256, dtype)
        for quantize in BLOCKS:
            check_blocks(comm, inputs, residual, weight, quantize, f"{algorithm}, {quantize}, special values")
        # Infinite, huge, tiny and missing weights: so are the normed values of their columns, not whole rows.
        inputs = [rows.nan_to_num(1.0, 1.0, 1.0) for rows in inputs]
        largest, least = torch.finfo(dtype).max, torch.finfo(dtype).tiny
        weight[:64] = torch.tensor([torch.inf, -torch.inf, torch.nan, largest, -largest, least, 0.0, -0.0]).repeat(8)
        weight[64:96], weight[96:128], weight[128:160] = 0.0, least, torch.nan
        for quantize in BLOCKS:
            check_blocks(comm, inputs, residual, weight, quantize, f"{algorithm}, {quantize}, special weights")


@every_dtype
@pytest.mark.parametrize("world", [2, 5])
def test_special_values(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    """Infinities saturate. A block of NaN has scale NaN; among numbers NaN has no magnitude, and becomes 6 in FP4."""
    ranks.run(world, check_special_values, dtype)


def check_global_scales() -> None:
    """Scales that are 0, subnormal, ordinary or saturated; a global scale that is no number."""
    with make_communicator() as comm:
        inputs = rows_of(comm.world_size, 3, 256, torch.bfloat16)
        residual, weight = operands_of(3, 256, torch.bfloat16)
        for value in (0.0, 1e-30, 2.0**-12, 1.0, 448 * 6 / 4.0, 1e6, torch.inf, torch.nan):
            scale = torch.tensor([value])
            check_blocks(comm, inputs, residual, weight, "nvfp4", f"global scale {value}", scale)


def test_global_scales(ranks: RankPool) -> None:
    ranks.run(2, check_global_scales)


def check_rounding() -> None:
    """Values of FP4 and halfway between them: a weight has the normed values of a row of ones, up to a factor."""
    halves = [(a + b) / 2 for a, b in itertools.pairwise(E2M1)]
    values = torch.tensor([*E2M1, *halves, 6.0])
    weight = torch.stack([values, -values]).flatten().to(torch.bfloat16)
    with make_communicator() as comm:
        x = torch.full((1, len(weight)), 64.0, dtype=torch.bfloat16)  # its norm is 1: eps is too small to matter
        normed, _ = comm.all_reduce_add_rms_norm(x, None, weight, 0.0)
        assert torch.equal(normed[0], weight)
        found, _, scale = comm.all_reduce_add_rms_norm(
            x, None, weight, 0.0, quantize="nvfp4_linear", global_scale=torch.tensor([1.0])
        )
        assert scale.float().tolist() == [[1.0, 1.0]]
        codes = torch.stack([found & 15, found >> 4], -1).flatten()
        evens = [0, 2, 2, 4, 4, 6, 6]  # of halves
        expected = [*range(8), *evens, 7]
        assert codes.tolist() == [*expected, *(code | 8 for code in expected)]
        assert torch.equal(codes, fp4_codes(weight.float()))


def test_halves_become_even(ranks: RankPool) -> None:
    ranks.run(2, check_rounding)


# ---- What the caller gives -------------------------------------------------------------------------------------------


def check_given() -> None:
    """Scales lie where they should, padding becomes zero, and nothing else is written."""
    for comm, algorithm in communicators():
        for rows, hidden in ((1, 32), (3, 672), (33, 96), (127, 64), (128, 64), (129, 256)):
            inputs = rows_of(comm.world_size, rows, hidden, torch.bfloat16)
            residual, weight = operands_of(rows, hidden, torch.bfloat16)
            for quantize in BLOCKS:
                what = f"{algorithm}, {rows} rows of {hidden}, {quantize}"
                call = (inputs[comm.rank], residual, weight, EPS)
                options = {"quantize": quantize, "global_scale": global_scale_of(quantize)}
                normed, _, made = comm.all_reduce_add_rms_norm(*call, **options)
                assert made.dtype == (FP8 if quantize.startswith("nvfp4") else torch.uint8), what
                memory = torch.full((made.numel() + 8,), GUARD, dtype=torch.uint8)
                scale = memory[3 : 3 + made.numel()].view(made.dtype).view(made.shape)
                place = torch.full((normed.numel() + 8,), GUARD, dtype=torch.uint8)
                out = place[1 : 1 + normed.numel()].view(normed.dtype).view(normed.shape)  # not aligned
                results = comm.all_reduce_add_rms_norm(*call, out=out, scale=scale, **options)
                assert (results[0] is out, results[2] is scale) == (True, True), what
                written = torch.ones(rows, hidden // BLOCKS[quantize], dtype=torch.uint8)
                is_scale = written.bool() if quantize.endswith("_linear") else in_tiles(written).bool()
                expected = torch.where(is_scale, made.view(torch.uint8), 0)
                assert torch.equal(scale.view(torch.uint8), expected), what
                assert torch.equal(out.view(torch.uint8), normed.view(torch.uint8)), what
                assert all((rest == GUARD).all() for rest in (memory[:3], memory[3 + made.numel() :])), what
                assert all((rest == GUARD).all() for rest in (place[:1], place[1 + normed.numel() :])), what


@pytest.mark.parametrize("world", [2, 3])
def test_outputs_of_the_caller(ranks: RankPool, world: int) -> None:
    ranks.run(world, check_given)


def check_three_dimensions() -> None:
    with make_communicator() as comm:
        x = rows_of(comm.world_size, 6, 64, torch.bfloat16)[comm.rank]
        _, weight = operands_of(1, 64, torch.bfloat16)
        for quantize in BLOCKS:
            options = {"quantize": quantize, "global_scale": global_scale_of(quantize)}
            flat = comm.all_reduce_add_rms_norm(x, None, weight, EPS, **options)
            found = comm.try_all_reduce_add_rms_norm(x.view(2, 3, 64), None, weight, EPS, **options)
            assert found is not None
            for one, other in zip(found, flat, strict=True):
                assert torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)), quantize
            assert found[0].shape == (2, 3, 32 if quantize.startswith("nvfp4") else 64)
            tiles = (128, 4)
            assert found[2].shape == ((2, 3, 64 // BLOCKS[quantize]) if quantize.endswith("_linear") else tiles)


def test_three_dimensions(ranks: RankPool) -> None:
    ranks.run(2, check_three_dimensions)


def check_behind_layers() -> None:
    with make_communicator() as comm:
        x = rows_of(comm.world_size, 3, 64, torch.bfloat16)[comm.rank]
        layer = rows_of(comm.world_size, 128, 64, torch.bfloat16, seed=5)[comm.rank]
        residual, weight = operands_of(3, 128, torch.bfloat16)
        for quantize in BLOCKS:
            options = {"quantize": quantize, "global_scale": global_scale_of(quantize)}
            expected = comm.all_reduce_add_rms_norm(comm.linear(x, layer), residual, weight, EPS, **options)
            found = comm.linear_all_reduce_add_rms_norm(x, layer, residual, weight, EPS, **options)
            operator = torch.ops.llm_comm.linear_all_reduce_add_rms_norm_block_scaled
            operands = (x, layer, residual, weight, None, None, None, EPS, 0.0, comm.name)
            by_operator = operator(*operands, quantize, options["global_scale"])
            for results in (found, by_operator):
                for one, other in zip(results, expected, strict=True):
                    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), quantize


def test_behind_linear_layers(ranks: RankPool) -> None:
    ranks.run(2, check_behind_layers)


def check_one_rank() -> None:
    with make_communicator() as comm:
        for quantize in BLOCKS:
            assert not comm.accepts_all_reduce_add_rms_norm(ROW, WEIGHT, quantize)


def test_world_of_one_declines(ranks: RankPool) -> None:
    ranks.run(1, check_one_rank)


ROW, WEIGHT = torch.ones(3, 256, dtype=torch.bfloat16), torch.ones(256, dtype=torch.bfloat16)
GLOBAL = torch.ones(1)
MXFP8 = {"quantize": "mxfp8", "global_scale": None}
#: Arguments, and what the error says.
MISFITS: dict[str, tuple[dict[str, object], str]] = {
    "rows of other lengths": (
        {"x": ROW[:, :200].contiguous(), "weight": WEIGHT[:200]},
        "rows of 200 elements: quantize='nvfp4' takes a multiple of 16",
    ),
    "rows of half a block": (
        {**MXFP8, "x": ROW[:, :48].contiguous(), "weight": WEIGHT[:48]},
        "rows of 48 elements: quantize='mxfp8' takes a multiple of 32",
    ),
    "no global scale": ({"global_scale": None}, "quantize='nvfp4' needs global_scale"),
    "a global scale without FP4": ({"quantize": "mxfp8"}, "global_scale with quantize='mxfp8'"),
    "a global scale without quantization": ({"quantize": None}, "global_scale with quantize=None"),
    "two global scales": ({"global_scale": torch.ones(2)}, r"global_scale \(\(2,\).* must have one element"),
    "a global scale of another type": ({"global_scale": GLOBAL.double()}, "global_scale .*be float32"),
    "a global scale without memory": ({"global_scale": torch.empty(1, device="meta")}, "global_scale.* no memory"),
    "a number as global scale": ({"global_scale": 1.0}, "global_scale is a float, not a tensor"),
    "scales without padding": (
        {"scale": torch.empty(3, 16, dtype=torch.uint8).view(FP8)},
        "scale .* must be contiguous and have 2048 elements",
    ),
    "scales of another type": ({"scale": torch.empty(128, 16, dtype=torch.uint8)}, "scale .* be float8_e4m3fn"),
    "MXFP8 scales of another type": ({**MXFP8, "scale": torch.empty(128, 8)}, "scale .* be uint8"),
    "out of another shape": ({"out": torch.empty(3, 256, dtype=torch.uint8)}, r"out .*\(3, 128\), torch.uint8"),
    "out of another type": ({**MXFP8, "out": ROW.clone()}, "out .*float8_e4m3fn"),
    "out over the scales": (
        {
            "out": (memory := torch.zeros(2048 + 384, dtype=torch.uint8))[2000:2384].view(3, 128),
            "scale": memory[:2048].view(FP8),
        },
        "overlaps",
    ),
    "out over the global scale": (
        {"out": (shared := torch.zeros(96)).view(torch.uint8).view(3, 128), "global_scale": shared[5:6]},
        "overlaps",
    ),
}


def reject(name: str) -> None:
    given, message = MISFITS[name]
    arguments = {"x": ROW.clone(), "residual": None, "weight": WEIGHT, "eps": EPS, "quantize": "nvfp4"}
    arguments |= {"global_scale": GLOBAL, **given}
    with make_communicator() as comm:
        inputs = rows_of(comm.world_size, 3, 256, torch.bfloat16)
        for quantize in ("nvfp4", "mxfp8"):  # a call of as many elements is prepared the second time
            for _ in range(2):
                with pytest.raises(UnsupportedInputError, match=message):
                    comm.all_reduce_add_rms_norm(**arguments)
                check_blocks(comm, inputs, None, WEIGHT, quantize, "a call after an error")


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit(ranks: RankPool, name: str) -> None:
    ranks.run(2, reject, name)


@pytest.mark.parametrize(
    ("quantize", "missing", "message"),
    [
        ("nvfp4", "global_scale", "takes a global scale, and none is given"),
        ("nvfp4_linear", "scale", "takes a tensor of scales, and none is given"),
        ("mxfp8", "scale", "takes a tensor of scales, and none is given"),
        ("dynamic", "scale", "takes a tensor of scales, and none is given"),
    ],
)
def test_core_refuses_a_call_without_scales(quantize: str, missing: str, message: str) -> None:
    (core, _) = connected(2)
    x, weight, scale = ROW.clone(), WEIGHT, torch.empty(128, 16)
    problem = problem_of(x, 2, EPS, CODES[quantize])
    run = core.prepare(number_of(FUSED, "one_shot"), problem, tiling_of(len(x), tile_lines=32))
    scales = {"scale": scale.data_ptr(), "global_scale": GLOBAL.data_ptr(), missing: 0}
    outputs = torch.empty_like(x), torch.empty_like(x)
    with pytest.raises(RuntimeError, match=message):
        run(x.data_ptr(), 0, weight.data_ptr(), *(out.data_ptr() for out in outputs), *scales.values(), 0)
