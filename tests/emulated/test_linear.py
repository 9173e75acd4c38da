"""Linear layers on emulated GPUs, alone and with the sum behind them: promised bits, and values within one rounding."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from fused_reference import EPS, FP8, FUSED_DTYPES, GROUP_SIZE, GROUPS, operands_of
from harness import RankPool, make_communicator
from reference import assert_bitwise_equal, bits, rank_order_sum
from test_fused import assert_untouched_outside, at_offset

every_dtype = pytest.mark.parametrize("dtype", FUSED_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
some_worlds = pytest.mark.parametrize("world", [2, 3])
#: (tokens, inputs, outputs): each kernel at both ends of its tokens, long rows and short ones.
SHAPES = (
    (1, 64, 64),
    (5, 640, 128),
    (8, 128, 192),
    (9, 192, 64),
    (16, 64, 320),
    (17, 320, 64),
    (32, 128, 128),
    (33, 64, 192),
    (64, 256, 128),
)
QUANTIZATIONS = (None, "static", "dynamic", "group", "group_column_major_tma_ue8m0")


def operands(
    rank: int, tokens: int, inputs: int, outputs: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and weight of a rank, the same in every process. The magnitudes of x are spread, so that sums cancel."""
    generator = torch.Generator().manual_seed((tokens << 40) + (inputs << 20) + (outputs << 4) + rank)
    x = torch.randn(tokens, inputs, generator=generator) * 2.0 ** torch.randint(
        -6, 6, (tokens, inputs), generator=generator
    )
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    return x.to(dtype), weight.to(dtype)


def small_integers(rank: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank + 17 * sum(shape))
    return torch.randint(-5, 6, shape, generator=generator)


def assert_is_layer(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, what: str) -> None:
    """Within the error bound of an fp32 sum, in whatever order, that is rounded once."""
    exact = x.double() @ weight.double().T
    magnitudes = x.double().abs() @ weight.double().abs().T
    info = torch.finfo(y.dtype)
    bound = 1.01 * (exact.abs() * info.eps / 2 + magnitudes * x.shape[-1] * 2.0**-24) + info.smallest_normal * info.eps
    assert y.shape == exact.shape, what
    assert y.dtype == x.dtype, what
    excess = (y.double() - exact).abs() - bound
    assert excess.max() <= 0, f"{what}: off by {float(excess.max())} more than rounding explains"


def as_bits(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """For comparisons, FP8 too."""
    return [tensor.flatten().view(torch.uint8) for tensor in tensors]


def assert_same(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], what: str) -> None:
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), f"{what}, result {place}"
    for place, (one, other) in enumerate(zip(as_bits(found), as_bits(expected), strict=True)):
        assert one.equal(other), f"{what}, result {place}"


# ---- The layer -------------------------------------------------------------------------------------------------------


def check_layer(dtype: torch.dtype) -> None:
    with make_communicator() as comm:
        for shape in SHAPES:
            x, weight = operands(comm.rank, *shape, dtype)
            copies = x.clone(), weight.clone()
            y = comm.linear(x, weight)
            assert_is_layer(y, x, weight, str(shape))
            assert_same((x, weight), copies, f"{shape}: operands")
            assert_bitwise_equal(comm.linear(x, weight), y, f"{shape}: the second time")


