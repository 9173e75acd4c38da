"""All-reduce + residual add + RMSNorm on emulated GPUs: promised bits of the residual, and norms within an ulp."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fused_reference import (
    EPS,
    FP8,
    FUSED_DTYPES,
    GROUPS,
    assert_normed,
    canonical,
    check_call,
    exact_norm,
    new_residual_of,
    operands_of,
    quantized,
    row_scales,
    rows_of,
    scales_of,
    special_rows,
)
from fused_worlds import communicators, every_dtype, types_and_worlds
from harness import RankPool, make_communicator
from reference import ALGORITHMS, assert_bitwise_equal, assert_is_sum, contributions
from tables import fused_row, write_fused_table

from llm_comm import Communicator, UnsupportedInputError
from llm_comm.planning.tables import FUSED, Row

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
some_worlds = pytest.mark.parametrize("world", [2, 3, 8])
#: (rows, hidden)
SHAPES = ((1, 8), (3, 24), (1, 64), (2, 72), (5, 512), (1, 2880), (3, 5120), (2, 8192), (1, 16384))


def check_shapes(dtype: torch.dtype) -> None:
    for comm, algorithm in communicators():
        world = comm.world_size
        for rows, hidden in SHAPES:
            inputs = rows_of(world, rows, hidden, dtype)
            residual, weight = operands_of(rows, hidden, dtype)
            what = f"{algorithm}, {rows} rows of {hidden}"
            assert comm.plan_all_reduce_add_rms_norm(inputs[0], weight).algorithm == algorithm
            with_residual = check_call(comm, inputs, residual, weight, what)
            again = check_call(comm, inputs, residual, weight, what)
            assert_bitwise_equal(with_residual, again, f"{what}: the second time")
            check_call(comm, inputs, None, weight, f"{what}, no residual")


@types_and_worlds
def test_sum_residual_and_norm(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    ranks.run(world, check_shapes, dtype)


# ---- Shapes of launches ----------------------------------------------------------------------------------------------

#: Every way to run rows that differs in code path: one cluster and several, clusters of one block and of many, blocks
#: that take a row in one tile and in several, tiles sent ahead or not.
VARIANTS = tuple(
    fused_row(1, algorithm, blocks, threads, cluster, depth)
    for algorithm in ALGORITHMS
    for blocks, threads, cluster, depths in (
        (1, 64, 1, (0, 3)),
        (2, 512, 1, (1,)),
        (8, 64, 2, (0, 1, 2)),
        (16, 256, 16, (0, 3)),
        (24, 1024, 8, (0, 1)),
        (64, 128, 4, (0,)),
    )
    for depth in depths
)


def variants(comm: Communicator) -> Iterator[str]:
    """Makes the communicator run one variant after the other; yields their plans for rows of 1024."""
    for row in VARIANTS:
        comm.use_table(comm.table.with_rows(row))
        yield str(
            comm.plan_all_reduce_add_rms_norm(
                torch.empty(5, 1024, dtype=torch.bfloat16), torch.empty(1024, dtype=torch.bfloat16)
            )
        )


def check_variants(rows: int, hidden: int, dtype: torch.dtype) -> None:
    """The bits of a row must not depend on the variant either, nor on the rows beside it."""
    world = dist.get_world_size()
    inputs = rows_of(world, rows, hidden, dtype)
    residual, weight = operands_of(rows, hidden, dtype)
    alone = [t[-1:].contiguous() for t in inputs]
    with make_communicator() as comm:
        first = check_call(comm, inputs, residual, weight, "the usual table")
        for plan in variants(comm):
            normed = check_call(comm, inputs, residual, weight, plan)
            assert_bitwise_equal(normed, first, f"{plan}, beside another one")
            row = check_call(comm, alone, residual[-1:].contiguous(), weight, f"{plan}, the last row")
            assert_bitwise_equal(row, first[-1:], f"{plan}, the last row alone")


@pytest.mark.parametrize(("world", "rows", "hidden"), [(2, 5, 1024), (3, 7, 712), (4, 5, 1024), (8, 3, 1032)])
def test_bits_do_not_depend_on_the_launch(ranks: RankPool, world: int, rows: int, hidden: int) -> None:
    ranks.run(world, check_variants, rows, hidden, torch.bfloat16)


def check_chunks(dtype: torch.dtype) -> None:
    for comm, algorithm in communicators(workspace_bytes=1 << 20):
        world = comm.world_size
        hidden = 4096
        residual, weight = operands_of(1, hidden, dtype)
        chunk = comm.plan_all_reduce_add_rms_norm(residual, weight).chunk_rows
        for rows in (chunk, 2 * chunk + 3):
            inputs = rows_of(world, rows, hidden, dtype)
            residual, weight = operands_of(rows, hidden, dtype)
            assert comm.plan_all_reduce_add_rms_norm(inputs[0], weight).chunks == -(-rows // chunk)
            check_call(comm, inputs, residual, weight, f"{algorithm}, chunks of {chunk}, {rows} rows")
            check_dynamic(comm, inputs, residual, weight, f"{algorithm}, chunks of {chunk}, {rows} rows")


@some_worlds
def test_message_larger_than_a_slot(ranks: RankPool, world: int) -> None:
    ranks.run(world, check_chunks, torch.bfloat16)


# ---- Outputs ---------------------------------------------------------------------------------------------------------


def at_offset(values: torch.Tensor, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of ``values`` that starts ``offset`` elements into a buffer of 77, and the buffer."""
    buffer = torch.full((offset + values.numel() + 16,), 77.0).to(values.dtype)
    inside = buffer[offset : offset + values.numel()].view(values.shape)
    inside.copy_(values)
    return inside, buffer


