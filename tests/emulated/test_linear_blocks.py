"""Linear layers of FP8 with scales of blocks on emulated GPUs: values, documented bits, and what is declined."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from fused_reference import EPS, FP8, operands_of
from harness import RankPool, make_communicator
from linear_calls import ones
from reference import assert_bitwise_equal, bits
from test_linear import assert_same, every_dtype
from test_linear_fp8 import DECLINED, SHAPES, Operands, decline, operands
from test_linear_gated import assert_is_activated

from llm_comm import UnsupportedInputError
from llm_comm.operations.fp8 import GROUP_SIZE, empty_scales

#: Layouts of the scales of x, as group quantizations make them.
LAYOUTS = ("group", "group_column_major", "group_column_major_tma")


def block_operands(rank: int, tokens: int, inputs: int, rows: int, layout: str = "group") -> Operands:
    """Operands of a rank, the same in every process. Scales are spread too: another scale changes every result."""
    drawn = operands(rank, tokens, inputs, rows, False, False)
    generator = torch.Generator().manual_seed((tokens << 40) + (inputs << 20) + (rows << 4) + rank + 1)

    def spread(*shape: int) -> torch.Tensor:
        return (0.5 + torch.rand(shape, generator=generator)) * 2.0 ** torch.randint(-9, -4, shape, generator=generator)

    x_scale = empty_scales(layout, drawn.x).copy_(spread(tokens, inputs // GROUP_SIZE))
    return drawn._replace(x_scale=x_scale, weight_scale=spread(-(-rows // GROUP_SIZE), inputs // GROUP_SIZE))


def dequantized(of: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """x and the weight in float64, each element times the scale of its block."""
    of_x = of.x_scale.double().repeat_interleave(GROUP_SIZE, 1)
    of_weight = of.weight_scale.double().repeat_interleave(GROUP_SIZE, 0).repeat_interleave(GROUP_SIZE, 1)
    return of.x.double() * of_x, of.weight.double() * of_weight[: len(of.weight)]


def assert_is_layer(y: torch.Tensor, of: Operands, what: str, bias: torch.Tensor | None = None) -> None:
    """Within the error bound of fp32 sums of products in any order, three more roundings a block, and the last one."""
    x, weight = dequantized(of)
    exact, magnitudes = x @ weight.T, x.abs() @ weight.abs().T
    if bias is not None:
        exact, magnitudes = exact + bias.double(), magnitudes + bias.double().abs()
    info = torch.finfo(y.dtype)
    bound = exact.abs() * info.eps / 2 + magnitudes * (of.x.shape[-1] + 4) * 2.0**-24
    excess = (y.double() - exact).abs() - 1.01 * bound - info.smallest_normal * info.eps
    assert y.shape == exact.shape, what
    assert excess.max() <= 0, f"{what}: off by {float(excess.max())} more than rounding explains"


def multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c`` of fp32, rounded once: by way of float64, rounded to odd."""
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    of_addend = total - product
    error = (product - (total - of_addend)) + (addend - of_addend)
    is_even = total.view(torch.int64) % 2 == 0
    neighbor = torch.nextafter(total, torch.full_like(total, torch.inf).copysign(error))
    return torch.where((error != 0) & is_even, neighbor, total).float()


