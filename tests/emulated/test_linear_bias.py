"""Linear layers with a bias on emulated GPUs: values, promised bits, what is declined, and graphs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import test_linear_fp8
import torch
from fused_reference import EPS, FP8, FUSED_DTYPES, operands_of
from harness import RankPool, make_communicator
from linear_calls import INPUTS, NORM, OUTPUTS, RESIDUAL, TOKENS, WEIGHT, X, compute_right, ones
from reference import assert_bitwise_equal, bits
from test_fused import at_offset
from test_linear import SHAPES, assert_is_layer, assert_same, every_dtype, operands, small_integers, some_worlds
from test_linear_gated import SILU, assert_is_activated
from torch._subclasses import FakeTensorMode

from llm_comm import Communicator, UnsupportedInputError, _core

GATE_UP = ones(2 * OUTPUTS, INPUTS)
BIAS = ones(OUTPUTS)


def bias_of(rank: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, generator=torch.Generator().manual_seed(rows + rank)).to(dtype)


def with_bias_as_input(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return a layer without bias that has the same exact results: the bias is one more column of the weight."""
    one, column = torch.ones(len(x), 1), bias.view(-1, 1)
    return torch.cat([x, one.to(x.dtype)], -1), torch.cat([weight, column], -1), f"{tuple(x.shape)}, {len(weight)} rows"


# ---- The layer -------------------------------------------------------------------------------------------------------


def check_layer(dtype: torch.dtype) -> None:
    with make_communicator() as comm:
        for tokens, inputs, outputs in SHAPES:
            x, weight = operands(comm.rank, tokens, inputs, 2 * outputs, dtype)
            bias = bias_of(comm.rank, 2 * outputs, dtype)
            copies = x.clone(), weight.clone(), bias.clone()
            y = comm.linear(x, weight, bias=bias)
            assert_is_layer(y, *with_bias_as_input(x, weight, bias))
            out = torch.empty_like(y)
            assert comm.linear(x, weight, out, bias=bias) is out
            assert_bitwise_equal(out, y, "out")
            activated = comm.linear_silu_and_mul(x, weight, bias=bias)
            assert_is_activated(SILU, activated, y, f"{tokens} tokens, {inputs} inputs, {outputs} outputs")
            assert_same((x, weight, bias), copies, "operands")
            assert not comm.linear(x, weight).equal(y), "a layer without bias is another one"


