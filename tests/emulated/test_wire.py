"""Option ``wire``: large all-reduces, reduce-scatters and lossy all-gathers are quantized and alike on all ranks, all
other messages are exact."""

from __future__ import annotations

import logging
import math

import pytest
import torch
import torch.distributed as dist
from fused_reference import EPS, FP8, assert_normed, canonical, exact_norm, operands_of, quantized, scales_of
from harness import RankPool, error_of_setup, make_communicator, unnamed
from reference import DTYPES, assert_bitwise_equal, assert_is_sum, rank_order_sum
from shards_reference import Division, assert_same_bits, assert_untouched_outside, divisions, placed

from llm_comm import Communicator
from llm_comm.bench.wire_reference import (
    FORMAT_OF_WIRE,
    KERNEL_BLOCK,
    quantized_all_reduce,
    quantized_rows,
    quantized_shard,
)
from llm_comm.planning.selection import MAX_WIRE_BYTES
from llm_comm.planning.tables import ALL_GATHER, ALL_REDUCE, FUSED, Row

WORLD = 3
SMALLEST = 64 << 10
BF16 = torch.bfloat16
HIDDEN = 512


def drawn(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.rand(count, generator=generator) * 2 - 1).to(dtype)


def assert_quantized_sum(found: torch.Tensor, inputs: list[torch.Tensor], wire: str) -> None:
    """Check the bits, which are the same on all ranks, and that they are no exact sum."""
    assert_bitwise_equal(found, quantized_all_reduce(inputs, FORMAT_OF_WIRE[wire]), wire)
    assert not torch.equal(found, rank_order_sum(inputs))


def check_sums(comm: Communicator, wire: str) -> None:
    for dtype in DTYPES:
        limit = SMALLEST // dtype.itemsize
        for count in (1, limit - 1, limit, limit + 1, 3 * limit + 5):
            inputs = [drawn(rank, count, dtype) for rank in range(WORLD)]
            x, what = inputs[comm.rank].clone(), f"{count} {dtype}"
            total = comm.all_reduce(x)
            assert_bitwise_equal(x, inputs[comm.rank], f"{what}: the input")
            assert_bitwise_equal(comm.all_reduce(x, out=x), total, f"{what}: in place")
            if count < limit:
                assert_is_sum(total, inputs, what)
            else:
                assert comm.plan(x).algorithm == f"two_shot_{wire}_hb"
                assert_quantized_sum(total, inputs, wire)
            if x.nbytes % 16 == 0:
                symmetric = comm.empty(count, dtype).copy_(inputs[comm.rank])
                assert_bitwise_equal(comm.all_reduce(symmetric, out=symmetric), total, f"{what}: symmetric tensors")


