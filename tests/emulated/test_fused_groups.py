"""FP8 by groups of 128 on emulated GPUs: of the normed rows that a call without FP8 returns, bitwise what vLLM's
``per_token_group_quant_fp8`` makes of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fused_reference import (
    EPS,
    FP8,
    GROUP_SIZE,
    GROUPS,
    LAYOUTS,
    canonical,
    operands_of,
    quantized,
    rows_of,
    scales_of,
    special_rows,
)
from fused_worlds import communicators, every_dtype, types_and_worlds
from harness import RankPool, make_communicator
from reference import assert_bitwise_equal
from tables import fused_rows

from llm_comm import Communicator, UnsupportedInputError

#: (rows, hidden): one group, groups that are no multiple of the ranks, and rows of a model.
SHAPES = ((1, 128), (3, 384), (5, 1024), (1, 7168), (2, 2176))
GUARD = -77.0


def strides_of(quantize: str, rows: int, hidden: int) -> tuple[int, int]:
    """As the engines allocate scales."""
    if "column_major" not in quantize:
        return hidden // GROUP_SIZE, 1
    return 1, (-(-rows // 4) * 4 if "tma" in quantize else rows)


def check_groups(
    comm: Communicator,
    inputs: list[torch.Tensor],
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    quantize: str,
    what: str,
) -> None:
    x = inputs[comm.rank]
    normed, plain_residual = comm.all_reduce_add_rms_norm(x, residual, weight, EPS)
    found, new_residual, scale = comm.all_reduce_add_rms_norm(x, residual, weight, EPS, quantize=quantize)
    assert (found.dtype, scale.dtype, found.shape) == (FP8, torch.float32, x.shape), what
    assert scale.stride() == strides_of(quantize, *x.shape), what
    assert_bitwise_equal(canonical(new_residual), canonical(plain_residual), what)
    assert torch.equal(scale, scales_of(normed, quantize)), what
    assert torch.equal(found.float().nan_to_num(1e9), quantized(normed, quantize, scale).float().nan_to_num(1e9)), what


def check_shapes(dtype: torch.dtype) -> None:
    for comm, algorithm in communicators():
        for number, (rows, hidden) in enumerate(SHAPES):
            inputs = rows_of(comm.world_size, rows, hidden, dtype)
            residual, weight = operands_of(rows, hidden, dtype)
            for quantize in GROUPS:
                assert comm.plan_all_reduce_add_rms_norm(inputs[0], weight, quantize).algorithm == algorithm
                what = f"{algorithm}, {rows} rows of {hidden}, {quantize}"
                check_groups(comm, inputs, None if number % 2 else residual, weight, quantize, what)
            zeros = torch.zeros(rows, hidden, dtype=dtype)
            check_groups(comm, [zeros] * comm.world_size, None, weight, "group", f"{algorithm}, zeros")


@types_and_worlds
def test_values_and_scales(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    ranks.run(world, check_shapes, dtype)


def check_variants(rows: int, hidden: int) -> None:
    inputs = rows_of(dist.get_world_size(), rows, hidden, torch.bfloat16)
    residual, weight = operands_of(rows, hidden, torch.bfloat16)
    with make_communicator() as comm:
        for number, row in enumerate(fused_rows()):
            comm.use_table(comm.table.with_rows(row))
            check_groups(comm, inputs, residual, weight, GROUPS[number % len(GROUPS)], str(row))


@pytest.mark.parametrize(("world", "rows", "hidden"), [(2, 5, 1024), (3, 7, 896), (4, 5, 1152), (8, 3, 2304)])
def test_every_launch(ranks: RankPool, world: int, rows: int, hidden: int) -> None:
    ranks.run(world, check_variants, rows, hidden)


def check_launches() -> None:
    """Of messages larger than a slot: each writes the scales of its rows."""
    for comm, algorithm in communicators(workspace_bytes=1 << 20):
        hidden = 4096
        residual, weight = operands_of(1, hidden, torch.bfloat16)
        rows = 2 * comm.plan_all_reduce_add_rms_norm(residual, weight, "group").chunk_rows + 3
        inputs = rows_of(comm.world_size, rows, hidden, torch.bfloat16)
        residual, weight = operands_of(rows, hidden, torch.bfloat16)
        assert comm.plan_all_reduce_add_rms_norm(inputs[0], weight, "group").chunks == 3
        for quantize in LAYOUTS:
            check_groups(comm, inputs, residual, weight, quantize, f"{algorithm}, {rows} rows, {quantize}")


@pytest.mark.parametrize("world", [2, 3, 8])
def test_message_larger_than_a_slot(ranks: RankPool, world: int) -> None:
    ranks.run(world, check_launches)


def check_special_values(dtype: torch.dtype) -> None:
    for comm, algorithm in communicators():
        inputs = special_rows(comm.world_size, dtype, 256)
        residual, weight = operands_of(len(inputs[0]), 256, dtype)
        for quantize in ("group", "group_column_major_ue8m0"):
            check_groups(comm, inputs, residual, weight, quantize, f"{algorithm}, {quantize}, special values")


@every_dtype
@pytest.mark.parametrize("world", [2, 5])
def test_special_values(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    """Infinities and NaNs of all kinds: a group with an infinity has an infinite scale, NaN has no magnitude."""
    ranks.run(world, check_special_values, dtype)


# ---- What the caller gives -------------------------------------------------------------------------------------------


def check_given() -> None:
    """Scales lie where they should and nothing else is written: rows that are padding, and what is behind."""
    for comm, algorithm in communicators():
        for rows, hidden in ((1, 128), (3, 640), (4, 256)):
            inputs = rows_of(comm.world_size, rows, hidden, torch.bfloat16)
            residual, weight = operands_of(rows, hidden, torch.bfloat16)
            for quantize in GROUPS:
                what = f"{algorithm}, {rows} rows of {hidden}, {quantize}"
                call = (inputs[comm.rank], residual, weight, EPS)
                normed, _, made = comm.all_reduce_add_rms_norm(*call, quantize=quantize)
                strides = strides_of(quantize, rows, hidden)
                memory = torch.full([max(strides) * max(rows, hidden // GROUP_SIZE) + 8], GUARD)
                scale = memory.as_strided(made.shape, strides, storage_offset=3)
                out = torch.empty(rows, hidden, dtype=FP8)
                results = comm.all_reduce_add_rms_norm(*call, out=out, quantize=quantize, scale=scale)
                assert (results[0] is out, results[2] is scale) == (True, True), what
                assert torch.equal(scale, made), what
                assert torch.equal(out.float(), normed.float()), what
                assert int((memory != GUARD).sum()) == made.numel(), f"{what}: something else was written"


@pytest.mark.parametrize("world", [2, 3])
def test_scales_of_the_caller(ranks: RankPool, world: int) -> None:
    ranks.run(world, check_given)


ROW, WEIGHT = torch.ones(3, 256, dtype=torch.bfloat16), torch.ones(256, dtype=torch.bfloat16)
BY_COLUMNS = torch.empty_strided((3, 2), (1, 3))
#: Arguments, and what the error says.
MISFITS: dict[str, tuple[dict[str, object], str]] = {
    "rows of other lengths": (
        {"x": ROW[:, :200].contiguous(), "weight": WEIGHT[:200]},
        "rows of 200 elements: quantize='group' takes a multiple of 128",
    ),
    "three dimensions": (
        {"x": ROW.view(1, 3, 256), "quantize": "group_column_major"},
        r"x has shape \(1, 3, 256\): quantize='group_column_major' takes two dimensions",
    ),
    "scales by columns": ({"scale": BY_COLUMNS}, r"scale .* must have shape \(3, 2\) and strides \(2, 1\)"),
    "scales by rows": (
        {"scale": torch.ones(3, 2), "quantize": "group_column_major"},
        r"scale .* must have shape \(3, 2\) and strides \(1, 3\)",
    ),
    "scales that are not padded": (
        {"scale": BY_COLUMNS, "quantize": "group_column_major_tma_ue8m0"},
        r"scale .* must have shape \(3, 2\) and strides \(1, 4\)",
    ),
    "a scale for each row": ({"scale": torch.ones(3, 1)}, r"scale .* must have shape \(3, 2\)"),
    "scales of another type": ({"scale": torch.ones(3, 2, dtype=torch.int32)}, "scale .* be float32"),
    "out of another type": ({"out": ROW.clone()}, "out .*float8_e4m3fn"),
    "out over the scales": (
        {
            "out": (memory := torch.zeros(3 * 256 + 64, dtype=torch.uint8))[26 : 26 + 768].view(FP8).view(3, 256),
            "scale": memory[:48].view(torch.float32).as_strided((3, 2), (1, 4)),
            "quantize": "group_column_major_tma",
        },
        "overlaps",
    ),
    "another quantization": ({"quantize": "group_row_major"}, "quantize is 'group_row_major': .*'group_ue8m0'"),
}


def reject(name: str) -> None:
    given, message = MISFITS[name]
    arguments = {"x": ROW.clone(), "residual": None, "weight": WEIGHT, "eps": EPS, "quantize": "group", **given}
    with make_communicator() as comm:
        inputs = rows_of(comm.world_size, 3, 256, torch.bfloat16)
        for quantize in LAYOUTS:  # a call of as many elements is prepared the second time
            for _ in range(2):
                with pytest.raises(UnsupportedInputError, match=message):
                    comm.all_reduce_add_rms_norm(**arguments)
                check_groups(comm, inputs, None, WEIGHT, quantize, "a call after an error")


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit(ranks: RankPool, name: str) -> None:
    ranks.run(2, reject, name)