def assert_untouched_outside(buffer: torch.Tensor, inside: torch.Tensor, what: str) -> None:
    offset = inside.storage_offset()
    outside = torch.cat([buffer[:offset].float(), buffer[offset + inside.numel() :].float()])
    expected = torch.full((1,), 77.0).to(buffer.dtype).float()
    if not outside.eq(expected).all():
        raise AssertionError(f"{what}: wrote outside of the output")


def check_alignment(dtype: torch.dtype, rows: int, hidden: int) -> None:
    for comm, algorithm in communicators():
        rank, world = comm.rank, comm.world_size
        inputs = rows_of(world, rows, hidden, dtype)
        residual, weight = operands_of(rows, hidden, dtype)
        expected = new_residual_of(inputs, residual)
        for step in range(8):
            what = f"{algorithm}, step {step}"
            x, _ = at_offset(inputs[rank], (step + 3 * rank) % 8)
            r, _ = at_offset(residual, (5 * step + rank) % 8)
            w, _ = at_offset(weight, (step * rank) % 8)
            out, out_buffer = at_offset(torch.zeros_like(x), (3 * step + rank) % 8)
            new, new_buffer = at_offset(torch.zeros_like(x), step)
            results = comm.all_reduce_add_rms_norm(x, r, w, EPS, out=out, residual_out=new)
            assert results[0] is out
            assert results[1] is new
            assert_bitwise_equal(new, expected, what)
            exact = exact_norm(expected, weight, EPS)
            assert_normed(out, exact, what)
            assert_bitwise_equal(x, inputs[rank], f"{what}: the input")
            assert_bitwise_equal(r, residual, f"{what}: the residual")
            assert_untouched_outside(out_buffer, out, what)
            assert_untouched_outside(new_buffer, new, what)

            # As the engines call it: the input becomes the norm, the residual the new one.
            x, x_buffer = at_offset(inputs[rank], (step + 3 * rank) % 8)
            comm.all_reduce_add_rms_norm(x, r, w, EPS, out=x, residual_out=r)
            assert_bitwise_equal(r, expected, f"{what}, in place")
            assert_bitwise_equal(x, out, f"{what}, in place")
            assert_untouched_outside(x_buffer, x, f"{what}, in place")
            x, x_buffer = at_offset(inputs[rank], (step + 5 * rank) % 8)
            comm.all_reduce_add_rms_norm(x, residual, w, EPS, out=out, residual_out=x)
            assert_bitwise_equal(x, expected, f"{what}, new residual in the place of the input")
            assert_untouched_outside(x_buffer, x, f"{what}, new residual in the place of the input")

            fp8, fp8_buffer = at_offset(torch.zeros_like(x, dtype=FP8), (step + rank) % 8)
            x, _ = at_offset(inputs[rank], step)
            scale = torch.tensor([0.05])
            comm.all_reduce_add_rms_norm(x, residual, w, EPS, out=fp8, quantize="static", scale=scale)
            assert torch.equal(fp8.float(), quantized(out, "static", scale).float())
            assert_untouched_outside(fp8_buffer, fp8, f"{what}, FP8")