def check_others(comm: Communicator) -> None:
    """Gathers of any size are as without the option, and fused all-reduces and reduce-scatters that have no kernel of
    the type or are small."""
    rows = 2 * SMALLEST // HIDDEN if comm.config.wire == "int8" else SMALLEST // (2 * HIDDEN) - 1
    x, weight = drawn(comm.rank, rows * HIDDEN, BF16).view(rows, HIDDEN), torch.ones(HIDDEN, dtype=BF16)
    with make_communicator() as exact:
        for one, other in zip(
            comm.all_reduce_add_rms_norm(x, x.clone(), weight, 1e-5),
            exact.all_reduce_add_rms_norm(x, x.clone(), weight, 1e-5),
            strict=True,
        ):
            assert_bitwise_equal(one, other, "fused")
        lossy = rows * HIDDEN * 2 * WORLD < SMALLEST
        assert_bitwise_equal(comm.all_gather(x, lossy=lossy), exact.all_gather(x), "all-gather")
        shards = drawn(comm.rank, WORLD * (rows * HIDDEN // WORLD), BF16)
        assert_bitwise_equal(comm.reduce_scatter(shards), exact.reduce_scatter(shards), "reduce-scatter")


def run(wire: str) -> None:
    with make_communicator(wire=wire, wire_min_bytes=SMALLEST) as comm:
        check_sums(comm, wire)
        check_others(comm)


@pytest.mark.parametrize("wire", FORMAT_OF_WIRE)
def test_large_sums_are_quantized(ranks: RankPool, wire: str) -> None:
    ranks.run(WORLD, run, wire)


def check_reduce_scatters(comm: Communicator) -> None:
    """Shards of any shape, the last ones empty, and tensors that are only element-aligned."""
    world = comm.world_size
    for dtype in DTYPES:
        for rows, inner, sizes in ((1, 1, None), (1, 7, None), (5, 3, [211, 400, 0]), (4, 64, [30, 41, 29])):
            of_rank = sizes or [(SMALLEST // dtype.itemsize + 99) // inner // world] * world
            shape = (rows, sum(of_rank), inner)
            inputs = [drawn(rank, math.prod(shape) + 1, dtype)[1:].view(shape) for rank in range(world)]
            parts = [x.split(of_rank, 1)[comm.rank] for x in inputs]
            found = comm.reduce_scatter(inputs[comm.rank], 1, of_rank)
            if inputs[0].nbytes >= SMALLEST:
                expected = quantized_shard(parts, comm.rank, FORMAT_OF_WIRE["fp8"])
                assert comm.plan_reduce_scatter(inputs[comm.rank], 1, of_rank).algorithm == "push_fp8_hb"
                assert found.numel() == 0 or not torch.equal(found, rank_order_sum(parts))
            else:
                expected = rank_order_sum(parts)
            assert_bitwise_equal(found, expected.view(found.shape), f"{shape} {dtype} {of_rank}")


def run_reduce_scatters() -> None:
    with make_communicator(wire="fp8", wire_min_bytes=SMALLEST) as comm:
        check_reduce_scatters(comm)


def test_large_reduce_scatters_are_quantized(ranks: RankPool) -> None:
    ranks.run(WORLD, run_reduce_scatters)


def special(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Blocks of kinds in turn: zeros of both signs, denormals, equal values, an outlier, an infinity, NaNs, infinities
    whose sum is none, and the largest value."""
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    blocks = list(drawn(rank, count, torch.float32).to(dtype).split(KERNEL_BLOCK))
    for i, block in enumerate(blocks):
        kind, place = i % 9, i % len(block)
        if kind == 0:
            block.zero_()[::2] = -0.0
        elif kind == 1:
            block.copy_(block.float() * smallest / 4)
        elif kind == 2:
            block.fill_(0.3)
        elif kind == 3:
            block[place] = 1e4
        elif kind == 4:
            block[place] = math.inf if rank else 1.0
        elif kind == 5:
            block[place], block[-1] = math.nan, -math.inf
        elif kind == 6:
            block[place] = -math.inf if rank else math.inf
        elif kind == 7:
            block[place] = largest if rank == 0 else 0.0
    return torch.cat(blocks)


def check_special(wire: str) -> None:
    world = dist.get_world_size()
    with make_communicator(wire=wire, wire_min_bytes=0) as comm:
        for dtype in DTYPES:
            for count in (9 * KERNEL_BLOCK * world, 5000, KERNEL_BLOCK + 1, 1):
                inputs = [special(rank, count, dtype) for rank in range(world)]
                expected = quantized_all_reduce(inputs, FORMAT_OF_WIRE[wire])
                found = comm.all_reduce(inputs[comm.rank])
                what = f"{count} {dtype}, {wire}"
                assert torch.equal(found.isnan(), expected.isnan()), what
                assert_bitwise_equal(found[~found.isnan()], expected[~expected.isnan()], what)


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_special_values(ranks: RankPool, world: int) -> None:
    for wire in FORMAT_OF_WIRE:
        ranks.run(world, check_special, wire)


def repeat() -> None:
    """A prepared call with other data, between exact ones, as an engine's prefill is between decode steps."""
    with make_communicator(wire="int8", wire_min_bytes=SMALLEST) as comm:
        x = torch.empty(SMALLEST, dtype=BF16)
        for seed in range(20):
            inputs = [drawn(rank, SMALLEST, BF16, seed) for rank in range(WORLD)]
            assert_quantized_sum(comm.all_reduce(x.copy_(inputs[comm.rank])), inputs, "int8")
            small = [of_rank[:1000].contiguous() for of_rank in inputs]
            assert_is_sum(comm.all_reduce(small[comm.rank]), small, f"{seed}")
        stats = comm.stats()
        by_name = {calls.algorithm: calls for calls in stats.calls}
        sent = by_name["two_shot_int8_hb"].bytes
        assert by_name["two_shot_int8_hb"].calls == 20
        assert sent == 20 * 2 * SMALLEST
        assert stats.bytes_saved == round(sent * 2 * (WORLD - 1) / WORLD * (1 - 1.0625 / 2))
        assert stats.as_dict()["bytes_saved"] == stats.bytes_saved


def test_calls_are_repeated_and_counted(ranks: RankPool) -> None:
    ranks.run(WORLD, repeat)


def differ() -> tuple[str, str]:
    odd = dist.get_rank() == 1
    return (
        error_of_setup(wire="fp8" if odd else "int8"),
        error_of_setup(wire="fp8", wire_min_bytes=SMALLEST if odd else 2 * SMALLEST),
    )


def test_ranks_must_agree(ranks: RankPool) -> None:
    for of_rank in ranks.run(WORLD, differ):
        wire, smallest = map(unnamed, of_rank)
        assert "have different options: wire is 'fp8' on rank 1, 'int8' on ranks 0, 2" in wire
        assert "have different options: wire_min_bytes is 65536 on rank 1, 131072 on ranks 0, 2" in smallest


def by_table() -> tuple[int, str]:
    with make_communicator(wire="fp8", wire_min_bytes=SMALLEST) as comm:
        comm.use_table(
            comm.table.with_rows(Row(1 << 30, ALL_REDUCE, "two_shot_fp8_hb", "HB", blocks=2, tile_lines=32, depth=3))
        )
        inputs = [drawn(rank, SMALLEST, BF16) for rank in range(WORLD)]
        assert_quantized_sum(comm.all_reduce(inputs[comm.rank]), inputs, "fp8")
        plan = comm.plan(inputs[0])
        return plan.depth, plan.reason


def test_rows_of_a_table(ranks: RankPool) -> None:
    for depth, reason in ranks.run(WORLD, by_table):
        assert depth == 3
        assert reason.endswith("up to 1073741824 bytes; wire fp8")


def check_chunks(tile_lines: int, blocks: int) -> None:
    """Sums by chunks of this length: two of a block, of which the last is not whole, and one with few lines."""
    options = {"wire": "fp8", "wire_min_bytes": 0, "workspace_bytes": 16 << 20}
    with make_communicator(**options) as comm:
        row = Row(1 << 30, ALL_REDUCE, "two_shot_fp8_hb", "HB", blocks=blocks, tile_lines=tile_lines, depth=2)
        comm.use_table(comm.table.with_rows(row))
        for dtype in DTYPES:
            of_line = 16 // dtype.itemsize
            for lines in (WORLD * blocks * tile_lines * 3 // 2 + 11, 5):
                inputs = [drawn(rank, lines * of_line - 1, dtype, lines) for rank in range(WORLD)]
                assert comm.plan(inputs[0]).tile_lines == tile_lines
                found = comm.all_reduce(inputs[comm.rank])
                assert_bitwise_equal(found, quantized_all_reduce(inputs, "e4m3"), f"{lines} lines of {dtype}")


# A warp has 1, 2, 4, 9 and 17 rows of 32 lines at most; its groups have 8 for two-byte types, 16 for fp32.
@pytest.mark.parametrize(("tile_lines", "blocks"), [(32, 3), (160, 2), (1024, 1), (2080, 1), (4128, 1)])
def test_chunks_of_any_length(ranks: RankPool, tile_lines: int, blocks: int) -> None:
    ranks.run(WORLD, check_chunks, tile_lines, blocks)


def over_nodes() -> list[str]:
    """Each rank is a node of its own. Returns the warnings."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("llm_comm")
    logger.addHandler(handler)
    try:
        with make_communicator(wire="fp8", wire_min_bytes=0, node=f"node {dist.get_rank()}") as comm:
            values = torch.arange(SMALLEST, dtype=torch.float32).remainder_(997)
            assert torch.equal(comm.all_reduce(values * (comm.rank + 1)), values * 6)
            assert torch.equal(comm.all_gather(values, lossy=True), values.repeat(WORLD))
            assert comm.stats().bytes_saved == 0
            # The limit is that of exact sums over nodes.
            limit = comm.table.max_message_bytes
            assert 0 < limit < MAX_WIRE_BYTES
            assert comm.accepts(torch.empty(limit // 4))
            assert not comm.accepts(torch.empty(limit // 4 + 1))
    finally:
        logger.removeHandler(handler)
    return said


def test_sums_over_nodes_are_exact(ranks: RankPool) -> None:
    first, *others = ranks.run(WORLD, over_nodes)
    assert "option wire is 'fp8' (Python), and the ranks are on several nodes: their all-reduces are exact" in first[-1]
    assert not any("wire" in text for of_rank in others for text in of_rank)


# ---- All-gathers -----------------------------------------------------------------------------------------------------


def quantized_parts(whole: torch.Tensor, division: Division) -> torch.Tensor:
    """Return what a lossy all-gather returns: each shard is the quantized sum of one contribution."""
    parts = [division.part_of(whole, rank) for rank in range(len(division.sizes))]
    return torch.cat([quantized_all_reduce([part], FORMAT_OF_WIRE["fp8"]) for part in parts], division.dim)


def check_gather(comm: Communicator, division: Division, dtype: torch.dtype, number: int) -> bytes:
    """Gather unaligned shards, exactly, lossily and in place. Return the bits of the lossy result."""
    rank, what = comm.rank, f"{division} of {dtype}"
    where = division.dim, division.sizes
    whole = special(1, math.prod(division.shape) + 1, dtype)[1:].view(division.shape)
    expected = quantized_parts(whole, division)
    x, _ = placed(division.part_of(whole, rank).contiguous(), (number + 3 * rank) % 8)
    out, buffer = placed(torch.zeros_like(whole), (3 * number + rank) % 8)
    plan = comm.plan_all_gather(x, *where, lossy=True)
    assert plan.algorithm == ("push_fp8_hb" if whole.numel() else "none")
    assert comm.all_gather(x, *where, out, lossy=True) is out
    assert torch.equal(out.isnan(), expected.isnan()), what
    assert_bitwise_equal(out[~out.isnan()], expected[~expected.isnan()], what)
    assert_same_bits(x, division.part_of(whole, rank), f"{what}: the input")
    assert_untouched_outside(buffer, out, what)
    found = comm.try_all_gather(x, *where, lossy=True)
    assert found is not None
    assert_same_bits(found, out, f"{what}, into a new tensor")
    shard = division.part_of(out, rank)
    out.zero_()
    shard.copy_(x)
    is_one_piece = shard.numel() > 0 and shard.is_contiguous()
    assert comm.all_gather(shard if is_one_piece else x, *where, out, lossy=True) is out
    assert_same_bits(out, found, f"{what}, in place")
    assert_untouched_outside(buffer, out, f"{what}, in place")
    assert_same_bits(comm.all_gather(x, *where), whole, f"{what}, exact")
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    assert_same_bits(comm.all_gather(x.view(integers), *where, lossy=True), whole.view(integers), f"{what}, integers")
    return found.view(integers).numpy().tobytes()


def check_gathers() -> list[bytes]:
    with make_communicator(wire="fp8", wire_min_bytes=0) as comm:
        x = torch.ones(comm.world_size, dtype=BF16)
        comm.all_gather(x, lossy=True)
        row = Row(1 << 30, ALL_GATHER, "push_fp8_hb", "HB", blocks=3, tile_lines=32, depth=2)
        comm.use_table(comm.table.with_rows(row))
        assert "up to 1073741824 bytes a rank; wire fp8" in comm.plan_all_gather(x, lossy=True).reason
        return [
            check_gather(comm, division, DTYPES[number % len(DTYPES)], number)
            for number, division in enumerate(divisions(comm.world_size))
        ]


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_lossy_all_gathers(ranks: RankPool, world: int) -> None:
    first, *others = ranks.run(world, check_gathers)
    assert all(of_rank == first for of_rank in others)


def check_which_gathers() -> None:
    """The whole tensor decides, and no memory of the tensors."""
    count = SMALLEST // 2
    with make_communicator(wire="fp8", wire_min_bytes=SMALLEST) as comm:
        for missing in (1, 0):
            sizes = (count // 2, 0, count - count // 2 - missing)
            division = Division((sum(sizes),), 0, sizes)
            whole = drawn(0, sum(sizes), BF16)
            expected = whole if missing else quantized_parts(whole, division)
            x = division.part_of(whole, comm.rank)
            plan = comm.plan_all_gather(x, 0, sizes, lossy=True)
            assert (plan.algorithm, plan.symmetric) == (("push_hb", "") if missing else ("push_fp8_hb", ""))
            assert_bitwise_equal(comm.all_gather(x, 0, sizes, lossy=True), expected, f"{missing} missing")
            comm.empty(1, BF16)
            out = comm.empty(len(whole), BF16)
            assert_bitwise_equal(comm.all_gather(x, 0, sizes, out, lossy=True), expected, "a symmetric output")
            assert comm.accepts_all_gather(x, 0, sizes, lossy=True)
        assert not torch.equal(expected, whole)
        share = sum(sizes) / max(sizes) - 1
        assert comm.stats().bytes_saved == round(2 * 2 * max(sizes) * share * (1 - 1.0625 / 2))
    for options, is_quantized in (
        ({"wire": "int8", "wire_min_bytes": 0}, False),
        ({"wire": "fp8", "wire_min_bytes": 0, "algorithm": "push_hb"}, False),
        ({"wire": "fp8", "algorithm": "push_fp8_hb"}, True),
        ({"algorithm": "push_fp8_hb"}, False),
    ):
        with make_communicator(**options) as comm:
            whole = drawn(0, 300 * WORLD, BF16)
            x = whole[300 * comm.rank :][:300]
            expected = quantized_parts(whole, Division((len(whole),), 0, (300,) * WORLD)) if is_quantized else whole
            assert_bitwise_equal(comm.all_gather(x, lossy=True), expected, str(options))
            assert_bitwise_equal(comm.all_gather(x), whole, str(options))


def test_which_lossy_all_gathers_are_quantized(ranks: RankPool) -> None:
    ranks.run(WORLD, check_which_gathers)


@torch.inference_mode()
def gather_by_operators_and_arrays() -> None:
    with make_communicator(wire="fp8", wire_min_bytes=SMALLEST) as comm:

        def layer(x: torch.Tensor) -> torch.Tensor | None:
            assert comm.accepts_all_gather(x, 1, lossy=True)
            return comm.all_gather(comm.try_all_gather(x, 1, lossy=True), lossy=True)

        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        limit = SMALLEST // (2 * FEATURES * WORLD) + 1
        for rows in (limit // WORLD - 1, limit, limit + 1):
            x = drawn(comm.rank, rows * FEATURES, BF16).view(rows, FEATURES)
            assert_bitwise_equal(compiled(x), layer(x), f"{rows} rows")
        assert sum(of.calls for of in comm.stats().calls if of.algorithm == "push_fp8_hb") == 8
        x = drawn(comm.rank, SMALLEST, torch.float32)
        expected = comm.all_gather(x, lossy=True)
        assert not torch.equal(expected, comm.all_gather(x))
        assert_bitwise_equal(torch.from_numpy(comm.all_gather(x.numpy(), lossy=True)), expected, "an array")
        tried = torch.from_numpy(comm.try_all_gather(x.numpy(), lossy=True))
        assert_bitwise_equal(tried, expected, "an array, if it is accepted")


def test_lossy_all_gathers_of_compiled_graphs_and_arrays(ranks: RankPool) -> None:
    ranks.run(WORLD, gather_by_operators_and_arrays)


def gather_alone() -> None:
    with make_communicator(wire="fp8", wire_min_bytes=0) as comm:
        x = drawn(0, 100, BF16)
        assert comm.plan_all_gather(x, lossy=True).algorithm == "none"
        assert_bitwise_equal(comm.all_gather(x, lossy=True), x, "a copy")


def test_a_world_of_one_copies(ranks: RankPool) -> None:
    ranks.run(1, gather_alone)


# ---- Fused with norms ------------------------------------------------------------------------------------------------

#: hidden, rows, blocks, tile_lines, depth. A row of 72 elements ends within a block, so tiles do too.
TILES = (
    (4096, 27, 2, 512, 2),
    (8192, 9, 1, 100, 2),
    (72, 75, 3, 24, 2),
    (72, 40, 1, 1, 3),
    (2880, 40, 2, 368, 3),
)


def check_fused(dtype: torch.dtype, shape: tuple[int, int, int, int, int]) -> list[bytes]:
    """Returns what all ranks must return alike."""
    hidden, rows, blocks, tile_lines, depth = shape
    with make_communicator(wire="fp8", wire_min_bytes=0) as comm:
        row = Row(1 << 30, FUSED, "two_shot_fp8_hb", "HB", blocks=blocks, tile_lines=tile_lines, depth=depth)
        comm.use_table(comm.table.with_rows(row))
        inputs = [drawn(rank, rows * hidden, dtype).view(rows, hidden) for rank in range(comm.world_size)]
        residual, weight = operands_of(rows, hidden, dtype)
        plan = comm.plan_all_reduce_add_rms_norm(inputs[0], weight)
        assert (plan.algorithm, plan.blocks, plan.depth, plan.chunks) == ("two_shot_fp8_hb", blocks, depth, 1), plan
        total = quantized_rows(inputs, "e4m3", 8 * plan.tile_lines)
        assert not torch.equal(total, rank_order_sum(inputs))
        found = []
        for r in (residual, None):
            expected = total if r is None else total + r
            what = f"{shape}, residual {r is not None}"
            x = inputs[comm.rank].clone()
            normed, new_residual = comm.all_reduce_add_rms_norm(x, r, weight, EPS)
            assert_bitwise_equal(new_residual, expected, what)
            assert_normed(normed, exact_norm(expected, weight, EPS), what)
            assert_bitwise_equal(x, inputs[comm.rank], f"{what}: the input")
            check_fused_in_place(comm, x, r, weight, (normed, new_residual), what)
            found += [normed.view(torch.int16), new_residual.view(torch.int16)]
            for quantize in (
                "static",
                "dynamic",
                *(("group", "group_column_major_ue8m0") if hidden % 128 == 0 else ()),
            ):
                given = {"scale": torch.tensor([0.0371])} if quantize == "static" else {}
                codes, new, *scales = comm.all_reduce_add_rms_norm(x, r, weight, EPS, quantize=quantize, **given)
                scale = given["scale"] if quantize == "static" else scales_of(normed, quantize)
                if quantize != "static":
                    assert torch.equal(scales[0], scale), f"{what}, {quantize}"
                assert codes.dtype == FP8
                assert torch.equal(codes.float(), quantized(normed, quantize, scale).float()), f"{what}, {quantize}"
                assert_bitwise_equal(new, expected, f"{what}, {quantize}")
                found.append(codes.view(torch.uint8))
        calls = comm.stats().by_operation()[FUSED]
        assert {one.algorithm for one in comm.stats().calls} == {"two_shot_fp8_hb"}
        world = comm.world_size
        assert comm.stats().bytes_saved == round(calls.bytes * 2 * (world - 1) / world * (1 - 1.0625 / 2))
        return [result.numpy().tobytes() for result in found]


def check_fused_in_place(
    comm: Communicator,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    expected: tuple[torch.Tensor, torch.Tensor],
    what: str,
) -> None:
    """Calls in place, of aligned tensors and of those an element behind an aligned address."""
    for offset in (0, 1):
        source, given, of_weight = (
            None
            if values is None
            else torch.cat([values.new_zeros(offset), values.flatten()])[offset:].view(values.shape)
            for values in (x, residual, weight)
        )
        into = torch.empty_like(x) if given is None else given
        comm.all_reduce_add_rms_norm(source, given, of_weight, EPS, out=source, residual_out=into)
        assert_bitwise_equal(source, expected[0], f"{what}, in place, offset {offset}")
        assert_bitwise_equal(into, expected[1], f"{what}, in place, offset {offset}")


@pytest.mark.parametrize("shape", TILES, ids=lambda shape: f"{shape[1]}x{shape[0]}-depth{shape[4]}")
@pytest.mark.parametrize("world", [2, 3])
def test_fused_sums_are_quantized_in_tiles(ranks: RankPool, world: int, shape: tuple[int, int, int, int, int]) -> None:
    first, *others = ranks.run(world, check_fused, BF16 if world == 2 else torch.float16, shape)
    assert first
    for of_rank in others:
        assert of_rank == first


def check_special_rows(dtype: torch.dtype) -> None:
    hidden = 9 * KERNEL_BLOCK + 8
    with make_communicator(wire="fp8", wire_min_bytes=0) as comm:
        comm.use_table(
            comm.table.with_rows(Row(1 << 30, FUSED, "two_shot_fp8_hb", "HB", blocks=2, tile_lines=80, depth=2))
        )
        inputs = [special(rank, 11 * hidden, dtype).view(11, hidden) for rank in range(comm.world_size)]
        weight = torch.ones(hidden, dtype=dtype)
        plan = comm.plan_all_reduce_add_rms_norm(inputs[0], weight)
        assert plan.algorithm == "two_shot_fp8_hb"
        _, found = comm.all_reduce_add_rms_norm(inputs[comm.rank], None, weight, EPS)
        expected = quantized_rows(inputs, "e4m3", 8 * plan.tile_lines)
        assert_bitwise_equal(canonical(found), canonical(expected), f"{dtype}")


@pytest.mark.parametrize("world", [2, 3, 8])
def test_special_values_of_fused_sums(ranks: RankPool, world: int) -> None:
    for dtype in (BF16, torch.float16):
        ranks.run(world, check_special_rows, dtype)


def check_sizes_of_fused() -> None:
    with make_communicator(wire="fp8", wire_min_bytes=SMALLEST) as comm:
        row = Row(1 << 30, FUSED, "two_shot_fp8_hb", "HB", blocks=4, tile_lines=64, depth=2)
        comm.use_table(comm.table.with_rows(row))
        weight = torch.ones(HIDDEN, dtype=BF16)
        limit = SMALLEST // (2 * HIDDEN)
        for rows in (1, limit - 1, limit, 2 * limit):
            inputs = [drawn(rank, rows * HIDDEN, BF16).view(rows, HIDDEN) for rank in range(WORLD)]
            plan = comm.plan_all_reduce_add_rms_norm(inputs[0], weight)
            _, found = comm.all_reduce_add_rms_norm(inputs[comm.rank], None, weight, EPS)
            assert (plan.algorithm == "two_shot_fp8_hb") == (rows >= limit), plan
            exact = rank_order_sum(inputs)
            expected = exact if rows < limit else quantized_rows(inputs, "e4m3", 8 * plan.tile_lines)
            assert_bitwise_equal(found, expected, f"{rows} rows")


def test_large_fused_sums_are_quantized(ranks: RankPool) -> None:
    ranks.run(WORLD, check_sizes_of_fused)


# ---- Compiled graphs -------------------------------------------------------------------------------------------------

FEATURES = 256


@torch.inference_mode()
def compile_sums() -> None:
    """One graph for small batches, which are exact, and for large ones, which are quantized."""
    with make_communicator(wire="fp8", wire_min_bytes=SMALLEST) as comm:
        limit = SMALLEST // (2 * FEATURES)
        compiled = torch.compile(lambda x: comm.all_reduce(x * 2), fullgraph=True, dynamic=True, backend="aot_eager")
        for rows in (limit - 1, limit, 2 * limit):
            inputs = [drawn(rank, rows * FEATURES, BF16).view(rows, FEATURES) for rank in range(WORLD)]
            total = compiled(inputs[comm.rank])
            doubled = [x * 2 for x in inputs]
            assert_bitwise_equal(total, comm.all_reduce(doubled[comm.rank]), f"{rows} rows")
            if rows < limit:
                assert_is_sum(total, doubled, f"{rows} rows")
        assert comm.stats().by_operation()["all_reduce"].calls == 6
        assert {calls.algorithm for calls in comm.stats().calls} >= {"two_shot_fp8_hb"}


def test_compiled_graphs_have_the_sums_of_eager_calls(ranks: RankPool) -> None:
    ranks.run(WORLD, compile_sums)
