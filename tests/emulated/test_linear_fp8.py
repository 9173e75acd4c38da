"""Linear layers of FP8 on emulated GPUs: values, promised bits, what is declined, and graphs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from fused_reference import EPS, FP8, GROUP_SIZE, GROUPS, operands_of
from harness import RankPool, make_communicator
from linear_calls import ones
from reference import assert_bitwise_equal, bits
from test_fused import at_offset
from test_linear import QUANTIZATIONS, as_bits, assert_same, every_dtype, some_worlds
from test_linear_gated import SILU, assert_is_activated
from torch._subclasses import FakeTensorMode

from llm_comm import Communicator, UnsupportedInputError

#: (tokens, inputs, outputs): each kernel at both ends of its tokens, an odd and an even number of boxes.
SHAPES = (
    (1, 128, 64),
    (5, 640, 128),
    (8, 256, 192),
    (9, 384, 64),
    (16, 128, 320),
    (17, 640, 64),
    (33, 128, 192),
    (64, 512, 128),
)
#: Whether each row of x has a scale of its own, and each output.
SCALES = tuple(itertools.product((False, True), (False, True)))


class Operands(NamedTuple):
    """Of a layer."""

    x: torch.Tensor
    weight: torch.Tensor
    x_scale: torch.Tensor
    weight_scale: torch.Tensor

    def scales(self) -> dict[str, torch.Tensor]:
        return {"x_scale": self.x_scale, "weight_scale": self.weight_scale}

    def rows(self, first: int, count: int) -> Operands:
        """Some rows of x, in new tensors."""
        rows = slice(first, first + count)
        scale = self.x_scale[rows].clone() if self.x_scale.numel() > 1 else self.x_scale
        return self._replace(x=self.x[rows].clone(), x_scale=scale)


def operands(rank: int, tokens: int, inputs: int, outputs: int, per_token: bool, per_channel: bool) -> Operands:
    """Of a rank, the same in every process. Magnitudes are spread over all that FP8 has, so that sums cancel."""
    generator = torch.Generator().manual_seed((tokens << 40) + (inputs << 20) + (outputs << 4) + rank)

    def drawn(*shape: int) -> torch.Tensor:
        spread = 2.0 ** torch.randint(-6, 6, shape, generator=generator)
        return (torch.randn(shape, generator=generator) * spread).to(FP8)

    def scales(count: int, per_row: bool) -> torch.Tensor:
        return 0.01 + torch.rand((count, 1) if per_row else (1,), generator=generator)

    x, weight = drawn(tokens, inputs), drawn(outputs, inputs)
    return Operands(x, weight, scales(tokens, per_token), scales(outputs, per_channel))


def assert_is_layer(y: torch.Tensor, of: Operands, what: str) -> None:
    """Within the error bound of an fp32 sum of exact products, in whatever order, two products with scales and one
    rounding."""
    scale = of.x_scale.double().view(-1, 1) * of.weight_scale.double().view(1, -1)
    exact = of.x.double() @ of.weight.double().T * scale
    magnitudes = of.x.double().abs() @ of.weight.double().abs().T * scale
    info = torch.finfo(y.dtype)
    unit = 2.0**-24
    bound = exact.abs() * (info.eps / 2 + 2 * unit) + magnitudes * of.x.shape[-1] * unit
    excess = (y.double() - exact).abs() - 1.01 * bound - info.smallest_normal * info.eps
    assert y.shape == exact.shape, what
    assert excess.max() <= 0, f"{what}: off by {float(excess.max())} more than rounding explains"


def all_operands(rank: int) -> Iterator[tuple[Operands, str]]:
    for number, shape in enumerate(SHAPES):
        scales = SCALES[number % 4]
        yield operands(rank, *shape, *scales), f"{shape}, scales {scales}"


# ---- The layer -------------------------------------------------------------------------------------------------------


def check_layer(dtype: torch.dtype) -> None:
    with make_communicator() as comm:
        for of, what in all_operands(comm.rank):
            copies = Operands(*(tensor.clone() for tensor in of))
            y = comm.linear(of.x, of.weight, **of.scales(), out_dtype=dtype)
            assert y.dtype is dtype
            assert_is_layer(y, of, what)
            assert_same(of, copies, f"{what}: operands")
            out = torch.empty_like(y)
            assert comm.linear(of.x, of.weight, out, **of.scales()) is out
            assert_bitwise_equal(out, y, f"{what}: out")


@every_dtype
@pytest.mark.parametrize("world", [1, 2])
def test_layer(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    ranks.run(world, check_layer, dtype)


def check_one_rounding(dtype: torch.dtype) -> None:
    """Sums of small whole numbers are exact, so what is left is the product with the scales, in their order."""
    generator = torch.Generator().manual_seed(3)
    with make_communicator() as comm:
        for (tokens, inputs, outputs), (per_token, per_channel) in itertools.product(SHAPES[:4], SCALES):
            x, weight = (
                torch.randint(-4, 5, (rows, inputs), generator=generator).to(FP8) for rows in (tokens, outputs)
            )
            x_scale = torch.rand(tokens if per_token else 1, 1, generator=generator)
            weight_scale = torch.rand(outputs if per_channel else 1, generator=generator)
            sums = (x.double() @ weight.double().T).float()
            expected = (x_scale * (weight_scale * sums)).to(dtype)
            scales = {"x_scale": x_scale, "weight_scale": weight_scale}
            y = comm.linear(x, weight, **scales, out_dtype=dtype)
            assert_bitwise_equal(y, expected, f"{tokens} tokens, {inputs} inputs, {outputs} outputs")


@every_dtype
def test_one_rounding(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(1, check_one_rounding, dtype)


def check_order_of_scales(dtype: torch.dtype) -> None:
    """With scales of outputs, found among many, for which another order of products is rounded otherwise."""
    generator = torch.Generator().manual_seed(4)
    x_scale, candidates = torch.tensor([0.7]), 0.5 + torch.rand(1 << 24, generator=generator)
    due = (x_scale * (candidates * 7)).to(dtype)
    places = (due != (x_scale * candidates * 7).to(dtype)).nonzero().flatten()[:64]
    assert len(places) == 64
    x, weight = torch.zeros(1, 128), torch.ones(64, 128).to(FP8)
    x[0, 5] = 7
    with make_communicator() as comm:
        y = comm.linear(x.to(FP8), weight, x_scale=x_scale, weight_scale=candidates[places], out_dtype=dtype)
        assert_bitwise_equal(y[0], due[places], "scales")


@every_dtype
def test_the_order_of_scales(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(1, check_order_of_scales, dtype)


def check_every_value() -> None:
    """Each FP8 number alone in its row, NaN too."""
    every = torch.arange(256, dtype=torch.uint8).view(FP8)
    one = torch.ones(1)
    with make_communicator() as comm:
        for first in range(0, 256, 64):
            x = torch.zeros(64, 128).to(FP8)
            x[:, 77] = every[first : first + 64]
            y = comm.linear(x, torch.eye(128).to(FP8), x_scale=one, weight_scale=one)
            column = every[first : first + 64].float()
            assert torch.equal(y[:, 77].float().nan_to_num(nan=1e4), column.nan_to_num(nan=1e4))


def test_every_value(ranks: RankPool) -> None:
    ranks.run(1, check_every_value)


def check_rows() -> None:
    """Whatever rows are beside it, and however many."""
    with make_communicator() as comm:
        for scales in SCALES:
            of = operands(comm.rank, 64, 640, 128, *scales)
            whole = comm.linear(of.x, of.weight, **of.scales())
            sums = comm.linear_all_reduce(of.x, of.weight, **of.scales())
            for tokens, first in itertools.product((1, 5, 9, 17, 33), (0, 31)):
                some, what = of.rows(first, tokens), f"{tokens} tokens from {first}"
                part = slice(first, first + tokens)
                assert_bitwise_equal(comm.linear(some.x, some.weight, **some.scales()), whole[part], what)
                total = comm.linear_all_reduce(some.x, some.weight, **some.scales())
                assert_bitwise_equal(total, sums[part], f"{what}: the sum")


def test_the_bits_of_a_row_do_not_depend_on_the_batch(ranks: RankPool) -> None:
    ranks.run(2, check_rows)


def check_silu(dtype: torch.dtype) -> None:
    with make_communicator() as comm:
        for number, (tokens, inputs, outputs) in enumerate(SHAPES):
            of = operands(comm.rank, tokens, inputs, 2 * outputs, *SCALES[number % 4])
            of = of._replace(x_scale=of.x_scale / 4096)  # fp16 holds products of gate and up
            what = f"{tokens} tokens, {inputs} inputs, {outputs} outputs"
            products = comm.linear(of.x, of.weight, **of.scales(), out_dtype=dtype)
            y = comm.linear_silu_and_mul(of.x, of.weight, **of.scales(), out_dtype=dtype)
            assert_is_activated(SILU, y, products, what)


@every_dtype
def test_silu_and_mul(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(1, check_silu, dtype)


# ---- With the sum ----------------------------------------------------------------------------------------------------


def check_sum(dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns the bits, which are those of all ranks."""
    found = []
    with make_communicator() as comm:
        for of, what in all_operands(comm.rank):
            expected = comm.all_reduce(comm.linear(of.x, of.weight, **of.scales(), out_dtype=dtype))
            total = comm.linear_all_reduce(of.x, of.weight, **of.scales(), out_dtype=dtype)
            assert_bitwise_equal(total, expected, what)
            out = torch.full_like(expected, 7.0)
            assert comm.linear_all_reduce(of.x, of.weight, out=out, **of.scales()) is out
            assert_bitwise_equal(out, expected, f"{what}: out")
            found.append(bits(total))
    return found


