"""Ranks of several nodes in one machine, and random calls of theirs with what they must return."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from fused_reference import (
    BLOCKS,
    EPS,
    FUSED_DTYPES,
    GROUPS,
    assert_normed,
    canonical,
    exact_norm,
    in_blocks,
    in_tiles,
    operands_of,
    quantized,
    scales_of,
)
from harness import make_communicator
from reference import DTYPES, assert_bitwise_equal, contributions, from_bits, rank_order_sum, special_patterns
from shards_reference import ANY_DTYPES, Division, assert_same_bits, assert_untouched_outside, drawn_bits, placed
from shards_reference import drawn_division as drawn_parts

import llm_comm
from llm_comm.nodes import ucx


class Layout(NamedTuple):
    """So many nodes of so many ranks; which ranks are on a node."""

    nodes: int
    places: int
    #: The ranks of a node do not stand together, but alternate.
    alternate: bool = False

    @property
    def world(self) -> int:
        return self.nodes * self.places

    def node_of(self, rank: int) -> int:
        return rank % self.nodes if self.alternate else rank // self.places

    def ranks_of(self, node: int) -> list[int]:
        return [rank for rank in range(self.world) if self.node_of(rank) == node]

    def __str__(self) -> str:
        return f"{self.nodes}x{self.places}{' alternating' * self.alternate}"


LAYOUTS = (
    Layout(2, 2),
    Layout(2, 3),
    Layout(4, 2),
    Layout(2, 1),
    Layout(3, 1),
    Layout(2, 2, alternate=True),
    Layout(3, 2, alternate=True),
)


def make(layout: Layout, **options: object) -> llm_comm.Communicator:
    """The communicator of a rank, which is told on which node it is."""
    return make_communicator(node=f"n{layout.node_of(dist.get_rank())}", **options)


def sum_over_nodes(inputs: list[torch.Tensor], layout: Layout) -> torch.Tensor:
    """The promised sum: in rank order within a node, rounded to the type; of these in node order, rounded again."""
    return rank_order_sum([rank_order_sum([inputs[r] for r in layout.ranks_of(n)]) for n in range(layout.nodes)])


def drawn_inputs(draw: random.Random, world: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What each rank puts in; sometimes with infinities, NaNs and subnormals."""
    inputs = contributions(world, count, dtype, draw.randrange(1000))
    if draw.random() < 0.2 and count:
        patterns = from_bits(special_patterns(dtype), dtype)
        generator = torch.Generator().manual_seed(draw.randrange(1000))
        for x in inputs:
            at = torch.randint(count, (min(count, 50),), generator=generator)
            x[at] = patterns[torch.randint(len(patterns), at.shape, generator=generator)]
    return inputs


