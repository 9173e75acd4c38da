"""Linear layers of FP8 in graphs of vLLM's compiler: run by ``test_vllm_scaled.py``, as ``scenarios.py`` by its test.

Layers call vLLM's ``cutlass_scaled_mm`` as its kernel for Hopper does, with the transposed weight as vLLM keeps it.
Values and weights are small whole numbers, so sums are the same in any order.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple
from unittest import mock

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

from llm_comm.integrations.vllm import operators
from llm_comm.integrations.vllm.operators import FP8
from llm_comm.operations.fp8 import GROUP_SIZE, empty_scales
from llm_comm.planning.layers import LayerRow

BF16 = torch.bfloat16
#: Of layers with scales of blocks: two of them.
BLOCK_INPUTS = 256
importlib.import_module("vllm.model_executor.kernels.linear.scaled_mm.flashinfer")  # defines operators
BY_BOTH = torch.ops.vllm.dynamic_flashinfer_deepgemm_blockscale_gemm
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


class BlockLayer(nn.Module):
    """As vLLM makes of a checkpoint with scales of blocks; its result is this rank's part of a sum.

    Args:
        quantizes: Whether the operator quantizes x, as with FlashInfer; else x is quantized in the graph, with scales
            by columns, as for DeepGEMM.
    """

    def __init__(self, inputs: int = BLOCK_INPUTS, outputs: int = HIDDEN, quantizes: bool = True) -> None:
        super().__init__()
        torch.manual_seed(dist_rank())
        self.weight = nn.Parameter(torch.randint(-2, 3, (outputs, inputs)).to(FP8), requires_grad=False)
        scales = 2.0 ** torch.randint(-3, 3, (-(-outputs // GROUP_SIZE), inputs // GROUP_SIZE))
        self.weight_scale = nn.Parameter(scales.float(), requires_grad=False)
        self.quantizes = quantizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.quantizes:
            return BY_BOTH(x, self.weight, self.weight_scale, GROUP_SIZE, False)
        x8, scale = self.quantized(x)
        y = x.new_empty(len(x), len(self.weight))
        torch.ops.vllm.fp8_gemm_nt_op(x8, scale, self.weight, self.weight_scale, y, False)
        return y

    def quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x8, scale = torch.empty_like(x, dtype=FP8), empty_scales("group_column_major", x)
        switches = (False, True, False)
        torch.ops._C.per_token_group_fp8_quant(x, x8, scale, GROUP_SIZE, 1e-10, -448.0, 448.0, *switches)
        return x8, scale


def by_deep_gemm(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, y: torch.Tensor, ue8m0: bool
) -> None:
    """Stands in for DeepGEMM on CPU tensors."""
    of_rows = scale.repeat_interleave(GROUP_SIZE, 0)[: len(weight)]
    total = torch.zeros(y.shape)
    for block in range(scale.shape[1]):
        columns = slice(block * GROUP_SIZE, (block + 1) * GROUP_SIZE)
        products = x[:, columns].float() @ weight[:, columns].float().t()
        total += x_scale[:, block, None] * of_rows[:, block] * products
    y.copy_(total)


def by_both(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, group_size: int, ue8m0: bool) -> torch.Tensor:
    """Stands in for FlashInfer on CPU tensors."""
    x8, x_scale = torch.empty_like(x, dtype=FP8), empty_scales("group", x)
    torch.ops._C.per_token_group_fp8_quant(x, x8, x_scale, group_size, 1e-10, -448.0, 448.0, False, False, False)
    y = x.new_empty(len(x), len(weight))
    by_deep_gemm(x8, x_scale, weight, scale, y, ue8m0)
    return y


torch.library.impl("vllm::fp8_gemm_nt_op", "CPU", by_deep_gemm)
torch.library.impl("vllm::dynamic_flashinfer_deepgemm_blockscale_gemm", "CPU", by_both)


def summed(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return tensor_model_parallel_all_reduce(layer(x))


def wide(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x * 2], -1)


def wider(x: torch.Tensor) -> torch.Tensor:
    return wide(wide(x))


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


@scenario(LLM_COMM_FUSE_LINEAR="1")
def layers_with_scales_of_blocks_become_operators() -> None:
    with compiler(with_model(compiler_config(norms_by="native"))) as vllm:
        kinds = (True, False)
        rows = [BlockLayer(quantizes=quantizes) for quantizes in kinds]
        columns = [BlockLayer(outputs=OUTPUTS, quantizes=quantizes) for quantizes in kinds]
        gates = [BlockLayer(outputs=2 * OUTPUTS, quantizes=quantizes) for quantizes in kinds]
        first, second = norms(1e-5, 1e-6)
        silu_and_mul = SiluAndMul()

        def model(x: torch.Tensor) -> Any:
            a, residual = first(summed(rows[0], wider(x)), x * 1)
            b, residual = second(summed(rows[1], wider(x * 2)), residual)
            alone = [layer(wider(x * (3 + place))) for place, layer in enumerate(columns)]
            activated = [silu_and_mul(layer(wider(x * (5 + place)))) for place, layer in enumerate(gates)]
            return a, b, residual, *alone, *activated

        expect(vllm, model, Expected(linear=2, columns=4))
        assert vllm.linear_calls == [((4, BLOCK_INPUTS), (HIDDEN, BLOCK_INPUTS), None)] * 2, vllm.linear_calls
        called = sorted((name, weight) for name, _, weight in vllm.column_calls)
        plain, gate_up = ("linear", (OUTPUTS, BLOCK_INPUTS)), ("linear_silu_and_mul", (2 * OUTPUTS, BLOCK_INPUTS))
        assert called == [plain] * 2 + [gate_up] * 2, called


@scenario()
def a_table_has_rows_of_blocks() -> None:
    kind, gate_up = "linear_fp8_blocks", "linear_silu_and_mul_fp8_blocks"
    rows = [
        LayerRow("linear_fp8", HIDDEN, BLOCK_INPUTS, False, 64, True),
        LayerRow(kind, HIDDEN, 2 * BLOCK_INPUTS, False, 8, True),
    ]
    use_table([*rows, LayerRow(gate_up, OUTPUTS, BLOCK_INPUTS, False, 8, True)])
    with compiler(with_model(compiler_config(norms_by="native"))) as vllm:
        other, preferred, gates = BlockLayer(), BlockLayer(2 * BLOCK_INPUTS), BlockLayer(outputs=2 * OUTPUTS)
        first, second = norms(1e-5, 1e-6)
        silu_and_mul = SiluAndMul()

        def model(x: torch.Tensor) -> Any:
            y, residual = first(summed(other, wider(x)), x * 1)
            return y, *second(summed(preferred, wide(wider(x))), residual), silu_and_mul(gates(wider(x)))

        compiled = vllm.trace(model, 64)
        quantizations = mock.Mock(wraps=operators._quantize)
        for batch, served in ((8, 1), (9, 0)):
            for calls in (vllm.linear_calls, vllm.fused_calls, vllm.column_calls):
                calls.clear()
            quantizations.reset_mock()
            with mock.patch.object(operators, "_quantize", quantizations):
                vllm.check(compiled, model, batch)
            assert [weight for _, weight, _ in vllm.linear_calls] == [(HIDDEN, 2 * BLOCK_INPUTS)] * served
            assert [weight for _, _, weight in vllm.column_calls] == [(2 * OUTPUTS, BLOCK_INPUTS)] * served
            assert quantizations.call_count == 2 * served, "nothing is quantized that llm_comm declines"


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
def blocks_that_are_declined_are_computed_all_the_same() -> None:
    with compiler(compiler_config(norms_by="native")) as vllm:
        layers = [BlockLayer(quantizes=quantizes) for quantizes in (True, False)]
        gates = [BlockLayer(outputs=2 * OUTPUTS, quantizes=quantizes) for quantizes in (True, False)]
        first, second = norms(1e-5, 1e-6)
        silu_and_mul = SiluAndMul()

        def model(x: torch.Tensor) -> Any:
            a, residual = first(summed(layers[0], wider(x)), x * 1)
            b, residual = second(summed(layers[1], wider(x * 2)), residual)
            return a, b, residual, *(silu_and_mul(layer(wider(x * 3))) for layer in gates)

        compiled = vllm.trace(model, 64)
        vllm.check(compiled, model, 9)  # 1,152 bytes
        assert not vllm.linear_calls
        vllm.check(compiled, model, 8)
        assert len(vllm.linear_calls) == 2
        # Without a communicator of llm_comm, the graph is as right.
        parallel_state.get_tp_group().device_communicator._llm_comm = None
        vllm.check(compiled, model, 8)


@scenario(LLM_COMM_FUSE_LINEAR="1")
def blocks_that_llm_comm_does_not_compute_are_left_alone() -> None:
    with compiler(with_model(compiler_config(norms_by="native"))) as vllm:
        layer, others = BlockLayer(outputs=OUTPUTS), BlockLayer(outputs=OUTPUTS)
        others.weight.data = torch.zeros(2 * OUTPUTS, BLOCK_INPUTS).to(FP8)[::2].copy_(others.weight)  # rows lie apart

        def model(x: torch.Tensor) -> Any:
            y = BY_BOTH(wider(x), layer.weight, layer.weight_scale * 2, GROUP_SIZE, False)
            weight = (layer.weight.float() * 1).to(FP8)  # which a kernel ahead has written, as those scales
            return y, BY_BOTH(wider(x * 2), weight, layer.weight_scale, GROUP_SIZE, False), others(wider(x * 3))

        expect(vllm, model, Expected())


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
