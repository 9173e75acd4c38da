"""The fused operators: models that call them compile as one graph."""

from __future__ import annotations

import math

import pytest
import torch
from fused_reference import EPS, FP8, check_call, operands_of, rows_of
from harness import RankPool, make_communicator
from reference import assert_bitwise_equal
from torch._subclasses import FakeTensorMode

from llm_comm import Communicator, UnsupportedInputError

HIDDEN = 256
SUFFIXES = ("", "_static_fp8", "_dynamic_fp8", "_group_fp8", "_block_scaled")
OPERATORS = tuple(f"all_reduce_add_rms_norm{suffix}" for suffix in SUFFIXES)


def own_operands(operator: str) -> list[torch.Tensor | str]:
    """That only operators with this quantization have."""
    if "group" in operator:
        return ["group_column_major_tma"]
    if "block" in operator:
        return ["nvfp4", torch.ones(1)]
    return [torch.ones(1)] if "static" in operator else []


class Layer(torch.nn.Module):
    """The end of a transformer layer, in every way to write it."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.comm = comm
        _, self.weight = operands_of(1, HIDDEN, torch.bfloat16)
        self.scale = torch.tensor([0.05])

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fused = self.comm.all_reduce_add_rms_norm
        normed, residual = fused(x * 2, residual, self.weight, EPS)
        y = normed + 1
        normed, residual = fused(y, residual, self.weight, EPS, weight_bias=1.0, out=y, residual_out=residual.clone())
        static, residual = fused(normed, residual, self.weight, EPS, quantize="static", scale=self.scale)
        dynamic, total, scale = fused(normed * 0.5, None, self.weight, EPS, quantize="dynamic")
        by_rows, _, row_scales = fused(x, total, self.weight, EPS, weight_bias=-0.5, quantize="group_ue8m0")
        given = torch.empty_strided((len(x), 2), (1, (len(x) + 3) // 4 * 4))
        fused(x, total, self.weight, EPS, quantize="group_column_major_tma", scale=given)
        by_columns, _, scales = fused(x, total, self.weight, EPS, quantize="group_column_major_tma")
        groups = by_rows.float(), row_scales, given, by_columns.float(), scales
        fp4, _, fp4_scales = fused(x, total, self.weight, EPS, quantize="nvfp4", global_scale=self.scale)
        fp8, _, fp8_scales = fused(x, total, self.weight, EPS, quantize="mxfp8_linear")
        blocks = fp4.float(), fp4_scales.float(), fp8.float(), fp8_scales.float()
        return y, residual, static.float(), dynamic.float() * scale, total, *groups, *blocks


@torch.inference_mode()
def compile_layer(backend: str) -> None:
    with make_communicator() as comm:
        torch._dynamo.reset()
        layer = Layer(comm)
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        for rows in (1, 3, 5):  # the second makes the batch dynamic
            x = rows_of(comm.world_size, rows, HIDDEN, torch.bfloat16)[comm.rank]
            residual, _ = operands_of(rows, HIDDEN, torch.bfloat16)
            for found, expected in zip(compiled(x, residual), layer(x, residual), strict=True):
                assert found.stride() == expected.stride()
                assert_bitwise_equal(found, expected, f"{backend}, {rows} rows")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_model_compiles_as_one_graph(ranks: RankPool, backend: str) -> None:
    ranks.run(2, compile_layer, backend)


def check_operators() -> None:
    with make_communicator() as comm:
        inputs = rows_of(comm.world_size, 3, HIDDEN, torch.bfloat16)
        residual, weight = operands_of(3, HIDDEN, torch.bfloat16)
        x = inputs[comm.rank]
        check_call(comm, inputs, residual, weight, "before")
        for name in OPERATORS:
            own = own_operands(name)
            operator = getattr(torch.ops.llm_comm, name)
            for r in (residual, None):
                torch.library.opcheck(operator.default, (x, r, weight, EPS, 1.0, comm.name, *own))
            # What is declined is an error: nobody may take an input that was not reduced for a result.
            with pytest.raises(UnsupportedInputError, match="not contiguous"):
                operator(x.t(), None, weight, EPS, 0.0, comm.name, *own)
            with pytest.raises(UnsupportedInputError, match="weight_bias is inf"):
                operator(x, None, weight, EPS, math.inf, comm.name, *own)
    with pytest.raises(RuntimeError, match="closed"):
        torch.ops.llm_comm.all_reduce_add_rms_norm(x, None, weight, EPS, 0.0, comm.name)


def test_operators(ranks: RankPool) -> None:
    ranks.run(2, check_operators)


@pytest.mark.parametrize("name", OPERATORS[:3])
@pytest.mark.parametrize("shape", [(0, HIDDEN), (3, HIDDEN), (2, 5, HIDDEN)])
def test_fake_results_are_like_the_real_ones(name: str, shape: tuple[int, ...]) -> None:
    with FakeTensorMode():
        x = torch.empty(shape, dtype=torch.float16)
        own = [torch.empty(1)] if "static" in name else []
        results = getattr(torch.ops.llm_comm, name)(x, x, torch.empty(HIDDEN), EPS, 0.0, "any", *own)
    expected = [(shape, FP8 if "fp8" in name else torch.float16), (shape, torch.float16)]
    expected += [((*shape[:-1], 1), torch.float32)] if "dynamic" in name else []
    assert [(tuple(result.shape), result.dtype) for result in results] == expected


@pytest.mark.parametrize(
    ("quantize", "shape", "strides"),
    [
        ("group", (3, HIDDEN), (2, 1)),
        ("group_ue8m0", (2, 5, HIDDEN), (10, 2, 1)),
        ("group_column_major", (3, HIDDEN), (1, 3)),
        ("group_column_major_tma_ue8m0", (5, HIDDEN), (1, 8)),
    ],
)
def test_fake_scales_of_groups(quantize: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    operator = torch.ops.llm_comm.all_reduce_add_rms_norm_group_fp8
    with FakeTensorMode():
        x, weight = torch.empty(shape, dtype=torch.float16), torch.empty(HIDDEN, dtype=torch.float16)
        normed, residual, scale = operator(x, x, weight, EPS, 0.0, "any", quantize)
        with pytest.raises(UnsupportedInputError, match=r"takes a multiple of 128|takes two dimensions"):
            operator(x[..., :200], None, weight[:200], EPS, 0.0, "any", quantize)
        with pytest.raises(UnsupportedInputError, match="quantize is 'grouped'"):
            operator(x, None, weight, EPS, 0.0, "any", "grouped")
    assert (normed.dtype, normed.shape, residual.dtype) == (FP8, x.shape, x.dtype)
    assert (scale.dtype, scale.shape, scale.stride()) == (torch.float32, (*shape[:-1], 2), strides)


@pytest.mark.parametrize(
    ("quantize", "shape", "scales"),
    [
        ("nvfp4", (3, HIDDEN), (128, 16)),
        ("nvfp4_linear", (2, 5, HIDDEN), (2, 5, 16)),
        ("mxfp8", (2, 65, HIDDEN), (256, 8)),
        ("mxfp8_linear", (0, HIDDEN), (0, 8)),
    ],
)
def test_fake_scales_of_blocks(quantize: str, shape: tuple[int, ...], scales: tuple[int, ...]) -> None:
    operator = torch.ops.llm_comm.all_reduce_add_rms_norm_block_scaled
    is_fp4 = "nvfp4" in quantize
    with FakeTensorMode():
        x, weight = torch.empty(shape, dtype=torch.float16), torch.empty(HIDDEN, dtype=torch.float16)
        global_scale = torch.empty(1) if is_fp4 else None
        normed, residual, scale = operator(x, x, weight, EPS, 0.0, "any", quantize, global_scale)
        with pytest.raises(UnsupportedInputError, match="takes a multiple of"):
            operator(x[..., :200], None, weight[:200], EPS, 0.0, "any", quantize, global_scale)
        with pytest.raises(UnsupportedInputError, match="global_scale"):
            operator(x, None, weight, EPS, 0.0, "any", quantize, None if is_fp4 else torch.empty(1))
    assert (normed.dtype, normed.shape[:-1], residual.dtype) == (torch.uint8 if is_fp4 else FP8, x.shape[:-1], x.dtype)
    assert normed.shape[-1] == (HIDDEN // 2 if is_fp4 else HIDDEN)
    assert (scale.dtype, scale.shape) == (FP8 if is_fp4 else torch.uint8, scales)