@some_worlds
@every_dtype
@pytest.mark.parametrize(("rows", "hidden"), [(1, 8), (3, 200)])
def test_pointers_unaligned_differently_on_every_rank(
    ranks: RankPool, world: int, dtype: torch.dtype, rows: int, hidden: int
) -> None:
    ranks.run(world, check_alignment, dtype, rows, hidden)


def check_outputs_of_variants() -> None:
    rows, hidden, dtype = 5, 1024, torch.bfloat16
    with make_communicator() as comm:
        inputs = rows_of(comm.world_size, rows, hidden, dtype)
        residual, weight = operands_of(rows, hidden, dtype)
        expected = new_residual_of(inputs, residual)
        for plan in variants(comm):
            check_dynamic(comm, inputs, residual, weight, plan)
            x, in_place = inputs[comm.rank].clone(), residual.clone()
            comm.all_reduce_add_rms_norm(x, in_place, weight, EPS, out=x, residual_out=in_place)
            assert_bitwise_equal(in_place, expected, plan)
            assert_normed(x, exact_norm(expected, weight, EPS), plan)
            # As vLLM calls FlashInfer for a norm without a residual.
            total = inputs[comm.rank].clone()
            normed, _ = comm.all_reduce_add_rms_norm(total, None, weight, EPS, residual_out=total)
            assert_bitwise_equal(total, new_residual_of(inputs, None), plan)
            assert_normed(normed, exact_norm(total, weight, EPS), plan)


@pytest.mark.parametrize("world", [2, 5, 8])
def test_in_place_and_fp8_in_every_launch(ranks: RankPool, world: int) -> None:
    ranks.run(world, check_outputs_of_variants)


def check_dynamic(
    comm: Communicator, inputs: list[torch.Tensor], residual: torch.Tensor | None, weight: torch.Tensor, what: str
) -> None:
    x = inputs[comm.rank]
    normed, plain_residual = comm.all_reduce_add_rms_norm(x, residual, weight, EPS)
    found, new_residual, scale = comm.all_reduce_add_rms_norm(x, residual, weight, EPS, quantize="dynamic")
    assert (found.dtype, scale.shape) == (FP8, (*x.shape[:-1], 1))
    assert_bitwise_equal(canonical(new_residual), canonical(plain_residual), what)
    assert torch.equal(scale, row_scales(normed)), what
    assert torch.equal(found.float().nan_to_num(1e9), quantized(normed, "dynamic", scale).float().nan_to_num(1e9)), what


def check_quantization(dtype: torch.dtype) -> None:
    for comm, algorithm in communicators():
        rank, world = comm.rank, comm.world_size
        for rows, hidden in ((1, 8), (3, 72), (4, 512), (1, 8192)):
            inputs = rows_of(world, rows, hidden, dtype)
            residual, weight = operands_of(rows, hidden, dtype)
            what = f"{algorithm}, {rows} rows of {hidden}"
            for r in (residual, None):
                check_dynamic(comm, inputs, r, weight, what)
                normed, _ = comm.all_reduce_add_rms_norm(inputs[rank], r, weight, EPS)
                for value in (0.001, 0.0371, 3.0):  # saturates, is usual, makes subnormals
                    scale = torch.tensor([value])
                    found, new_residual = comm.all_reduce_add_rms_norm(
                        inputs[rank], r, weight, EPS, quantize="static", scale=scale
                    )
                    assert torch.equal(found.float(), quantized(normed, "static", scale).float()), what
                    assert_bitwise_equal(new_residual, new_residual_of(inputs, r), what)
            zeros = torch.zeros(rows, hidden, dtype=dtype)
            check_dynamic(comm, [zeros] * world, None, weight, f"{what}, zeros")
            given = torch.full((rows,), -1.0)
            results = comm.all_reduce_add_rms_norm(inputs[rank], None, weight, EPS, quantize="dynamic", scale=given)
            assert results[2] is given
            assert (given > 0).all()