@every_dtype
@pytest.mark.parametrize("world", [1, 2])
def test_layer(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    ranks.run(world, check_layer, dtype)


def check_one_rounding(dtype: torch.dtype) -> None:
    """Of integers every fp32 sum is exact, so one rounding leaves one answer."""
    with make_communicator() as comm:
        for tokens, inputs, outputs in SHAPES:
            x = small_integers(0, tokens, inputs)
            weight = small_integers(1, outputs, inputs)
            x[:, :2] = 1000  # sums that the dtype does not hold
            exact = x.double() @ weight.double().T
            rounded = exact.float().to(dtype)
            assert (rounded.double() != exact).any()
            y = comm.linear(x.to(dtype), weight.to(dtype))
            assert_bitwise_equal(y, rounded, f"{tokens} tokens, {inputs} inputs, {outputs} outputs")


@every_dtype
def test_one_rounding(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(1, check_one_rounding, dtype)


def check_rows() -> None:
    """Whatever rows are beside it, and however many."""
    inputs, outputs = 320, 128
    with make_communicator() as comm:
        for dtype in FUSED_DTYPES:
            x, weight = operands(comm.rank, 64, inputs, outputs, dtype)
            whole = comm.linear(x, weight)
            sums = comm.linear_all_reduce(x, weight)
            for tokens, first in itertools.product((1, 5, 9, 17, 33), (0, 31)):
                rows = x[first : first + tokens].clone()
                what = f"{tokens} tokens from {first}"
                assert_bitwise_equal(comm.linear(rows, weight), whole[first : first + tokens], what)
                total = comm.linear_all_reduce(rows, weight)
                assert_bitwise_equal(total, sums[first : first + tokens], f"{what}: the sum")
            norm_weight = operands_of(1, outputs, dtype)[1]
            normed, new_residual = comm.linear_all_reduce_add_rms_norm(x, weight, whole, norm_weight, EPS)
            for tokens in (1, 5, 9, 17):
                found = comm.linear_all_reduce_add_rms_norm(
                    x[:tokens].clone(), weight, whole[:tokens].clone(), norm_weight, EPS
                )
                assert_same(found, (normed[:tokens], new_residual[:tokens]), f"{tokens} tokens: the norm")


def test_the_bits_of_a_row_do_not_depend_on_the_batch(ranks: RankPool) -> None:
    ranks.run(2, check_rows)


def check_many_tokens(dtype: torch.dtype) -> None:
    """Tiles of 128 and 256 tokens, whole and cut off, and grids of several of them."""
    with make_communicator() as comm:
        for inputs, outputs in ((64, 64), (320, 192), (192, 1600)):
            x, weight = operands(comm.rank, 600, inputs, outputs, dtype)
            few = torch.cat([comm.linear(rows.clone(), weight) for rows in x.split(64)])
            for tokens, first in (
                (5, 0),
                (64, 99),
                (65, 0),
                (128, 31),
                (129, 0),
                (256, 5),
                (257, 300),
                (513, 87),
                (600, 0),
            ):
                what = f"{tokens} tokens from {first}, {inputs} inputs, {outputs} outputs"
                rows = x[first : first + tokens].clone()
                assert comm.accepts_batch_invariant_linear(rows, weight)
                assert comm.accepts_linear(rows, weight) is (tokens <= 64)
                assert_bitwise_equal(comm.batch_invariant_linear(rows, weight), few[first : first + tokens], what)
                guarded = torch.full((tokens + 2, outputs), 7.0, dtype=dtype)
                comm.batch_invariant_linear(rows, weight, out=guarded[1:-1])
                assert_bitwise_equal(guarded[1:-1], few[first : first + tokens], f"{what}: out")
                assert guarded[:: tokens + 1].eq(7).all(), f"{what}: beyond out"


@every_dtype
def test_many_tokens_have_the_bits_of_few(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(1, check_many_tokens, dtype)


def check_shapes_of_results() -> None:
    with make_communicator() as comm:
        x, weight = operands(comm.rank, 6, 64, 128, torch.bfloat16)
        y = comm.linear(x, weight)
        norm_weight = torch.ones(128, dtype=torch.bfloat16)
        for rows in ((2, 3), (6, 1, 1), (1, 2, 3)):
            found = comm.linear(x.view(*rows, 64), weight)
            assert found.shape == (*rows, 128)
            assert found.view(6, 128).equal(y)
            assert comm.linear_all_reduce(x.view(*rows, 64), weight).shape == (*rows, 128)
            results = comm.linear_all_reduce_add_rms_norm(
                x.view(*rows, 64), weight, y.view(*rows, 128), norm_weight, EPS, quantize="dynamic"
            )
            assert [tuple(result.shape) for result in results] == [(*rows, 128), (*rows, 128), (*rows, 1)]
        assert comm.linear(x[0], weight).equal(y[0])
        assert comm.linear_all_reduce(x[0], weight).shape == (128,)


def test_shapes_of_results(ranks: RankPool) -> None:
    ranks.run(2, check_shapes_of_results)


# ---- With the sum ----------------------------------------------------------------------------------------------------


def check_sum(dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Returns the bits, which are those of all ranks."""
    found = []
    with make_communicator() as comm:
        for shape in SHAPES:
            x, weight = operands(comm.rank, *shape, dtype)
            expected = comm.all_reduce(comm.linear(x, weight))
            total = comm.linear_all_reduce(x, weight)
            assert_bitwise_equal(total, expected, str(shape))
            out = torch.full_like(expected, 7.0)
            assert comm.linear_all_reduce(x, weight, out=out) is out
            assert_bitwise_equal(out, expected, f"{shape}: out")
            found.append([bits(total)])
    return found


@every_dtype
@pytest.mark.parametrize("world", [1, 2, 3])
def test_sum_of_layers(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    first, *others = ranks.run(world, check_sum, dtype)
    assert all(all(map(torch.equal, *pair)) for other in others for pair in zip(first, other, strict=True))


def check_norm(dtype: torch.dtype) -> list[list[torch.Tensor]]:
    found = []
    with make_communicator() as comm:
        for shape in SHAPES:
            tokens, _, outputs = shape
            x, weight = operands(comm.rank, *shape, dtype)
            residual, norm_weight = operands_of(tokens, outputs, dtype)
            y = comm.linear(x, weight)
            for quantize, given in itertools.product(QUANTIZATIONS, (residual, None)):
                if quantize in GROUPS and outputs % GROUP_SIZE != 0:
                    assert not comm.accepts_linear_all_reduce_add_rms_norm(x, weight, norm_weight, quantize)
                    continue
                what = f"{shape}, {quantize}, {'with' if given is not None else 'no'} residual"
                options = {"quantize": quantize, "scale": torch.tensor([0.05]) if quantize == "static" else None}
                before = None if given is None else given.clone()
                expected = comm.all_reduce_add_rms_norm(y, given, norm_weight, EPS, **options)
                results = comm.linear_all_reduce_add_rms_norm(x, weight, given, norm_weight, EPS, **options)
                assert_same(results, expected, what)
                assert before is None or given.equal(before), what
                found.append(as_bits(results))
    return found


@some_worlds
@every_dtype
def test_norm_of_layers(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    first, *others = ranks.run(world, check_norm, dtype)
    assert all(all(map(torch.equal, one, two)) for other in others for one, two in zip(first, other, strict=True))


def check_given_outputs() -> None:
    with make_communicator() as comm:
        x, weight = operands(comm.rank, 5, 128, 192, torch.bfloat16)
        residual, norm_weight = operands_of(5, 192, torch.bfloat16)
        call = comm.linear_all_reduce_add_rms_norm
        expected = call(x, weight, residual, norm_weight, EPS)
        # As engines call it: the new residual takes the place of the old one.
        out, in_place = torch.empty_like(residual), residual.clone()
        results = call(x, weight, in_place, norm_weight, EPS, out=out, residual_out=in_place)
        assert results[0] is out
        assert results[1] is in_place
        assert_same(results, expected, "in place")

        fp8, new_residual, scale = torch.empty(5, 192, dtype=FP8), torch.empty_like(residual), torch.empty(5)
        results = call(
            x,
            weight,
            residual,
            norm_weight,
            EPS,
            out=fp8,
            residual_out=new_residual,
            quantize="dynamic",
            scale=scale,
        )
        assert all(map(lambda one, other: one is other, results, (fp8, new_residual, scale)))
        dynamic = call(x, weight, residual, norm_weight, EPS, quantize="dynamic")
        assert_same((fp8, new_residual, scale.view(5, 1)), dynamic, "dynamic")

        flat = torch.empty(5 * 192, dtype=torch.bfloat16)
        y = comm.linear(x, weight)
        assert comm.linear(x, weight, out=flat) is flat
        assert_bitwise_equal(flat.view(5, 192), y, "out of another shape")


def test_given_outputs(ranks: RankPool) -> None:
    ranks.run(2, check_given_outputs)


def check_alignment() -> None:
    """Where tensors begin may differ between ranks."""
    with make_communicator() as comm:
        for dtype in FUSED_DTYPES:
            x, weight = operands(comm.rank, 3, 192, 64, dtype)
            residual, norm_weight = operands_of(3, 64, dtype)
            y = comm.linear(x, weight)
            total = comm.linear_all_reduce(x, weight)
            normed = comm.linear_all_reduce_add_rms_norm(x, weight, residual, norm_weight, EPS)
            for step in range(8):
                moved, _ = at_offset(x, (step + 3 * comm.rank) % 8)
                out, around = at_offset(torch.zeros_like(y), (3 * step + comm.rank) % 8)
                what = f"{dtype}, step {step}"
                assert_bitwise_equal(comm.linear(moved, weight), y, what)
                assert comm.linear(moved, weight, out=out) is out
                assert_bitwise_equal(out, y, f"{what}: out")
                assert_bitwise_equal(comm.linear_all_reduce(moved, weight, out=out), total, f"{what}: the sum")
                other, around_other = at_offset(residual, step)
                norm, _ = at_offset(norm_weight, 7 - step)
                results = comm.linear_all_reduce_add_rms_norm(
                    moved, weight, other, norm, EPS, out=out, residual_out=other
                )
                assert_same(results, normed, f"{what}: the norm")
                assert_bitwise_equal(moved, x, f"{what}: x")
                assert_untouched_outside(around, out, f"{what}: out")
                assert_untouched_outside(around_other, other, f"{what}: the residual")


def test_operands_and_outputs_begin_anywhere(ranks: RankPool) -> None:
    ranks.run(2, check_alignment)


# ---- Sequences -------------------------------------------------------------------------------------------------------


def check_random_calls(seed: int, calls: int) -> None:
    """Among each other and among other operations, each the sum of what the layer of its rank makes."""
    draw = random.Random(seed)  # the same on all ranks
    with make_communicator() as comm:
        for call in range(calls):
            tokens, inputs, outputs = draw.randrange(1, 65), 64 * draw.randrange(1, 6), 64 * draw.randrange(1, 4)
            dtype = draw.choice(FUSED_DTYPES)
            what = f"call {call}: {tokens} tokens, {inputs} inputs, {outputs} outputs, {dtype}"
            x, weight = operands(comm.rank, tokens, inputs, outputs, dtype)
            kind = draw.randrange(4)
            if kind == 0:
                assert_is_layer(comm.linear(x, weight), x, weight, what)
                continue
            if kind == 1:
                count = draw.randrange(1, 3000)
                assert comm.all_reduce(torch.ones(count)).eq(comm.world_size).all(), what
                continue
            of_ranks = [operands(rank, tokens, inputs, outputs, dtype) for rank in range(comm.world_size)]
            total = rank_order_sum([comm.linear(*given) for given in of_ranks])
            if kind == 2:
                found = comm.linear_all_reduce(x, weight)
            else:
                norm_weight = operands_of(1, outputs, dtype)[1]
                _, found = comm.linear_all_reduce_add_rms_norm(x, weight, None, norm_weight, EPS)
            assert_bitwise_equal(found, total, what)


@some_worlds
def test_random_calls(ranks: RankPool, world: int) -> None:
    ranks.run(world, check_random_calls, world, 60)


def sum_alone() -> None:
    with make_communicator() as comm:
        for shape in SHAPES:
            x, weight = operands(0, *shape, torch.float16)
            y = comm.linear(x, weight)
            assert_bitwise_equal(comm.linear_all_reduce(x, weight), y, str(shape))
            out = torch.zeros_like(y)
            assert comm.linear_all_reduce(x, weight, out=out) is out
            assert_bitwise_equal(out, y, f"{shape}: out")


def test_one_rank(ranks: RankPool) -> None:
    ranks.run(1, sum_alone)


def drop() -> None:
    """A prepared layer holds the core, and with it the workspace."""
    x, weight = operands(0, 4, 64, 64, torch.float16)
    with make_communicator() as comm:
        comm.linear_all_reduce(x, weight)
        layers = comm._operations.linear
        assert len(layers._prepared) == 1
    assert not layers._prepared
    for call in (comm.linear, comm.linear_all_reduce, comm.accepts_linear, comm.accepts_linear_all_reduce):
        with pytest.raises(RuntimeError, match="closed"):
            call(x, weight)


def test_nothing_is_kept_of_a_closed_communicator(ranks: RankPool) -> None:
    ranks.run(2, drop)
