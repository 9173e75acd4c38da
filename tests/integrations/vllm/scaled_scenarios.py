"""Linear layers of FP8 in graphs of vLLM's compiler: run by ``test_vllm_scaled.py``, as ``scenarios.py`` by its test.

Layers call vLLM's ``cutlass_scaled_mm`` as its kernel for Hopper does, with the transposed weight as vLLM keeps it.
Values and weights are small whole numbers, so sums are the same in any order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from compiler_harness import (
    FP8_SCALE,
    HIDDEN,
    Compiler,
    Model,
    compiler,
    compiler_config,
    matches,
    norms,
    quantization,
    with_model,
)
from linear_scenarios import COLUMN_PASS, INPUTS, LINEAR_PASS, use_table
from rank_processes import data, dist_rank, scenario
from scenarios import parallel_state, tensor_model_parallel_all_reduce
from torch import nn
from vllm import _custom_ops
from vllm.model_executor.layers.activation import SiluAndMul

from llm_comm.integrations.vllm.operators import FP8
from llm_comm.planning.layers import LayerRow

BF16 = torch.bfloat16
#: Of the layers here, whose inputs are whole boxes of FP8.
WEIGHT = (HIDDEN, INPUTS)
#: Of a rank: those of qkv, and of gate as of up.
OUTPUTS = 128


class ScaledLayer(nn.Module):
    """As vLLM makes of a checkpoint; its result is this rank's part of a sum.

    Args:
        per_channel: Whether each output has a scale of its own.
        per_token: Whether x is quantized with a scale for each token, in the graph; else with a parameter.
    """

    def __init__(
        self,
        inputs: int = INPUTS,
        outputs: int = HIDDEN,
        per_channel: bool = True,
        per_token: bool = True,
        dtype: torch.dtype = BF16,
    ) -> None:
        super().__init__()
        torch.manual_seed(dist_rank())
        weight = torch.randint(-2, 3, (outputs, inputs)).to(FP8)
        self.weight = nn.Parameter(weight.t(), requires_grad=False)
        scales = 2.0 ** torch.randint(-3, 3, (outputs, 1) if per_channel else ())
        self.weight_scale = nn.Parameter(scales.float(), requires_grad=False)
        self.input_scale = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.per_token, self.dtype = per_token, dtype

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        x8, scale = self.quantized(x.view(-1, x.shape[-1]))
        y = _custom_ops.cutlass_scaled_mm(x8, self.weight, scale, self.weight_scale, self.dtype, bias)
        return y.view(*x.shape[:-1], y.shape[-1])

    def quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x, and its scales, which are powers of two."""
        if not self.per_token:
            return (x.float() / self.input_scale).clamp(-448, 448).to(FP8), self.input_scale
        scale = torch.exp2(torch.ceil(torch.log2(x.float().abs().amax(-1, keepdim=True).clamp(min=1) / 256)))
        return (x.float() / scale).to(FP8), scale


def summed(layer: ScaledLayer, x: torch.Tensor) -> torch.Tensor:
    return tensor_model_parallel_all_reduce(layer(x))


def wide(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x * 2], -1)


# ---- What is replaced -----------------------------------------------------------------------------------------------


class Expected(NamedTuple):
    """How many layers go into which operators."""

    linear: int = 0
    columns: int = 0
    norms_alone: int = 0


def expect(vllm: Compiler, model: Model, wanted: Expected, rows: int = 4) -> None:
    """Compiles and runs ``model``, whose layers are replaced so; ``norms_alone`` are fused without their layers."""
    for calls in (vllm.linear_calls, vllm.fused_calls, vllm.column_calls):
        calls.clear()
    before = matches(LINEAR_PASS), matches(COLUMN_PASS)
    vllm.check(vllm.trace(model, 64), model, rows)
    replaced = matches(LINEAR_PASS) - before[0], matches(COLUMN_PASS) - before[1]
    assert replaced == (wanted.linear, wanted.columns), f"{replaced} instead of {wanted}"
    found = Expected(len(vllm.linear_calls), len(vllm.column_calls), len(vllm.fused_calls))
    assert found == wanted, found