@every_dtype
@pytest.mark.parametrize("world", [1, 2, 3])
def test_sum_of_layers(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    first, *others = ranks.run(world, check_sum, dtype)
    assert all(map(torch.equal, other, first) for other in others)


def check_norm(dtype: torch.dtype) -> list[list[torch.Tensor]]:
    found = []
    with make_communicator() as comm:
        for of, what in itertools.islice(all_operands(comm.rank), 4):
            residual, norm_weight = operands_of(of.x.shape[0], of.weight.shape[0], dtype)
            y = comm.linear(of.x, of.weight, **of.scales(), out_dtype=dtype)
            for quantize in QUANTIZATIONS:
                if quantize in GROUPS and of.weight.shape[0] % GROUP_SIZE != 0:
                    continue
                options = {"quantize": quantize, "scale": torch.tensor([0.05]) if quantize == "static" else None}
                options["weight_bias"] = 1.0 if quantize in (None, "dynamic") else 0.0
                expected = comm.all_reduce_add_rms_norm(y, residual, norm_weight, EPS, **options)
                results = comm.linear_all_reduce_add_rms_norm(
                    of.x, of.weight, residual, norm_weight, EPS, **of.scales(), **options
                )
                assert_same(results, expected, f"{what}, {quantize}")
                found.append(as_bits(results))
    return found


@some_worlds
@every_dtype
def test_norm_of_layers(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    first, *others = ranks.run(world, check_norm, dtype)
    assert all(all(map(torch.equal, one, two)) for other in others for one, two in zip(first, other, strict=True))


# ---- What is accepted, and declined ----------------------------------------------------------------------------------

TOKENS, INPUTS, OUTPUTS = 2, 256, 64
USUAL: dict[str, Any] = {
    "x": ones(TOKENS, INPUTS).to(FP8),
    "weight": ones(OUTPUTS, INPUTS).to(FP8),
    "x_scale": torch.full((1,), 0.5),
    "weight_scale": torch.full((OUTPUTS, 1), 2.0),
}
NORM = ones(OUTPUTS)
ONE = torch.ones(1)


def calls(comm: Communicator, given: dict[str, Any]) -> list[Any]:
    """Each operation of these, and whether it is accepted."""
    call = {**USUAL, **given}
    x, weight, out_dtype = call.pop("x"), call.pop("weight"), call.pop("out_dtype", None)
    plain = {**call, "out_dtype": out_dtype}
    return [
        (lambda: comm.linear(x, weight, **plain), lambda: comm.accepts_linear(x, weight, **plain)),
        (
            lambda: comm.linear_all_reduce(x, weight, **plain),
            lambda: comm.accepts_linear_all_reduce(x, weight, **plain),
        ),
        (
            lambda: comm.linear_all_reduce_add_rms_norm(x, weight, None, NORM, EPS, **call),
            lambda: comm.accepts_linear_all_reduce_add_rms_norm(x, weight, NORM, **call),
        ),
    ]


def compute_right(comm: Communicator) -> None:
    plain, total, norm = (call() for call, _ in calls(comm, {}))
    assert plain.eq(INPUTS).all()
    assert total.eq(INPUTS * comm.world_size).all()
    assert norm[0].eq(1).all()


DECLINED: dict[str, tuple[dict[str, Any], str]] = {
    "no scales": ({"x_scale": None, "weight_scale": None}, "x is torch.float8_e4m3fn: it needs x_scale and weight_s"),
    "no scale of x": ({"x_scale": None}, "x_scale is a NoneType, not a tensor"),
    "no scale of the weight": ({"weight_scale": None}, "weight_scale is a NoneType, not a tensor"),
    "scale that is a number": ({"x_scale": 0.5}, "x_scale is a float, not a tensor"),
    "bf16 with scales": (
        {"x": ones(TOKENS, INPUTS), "weight": ones(OUTPUTS, INPUTS)},
        "x_scale, weight_scale and out_dtype are for torch.float8_e4m3fn, x is torch.bfloat16",
    ),
    "bf16 weight": ({"weight": ones(OUTPUTS, INPUTS)}, "weight is torch.bfloat16, x is torch.float8_e4m3fn"),
    "e5m2": (
        {name: USUAL[name].to(torch.float8_e5m2) for name in ("x", "weight")},
        "torch.float8_e5m2 is not one of torch.bfloat16, torch.float16, torch.float8_e4m3fn",
    ),
    "192 inputs": (
        {"x": ones(TOKENS, 192).to(FP8), "weight": ones(OUTPUTS, 192).to(FP8)},
        "192 inputs: it takes multiples of 128 up to 16777216",
    ),
    "32 outputs": ({"weight": USUAL["weight"][:32], "weight_scale": ONE}, "32 outputs: it takes multiples of 64"),
    "65 tokens": ({"x": ones(65, INPUTS).to(FP8)}, "65 tokens: it takes 1 to 64"),
    "scales of other rows": (
        {"x_scale": torch.ones(3)},
        "x_scale has shape (3,): it must be one scale, or one for each",
    ),
    "scales of blocks": ({"weight_scale": torch.ones(1, 2)}, "weight_scale has shape (1, 2): it must be one scale"),
    "no scale at all": ({"x_scale": torch.ones(0)}, "x_scale has shape (0,)"),
    "bf16 scale": ({"x_scale": ONE.bfloat16()}, "x_scale is torch.bfloat16; it must be torch.float32"),
    "strided scales": ({"weight_scale": torch.ones(OUTPUTS, 2)[:, 0]}, "weight_scale: the tensor is not contiguous"),
    "scale elsewhere": ({"x_scale": ONE.to("meta")}, "x_scale: the tensor is on meta"),
    "negated scale": ({"x_scale": torch._neg_view(ONE)}, "x_scale: the tensor is a negated view"),
    "scale that requires grad": ({"x_scale": ONE.clone().requires_grad_()}, "x_scale: the tensor requires grad"),
}


def decline(name: str) -> list[str]:
    given, _ = DECLINED[name]
    texts = []
    with make_communicator() as comm:
        compute_right(comm)  # calls of as many elements are prepared
        for call, accepts in calls(comm, given):
            assert not accepts()
            with pytest.raises(UnsupportedInputError) as error:
                call()
            texts.append(str(error.value))
        compute_right(comm)
    return texts


@pytest.mark.parametrize("name", DECLINED)
def test_declined_operands(ranks: RankPool, name: str) -> None:
    first, second = ranks.run(2, decline, name)
    assert first == second
    names = ("linear", "linear_all_reduce", "linear_all_reduce_add_rms_norm")
    for operation, text in zip(names, first, strict=True):
        assert text.startswith(f"{operation}: ")
        assert DECLINED[name][1] in text


def check_types_of_results() -> None:
    with make_communicator() as comm:
        x, weight = USUAL["x"], USUAL["weight"]
        scales = {name: USUAL[name] for name in ("x_scale", "weight_scale")}
        assert comm.linear(x, weight, **scales).dtype is torch.bfloat16
        half = torch.empty(TOKENS, OUTPUTS, dtype=torch.float16)
        assert comm.linear(x, weight, half, **scales).eq(INPUTS).all()
        for wrong in (torch.float32, FP8):
            assert not comm.accepts_linear(x, weight, **scales, out_dtype=wrong)
            with pytest.raises(UnsupportedInputError, match=rf"are torch.bfloat16 or torch.float16, not {wrong}"):
                comm.linear(x, weight, **scales, out_dtype=wrong)
        with pytest.raises(UnsupportedInputError, match="like the result"):
            comm.linear(x, weight, half, **scales, out_dtype=torch.bfloat16)
        with pytest.raises(UnsupportedInputError, match=r"are for torch.float8_e4m3fn, x is torch.float16"):
            comm.linear(x.half(), weight.half(), out_dtype=torch.float16)
        normed, residual = comm.linear_all_reduce_add_rms_norm(x, weight, None, NORM.half(), EPS, **scales)
        assert (normed.dtype, residual.dtype) == (torch.float16, torch.float16)
        compute_right(comm)


def test_types_of_results(ranks: RankPool) -> None:
    ranks.run(2, check_types_of_results)


def check_written_scales() -> None:
    """Results may not lie over scales, which are read until the end."""
    buffer = torch.ones(OUTPUTS * TOKENS)
    weight_scale, out = buffer[:OUTPUTS], buffer.view(torch.bfloat16)[: TOKENS * OUTPUTS].view(TOKENS, OUTPUTS)
    with make_communicator() as comm:
        call = {**USUAL, "weight_scale": weight_scale}
        x, weight = call.pop("x"), call.pop("weight")
        for operation in (comm.linear, comm.linear_all_reduce):
            with pytest.raises(UnsupportedInputError, match="out overlaps weight_scale"):
                operation(x, weight, out, **call)
        with pytest.raises(UnsupportedInputError, match="out overlaps weight_scale"):
            comm.linear_all_reduce_add_rms_norm(x, weight, None, NORM, EPS, out=out, **call)
        compute_right(comm)


def test_results_over_scales(ranks: RankPool) -> None:
    ranks.run(2, check_written_scales)


def check_alignment() -> None:
    with make_communicator() as comm:
        of = operands(comm.rank, 3, 384, 64, True, True)
        y = comm.linear(of.x, of.weight, **of.scales())
        for step in range(1, 16, 3):
            moved = at_offset(of.x.view(torch.uint8), step)[0].view(FP8)
            assert_bitwise_equal(comm.linear(moved, of.weight, **of.scales()), y, f"x at byte {step}")
            out, _ = at_offset(torch.zeros_like(y), step % 8)
            assert comm.linear(of.x, of.weight, out, **of.scales()) is out
            assert_bitwise_equal(out, y, f"out at element {step % 8}")
            scale, _ = at_offset(of.x_scale, step % 4)
            found = comm.linear(of.x, of.weight, x_scale=scale, weight_scale=of.weight_scale)
            assert_bitwise_equal(found, y, f"scales at element {step % 4}")


def test_operands_and_outputs_begin_anywhere(ranks: RankPool) -> None:
    ranks.run(1, check_alignment)


def go_without_kernels() -> None:
    """As on a GPU before sm_89."""
    with make_communicator() as comm:
        compute_right(comm)
        layers = comm._operations.linear
        layers.forget()
        with mock.patch.object(layers, "has_fp8", False):
            assert not comm.prefers_linear(OUTPUTS, INPUTS, TOKENS, fp8=True)
            for call, accepts in calls(comm, {}):
                assert not accepts()
                with pytest.raises(UnsupportedInputError, match=r"torch.float8_e4m3fn needs a GPU of sm_89 or later"):
                    call()
        assert comm.linear(ones(1, 64), ones(64, 64)).eq(64).all()


def test_devices_without_fp8(ranks: RankPool) -> None:
    ranks.run(2, go_without_kernels)


# ---- Graphs ----------------------------------------------------------------------------------------------------------


def compile_layers() -> None:
    with make_communicator() as comm:
        of = operands(comm.rank, 5, 256, 128, True, True)
        norm_weight = torch.ones(128, dtype=torch.float16)

        def model(x: torch.Tensor, x_scale: torch.Tensor) -> Any:
            scales = {"x_scale": x_scale, "weight_scale": of.weight_scale}
            assert comm.accepts_linear(x, of.weight, **scales)
            assert not comm.accepts_linear(x, of.weight, x_scale=x_scale, weight_scale=of.weight_scale[:3])
            y = comm.linear(x, of.weight, **scales, out_dtype=torch.float16)
            activated = comm.linear_silu_and_mul(x, of.weight, **scales)
            total = comm.linear_all_reduce(x, of.weight, **scales)
            return (
                y,
                activated,
                total,
                *comm.linear_all_reduce_add_rms_norm(x, of.weight, y, norm_weight, EPS, **scales),
            )

        expected = model(of.x, of.x_scale)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert_same(compiled(of.x, of.x_scale), expected, "compiled")
        for operator in (torch.ops.llm_comm.linear.default, torch.ops.llm_comm.linear_all_reduce.default):
            # The check of the schema has no arithmetic for FP8.
            torch.library.opcheck(
                operator, (*of[:2], None, *of[2:], torch.float16, comm.name), test_utils="test_faketensor"
            )
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in of]
            result = comm.linear(fake[0], fake[1], x_scale=fake[2], weight_scale=fake[3], out_dtype=torch.float16)
            assert (result.shape, result.dtype) == ((5, 128), torch.float16)


def test_graphs(ranks: RankPool) -> None:
    ranks.run(2, compile_layers)