@every_dtype
@pytest.mark.parametrize("world", [1, 2])
def test_layer(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    ranks.run(world, check_layer, dtype)


def check_one_rounding(dtype: torch.dtype) -> None:
    """Sums of integers are exact in fp32, so one rounding behind the bias leaves one answer."""
    with make_communicator() as comm:
        for tokens, inputs, outputs in ((5, 128, 64), (70, 192, 320)):
            x, weight = small_integers(0, tokens, inputs), small_integers(1, outputs, inputs)
            bias = 16 * small_integers(2, outputs) + 1
            x[:, :2] = 1000  # sums that the dtype does not hold
            sums = x.double() @ weight.double().T
            due = (sums + bias).float().to(dtype)
            assert not due.equal((sums.float().to(dtype) + bias.to(dtype)).to(dtype)), "two roundings have other bits"
            y = comm.batch_invariant_linear(x.to(dtype), weight.to(dtype), bias=bias.to(dtype))
            assert_bitwise_equal(y, due, f"{tokens} tokens")


@every_dtype
def test_one_rounding(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(1, check_one_rounding, dtype)


def check_scales(dtype: torch.dtype) -> None:
    """The bias nearly cancels products that fp32 does not hold, so their own rounding would be seen."""
    generator = torch.Generator().manual_seed(4)
    x_scale, candidates = torch.tensor([0.7]), 0.5 + torch.rand(1 << 16, generator=generator)
    products = x_scale.double() * (candidates * 7).double()
    biases = (-products).to(dtype)
    due = (products + biases.double()).float().to(dtype)
    places = (due != (x_scale * (candidates * 7) + biases.float()).to(dtype)).nonzero().flatten()[:64]
    assert len(places) == 64
    x, weight = torch.zeros(1, 128), torch.ones(64, 128).to(FP8)
    x[0, 5] = 7
    scales = {"x_scale": x_scale, "weight_scale": candidates[places]}
    with make_communicator() as comm:
        y = comm.linear(x.to(FP8), weight, bias=biases[places], **scales, out_dtype=dtype)
        assert_bitwise_equal(y[0], due[places], "one rounding of the last product and the bias")
        zeros = comm.linear(torch.zeros(1, 128).to(FP8), weight, x_scale=x_scale, weight_scale=-torch.ones(1))
        assert zeros.eq(0).logical_and(zeros.signbit()).all(), "without a bias nothing is added"


@every_dtype
def test_the_order_of_scales_and_bias(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(1, check_scales, dtype)


def check_fp8(dtype: torch.dtype) -> None:
    with make_communicator() as comm:
        for number, (tokens, inputs, outputs) in enumerate(test_linear_fp8.SHAPES):
            of = test_linear_fp8.operands(comm.rank, tokens, inputs, 2 * outputs, *test_linear_fp8.SCALES[number % 4])
            of = of._replace(x_scale=of.x_scale / 4096)  # fp16 holds products of gate and up
            options = {**of.scales(), "bias": bias_of(comm.rank, 2 * outputs, dtype), "out_dtype": dtype}
            y = comm.linear(of.x, of.weight, **options)
            # The bias is one more product of 1 and itself, which fp32 holds: in units of the scales.
            scale = of.x_scale.double().view(-1, 1) * of.weight_scale.double().view(1, -1)
            sums = of.x.double() @ of.weight.double().T * scale
            magnitudes = of.x.double().abs() @ of.weight.double().abs().T * scale
            exact = sums + options["bias"].double()
            info, unit = torch.finfo(dtype), 2.0**-24
            bound = exact.abs() * (info.eps / 2 + unit) + sums.abs() * 2 * unit + magnitudes * inputs * unit
            excess = (y.double() - exact).abs() - 1.01 * bound - info.smallest_normal * info.eps
            assert excess.max() <= 0, f"{tokens} tokens, {inputs} inputs: off by {float(excess.max())}"
            activated = comm.linear_silu_and_mul(of.x, of.weight, **options)
            assert_is_activated(SILU, activated, y, f"{tokens} tokens, {inputs} inputs, {outputs} outputs")
            row = of.rows(tokens - 1, 1)
            alone = comm.linear(row.x, row.weight, **{**options, **row.scales()})
            assert_bitwise_equal(alone[0], y[-1], "a row alone")


@every_dtype
def test_fp8(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(1, check_fp8, dtype)


def check_rows() -> None:
    """Whatever rows are beside it, and however many."""
    inputs, outputs = 320, 192
    with make_communicator() as comm:
        for dtype in FUSED_DTYPES:
            x, weight = operands(comm.rank, 300, inputs, outputs, dtype)
            bias = bias_of(comm.rank, outputs, dtype)
            whole = comm.batch_invariant_linear(x, weight, bias=bias)
            for tokens, first in itertools.product((1, 5, 9, 17, 33, 64, 65, 129), (0, 31)):
                rows, what = x[first : first + tokens].clone(), f"{tokens} tokens from {first}"
                found = comm.batch_invariant_linear(rows, weight, bias=bias)
                assert_bitwise_equal(found, whole[first : first + tokens], what)
                if tokens <= 64:
                    assert_bitwise_equal(comm.linear(rows, weight, bias=bias), found, what)


def test_the_bits_of_a_row_do_not_depend_on_the_batch(ranks: RankPool) -> None:
    ranks.run(1, check_rows)


def check_choices() -> None:
    """However the layer is cut: blocks that divide the outputs and that do not."""
    tokens, inputs, outputs, dtype = 9, 320, 192, torch.bfloat16
    with make_communicator() as comm:
        x, weight = operands(comm.rank, tokens, inputs, 2 * outputs, dtype)
        for silu, block in itertools.product((False, True), (8, 16, 24, 40, 48, 64)):
            rows = outputs * (1 + silu)
            if block % (8 * (1 + silu)) != 0:
                continue
            of, bias = weight[:rows], bias_of(comm.rank, rows, dtype)
            call = comm.linear_silu_and_mul if silu else comm.linear
            run = comm._handle.core().prepare_linear(
                tokens=tokens,
                inputs=inputs,
                outputs=outputs,
                data_type=comm._operations.linear._data_types[dtype],
                epilogue="silu_and_mul" if silu else "none",
                choice=_core.LinearChoice(block_outputs=block, stages=3, stage_boxes=2),
            )
            out = torch.empty(tokens, outputs, dtype=dtype)
            assert run(x.data_ptr(), of.data_ptr(), out.data_ptr(), bias.data_ptr(), 0)
            assert_bitwise_equal(out, call(x, of, bias=bias), f"silu {silu}, blocks of {block}")
        with pytest.raises(RuntimeError, match="the bias does not begin at a multiple of its elements' size"):
            run(x.data_ptr(), of.data_ptr(), out.data_ptr(), bias.data_ptr() + 1, 0)


def test_choices_do_not_change_the_bits(ranks: RankPool) -> None:
    ranks.run(1, check_choices)


def check_alignment() -> None:
    with make_communicator() as comm:
        x, weight = operands(comm.rank, 3, 192, 64, torch.float16)
        bias = bias_of(comm.rank, 64, torch.float16)
        y = comm.linear(x, weight, bias=bias)
        for step in range(8):
            assert_bitwise_equal(comm.linear(x, weight, bias=at_offset(bias, step)[0]), y, f"element {step}")


def test_a_bias_begins_anywhere(ranks: RankPool) -> None:
    ranks.run(1, check_alignment)


# ---- With the sum ----------------------------------------------------------------------------------------------------


def check_sums(dtype: torch.dtype, biased: tuple[int, ...]) -> list[torch.Tensor]:
    """A bias of the sum is given by one rank, as engines do, or each has its own. Returns bits of all results."""
    found = []
    with make_communicator() as comm:
        for tokens, inputs, outputs in SHAPES[::3]:
            x, weight = operands(comm.rank, tokens, inputs, outputs, dtype)
            bias = bias_of(comm.rank, outputs, dtype) if comm.rank in biased else None
            residual, norm_weight = operands_of(tokens, outputs, dtype)
            y, what = comm.linear(x, weight, bias=bias), f"{tokens} tokens, {inputs} inputs, {outputs} outputs"
            assert comm.accepts_linear_all_reduce(x, weight, bias=bias)
            total = comm.linear_all_reduce(x, weight, bias=bias)
            assert_bitwise_equal(total, comm.all_reduce(y), what)
            assert comm.accepts_linear_all_reduce_add_rms_norm(x, weight, norm_weight, bias=bias)
            results = comm.linear_all_reduce_add_rms_norm(x, weight, residual, norm_weight, EPS, bias=bias)
            assert_same(results, comm.all_reduce_add_rms_norm(y, residual, norm_weight, EPS), what)
            found += map(bits, (total, *results))
        of = test_linear_fp8.operands(comm.rank, 5, 256, 64, True, True)
        bias = bias_of(comm.rank, 64, dtype) if comm.rank in biased else None
        total = comm.linear_all_reduce(of.x, of.weight, bias=bias, **of.scales(), out_dtype=dtype)
        y = comm.linear(of.x, of.weight, bias=bias, **of.scales(), out_dtype=dtype)
        assert_bitwise_equal(total, comm.all_reduce(y), "FP8")
        return [*found, bits(total)]


@some_worlds
@every_dtype
@pytest.mark.parametrize("biased", [(0,), (0, 1)], ids=["rank 0", "two ranks"])
def test_sums_of_layers(ranks: RankPool, world: int, dtype: torch.dtype, biased: tuple[int, ...]) -> None:
    first, *others = ranks.run(world, check_sums, dtype, biased)
    assert all(all(map(torch.equal, first, other)) for other in others)


# ---- What is declined ------------------------------------------------------------------------------------------------

DECLINED: dict[str, tuple[Any, str]] = {
    "other dtype": (BIAS.half(), "bias is torch.float16, the result torch.bfloat16"),
    "fp32": (BIAS.float(), "bias is torch.float32, the result torch.bfloat16"),
    "longer": (ones(2 * OUTPUTS), "bias has shape (128,): it must be [64], one for each row of the weight"),
    "shorter": (BIAS[:32], "bias has shape (32,): it must be [64]"),
    "one for all": (ones(1), "bias has shape (1,): it must be [64]"),
    "a row": (BIAS.view(1, OUTPUTS), "bias has shape (1, 64): it must be [64]"),
    "a number": (torch.tensor(1.0).bfloat16(), "bias has shape (): it must be [64]"),
    "strided": (ones(2 * OUTPUTS)[::2], "bias: the tensor is not contiguous"),
    "elsewhere": (BIAS.to("meta"), "bias: the tensor is on meta, the communicator on cpu"),
    "sparse": (BIAS.to_sparse(), "bias: the tensor is torch.sparse_coo"),
    "negated": (torch._neg_view(BIAS), "bias: the tensor is a negated view"),
    "requires grad": (torch.nn.Parameter(BIAS), "bias: the tensor requires grad"),
    "no tensor": ([1.0], "bias is a list, not a tensor"),
}


def decline(name: str) -> list[str]:
    bias, _ = DECLINED[name]
    texts = []
    with make_communicator(fuse_linear=True) as comm:
        calls = [
            lambda: comm.linear(X, WEIGHT, bias=bias),
            lambda: comm.batch_invariant_linear(X, WEIGHT, bias=bias),
            lambda: comm.linear_all_reduce(X, WEIGHT, bias=bias),
            lambda: comm.linear_all_reduce_add_rms_norm(X, WEIGHT, RESIDUAL, NORM, EPS, bias=bias),
        ]
        for _ in range(2):  # the second time, calls of as many elements are prepared
            if isinstance(bias, torch.Tensor):
                assert not comm.accepts_linear(X, WEIGHT, bias=bias)
                assert not comm.accepts_batch_invariant_linear(X, WEIGHT, bias=bias)
                assert not comm.accepts_linear_all_reduce(X, WEIGHT, bias=bias)
                assert not comm.accepts_linear_all_reduce_add_rms_norm(X, WEIGHT, NORM, bias=bias)
                # Tracing does not ask who has another's memory; the call does.
                assert comm._operations.linear._accepts_traced(X, WEIGHT, None, bias) == (name == "negated")
            for call in calls:
                with pytest.raises(UnsupportedInputError) as error:
                    call()
                texts.append(str(error.value))
            assert comm.try_linear(X, WEIGHT, bias=bias) is None
            assert comm.try_linear_all_reduce_add_rms_norm(X, WEIGHT, RESIDUAL, NORM, EPS, bias=bias) is None
            compute_right(comm)
    return texts


@pytest.mark.parametrize("name", DECLINED)
def test_declined_bias(ranks: RankPool, name: str) -> None:
    first, second = ranks.run(2, decline, name)
    assert first == second
    batch_invariant = ("linear: ", "batch_invariant_linear: ")
    names = ("linear: ", batch_invariant, "linear_all_reduce: ", "linear_all_reduce_add_rms_norm: ") * 2
    for operation, text in zip(names, first, strict=True):
        assert text.startswith(operation)
        assert DECLINED[name][1] in text


def check_types() -> None:
    """The bias is of the type of the result, and has an element for each row of the weight."""
    one = torch.ones(1)
    x, weight, gate_up = X.to(FP8), WEIGHT.to(FP8), GATE_UP.to(FP8)
    scales: dict[str, Any] = {"x_scale": one, "weight_scale": one}
    with make_communicator(fuse_linear=True) as comm:
        assert comm.linear(x, weight, bias=BIAS, **scales).eq(INPUTS + 1).all()
        half = torch.empty(TOKENS, OUTPUTS, dtype=torch.float16)
        assert comm.linear(x, weight, half, bias=BIAS.half(), **scales).eq(INPUTS + 1).all()
        with pytest.raises(UnsupportedInputError, match=r"bias is torch.float16, the result torch.bfloat16"):
            comm.linear(x, weight, bias=BIAS.half(), **scales)
        with pytest.raises(UnsupportedInputError, match=r"bias is torch.bfloat16, the result torch.float16"):
            comm.linear_all_reduce_add_rms_norm(x, weight, None, NORM.half(), EPS, bias=BIAS, **scales)
        assert not comm.accepts_linear(x, weight, bias=BIAS, **scales, out_dtype=torch.float16)
        both = ones(2 * OUTPUTS)
        due = (INPUTS + 1) ** 2
        for of_x, of_weight, options in ((X, GATE_UP, {}), (x, gate_up, scales)):
            assert comm.accepts_linear_silu_and_mul(of_x, of_weight, bias=both, **options)
            assert comm._operations.linear_silu_and_mul.accepts(of_x, of_weight, None, both) == (not options)
            assert comm.linear_silu_and_mul(of_x, of_weight, bias=both, **options).float().sub(due).abs().max() <= 64
            found = comm.try_linear_silu_and_mul(of_x, of_weight, bias=both, **options)
            assert torch.equal(found, comm.linear_silu_and_mul(of_x, of_weight, bias=both, **options))
            assert not comm.accepts_linear_silu_and_mul(of_x, of_weight, bias=BIAS, **options)
            with pytest.raises(UnsupportedInputError, match=r"bias has shape \(64,\): it must be \[128\]"):
                comm.linear_silu_and_mul(of_x, of_weight, bias=BIAS, **options)
        found = comm.try_linear_all_reduce_add_rms_norm(X, WEIGHT, None, NORM, EPS, bias=BIAS)
        assert found[1].eq(comm.world_size * (INPUTS + 1)).all()
        assert comm.try_linear(X, WEIGHT, bias=BIAS).eq(INPUTS + 1).all()


def test_types_and_lengths(ranks: RankPool) -> None:
    ranks.run(2, check_types)


def check_written() -> None:
    """Results may not lie over a bias."""
    buffer = ones(TOKENS, OUTPUTS)
    with make_communicator() as comm:
        for operation in (comm.linear, comm.batch_invariant_linear, comm.linear_all_reduce):
            with pytest.raises(UnsupportedInputError, match="out overlaps bias"):
                operation(X, WEIGHT, buffer, bias=buffer[1])
        with pytest.raises(UnsupportedInputError, match="out overlaps bias"):
            comm.linear_all_reduce_add_rms_norm(X, WEIGHT, None, NORM, EPS, out=buffer, bias=buffer[1])
        compute_right(comm)


def test_results_over_a_bias(ranks: RankPool) -> None:
    ranks.run(2, check_written)


# ---- Graphs ----------------------------------------------------------------------------------------------------------


def calls_of(comm: Communicator, x: torch.Tensor, bias: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """Each operation once."""
    both = None if bias is None else torch.cat([bias, bias])
    assert comm.accepts_linear(x, WEIGHT, bias=bias)
    assert bias is None or not comm.accepts_linear(x, WEIGHT, bias=both)
    assert bias is None or not comm.accepts_linear(x, WEIGHT, bias=bias.half())
    yield comm.linear(x, WEIGHT, bias=bias)
    yield comm.batch_invariant_linear(x, WEIGHT, bias=bias)
    yield comm.linear_silu_and_mul(x, GATE_UP, bias=both)
    yield comm.linear_all_reduce(x, WEIGHT, bias=bias)
    yield from comm.linear_all_reduce_add_rms_norm(x, WEIGHT, None, NORM, EPS, bias=bias)


def compile_calls() -> None:
    """Rank 0 alone has a bias, so graphs of ranks differ."""
    with make_communicator() as comm, torch.inference_mode():
        torch._dynamo.reset()
        bias = bias_of(0, OUTPUTS, torch.bfloat16) if comm.rank == 0 else None
        compiled = torch.compile(lambda x: tuple(calls_of(comm, x, bias)), fullgraph=True, backend="aot_eager")
        for tokens in (1, 3, 5, 64):
            x, _ = operands(comm.rank, tokens, INPUTS, OUTPUTS, torch.bfloat16)
            assert_same(compiled(x), tuple(calls_of(comm, x, bias)), f"{tokens} tokens")


def test_graphs(ranks: RankPool) -> None:
    ranks.run(2, compile_calls)


def check_operators() -> None:
    names = ("linear", "batch_invariant_linear", "linear_silu_and_mul", "linear_all_reduce")
    with make_communicator() as comm:
        for name in names:
            operator = getattr(torch.ops.llm_comm, name).default
            weight = GATE_UP if name == "linear_silu_and_mul" else WEIGHT
            bias = ones(len(weight))
            torch.library.opcheck(operator, (X, weight, bias, None, None, None, comm.name))
            given = operator(X, weight, bias, None, None, None, comm.name)
            assert_bitwise_equal(given, getattr(comm, name)(X, weight, bias=bias), name)
        norm = torch.ops.llm_comm.linear_all_reduce_add_rms_norm.default
        torch.library.opcheck(norm, (X, WEIGHT, RESIDUAL, NORM, BIAS, None, None, EPS, 0.0, comm.name))
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = torch.empty(3, INPUTS, dtype=torch.bfloat16)
            assert comm.linear(fake, WEIGHT, bias=BIAS).shape == (3, OUTPUTS)


def test_operators(ranks: RankPool) -> None:
    ranks.run(2, check_operators)