def drawn_count(draw: random.Random, most: int) -> int:
    """Small ones, ones about lines of 16 bytes, and larger ones."""
    return draw.choice(
        [draw.randint(0, 20), draw.randint(0, 300), draw.randint(0, most), 64 * draw.randint(1, most // 64)]
    )


#: A random call. Returns how many were made of the communicator.
Call = Callable[[llm_comm.Communicator, Layout, random.Random, int, str], int]


def calls_of(layout: Layout) -> tuple[Call, ...]:
    """What a layout serves: nodes of one rank make no norms."""
    plain = (_all_reduce, _reduce_scatter, _all_gather)
    return (*plain, _fused) if layout.places > 1 else plain


def run_random_cases(layout: Layout, seed: int, cases: int, most: int, **options: object) -> dict[str, int]:
    """Random calls, each compared bitwise with a reference that is the same on all ranks. Returns how many of each.

    Args:
        seed: The same on all ranks.
        most: Elements of a tensor.
    """
    draw = random.Random(f"{layout} {seed}")
    calls, counts, made = calls_of(layout), dict[str, int](), 0
    with make(layout, **options) as comm:
        for case in range(cases):
            call = calls[case] if case < len(calls) else draw.choice(calls)
            made += call(comm, layout, draw, most, f"{layout} seed {seed} case {case} rank {comm.rank}")
            counts[call.__name__] = counts.get(call.__name__, 0) + 1
        assert sum(calls.calls for calls in comm.stats().calls) == made
    return counts


def run_random_cases_over(transport: str, part_bytes: int, *of_cases: Any) -> dict[str, int]:
    """``run_random_cases`` with a transport between the nodes, and parts of so many bytes, if it is UCX."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ucx, "PART_BYTES", part_bytes)
        return run_random_cases(*of_cases, node_transport=transport)


def _all_reduce(comm: llm_comm.Communicator, layout: Layout, draw: random.Random, most: int, what: str) -> int:
    dtype = draw.choice(DTYPES)
    inputs = drawn_inputs(draw, layout.world, drawn_count(draw, most), dtype)
    expected = sum_over_nodes(inputs, layout)
    x, around_x = placed(inputs[comm.rank], draw.randrange(9))
    out, around_out = placed(inputs[comm.rank], draw.randrange(9))
    how = draw.choice(("new", "out", "in place"))
    what = f"all-reduce {what}: {dtype} {len(x)} {how}"
    if how == "new":
        found = comm.all_reduce(x)
        assert_bitwise_equal(x, inputs[comm.rank], f"input of {what}")
    else:
        found = comm.all_reduce(x, out=x if how == "in place" else out)
        assert found is (x if how == "in place" else out)
    assert_bitwise_equal(found, expected, what)
    assert_untouched_outside(around_x, x, what)
    assert_untouched_outside(around_out, out, what)
    return 1


def _reduce_scatter(comm: llm_comm.Communicator, layout: Layout, draw: random.Random, most: int, what: str) -> int:
    dtype = draw.choice(DTYPES)
    division = drawn_parts(draw, layout.world, most)
    inputs = drawn_inputs(draw, layout.world, torch.Size(division.shape).numel(), dtype)
    expected = division.part_of(sum_over_nodes(inputs, layout).view(division.shape), comm.rank)
    x, around = placed(inputs[comm.rank], draw.randrange(9))
    what = f"reduce-scatter {what}: {dtype} {division}"
    found = comm.reduce_scatter(x.view(division.shape), division.dim, _sizes(draw, division))
    assert_bitwise_equal(found, expected.contiguous(), what)
    assert_untouched_outside(around, x, what)
    return 1


def _all_gather(comm: llm_comm.Communicator, layout: Layout, draw: random.Random, most: int, what: str) -> int:
    dtype = draw.choice(ANY_DTYPES)
    division = drawn_parts(draw, layout.world, most)
    whole = drawn_bits(division.shape, dtype, draw.randrange(1000))
    x, around = placed(division.part_of(whole, comm.rank).contiguous().flatten(), draw.randrange(9))
    what = f"all-gather {what}: {dtype} {division}"
    part = x.view(division.shard_shape(comm.rank))
    found = comm.all_gather(part, division.dim, _sizes(draw, division))
    assert_same_bits(found, whole, what)
    assert_untouched_outside(around, x, what)
    return 1


def _fused(comm: llm_comm.Communicator, layout: Layout, draw: random.Random, most: int, what: str) -> int:
    dtype = draw.choice(FUSED_DTYPES)
    quantize = draw.choice((None, "static", "dynamic", *GROUPS, *BLOCKS))
    hidden = draw.choice((128, 256, 1152)) if quantize in (*GROUPS, *BLOCKS) else 8 * draw.randint(1, 150)
    rows = draw.choice((1, 2, draw.randint(1, max(1, most // hidden))))
    shape = (rows, hidden)
    inputs = drawn_inputs(draw, layout.world, rows * hidden, dtype)
    residual, weight = operands_of(rows, hidden, dtype, draw.randrange(1000))
    given = residual.clone() if draw.random() < 0.8 else None
    total = sum_over_nodes(inputs, layout).view(shape)
    expected = total if given is None else canonical(total + given)
    x, around = placed(inputs[comm.rank], draw.randrange(9))
    scale = torch.tensor([0.05]) if quantize == "static" else None
    global_scale = torch.tensor([37.5]) if str(quantize).startswith("nvfp4") else None
    in_place = draw.random() < 0.5
    out = x.view(shape) if in_place and quantize is None else None
    residual_out = given if in_place else None
    bias = draw.choice((0.0, 1.0, 0.5))
    what = f"fused {what}: {dtype} {shape} {quantize} weight_bias {bias}{' in place' * in_place}"
    options = {"weight_bias": bias, "quantize": quantize, "scale": scale, "global_scale": global_scale}
    normed, new_residual, *scales = comm.all_reduce_add_rms_norm(
        x.view(shape), given, weight, EPS, out=out, residual_out=residual_out, **options
    )
    assert_bitwise_equal(canonical(new_residual), expected, f"new residual of {what}")
    assert_untouched_outside(around, x, what)
    if quantize is None:
        assert_normed(normed, exact_norm(expected, weight, EPS, bias), what)
        return 1
    # What is quantized are the rows that the same call returns without.
    given = None if given is None else residual
    x = inputs[comm.rank].view(shape)
    rows_before = comm.all_reduce_add_rms_norm(x, given, weight, EPS, weight_bias=bias)[0]
    if quantize in BLOCKS:
        values, by_rows = in_blocks(rows_before, quantize, global_scale)
        (scale,) = scales
        assert torch.equal(scale.view(torch.uint8), by_rows if "linear" in quantize else in_tiles(by_rows)), what
        mask = 0x7F if global_scale is None else 0xFF  # any NaN of FP8
        assert torch.equal(normed.view(torch.uint8) & mask, values & mask), what
        return 2
    if scale is None:
        (scale,) = scales
        assert torch.equal(scale, scales_of(rows_before, quantize)), f"scales of {what}"
    found, wanted = normed.float(), quantized(rows_before, quantize, scale).float()
    assert torch.equal(found.nan_to_num(1e9), wanted.nan_to_num(1e9)), what
    return 2


def _sizes(draw: random.Random, division: Division) -> list[int] | None:
    """None where parts are alike, at times."""
    given = list(division.sizes)
    return None if draw.random() < 0.5 and division.is_even else given