@scenario(smoke=True, LLM_COMM_FUSE_LINEAR="1")
def layers_go_into_the_operator_of_their_norm() -> None:
    with compiler(with_model(compiler_config(norms_by="native"))) as vllm:
        layers = [ScaledLayer(per_channel=c, per_token=t) for c in (False, True) for t in (False, True)]
        first, second, third, last = norms(1e-5, 1e-6, 3e-6, 0.1)
        quantize = quantization()
        scale = torch.tensor([FP8_SCALE])

        def model(x: torch.Tensor) -> Any:
            a, residual = first(summed(layers[0], wide(x)), x * 1)
            b, residual = second(summed(layers[1], wide(x * 2)), residual)
            normed, residual = third(summed(layers[2], wide(x * 3)), residual)
            # A batch of one sequence, as models of transformers are given. Nobody takes the last residual.
            end, _ = last(summed(layers[3], wide(x).unsqueeze(0)), residual.unsqueeze(0))
            return a, b, quantize(normed, scale)[0], end

        expect(vllm, model, Expected(linear=4))
        flat = ((4, INPUTS), WEIGHT)
        ways = [(*flat, None), (*flat, None), (*flat, "static"), ((1, 4, INPUTS), WEIGHT, None)]
        assert vllm.linear_calls == ways, vllm.linear_calls


@scenario(LLM_COMM_FUSE_LINEAR="1")
def layers_split_by_columns_become_operators() -> None:
    with compiler(with_model(compiler_config(norms_by="native"))) as vllm:
        qkv, gate_up = ScaledLayer(outputs=OUTPUTS), ScaledLayer(outputs=2 * OUTPUTS, per_channel=False)
        silu_and_mul = SiluAndMul()
        bias, both = torch.arange(OUTPUTS).to(BF16), torch.arange(2 * OUTPUTS).to(BF16)

        def model(x: torch.Tensor) -> Any:
            return (
                qkv(wide(x)),
                silu_and_mul(gate_up(wide(x)) * 2),
                silu_and_mul(gate_up(wide(x * 2))),
                qkv(wide(x * 3), bias),
                silu_and_mul(gate_up(wide(x * 4), both)),
            )

        expect(vllm, model, Expected(columns=5))
        called = [(name, weight) for name, _, weight in vllm.column_calls]
        gate_up_weight = (2 * OUTPUTS, INPUTS)
        wanted = [("linear", (OUTPUTS, INPUTS)), ("linear", gate_up_weight), ("linear_silu_and_mul", gate_up_weight)]
        wanted += [wanted[0], wanted[2]]
        assert sorted(called) == sorted(wanted), called


@scenario(LLM_COMM_FUSE_LINEAR="1")
def results_are_those_of_llm_comm() -> None:
    with compiler(with_model(compiler_config(norms_by="native"))) as vllm:
        for dtype in (BF16, torch.float16):
            layer, (norm,) = ScaledLayer(dtype=dtype), norms(1e-5)
            norm.weight.data = norm.weight.data.to(dtype)
            x = data((5, HIDDEN)).to(dtype)

            bias = torch.arange(HIDDEN).to(dtype)

            def model(x: torch.Tensor, layer: Any = layer, norm: Any = norm, bias: Any = bias) -> Any:
                of_rank_0 = layer(wide(x * 3), bias if dist_rank() == 0 else None)
                biased = norm(tensor_model_parallel_all_reduce(of_rank_0), x * 2)
                return *norm(summed(layer, wide(x)), x * 1), layer(wide(x * 2)), *biased

            vllm.linear_calls.clear()
            # Inductor once, as it takes seconds.
            compiled = vllm.compile(model) if dtype == BF16 else vllm.trace(model, 64)
            normed, residual, alone, *biased = compiled(x)
            assert len(vllm.linear_calls) == 2
            ours = parallel_state.get_tp_group().device_communicator._llm_comm

            def arguments(x: torch.Tensor, layer: Any = layer) -> tuple[Any, Any, dict[str, Any]]:
                x8, scale = layer.quantized(wide(x))
                return x8, layer.weight.t().detach(), {"x_scale": scale, "weight_scale": layer.weight_scale.detach()}

            x8, weight, scales = arguments(x)
            one_by_one = ours.linear_all_reduce_add_rms_norm(x8, weight, x, norm.weight, 1e-5, **scales)
            assert torch.equal(normed, one_by_one[0])
            assert torch.equal(residual, one_by_one[1])
            x8, weight, scales = arguments(x * 2)
            assert torch.equal(alone, ours.linear(x8, weight, **scales, out_dtype=dtype))
            x8, weight, scales = arguments(x * 3)
            scales["bias"] = bias if dist_rank() == 0 else None
            one_by_one = ours.linear_all_reduce_add_rms_norm(x8, weight, x * 2, norm.weight, 1e-5, **scales)
            assert all(map(torch.equal, biased, one_by_one))