@some_worlds
@every_dtype
def test_fp8(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    ranks.run(world, check_quantization, dtype)


# ---- Tiles of whole rows ---------------------------------------------------------------------------------------------

#: hidden, rows, blocks, tile_lines, depth, rows of a tile on 2 and on 3 ranks. Blocks have more tiles than buffers. A
#: row of 72 elements has 9 lines, which 2 ranks cannot share evenly.
TILES = (
    (4096, 27, 2, 512, 2, (2, 3)),
    (8192, 10, 1, 600, 2, (1, 1)),
    (72, 75, 3, 11, 2, (2, 3)),
    (72, 40, 1, 1, 3, (1, 1)),
    (2880, 40, 2, 370, 3, (2, 3)),
)


def tile_row(algorithm: str, blocks: int, tile_lines: int, depth: int) -> Row:
    return Row(1 << 30, FUSED, algorithm, "HB", blocks=blocks, tile_lines=tile_lines, depth=depth)


def check_tiles(dtype: torch.dtype, shape: tuple[int, int, int, int, int, tuple[int, int]]) -> None:
    """Everything that a call returns has the bits of the LL kernel."""
    hidden, rows, blocks, tile_lines, depth, rows_of_tile = shape
    with make_communicator(algorithm="two_shot") as by_ll, make_communicator(algorithm="two_shot_hb") as comm:
        comm.use_table(comm.table.with_rows(tile_row("two_shot_hb", blocks, tile_lines, depth)))
        inputs = rows_of(comm.world_size, rows, hidden, dtype)
        residual, weight = operands_of(rows, hidden, dtype)
        plan = comm.plan_all_reduce_add_rms_norm(inputs[0], weight)
        what = f"{rows} rows of {hidden} {dtype}: {plan}"
        assert (plan.algorithm, plan.blocks, plan.depth, plan.chunks) == ("two_shot_hb", blocks, depth, 1), what
        of_tile = max(plan.tile_lines * comm.world_size // (hidden // 8), 1)
        assert of_tile == rows_of_tile[comm.world_size - 2], what
        assert rows > 2 * depth * blocks * of_tile, what

        for r in (residual, None):
            expected = by_ll.all_reduce_add_rms_norm(inputs[comm.rank], r, weight, EPS)
            check_outputs(comm, inputs[comm.rank], r, weight, expected, what)
        assert_bitwise_equal(canonical(expected[1]), new_residual_of(inputs, None), what)
        check_fp8_of_tiles(comm, by_ll, inputs[comm.rank], residual, weight, what)


def check_outputs(
    comm: Communicator,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    expected: tuple[torch.Tensor, torch.Tensor],
    what: str,
) -> None:
    """Aligned tensors, all tensors or one of them an element behind an aligned address, and calls in place."""
    normed, new_residual = expected
    for unaligned in ("none", "all", "x", "residual", "weight", "out", "residual_out"):

        def place(name: str, values: torch.Tensor, unaligned: str = unaligned) -> tuple[torch.Tensor, torch.Tensor]:
            return at_offset(values, 1 if unaligned in ("all", name) else 0)

        here = f"{what}, unaligned: {unaligned}"
        source, _ = place("x", x)
        given = None if residual is None else place("residual", residual)[0]
        of_weight, _ = place("weight", weight)
        out, out_buffer = place("out", torch.zeros_like(x))
        new, new_buffer = place("residual_out", torch.zeros_like(x))
        comm.all_reduce_add_rms_norm(source, given, of_weight, EPS, out=out, residual_out=new)
        assert_bitwise_equal(new, new_residual, here)
        assert_bitwise_equal(out, normed, here)
        assert_bitwise_equal(source, x, f"{here}: the input")
        assert_untouched_outside(out_buffer, out, here)
        assert_untouched_outside(new_buffer, new, here)
        if given is not None and residual is not None:
            assert_bitwise_equal(given, residual, f"{here}: the residual")

        source, buffer = place("x", x)
        into = new if given is None else given
        comm.all_reduce_add_rms_norm(source, given, of_weight, EPS, out=source, residual_out=into)
        assert_bitwise_equal(into, new_residual, f"{here}, in place")
        assert_bitwise_equal(source, normed, f"{here}, in place")
        assert_untouched_outside(buffer, source, f"{here}, in place")
        source, _ = place("x", x)
        given = None if residual is None else place("residual", residual)[0]
        comm.all_reduce_add_rms_norm(source, given, of_weight, EPS, out=out, residual_out=source)
        assert_bitwise_equal(source, new_residual, f"{here}, new residual in the place of the input")
        assert_bitwise_equal(out, normed, f"{here}, new residual in the place of the input")


def check_fp8_of_tiles(
    comm: Communicator,
    by_ll: Communicator,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    what: str,
) -> None:
    for quantize in ("static", "dynamic", *(GROUPS if x.shape[-1] % 128 == 0 else ())):
        given = {"scale": torch.tensor([0.0371])} if quantize == "static" else {}
        expected = by_ll.all_reduce_add_rms_norm(x, residual, weight, EPS, quantize=quantize, **given)
        for offset in (0, 1):
            of_weight, _ = at_offset(weight, offset)
            out, buffer = at_offset(torch.zeros_like(x, dtype=FP8), offset)
            found = comm.all_reduce_add_rms_norm(x, residual, of_weight, EPS, out=out, quantize=quantize, **given)
            here = f"{what}, {quantize}, offset {offset}"
            assert torch.equal(out.view(torch.uint8), expected[0].view(torch.uint8)), here
            assert_untouched_outside(buffer, out, here)
            assert_bitwise_equal(found[1], expected[1], here)
            if quantize != "static":
                assert torch.equal(found[2], expected[2]), here
                normed, _ = by_ll.all_reduce_add_rms_norm(x, residual, weight, EPS)
                assert torch.equal(found[2], scales_of(normed, quantize)), here


@pytest.mark.parametrize("shape", TILES, ids=lambda shape: f"{shape[1]}x{shape[0]}-depth{shape[4]}")
@pytest.mark.parametrize("world", [2, 3])
def test_tiles_of_whole_rows(
    ranks: RankPool, world: int, shape: tuple[int, int, int, int, int, tuple[int, int]]
) -> None:
    ranks.run(world, check_tiles, torch.bfloat16 if world == 2 else torch.float16, shape)


def check_tiles_of_special_values(dtype: torch.dtype) -> None:
    with make_communicator(algorithm="two_shot_hb") as comm:
        comm.use_table(comm.table.with_rows(tile_row("two_shot_hb", 2, 16, 2)))
        inputs = special_rows(comm.world_size, dtype, 72)
        residual, weight = operands_of(len(inputs[0]), 72, dtype)
        assert comm.plan_all_reduce_add_rms_norm(inputs[0], weight).algorithm == "two_shot_hb"
        check_call(comm, inputs, residual, weight, "special values in tiles")
        check_call(comm, inputs, None, weight, "special values in tiles, no residual")
        check_dynamic(comm, inputs, residual, weight, "special values in tiles")
        # The only tile is not full.
        one = [x[:1].contiguous() for x in inputs]
        check_call(comm, one, residual[:1], weight, "one row")


@every_dtype
def test_special_values_in_tiles_of_rows(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(3, check_tiles_of_special_values, dtype)


# ---- Values ----------------------------------------------------------------------------------------------------------


def check_special_values(dtype: torch.dtype) -> None:
    for comm, algorithm in communicators():
        world = comm.world_size
        inputs = special_rows(world, dtype, 40)
        residual, weight = operands_of(len(inputs[0]), 40, dtype)
        for _ in range(2):
            check_call(comm, inputs, residual, weight, f"{algorithm}, special values")
        check_call(comm, inputs, None, weight, f"{algorithm}, special values, no residual")
        check_dynamic(comm, inputs, residual, weight, f"{algorithm}, special values")


@every_dtype
@pytest.mark.parametrize("world", [2, 4, 7])
def test_special_values(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    """Signed zeros, subnormals, infinities and NaNs of all kinds, the pattern of an empty line among them."""
    ranks.run(world, check_special_values, dtype)


def check_extremes(dtype: torch.dtype) -> None:
    for comm, algorithm in communicators():
        world = comm.world_size
        zeros = torch.zeros(2, 48, dtype=dtype)
        _, weight = operands_of(2, 48, dtype)
        check_call(comm, [-zeros] * world, -zeros, weight, f"{algorithm}, -0.0")
        for exponent in (-120, -70, -24, 10, 60, 110):
            power = torch.tensor(2.0**exponent)
            inputs = [(t.float() * power).to(dtype) for t in rows_of(world, 2, 48, dtype)]
            residual = (operands_of(2, 48, dtype)[0].float() * power).to(dtype)
            check_call(comm, inputs, residual, weight, f"{algorithm}, 2^{exponent}", eps=1e-6)


@every_dtype
def test_tiny_and_huge_values(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(3, check_extremes, dtype)


# ---- Sequences -------------------------------------------------------------------------------------------------------


def check_random_calls(table: Path, seed: int, calls: int) -> None:
    draw = random.Random(seed)  # the same on all ranks
    with make_communicator(table=str(table)) as comm:
        for call in range(calls):
            if draw.random() < 0.4:
                count = draw.randrange(1, draw.choice([70, 600, 9000]))
                inputs = contributions(comm.world_size, count, torch.float32, call)
                assert_is_sum(comm.all_reduce(inputs[comm.rank]), inputs, f"call {call}: plain, {count} elements")
                continue
            rows, hidden = draw.randrange(1, 9), 8 * draw.choice([1, 2, 9, 40, 130])
            dtype = draw.choice(FUSED_DTYPES)
            inputs = rows_of(comm.world_size, rows, hidden, dtype, call)
            residual, weight = operands_of(rows, hidden, dtype, call)
            chosen = draw.choice([residual, None])
            check_call(comm, inputs, chosen, weight, f"call {call}: {rows} rows of {hidden}")


@pytest.mark.parametrize("world", [2, 3, 7, 8])
def test_random_calls_among_plain_ones(ranks: RankPool, world: int, tmp_path: Path) -> None:
    order = random.Random(0).sample(VARIANTS, len(VARIANTS))
    rows = [row._replace(up_to=500 * n) for n, row in enumerate(order, start=1)]
    ranks.run(world, check_random_calls, write_fused_table(tmp_path / "table.yaml", rows), world, 120)


# ---- What is declined ------------------------------------------------------------------------------------------------

ROW = torch.ones(2, 64, dtype=torch.bfloat16)
WEIGHT = torch.ones(64, dtype=torch.bfloat16)
DECLINED = {
    "fp32": (ROW.float(), WEIGHT.float(), None, "torch.float32 is not one of torch.bfloat16"),
    "other weight dtype": (ROW, WEIGHT.half(), None, "weight is torch.float16, x is torch.bfloat16"),
    "hidden not a multiple of 8": (ROW[:, :60].contiguous(), WEIGHT[:60], None, "rows of 60 elements"),
    "hidden too large": (
        torch.ones(1, 16392, dtype=torch.bfloat16),
        torch.ones(16392, dtype=torch.bfloat16),
        None,
        "rows of 16392 elements",
    ),
    "no elements": (ROW[:, :0], WEIGHT[:0], None, "rows of 0 elements"),
    "strided rows": (ROW[:, :32], WEIGHT[:32], None, "x is not contiguous"),
    "strided weight": (ROW[:, :32].contiguous(), WEIGHT[::2], None, "weight is not contiguous"),
    "other length": (ROW, WEIGHT[:32], None, "it must be that of a row of x"),
    "other device": (ROW.to("meta"), WEIGHT, None, "x is on meta, the communicator on cpu"),
    "too large": (torch.ones(40, 64, dtype=torch.bfloat16), WEIGHT, None, "more than max_message_bytes=4096"),
    "unknown quantization": (ROW, WEIGHT, "int8", "quantize is 'int8'"),
}


def decline(name: str) -> str:
    x, weight, quantize, _ = DECLINED[name]
    with make_communicator(max_message_bytes=4096) as comm:
        check_call(comm, rows_of(comm.world_size, 2, 64, torch.bfloat16), None, WEIGHT, "a call before")
        assert not comm.accepts_all_reduce_add_rms_norm(x, weight, quantize)
        plan = comm.plan_all_reduce_add_rms_norm(x, weight, quantize)
        assert plan.algorithm == "declined"
        with pytest.raises(UnsupportedInputError) as error:
            comm.all_reduce_add_rms_norm(x, None, weight, EPS, quantize=quantize, scale=torch.ones(1))
        assert plan.reason in str(error.value)
        check_call(comm, rows_of(comm.world_size, 2, 64, torch.bfloat16), None, WEIGHT, "a call after")
        return plan.reason


@pytest.mark.parametrize("name", DECLINED)
def test_declined_input(ranks: RankPool, name: str) -> None:
    (reason,) = set(ranks.run(2, decline, name))
    assert DECLINED[name][3] in reason


def decline_in_world_of_one() -> None:
    with make_communicator() as comm:
        assert not comm.accepts_all_reduce_add_rms_norm(ROW, WEIGHT)
        assert not comm._operations.all_reduce_add_rms_norm.accepts_traced(ROW, WEIGHT, None)
        with pytest.raises(UnsupportedInputError, match="one rank"):
            comm.all_reduce_add_rms_norm(ROW, None, WEIGHT, EPS)


def test_world_of_one_is_declined(ranks: RankPool) -> None:
    ranks.run(1, decline_in_world_of_one)


def accept() -> None:
    with make_communicator() as comm:
        for shape in ((0, 64), (64,), (2, 3, 64)):
            x = torch.ones(shape, dtype=torch.bfloat16)
            assert comm.accepts_all_reduce_add_rms_norm(x, WEIGHT)
            normed, new_residual = comm.all_reduce_add_rms_norm(x, x, WEIGHT, 0.0)
            assert normed.shape == new_residual.shape == x.shape
            assert new_residual.eq(comm.world_size + 1).all()
            assert normed.eq(1).all()


def test_shape_is_kept(ranks: RankPool) -> None:
    ranks.run(2, accept)


BUFFER = torch.ones(300, dtype=torch.bfloat16)
MISFITS = {
    "residual of other shape": ({"residual": ROW[:1]}, "residual "),
    "residual of other dtype": ({"residual": ROW.half()}, "residual "),
    "out of other shape": ({"out": ROW[:1]}, "out "),
    "out for FP8": ({"out": ROW.clone(), "quantize": "dynamic"}, "out .*float8_e4m3fn"),
    "x itself for FP8": ({"x": ROW, "out": ROW, "quantize": "dynamic"}, "out .*float8_e4m3fn"),
    "residual_out of other dtype": ({"residual_out": ROW.half()}, "residual_out "),
    "residual, written in place, over part of x": (
        {"x": BUFFER[:128].view(2, 64), "residual": (part := BUFFER[1:129].view(2, 64)), "residual_out": part},
        "residual_out overlaps x",
    ),
    "no scale": ({"quantize": "static"}, "needs scale"),
    "scale of other dtype": ({"quantize": "static", "scale": WEIGHT[:1]}, "scale .*float32"),
    "scale for each row": ({"quantize": "static", "scale": torch.ones(2)}, "scale .*1 elements"),
    "scale for some rows": ({"quantize": "dynamic", "scale": torch.ones(1)}, "scale .*2 elements"),
    "scale in strides": ({"quantize": "dynamic", "scale": torch.ones(2, 2)[:, 0]}, "scale .*contiguous"),
    "scale without quantization": ({"scale": torch.ones(1)}, "scale without quantize"),
    "weight_bias is infinite": ({"weight_bias": -math.inf}, "weight_bias is -inf"),
    "weight_bias is no number": ({"weight_bias": math.nan, "quantize": "dynamic"}, "weight_bias is nan"),
    "weight_bias beyond fp32": ({"weight_bias": 3.5e38}, "weight_bias is 35.* finite number in fp32"),
}


def reject(name: str) -> None:
    given, message = MISFITS[name]
    arguments = {"x": ROW.clone(), "residual": None, "weight": WEIGHT, "eps": EPS, **given}
    with make_communicator() as comm:
        with pytest.raises(UnsupportedInputError, match=message):
            comm.all_reduce_add_rms_norm(**arguments)
        check_call(comm, rows_of(comm.world_size, 2, 64, torch.bfloat16), None, WEIGHT, "a call after an error")


@pytest.mark.parametrize("name", MISFITS)
def test_tensor_that_does_not_fit(ranks: RankPool, name: str) -> None:
    ranks.run(2, reject, name)