def documented(of: Operands, dtype: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A layer with its additions in the order that ``Communicator.linear`` documents, as the emulator makes them."""
    sums = torch.zeros(2, len(of.x), len(of.weight))
    of_rows = of.weight_scale.repeat_interleave(GROUP_SIZE, 0)[: len(of.weight)]
    for block in range(of.x.shape[1] // GROUP_SIZE):
        products = torch.zeros_like(sums[0])
        for k in range(block * GROUP_SIZE, (block + 1) * GROUP_SIZE):
            # Exact in float64: all of it are multiples of 2^-18.
            products = (products.double() + of.x[:, k, None].double() * of.weight[None, :, k].double()).float()
        scale = of.x_scale[:, block, None] * of_rows[None, :, block]
        sums[block % 2] = multiply_add(scale, products, sums[block % 2])
    total = sums[0] + sums[1]
    return (total if bias is None else total + bias.float()).to(dtype)


# ---- The layer -------------------------------------------------------------------------------------------------------


def check_layer(dtype: torch.dtype) -> None:
    with make_communicator() as comm:
        for number, shape in enumerate(SHAPES):
            layout = LAYOUTS[number % 3]
            of, what = block_operands(comm.rank, *shape, layout), f"{shape}, {layout}"
            copies = Operands(*(tensor.clone() for tensor in of))
            y = comm.linear(of.x, of.weight, **of.scales(), out_dtype=dtype)
            assert_is_layer(y, of, what)
            if shape[0] < 20:
                assert_bitwise_equal(y, documented(of, dtype), f"{what}: the documented order")
            bias = torch.randn(shape[2]).to(dtype)
            with_bias = comm.linear(of.x, of.weight, bias=bias, **of.scales(), out_dtype=dtype)
            assert_is_layer(with_bias, of, f"{what}: with bias", bias)
            if shape[0] < 10:
                assert_bitwise_equal(with_bias, documented(of, dtype, bias), f"{what}: with bias")
            out = torch.empty_like(y)
            assert comm.linear(of.x, of.weight, out, **of.scales()) is out
            assert_bitwise_equal(out, y, f"{what}: out")
            assert_same(of, copies, f"{what}: operands")


@every_dtype
def test_layer(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(1, check_layer, dtype)


def check_gated(method: str, dtype: torch.dtype) -> None:
    with make_communicator() as comm:
        for tokens, inputs, outputs in SHAPES:
            of = block_operands(comm.rank, tokens, inputs, 2 * outputs)
            of = of._replace(x_scale=of.x_scale / 64)  # fp16 holds products of gate and up
            products = comm.linear(of.x, of.weight, **of.scales(), out_dtype=dtype)
            y = getattr(comm, method)(of.x, of.weight, **of.scales(), out_dtype=dtype)
            assert_is_activated(method, y, products, f"{tokens} tokens, {inputs} inputs, {outputs} outputs")


@every_dtype
@pytest.mark.parametrize("method", ["linear_silu_and_mul", "linear_gelu_tanh_and_mul"])
def test_gate_and_up(ranks: RankPool, method: str, dtype: torch.dtype) -> None:
    ranks.run(1, check_gated, method, dtype)


def check_rows() -> None:
    """Whatever rows are beside it, however many, and however their scales lie."""
    with make_communicator() as comm:
        of = block_operands(comm.rank, 64, 640, 192)
        whole = comm.linear(of.x, of.weight, **of.scales())
        for tokens, first, layout in itertools.product((1, 5, 9, 17, 33), (0, 31), LAYOUTS):
            rows = slice(first, first + tokens)
            x = of.x[rows].clone()
            scale = empty_scales(layout, x).copy_(of.x_scale[rows])
            y = comm.linear(x, of.weight, x_scale=scale, weight_scale=of.weight_scale)
            assert_bitwise_equal(y, whole[rows], f"{tokens} tokens from {first}, {layout}")
            # Rows of scales that lie apart, as in a slice of a larger buffer.
            y = comm.linear(x, of.weight, x_scale=of.x_scale[rows], weight_scale=of.weight_scale)
            assert_bitwise_equal(y, whole[rows], f"{tokens} tokens from {first}, a slice")


def test_the_bits_of_a_row_do_not_depend_on_the_batch(ranks: RankPool) -> None:
    ranks.run(1, check_rows)


def check_sum() -> list[torch.Tensor]:
    """Returns the bits, which are those of all ranks."""
    found = []
    with make_communicator() as comm:
        for tokens, inputs, outputs in SHAPES[:4]:
            of, what = block_operands(comm.rank, tokens, inputs, outputs), f"{tokens} tokens, {inputs} inputs"
            y = comm.linear(of.x, of.weight, **of.scales())
            total = comm.linear_all_reduce(of.x, of.weight, **of.scales())
            assert_bitwise_equal(total, comm.all_reduce(y), what)
            residual, norm_weight = operands_of(tokens, outputs, torch.bfloat16)
            expected = comm.all_reduce_add_rms_norm(y, residual, norm_weight, EPS)
            results = comm.linear_all_reduce_add_rms_norm(of.x, of.weight, residual, norm_weight, EPS, **of.scales())
            assert_same(results, expected, f"{what}: normed")
            found.append(bits(total))
    return found


def test_sums_and_norms_of_layers(ranks: RankPool) -> None:
    first, second = ranks.run(2, check_sum)
    assert all(map(torch.equal, first, second))


def check_shapes() -> None:
    """x of other dimensions, and layers of one block, whose scales are those of tensors and rows where they fit."""
    with make_communicator() as comm:
        of = block_operands(comm.rank, 6, 384, 128)
        y = comm.linear(of.x, of.weight, **of.scales())
        x, x_scale = of.x.view(2, 3, -1), of.x_scale.view(2, 3, -1)
        many = comm.linear(x, of.weight, x_scale=x_scale, weight_scale=of.weight_scale)
        assert_bitwise_equal(many, y.view(2, 3, -1), "three dimensions")
        one = comm.linear(of.x[0], of.weight, x_scale=of.x_scale[0], weight_scale=of.weight_scale)
        assert_bitwise_equal(one, y[0], "one dimension")
        single = block_operands(comm.rank, 3, 128, 192)  # a scale for each row of x, two for the weight
        assert_is_layer(comm.linear(single.x, single.weight, **single.scales()), single, "one block of inputs")
        small = block_operands(comm.rank, 3, 128, 64)
        assert_is_layer(comm.linear(small.x, small.weight, **small.scales()), small, "one block")
        # As many scales as rows: a scale for each row of the weight, whatever their shape is.
        wide = operands(comm.rank, 2, 128 * 128, 128, False, True)
        square = wide.weight_scale.view(1, 128)
        found = comm.linear(wide.x, wide.weight, x_scale=wide.x_scale, weight_scale=square)
        assert_bitwise_equal(found, comm.linear(wide.x, wide.weight, **wide.scales()), "scales of rows")
        of_blocks = block_operands(comm.rank, 2, 128 * 128, 128)
        assert_is_layer(comm.linear(of_blocks.x, of_blocks.weight, **of_blocks.scales()), of_blocks, "of blocks")


def test_shapes_of_scales(ranks: RankPool) -> None:
    ranks.run(1, check_shapes)


# ---- What is declined ------------------------------------------------------------------------------------------------

TOKENS, INPUTS, OUTPUTS = 2, 256, 64
BLOCKS = {"x_scale": torch.ones(TOKENS, 2), "weight_scale": torch.ones(1, 2)}
DECLINED_BLOCKS: dict[str, tuple[dict[str, Any], str]] = {
    "of x alone": (
        {**BLOCKS, "weight_scale": torch.ones(OUTPUTS)},
        "x_scale has shape (2, 2): it must be one scale, or one for each of 2 rows; or x_scale is [2, 2] and "
        "weight_scale [1, 2], for blocks of 128",
    ),
    "of the weight alone": ({**BLOCKS, "x_scale": torch.ones(TOKENS)}, "weight_scale has shape (1, 2): it must be one"),
    "of other inputs": ({**BLOCKS, "x_scale": torch.ones(TOKENS, 3)}, "x_scale has shape (2, 3): it must be one scale"),
    "of other tokens": ({**BLOCKS, "x_scale": torch.ones(3, 2)}, "x_scale has shape (3, 2): it must be one scale"),
    "of other outputs": ({**BLOCKS, "weight_scale": torch.ones(2, 2)}, "x_scale has shape (2, 2): it must be one"),
    "flat": ({**BLOCKS, "weight_scale": torch.ones(2)}, "x_scale has shape (2, 2): it must be one scale"),
    "weight by columns": (
        {**BLOCKS, "weight": ones(256, INPUTS).to(FP8), "weight_scale": torch.ones(2, 2).t()},
        "weight_scale: the tensor is not contiguous",
    ),
    "expanded": (
        {**BLOCKS, "x_scale": torch.ones(TOKENS, 1).expand(TOKENS, 2)},
        "x_scale has shape (2, 2) and strides (1, 0): it must be contiguous, or have two dimensions and strides of 1",
    ),
    "bf16 scales": ({**BLOCKS, "x_scale": ones(TOKENS, 2)}, "x_scale is torch.bfloat16; it must be torch.float32"),
    "scales elsewhere": ({**BLOCKS, "x_scale": BLOCKS["x_scale"].to("meta")}, "x_scale: the tensor is on meta"),
    "negated scales": ({**BLOCKS, "x_scale": torch._neg_view(BLOCKS["x_scale"])}, "x_scale: the tensor is a negated"),
    "sparse scales": ({**BLOCKS, "x_scale": BLOCKS["x_scale"].to_sparse()}, "x_scale: the tensor is torch.sparse_coo"),
    "scales that require grad": (
        {**BLOCKS, "x_scale": torch.ones(TOKENS, 2, requires_grad=True)},
        "x_scale: the tensor requires grad",
    ),
}


@pytest.mark.parametrize("name", DECLINED_BLOCKS)
def test_declined_scales(ranks: RankPool, name: str) -> None:
    first, second = ranks.run(2, decline_blocks, name)
    assert first == second
    assert all(DECLINED_BLOCKS[name][1] in text for text in first), first


def decline_blocks(name: str) -> list[str]:
    DECLINED[name] = DECLINED_BLOCKS[name]
    return decline(name)


def check_written_scales() -> None:
    """A result may not lie over scales, whatever their strides are."""
    buffer = torch.ones(4, 64)
    x_scale, out = buffer[:TOKENS, 1:3], buffer[1].view(torch.bfloat16).view(TOKENS, OUTPUTS)
    x, weight = ones(TOKENS, INPUTS).to(FP8), ones(OUTPUTS, INPUTS).to(FP8)
    with make_communicator() as comm, pytest.raises(UnsupportedInputError, match="out overlaps x_scale"):
        comm.linear(x, weight, out, x_scale=x_scale, weight_scale=torch.ones(1, 2))


def test_results_over_scales(ranks: RankPool) -> None:
    ranks.run(1, check_written_scales)


# ---- Graphs ----------------------------------------------------------------------------------------------------------


def compile_layers() -> None:
    with make_communicator() as comm:
        of = block_operands(comm.rank, 5, 256, 128, "group_column_major")

        def model(x: torch.Tensor, x_scale: torch.Tensor) -> Any:
            scales = {"x_scale": x_scale, "weight_scale": of.weight_scale}
            assert comm.accepts_linear(x, of.weight, **scales)
            assert not comm.accepts_linear(x, of.weight, x_scale=x_scale[:, :1], weight_scale=of.weight_scale)
            return comm.linear(x, of.weight, **scales), comm.linear_silu_and_mul(x, of.weight, **scales)

        expected = model(of.x, of.x_scale)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert_same(compiled(of.x, of.x_scale), expected, "compiled")


def test_graphs(ranks: RankPool) -> None:
    ranks.run(1, compile_layers)