@scenario()
def a_table_has_rows_of_fp8() -> None:
    use_table([LayerRow("linear", *WEIGHT, False, 8, True), LayerRow("linear_fp8", HIDDEN, 2 * INPUTS, False, 8, True)])
    with compiler(with_model(compiler_config(norms_by="native"))) as vllm:
        other, preferred = ScaledLayer(), ScaledLayer(2 * INPUTS)
        first, second = norms(1e-5, 1e-6)

        def model(x: torch.Tensor) -> Any:
            y, residual = first(summed(other, wide(x)), x * 1)
            return y, *second(summed(preferred, wide(wide(x))), residual)

        for calls in (vllm.linear_calls, vllm.fused_calls):
            calls.clear()
        vllm.check(vllm.trace(model, 8), model)
        assert [weight for _, weight, _ in vllm.linear_calls] == [(HIDDEN, 2 * INPUTS)], vllm.linear_calls
        assert len(vllm.fused_calls) == 1


# ---- What is not ----------------------------------------------------------------------------------------------------


@scenario(LLM_COMM_FUSE_LINEAR="1")
def layers_that_llm_comm_does_not_compute_are_left_alone() -> None:
    with compiler(with_model(compiler_config(norms_by="native"))) as vllm:
        layer, odd = ScaledLayer(), ScaledLayer(96)
        in_rows = ScaledLayer()
        in_rows.weight.data = in_rows.weight.data.contiguous()  # no layout of cutlass's
        bias = torch.ones(HIDDEN, dtype=BF16)
        others = norms(*[1e-5] * 5)

        def of(y: torch.Tensor, x: torch.Tensor, place: int) -> torch.Tensor:
            return others[place](tensor_model_parallel_all_reduce(y), x)[0]

        def model(x: torch.Tensor) -> Any:
            x8, scale = layer.quantized(wide(x))
            return (
                of(layer(wide(x), bias * 2), x * 1, 0),  # which a kernel ahead has written
                of(odd(wide(x)[:, :96] * 1), x * 2, 1),
                of(in_rows(wide(x)), x * 3, 2),
                # Scales of the weight that a kernel ahead has made, and a weight.
                of(_custom_ops.cutlass_scaled_mm(x8, layer.weight, scale, layer.weight_scale * 2, BF16), x * 4, 3),
                of(
                    _custom_ops.cutlass_scaled_mm(
                        x8, (layer.weight.float() * 1).to(FP8), scale, layer.weight_scale, BF16
                    ),
                    x * 5,
                    4,
                ),
            )

        expect(vllm, model, Expected(norms_alone=5))


@scenario(LLM_COMM_FUSE_LINEAR="1", LLM_COMM_MAX_MESSAGE_BYTES="1024")
def what_is_declined_is_computed_all_the_same() -> None:
    with compiler(compiler_config(norms_by="native")) as vllm:
        layer, gate_up, silu_and_mul = ScaledLayer(), ScaledLayer(outputs=2 * OUTPUTS), SiluAndMul()
        (norm,) = norms(1e-5)

        def model(x: torch.Tensor) -> Any:
            normed, residual = norm(summed(layer, wide(x)), x * 1)
            return normed, residual, layer(wide(x * 2)), silu_and_mul(gate_up(wide(x)))

        compiled = vllm.trace(model, 64)
        for rows, served in ((9, 0), (8, 1)):  # 1,152 bytes
            vllm.check(compiled, model, rows)
            assert len(vllm.linear_calls) == served
        assert len(vllm.column_calls) == 4
        # A weight that begins at an odd place is read by vLLM's kernel.
        for each in (layer, gate_up):
            kept = each.weight.data.t()
            moved = torch.empty(kept.numel() + 1, dtype=FP8)[1:].view(kept.shape)
            each.weight.data = moved.copy_(kept).t()
        calls = len(vllm.linear_calls), len(vllm.column_calls)
        vllm.check(compiled, model, 8)
        assert (len(vllm.linear_calls), len(vllm.column_calls)) == calls
        # Without a communicator of llm_comm, the graph is as right.
        parallel_state.get_tp_group().device_communicator._llm_comm = None
        vllm.check(compiled, model, 8)
