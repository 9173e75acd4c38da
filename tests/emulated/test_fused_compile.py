"""The fused operators: models that call them compile as one graph."""

from __future__ import annotations

import pytest
import torch
from fused_reference import EPS, FP8, check_call, operands_of, rows_of
from harness import RankPool, make_communicator
from reference import assert_bitwise_equal
from torch._subclasses import FakeTensorMode

from llm_comm import Communicator, UnsupportedInputError

HIDDEN = 64
OPERATORS = ("all_reduce_add_rms_norm", "all_reduce_add_rms_norm_static_fp8", "all_reduce_add_rms_norm_dynamic_fp8")


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
        normed, residual = fused(y, residual, self.weight, EPS, out=y, residual_out=residual.clone())
        static, residual = fused(normed, residual, self.weight, EPS, quantize="static", scale=self.scale)
        dynamic, total, scale = fused(normed * 0.5, None, self.weight, EPS, quantize="dynamic")
        return y, residual, static.float(), dynamic.float() * scale, total


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
            scale = [torch.ones(1)] if "static" in name else []
            operator = getattr(torch.ops.llm_comm, name)
            for r in (residual, None):
                torch.library.opcheck(operator.default, (x, r, weight, EPS, comm.name, *scale))
            # What is declined is an error: nobody may take an input that was not reduced for a result.
            with pytest.raises(UnsupportedInputError, match="not contiguous"):
                operator(x.t(), None, weight, EPS, comm.name, *scale)
    with pytest.raises(RuntimeError, match="closed"):
        torch.ops.llm_comm.all_reduce_add_rms_norm(x, None, weight, EPS, comm.name)


def test_operators(ranks: RankPool) -> None:
    ranks.run(2, check_operators)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("shape", [(0, HIDDEN), (3, HIDDEN), (2, 5, HIDDEN)])
def test_fake_results_are_like_the_real_ones(name: str, shape: tuple[int, ...]) -> None:
    with FakeTensorMode():
        x = torch.empty(shape, dtype=torch.float16)
        scale = [torch.empty(1)] if "static" in name else []
        results = getattr(torch.ops.llm_comm, name)(x, x, torch.empty(HIDDEN), EPS, "any", *scale)
    expected = [(shape, FP8 if "fp8" in name else torch.float16), (shape, torch.float16)]
    expected += [((*shape[:-1], 1), torch.float32)] if "dynamic" in name else []
    assert [(tuple(result.shape), result.dtype) for result in results] == expected
