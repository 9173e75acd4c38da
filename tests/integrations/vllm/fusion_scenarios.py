"""vLLM's compiler with the pass of llm_comm: run by ``test_vllm_fusion.py``, as ``scenarios.py`` is by its test.

Models of a few layers are made of vLLM's own norms and quantization, and compiled by ``compiler_harness.py``.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import vllm as vllm_package
import vllm.ir.ops as vllm_ir
from compiler_harness import (
    FP8_SCALE,
    HIDDEN,
    OUR_PASS,
    Compiler,
    compiler,
    compiler_config,
    expect_no_fusion,
    gemma_norms,
    matches,
    norms,
    quantization,
    with_model,
)
from lost_seams import OTHER_BODY, lose
from rank_processes import STAND_INS, data, dist_rank, expected_sum, scenario, shared_directory
from scenarios import current_platform, parallel_state, plugin, tensor_model_parallel_all_reduce
from vllm._custom_ops import scaled_fp4_quant
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.config import CompilationConfig, CompilationMode, PassConfig, VllmConfig, set_current_vllm_config
from vllm.config.utils import Range
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

from llm_comm.errors import UnsupportedInputError
from llm_comm.integrations.vllm.seams import TABLE

# Where a graph is cut in pieces, as at attention.
torch.library.define("llm_comm_tests::cut", "(Tensor x) -> Tensor")
torch.library.impl("llm_comm_tests::cut", "CPU", torch.clone)
torch.library.register_fake("llm_comm_tests::cut", torch.empty_like)

# A layer that takes FP8 with scales for TMA. One of vLLM's takes no others, so it looks at them.
torch.library.define("llm_comm_tests::dequantize", "(Tensor x, Tensor scales) -> Tensor")
torch.library.register_fake("llm_comm_tests::dequantize", lambda x, scales: torch.empty_like(x, dtype=torch.float32))


@torch.library.impl("llm_comm_tests::dequantize", "CPU")
def dequantize(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    assert scales.stride() == (1, -(-len(x) // 4) * 4), scales.stride()
    return x.float() * scales.repeat_interleave(128, -1)


# ---- What vLLM fuses itself, by FlashInfer --------------------------------------------------------------------------


def with_flashinfer() -> Any:
    """FlashInfer is installed: modules that have looked for it look again. Returns ``flashinfer.comm``."""
    sys.path.insert(0, str(STAND_INS))
    for name in (
        "distributed.device_communicators.flashinfer_all_reduce",
        "compilation.passes.fusion.allreduce_rms_fusion",
    ):
        importlib.reload(importlib.import_module(f"vllm.{name}"))
    importlib.reload(importlib.import_module("vllm.compilation.passes.pass_manager"))
    return importlib.import_module("flashinfer.comm")


def config_with_flashinfer() -> VllmConfig:
    """As a vLLM of today has it by default, on a GPU of these ranks."""
    config = with_model(compiler_config())
    config.compilation_config.pass_config.fuse_allreduce_rms = True
    config.compilation_config.pass_config.fi_allreduce_fusion_max_size_mb = 1.0
    return config


def compiled_by_flashinfer(vllm: Any) -> tuple[Any, Any]:
    """A model of what vLLM fuses, and the same compiled."""
    first, *others = norms(1e-5, 1e-6, 1e-5)
    quantize, scale = quantization(), torch.tensor([FP8_SCALE])

    def model(x: torch.Tensor) -> Any:
        x = residual = tensor_model_parallel_all_reduce(x)
        x = first(x)
        for norm in others:
            x, residual = norm(tensor_model_parallel_all_reduce(x), residual)
        normed, residual = first(tensor_model_parallel_all_reduce(x), residual)
        return quantize(normed, scale)[0], residual

    return model, vllm.trace(model)


@scenario(smoke=True)
def of_an_untested_release_norms_that_vllm_fuses_by_flashinfer_are_computed_by_llm_comm() -> None:
    theirs = with_flashinfer()
    lose(TABLE, "vllm.compilation.passes.pass_manager:PostGradPassManager", how=OTHER_BODY)
    with compiler(config_with_flashinfer()) as vllm:
        said = "vLLM's fuse_allreduce_rms is on, and llm_comm computes what it serves of it"
        assert len(vllm.log.having(said)) == (dist_rank() == 0)
        model, compiled = compiled_by_flashinfer(vllm)
        vllm.check(compiled, model)
        assert vllm.fused_calls == [((4, HIDDEN), None)] * 3 + [((4, HIDDEN), "static")], vllm.fused_calls
        assert not theirs.calls
        assert len(vllm.log.having("llm_comm: first all-reduce fused with its RMSNorm")) == (dist_rank() == 0)
        # A group that has ended is left to FlashInfer, and so is what llm_comm does not compute.
        parallel_state.get_tp_group().device_communicator.destroy()
        vllm.check(compiled, model)
        assert theirs.calls == [1, 1, 1, 2]


@scenario(LLM_COMM_MAX_MESSAGE_BYTES="256")
def what_llm_comm_declines_of_flashinfers_norms_goes_to_flashinfer() -> None:
    theirs = with_flashinfer()
    lose(TABLE, "vllm.compilation.passes.pass_manager:PostGradPassManager", how=OTHER_BODY)
    with compiler(config_with_flashinfer()) as vllm:
        model, compiled = compiled_by_flashinfer(vllm)
        vllm.check(compiled, model)
        assert (theirs.calls, vllm.fused_calls) == ([1, 1, 1, 2], [])
        vllm.check(compiled, model, rows=2)
        assert len(vllm.fused_calls) == 4
        (adds_1,) = gemma_norms(1e-6)

        def gemma(x: torch.Tensor) -> Any:
            return adds_1(tensor_model_parallel_all_reduce(x * 2), x)

        compiled = vllm.trace(gemma)
        for rows, served in ((2, 5), (4, 5)):
            vllm.check(compiled, gemma, rows)
            assert (theirs.calls[4:], len(vllm.fused_calls)) == ([1] * (rows == 4), served)


@scenario()
def one_rank_without_flashinfer_leaves_its_norms_to_nobody() -> None:
    with_flashinfer()
    lost = ["vllm.compilation.passes.pass_manager:PostGradPassManager"]
    lose(TABLE, *lost, how=OTHER_BODY)
    if dist_rank() == 1:
        lose(TABLE, *lost, "flashinfer.comm:allreduce_fusion")
    config = config_with_flashinfer()
    with compiler(config) as vllm:
        assert config.compilation_config.pass_config.fuse_allreduce_rms is False
        model, compiled = compiled_by_flashinfer(vllm)
        vllm.check(compiled, model)
        assert not vllm.fused_calls


@scenario()
def of_a_tested_release_the_passes_of_llm_comm_come_first() -> None:
    theirs = with_flashinfer()
    config = config_with_flashinfer()
    with compiler(config) as vllm:
        assert config.compilation_config.pass_config.fuse_allreduce_rms is False
        model, compiled = compiled_by_flashinfer(vllm)
        vllm.check(compiled, model)
        assert (len(vllm.fused_calls), matches(OUR_PASS), theirs.calls) == (4, 4, [])


# ---- What is fused --------------------------------------------------------------------------------------------------


@scenario(smoke=True)
def norms_of_any_epsilon_are_fused_with_and_without_residual() -> None:
    with compiler() as vllm:
        first, *others = norms(1e-5, 1e-6, 3e-6, 0.1)

        def model(x: torch.Tensor) -> torch.Tensor:
            x = residual = tensor_model_parallel_all_reduce(x)
            x = first(x)
            for norm in others:
                x, residual = norm(tensor_model_parallel_all_reduce(x), residual)
            return x  # nobody takes the last residual

        vllm.expect(model, fused=4)


@scenario()
def norms_that_inductor_would_generate_are_fused_too() -> None:
    """As by default: vLLM's norms become chains of torch operators, after this pass."""
    with compiler(norms_by="native") as vllm:
        before, after, end = norms(1e-5, 1e-5, 1e-5)

        def model(x: torch.Tensor) -> Any:
            x, residual = after(tensor_model_parallel_all_reduce(before(x) * 2), x)
            return end(x + residual), residual

        vllm.expect(model, fused=1)


@scenario(smoke=True)
def norms_of_gemma_are_fused() -> None:
    """The layers of Gemma 3: a norm of each sum, and one of that and the residual."""
    with compiler() as vllm:
        before, attention, ahead, mlp, end = gemma_norms(1e-6, 1e-6, 2e-6, 1e-5, 1e-6)

        def model(x: torch.Tensor) -> Any:
            residual = x
            x = attention(tensor_model_parallel_all_reduce(before(x)))
            x, residual = ahead(x, residual)
            x = mlp(tensor_model_parallel_all_reduce(x * 2))
            return end(x, residual)

        vllm.expect(model, fused=2)
        vllm.expect(model, fused=2, compile=vllm.compile)


@scenario(LLM_COMM_MAX_MESSAGE_BYTES="256")
def norms_of_gemma_with_residual_are_fused_and_declined() -> None:
    """The layers of Gemma and Qwen3-Next, in batches that the kernel takes and that it declines."""
    with compiler() as vllm:
        first, second, third = gemma_norms(1e-5, 1e-6, 3e-6)
        (plain,) = norms(1e-5)

        def model(x: torch.Tensor) -> Any:
            x, residual = first(tensor_model_parallel_all_reduce(x), x * 1)
            x, residual = second(tensor_model_parallel_all_reduce(x), residual)
            x, residual = plain(tensor_model_parallel_all_reduce(x), residual)
            return third(tensor_model_parallel_all_reduce(x), residual)[0]

        compiled, before = vllm.trace(model), matches(OUR_PASS)
        for rows, fused in ((4, 0), (2, 4)):
            vllm.check(compiled, model, rows)
            assert len(vllm.fused_calls) == fused
        assert matches(OUR_PASS) - before == 4


def expect_static_quantization(vllm: Compiler, first: Any, second: Any, third: Any) -> None:
    """Norms without and with residual are fused with the quantization behind them."""
    quantize, scale = quantization(), torch.tensor([FP8_SCALE])

    def model(x: torch.Tensor) -> Any:
        total = tensor_model_parallel_all_reduce(x)
        a, _ = quantize(first(total), scale)
        normed, residual = second(tensor_model_parallel_all_reduce(x * 2), total)
        b, _ = quantize(normed, scale)
        c, _ = quantize(third(tensor_model_parallel_all_reduce(x * 4), residual + 1)[0], scale)
        return a, b, residual, c

    vllm.expect(model, fused=3, quantized=3)


@scenario()
def norms_of_gemma_are_fused_with_static_quantization() -> None:
    with compiler() as vllm:
        expect_static_quantization(vllm, *gemma_norms(1e-5, 2e-5, 3e-5))


@scenario(LLM_COMM_MAX_MESSAGE_BYTES="1024")
def norms_of_gemma_are_fused_with_quantization_by_groups() -> None:
    with compiler(compiler_config(custom_ops=["+quant_fp8"])) as vllm:
        first, second = gemma_norms(1e-5, 2e-5, hidden=OF_GROUPS)
        for name in ("group", "group_column_major_tma_ue8m0"):
            quantize = group_quantization(**GROUPS[name])

            def model(x: torch.Tensor, quantize: QuantFP8 = quantize) -> Any:
                total = tensor_model_parallel_all_reduce(x)
                normed, residual = second(tensor_model_parallel_all_reduce(x * 2), total)
                return *quantize(first(total)), *quantize(normed), residual

            vllm.fused_calls.clear()
            compiled = vllm.trace(model)
            for rows in (3, 2):
                vllm.check(compiled, model, rows, OF_GROUPS)
            assert vllm.fused_calls == [((2, OF_GROUPS), name)] * 2


@scenario(world=4, LLM_COMM_MULTI_NODE="1")
def norms_over_two_nodes_are_fused_with_the_last_phase() -> None:
    os.environ["LLM_COMM_NODE"] = f"node-{dist_rank() // 2}"
    with compiler(tensor_parallel=4) as vllm:
        first, second = norms(1e-5, 2e-5)
        quantize = quantization()
        scale = torch.tensor([FP8_SCALE])

        def model(x: torch.Tensor) -> Any:
            total = tensor_model_parallel_all_reduce(x)
            a, _ = quantize(first(total), scale)
            b, residual = second(tensor_model_parallel_all_reduce(x * 2), total)
            return a, b, residual

        vllm.expect(model, fused=2, quantized=1)
        assert len(vllm.log.having("; fused with RMSNorm in compiled graphs")) == (dist_rank() == 0)
        stats = parallel_state.get_tp_group().device_communicator._llm_comm.stats()
        assert stats.by_operation()["all_reduce_add_rms_norm"].calls == 2


@scenario(world=2, LLM_COMM_MULTI_NODE="1")
def norms_over_nodes_of_one_rank_are_left_to_vllm() -> None:
    os.environ["LLM_COMM_NODE"] = f"node-{dist_rank()}"
    expect_no_fusion(compiler_config(), "it is the last phase in a node, and nodes of one rank have none")


@scenario(smoke=True, LLM_COMM_ALGORITHM="two_shot")
def a_batch_of_any_size_takes_the_same_graph() -> None:
    with compiler() as vllm:
        (norm,) = norms(1e-5)

        def model(x: torch.Tensor) -> Any:
            return norm(tensor_model_parallel_all_reduce(x), x)

        compiled = vllm.compile(model)
        for rows in (3, 2, 7, 40):
            vllm.check(compiled, model, rows)
        assert vllm.fused_calls == [((rows, HIDDEN), None) for rows in (3, 2, 7, 40)], vllm.fused_calls


@scenario(smoke=True)
def static_quantization_is_fused_too() -> None:
    with compiler() as vllm:
        expect_static_quantization(vllm, *norms(1e-5, 2e-5, 3e-5))


@scenario()
def static_quantization_by_the_operator_of_vllm_is_fused_too() -> None:
    config = compiler_config(custom_ops=["+quant_fp8"])
    with compiler(config) as vllm:
        (norm,) = norms(1e-5)
        quantize = quantization()
        scale = torch.tensor([FP8_SCALE])

        def model(x: torch.Tensor) -> Any:
            normed, residual = norm(tensor_model_parallel_all_reduce(x), x)
            return quantize(normed, scale)[0], residual

        vllm.expect(model, fused=1, quantized=1)


#: A row of two groups.
OF_GROUPS = 256
#: How layers of vLLM's quantize their inputs by groups, by what llm_comm calls it.
GROUPS = {
    "group": {},
    "group_ue8m0": {"use_ue8m0": True},
    "group_column_major": {"column_major_scales": True},
    "group_column_major_ue8m0": {"column_major_scales": True, "use_ue8m0": True},
    "group_column_major_tma": {"column_major_scales": True, "tma_aligned_scales": True},
    "group_column_major_tma_ue8m0": {"column_major_scales": True, "tma_aligned_scales": True, "use_ue8m0": True},
}


def group_quantization(size: int = 128, **switches: bool) -> QuantFP8:
    return QuantFP8(False, GroupShape(1, size), **{"use_ue8m0": False, **switches}, compile_native=False)


@scenario(smoke=True)
def quantization_by_groups_is_fused_too() -> None:
    with compiler(compiler_config(custom_ops=["+quant_fp8"])) as vllm:
        first, second, third = norms(1e-5, 2e-5, 3e-5, hidden=OF_GROUPS)
        for name, switches in GROUPS.items():
            quantize = group_quantization(**switches)

            def model(x: torch.Tensor, quantize: QuantFP8 = quantize) -> Any:
                total = tensor_model_parallel_all_reduce(x)
                a = quantize(first(total))
                normed, residual = second(tensor_model_parallel_all_reduce(x * 2), total)
                b = quantize(normed)
                c = quantize(third(tensor_model_parallel_all_reduce(x * 4), residual + 1)[0])
                return *a, *b, residual, *c

            vllm.fused_calls.clear()
            before = matches(OUR_PASS)
            compiled = vllm.trace(model)
            for rows in (5, 8):
                vllm.check(compiled, model, rows, OF_GROUPS)
            assert matches(OUR_PASS) - before == 3, name
            assert vllm.fused_calls == [((rows, OF_GROUPS), name) for rows in (5, 8) for _ in range(3)], name


@scenario(LLM_COMM_ALGORITHM="two_shot")
def quantization_by_groups_goes_through_inductor() -> None:
    with compiler(compiler_config(custom_ops=["+quant_fp8"])) as vllm:
        (norm,) = norms(1e-5, hidden=OF_GROUPS)
        quantize = group_quantization(column_major_scales=True, tma_aligned_scales=True)

        def model(x: torch.Tensor) -> Any:
            normed, residual = norm(tensor_model_parallel_all_reduce(x), x)
            return torch.ops.llm_comm_tests.dequantize(*quantize(normed)), residual

        compiled = vllm.compile(model)
        for rows in (3, 2, 7, 40):
            vllm.check(compiled, model, rows, OF_GROUPS)
        assert vllm.fused_calls == [((rows, OF_GROUPS), "group_column_major_tma") for rows in (3, 2, 7, 40)]


@scenario(LLM_COMM_MAX_MESSAGE_BYTES="1024")
def groups_that_the_kernel_declines_are_quantized_all_the_same() -> None:
    with compiler(compiler_config(custom_ops=["+quant_fp8"])) as vllm:
        (norm,) = norms(1e-5, hidden=OF_GROUPS)
        for name, switches in GROUPS.items():
            quantize = group_quantization(**switches)

            def model(x: torch.Tensor, quantize: QuantFP8 = quantize) -> Any:
                normed, residual = norm(tensor_model_parallel_all_reduce(x), x * 1)
                return *quantize(normed), residual

            compiled = vllm.trace(model)
            vllm.fused_calls.clear()
            residual = vllm.check(compiled, model, 3, OF_GROUPS)[2]
            assert torch.equal(residual, expected_sum((3, OF_GROUPS)) + data((3, OF_GROUPS))), "not reduced"
            assert not vllm.fused_calls
            vllm.check(compiled, model, 2, OF_GROUPS)
            assert vllm.fused_calls == [((2, OF_GROUPS), name)]


#: Rows of 20 blocks, a multiple of 4, and of 5.
OF_BLOCKS = (320, 80)


def same_fp4(got: Any, want: Any, what: str) -> None:
    """Compare values and scales of NVFP4, and behind them the new residual.

    Norms may differ by a rounding, so one value or scale in 100 may be the next one. Padding of scales is the same.
    """
    *got, residual = got
    *want, expected = want
    assert torch.equal(residual, expected), f"{what}: the new residual"
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride()), what
    for packed, packed_by_vllm, scales, scales_by_vllm in zip(got[::2], want[::2], got[1::2], want[1::2], strict=True):
        close(fp4_numbers(packed), fp4_numbers(packed_by_vllm), f"{what}: values")
        rows, blocks = len(packed), packed.shape[1] // 8
        ours, theirs = by_rows(scales), by_rows(scales_by_vllm)
        close(ours[:rows, :blocks], theirs[:rows, :blocks], f"{what}: scales")
        ours[:rows, :blocks] = theirs[:rows, :blocks]
        assert torch.equal(ours, theirs), f"{what}: padding of scales"


def fp4_numbers(packed: torch.Tensor) -> torch.Tensor:
    """Number the values of NVFP4 in ascending order, from -7 to 7."""
    codes = torch.stack([packed & 15, packed >> 4], -1).int()
    return torch.where(codes < 8, codes, 8 - codes)


def by_rows(scales: torch.Tensor) -> torch.Tensor:
    """Return the bytes of scales in tiles of 128x4 by rows, padding included."""
    rows, blocks = scales.shape
    tiles = scales.view(torch.uint8).view(rows // 128, blocks // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, blocks).int()


def close(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    """Require that at most one number in 100 is another one, and that one the next."""
    apart = (ours - theirs).abs()
    others = int((apart > 0).sum())
    assert apart.max() <= 1, f"{what}: {apart.max()} apart"
    assert others <= apart.numel() // 100, f"{what}: {others} of {apart.numel()} differ"


@scenario(smoke=True)
def nvfp4_quantization_is_fused_too() -> None:
    with compiler() as vllm:
        for hidden in OF_BLOCKS:
            first, second, third = norms(1e-5, 2e-5, 3e-5, hidden=hidden)
            scale = torch.tensor([300.0])

            def model(x: torch.Tensor, norms: Any = (first, second, third), scale: Any = scale) -> Any:
                total = tensor_model_parallel_all_reduce(x)
                a = scaled_fp4_quant(norms[0](total), scale)
                normed, residual = norms[1](tensor_model_parallel_all_reduce(x * 2), total)
                b = scaled_fp4_quant(normed, scale)
                c = scaled_fp4_quant(norms[2](tensor_model_parallel_all_reduce(x * 4), residual + 1)[0], scale)
                return *a, *b, *c, residual

            vllm.fused_calls.clear()
            before = matches(OUR_PASS)
            compiled = vllm.trace(model)
            for rows in (5, 130):
                want, got = model(data((rows, hidden))), compiled(data((rows, hidden)))
                same_fp4(got, want, f"{rows} rows of {hidden}")
            assert matches(OUR_PASS) - before == 3, hidden
            assert vllm.fused_calls == [((rows, hidden), "nvfp4") for rows in (5, 130) for _ in range(3)], (
                vllm.fused_calls
            )


@scenario()
def nvfp4_rows_that_vllm_pads_are_quantized_by_vllm() -> None:
    with compiler() as vllm:
        (norm,) = norms(1e-5, hidden=80)
        scale = torch.tensor([300.0])

        def model(x: torch.Tensor) -> Any:
            normed, residual = norm(tensor_model_parallel_all_reduce(x), x * 1)
            return *scaled_fp4_quant(normed, scale, padded_n=128), residual

        same_fp4(vllm.trace(model)(data((5, 80))), model(data((5, 80))), "padded rows")
        assert vllm.fused_calls == [((5, 80), None)]


@scenario(LLM_COMM_ALGORITHM="two_shot")
def nvfp4_quantization_goes_through_inductor() -> None:
    with compiler() as vllm:
        (norm,) = norms(1e-5, hidden=80)
        scale = torch.tensor([300.0])

        def model(x: torch.Tensor) -> Any:
            normed, residual = norm(tensor_model_parallel_all_reduce(x), x)
            return *scaled_fp4_quant(normed, scale), residual

        compiled = vllm.compile(model)
        for rows in (3, 2, 130):
            same_fp4(compiled(data((rows, 80))), model(data((rows, 80))), f"{rows} rows")
        assert vllm.fused_calls == [((rows, 80), "nvfp4") for rows in (3, 2, 130)]


@scenario(LLM_COMM_MAX_MESSAGE_BYTES="1024")
def nvfp4_that_the_kernel_declines_is_quantized_all_the_same() -> None:
    with compiler() as vllm:
        (norm,) = norms(1e-5, hidden=80)
        scale = torch.tensor([300.0])

        def model(x: torch.Tensor) -> Any:
            normed, residual = norm(tensor_model_parallel_all_reduce(x), x * 1)
            return *scaled_fp4_quant(normed, scale), residual

        compiled = vllm.trace(model)
        for rows, calls in ((7, 0), (5, 1)):
            vllm.fused_calls.clear()
            same_fp4(compiled(data((rows, 80))), model(data((rows, 80))), f"{rows} rows")
            assert len(vllm.fused_calls) == calls


@scenario()
def quantization_by_other_groups_is_left_to_vllm() -> None:
    with compiler(compiler_config(custom_ops=["+quant_fp8"])) as vllm:
        first, second = norms(1e-5, 2e-5, hidden=OF_GROUPS)
        smaller, usual = group_quantization(size=64), group_quantization()

        def model(x: torch.Tensor) -> Any:
            normed, residual = first(tensor_model_parallel_all_reduce(x), x * 1)
            twice, residual = second(tensor_model_parallel_all_reduce(x * 2), residual)
            return *smaller(normed), *usual(twice), twice, residual

        compiled = vllm.trace(model)
        vllm.check(compiled, model, 4, OF_GROUPS)
        assert vllm.fused_calls == [((4, OF_GROUPS), None)] * 2


@scenario()
def quantization_of_one_use_of_a_norm_leaves_the_norm_whole() -> None:
    with compiler() as vllm:
        (norm,) = norms(1e-5)
        quantize = quantization()
        scale = torch.tensor([FP8_SCALE])

        def model(x: torch.Tensor) -> Any:
            normed, residual = norm(tensor_model_parallel_all_reduce(x), x)
            return quantize(normed, scale)[0], normed, residual

        vllm.expect(model, fused=1)


@scenario()
def the_fusion_of_vllm_works_on_what_is_left() -> None:
    config = compiler_config(fuse_norm_quant=True, custom_ops=["+quant_fp8"])
    with compiler(config) as vllm:
        reduced, alone = norms(1e-5, 1e-6)
        quantize = quantization()
        scale = torch.tensor([FP8_SCALE])

        def model(x: torch.Tensor) -> Any:
            normed, residual = reduced(tensor_model_parallel_all_reduce(x), x)
            return residual, quantize(alone(normed), scale)[0]

        backend = vllm.backend()
        backend.configure_post_pass()
        names = [type(its_pass).__name__ for its_pass in backend.pass_manager.passes]
        assert names == ["NoOpEliminationPass", OUR_PASS, "RMSNormQuantFusionPass"], names
        vllm.expect(model, fused=1)
        (of_vllm,) = (p for p in vllm.backends[-1].pass_manager.passes if type(p).__name__ == names[-1])
        assert of_vllm.matched_count == 1


@scenario(world=4)
def each_group_sums_its_own_ranks() -> None:
    with compiler(tensor_parallel=2, pipeline_parallel=2) as vllm:
        (norm,) = norms(1e-5)

        def model(x: torch.Tensor) -> Any:
            return norm(tensor_model_parallel_all_reduce(x), torch.ones_like(x))

        _, residual = vllm.trace(model)(data((4, HIDDEN)))
        first = dist_rank() // 2 * 2
        assert torch.equal(residual, expected_sum((4, HIDDEN), (first, first + 1)) + 1)
        assert vllm.fused_calls == [((4, HIDDEN), None)]


# ---- What is not ----------------------------------------------------------------------------------------------------


@scenario()
def norms_that_compute_something_else_are_left_alone() -> None:
    with compiler() as vllm:
        (gemma,) = gemma_norms(1e-5)
        gemma_of_float = GemmaRMSNorm(HIDDEN)
        weightless = RMSNorm(HIDDEN, has_weight=False)
        half = RMSNorm(HIDDEN, var_hidden_size=HIDDEN // 2, dtype=torch.bfloat16)
        of_float = RMSNorm(HIDDEN, dtype=torch.float32)

        def model(x: torch.Tensor) -> Any:
            total = tensor_model_parallel_all_reduce(x)
            a, residual = vllm_ir.fused_add_rms_norm(total, x * 8, gemma.weight.float() + 0.5, 1e-5)
            b = weightless(tensor_model_parallel_all_reduce(x * 2))
            c, _ = half(tensor_model_parallel_all_reduce(x * 4), x * 16)
            d = of_float(tensor_model_parallel_all_reduce(x.float()))
            e = gemma_of_float(tensor_model_parallel_all_reduce(x * 3))
            return a, residual, b, c, d, e

        vllm.expect(model, fused=0)


@scenario()
def a_sum_that_others_need_stays_a_sum() -> None:
    with compiler() as vllm:
        (norm,) = norms(1e-5)

        def model(x: torch.Tensor) -> Any:
            total = tensor_model_parallel_all_reduce(x)
            # The overload that may overwrite its inputs, which norms of vLLM take, would refuse this.
            return *vllm_ir.fused_add_rms_norm(total, x, norm.weight, 1e-5), total

        vllm.expect(model, fused=0)


@scenario(world=4)
def all_reduces_of_other_groups_stay() -> None:
    with compiler(tensor_parallel=2, pipeline_parallel=2) as vllm:
        (norm,) = norms(1e-5)

        def model(x: torch.Tensor) -> Any:
            return norm(parallel_state.get_pp_group().all_reduce(x), x * 1)

        vllm.expect(model, fused=0)


@scenario()
def a_norm_in_another_piece_of_the_graph_than_its_all_reduce_is_left_alone() -> None:
    with compiler(compiler_config(splitting_ops=["llm_comm_tests::cut"])) as vllm:
        first, second = norms(1e-5, 1e-6)

        def model(x: torch.Tensor) -> Any:
            total = tensor_model_parallel_all_reduce(x)
            x, residual = first(total, torch.ops.llm_comm_tests.cut(x))
            return second(tensor_model_parallel_all_reduce(x), residual)

        vllm.expect(model, fused=1, compile=vllm.compile)


@scenario()
def a_graph_break_is_no_obstacle() -> None:
    with compiler() as vllm:
        first, second = norms(1e-5, 1e-6)

        def model(x: torch.Tensor) -> Any:
            x, residual = first(tensor_model_parallel_all_reduce(x), x)
            torch._dynamo.graph_break()
            return second(tensor_model_parallel_all_reduce(x), residual)

        def own_backend(*graph: Any) -> Any:
            return vllm.backend()(*graph)  # one of vLLM's serves one graph

        compiled = torch.compile(model, backend=own_backend)
        vllm.check(compiled, model)
        assert len(vllm.fused_calls) == 2


# ---- Nothing is left out when the kernel declines -------------------------------------------------------------------


@scenario(LLM_COMM_MAX_MESSAGE_BYTES="1024")
def what_the_kernel_declines_is_reduced_all_the_same() -> None:
    with compiler() as vllm:
        norm, other = norms(1e-5, 1e-6)
        quantize = quantization()
        scale = torch.tensor([FP8_SCALE])

        def model(x: torch.Tensor) -> Any:
            normed, residual = norm(tensor_model_parallel_all_reduce(x), x * 1)
            total = tensor_model_parallel_all_reduce(x * 2)
            return normed, residual, total, quantize(other(total), scale)[0]

        compiled = vllm.trace(model)
        rows = 9  # 1,152 bytes
        x = data((rows, HIDDEN))
        residual = vllm.check(compiled, model, rows)[1]
        assert torch.equal(residual, expected_sum((rows, HIDDEN)) + x), "not reduced"
        assert not vllm.fused_calls
        vllm.check(compiled, model, 8)
        assert len(vllm.fused_calls) == 2
        # Without a communicator of llm_comm, the graph is as right.
        parallel_state.get_tp_group().device_communicator._llm_comm = None
        residual = vllm.check(compiled, model, 8)[1]
        assert torch.equal(residual, expected_sum((8, HIDDEN)) + data((8, HIDDEN))), "not reduced"
        assert len(vllm.fused_calls) == 2


@scenario(LLM_COMM_MAX_MESSAGE_BYTES="1024")
def batches_that_are_too_large_have_a_graph_without_the_operator() -> None:
    config = with_model(compiler_config(norms_by="native"))
    before = config.compilation_config.compile_ranges_endpoints
    with compiler(config) as vllm:
        assert config.compilation_config.compile_ranges_endpoints == [8, *before]  # of 128 bytes each
        (norm,) = norms(1e-5)

        def model(x: torch.Tensor) -> Any:
            return norm(tensor_model_parallel_all_reduce(x), x)

        compiled = vllm.compile(model)
        vllm.check(compiled, model, 8)
        assert vllm.fused_calls == [((8, HIDDEN), None)]
        with mock.patch("llm_comm.integrations.vllm.operators.run_one_by_one", side_effect=AssertionError):
            _, residual = vllm.check(compiled, model, 9)
        assert torch.equal(residual, expected_sum((9, HIDDEN)) + data((9, HIDDEN))), "not reduced"
        assert len(vllm.fused_calls) == 1


@scenario(LLM_COMM_WIRE="int8", LLM_COMM_WIRE_MIN_BYTES="1024")
def batches_that_are_too_large_to_be_fused_are_quantized() -> None:
    table = shared_directory() / f"rank{dist_rank()}" / "table.yaml"
    table.parent.mkdir()
    table.write_text(
        "{device: emulated, world_size: 2, max_message_bytes: 65536, max_fused_bytes: 1024, rows: [{operation: "
        "all_reduce, up_to: 65536, algorithm: two_shot, protocol: LL, blocks: 4, tile_lines: 16, depth: 1}]}"
    )
    os.environ["LLM_COMM_TABLE"] = str(table)
    config = with_model(compiler_config(norms_by="native"))
    with compiler(config) as vllm:
        assert config.compilation_config.compile_ranges_endpoints[0] == 8  # of 128 bytes each
        (norm,) = norms(1e-5)

        def model(x: torch.Tensor) -> Any:
            return norm(tensor_model_parallel_all_reduce(x), x)

        communicator = parallel_state.get_tp_group().device_communicator._llm_comm
        compiled = vllm.compile(model)
        for rows, fused, quantized in ((8, 1, 0), (9, 0, 1)):
            before = communicator.stats().calls
            vllm.fused_calls.clear()
            compiled(data((rows, HIDDEN)))
            assert len(vllm.fused_calls) == fused
            new = [calls for calls in communicator.stats().calls if calls not in before]
            assert [calls.algorithm for calls in new].count("two_shot_int8_hb") == quantized, new


@scenario()
def where_all_batches_are_fused_there_is_one_graph() -> None:
    config = with_model(compiler_config())
    before = config.compilation_config.compile_ranges_endpoints
    with compiler(config):
        assert config.compilation_config.compile_ranges_endpoints == before


@scenario()
def norms_of_transformers_become_those_of_vllm_first() -> None:
    with compiler(with_model(compiler_config(), transformers=True)) as vllm:
        backend = vllm.backend()
        backend.configure_post_pass()
        names = [type(its_pass).__name__ for its_pass in backend.pass_manager.passes]
        place = names.index(OUR_PASS)
        if Path(vllm_package.__file__).with_name("compilation").joinpath("passes/fusion/add_rms_fusion.py").exists():
            assert names[place - 1] == "AddRMSNormFusionPass", names
            assert len(names) == len(set(names)), names
        else:  # before 0.33
            assert names[:place] == ["NoOpEliminationPass"], names


@scenario(LLM_COMM_MAX_MESSAGE_BYTES="0")
def inputs_of_the_operator_are_not_changed() -> None:
    with compiler():
        (norm,) = norms(1e-5)
        x, residual = data((4, HIDDEN)), torch.ones(4, HIDDEN, dtype=torch.bfloat16)
        before = x.clone()
        operator = torch.ops.llm_comm_vllm.all_reduce_add_rms_norm
        _, new_residual = operator(x, residual, norm.weight, 1e-5, 0.0, None, "tp:0")
        assert torch.equal(x, before)
        assert torch.equal(residual, torch.ones_like(residual))
        assert torch.equal(new_residual, expected_sum((4, HIDDEN)) + 1)


# ---- Switches and caches --------------------------------------------------------------------------------------------


@scenario()
def the_log_says_that_it_fuses() -> None:
    with compiler() as vllm:
        lines = vllm.log.having("is active for group tp:0")
        assert len(lines) == (dist_rank() == 0)
        assert all("; fused with RMSNorm in compiled graphs; linear layers are" in line for line in lines), lines


@scenario()
def the_log_says_what_was_fused() -> None:
    with compiler() as vllm:
        first, second = norms(1e-5, 1e-6)

        def model(x: torch.Tensor) -> Any:
            x, residual = first(tensor_model_parallel_all_reduce(x), x)
            total = tensor_model_parallel_all_reduce(x * 2)
            return *second(tensor_model_parallel_all_reduce(x), residual), total, total * 2

        compiled = vllm.trace(model)
        vllm.check(compiled, model)
        vllm.check(compiled, model)
        is_rank_0 = dist_rank() == 0
        said = "llm_comm fused 2 of 3 all-reduces of a graph for batches of 1 to 1024"
        assert len(vllm.log.having(said)) == is_rank_0
        assert len(vllm.log.having("llm_comm: first all-reduce fused with its RMSNorm (2 ranks")) == is_rank_0


@scenario()
def one_rank_that_cannot_fuse_takes_the_others_along() -> None:
    missing = {"llm_comm.integrations.vllm.operators": None} if dist_rank() == 1 else {}
    with mock.patch.dict("sys.modules", missing):
        expect_no_fusion(compiler_config(), "rank 1 (global rank 1): it cannot be set up in vLLM")


@scenario()
def one_rank_that_lacks_the_pass_takes_the_others_along() -> None:
    missing = {"llm_comm.integrations.vllm.fusion_pass": None} if dist_rank() == 1 else {}
    with mock.patch.dict("sys.modules", missing):
        expect_no_fusion(compiler_config(), "rank 1 (global rank 1): it cannot be set up in vLLM")


@scenario()
def without_inductor_there_are_no_passes() -> None:
    config = compiler_config()
    config.compilation_config.backend = "eager"
    with compiler(config) as vllm:
        assert len(vllm.log.having("not fused with RMSNorm: compilation_config.backend is 'eager'")) == (
            dist_rank() == 0
        )
        assert current_platform.get_pass_manager_cls() == plugin.THEIR_PASS_MANAGER


@scenario()
def a_configuration_that_llm_comm_does_not_know_is_left_alone() -> None:
    config = with_model(compiler_config())
    config.model_config.get_hidden_size.side_effect = AttributeError("renamed")
    expect_no_fusion(config, f"it cannot be set up in {TABLE.release} (AttributeError: renamed)")


@scenario()
def a_model_whose_messages_the_kernel_declines_is_left_alone() -> None:
    in_fp32 = with_model(compiler_config())
    in_fp32.model_config.dtype = torch.float32
    expect_no_fusion(in_fp32, "the model is in torch.float32")


@scenario()
def a_model_of_odd_rows_is_left_alone() -> None:
    odd = with_model(compiler_config())
    odd.model_config.get_hidden_size.return_value = 2052
    expect_no_fusion(odd, "rows of 2052 elements: they must have a multiple of 8 up to 16384")


@scenario()
def graphs_in_a_directory_of_the_operator_do_not_hold_ours() -> None:
    config = compiler_config()
    config.compilation_config.cache_dir = str(shared_directory() / f"graphs{dist_rank()}")
    expect_no_fusion(config, "vLLM tells graphs with and without it apart by their directory")


@scenario(LLM_COMM_FUSE="0")
def a_variable_switches_fusion_off() -> None:
    expect_no_fusion(compiler_config(), "fuse is false (LLM_COMM_FUSE)")


@scenario()
def additional_config_switches_fusion_off() -> None:
    config = compiler_config(additional_config={"llm_comm": {"fuse": False}})
    expect_no_fusion(config, "fuse is false (Python)")


@scenario(VLLM_BATCH_INVARIANT="1")
def batch_invariant_norms_are_those_of_vllm() -> None:
    expect_no_fusion(compiler_config(), "VLLM_BATCH_INVARIANT is on, and batch_invariant_norm is 'engine'")


@scenario(VLLM_BATCH_INVARIANT="1", LLM_COMM_BATCH_INVARIANT_NORM="llm_comm")
def batch_invariant_norms_can_be_those_of_llm_comm_at_every_size() -> None:
    config = with_model(compiler_config(norms_by="native"))
    before = config.compilation_config.compile_ranges_endpoints
    with compiler(config) as vllm:
        group = parallel_state.get_tp_group().device_communicator
        # Without the option a row would be fused, and two would not.
        group._llm_comm.use_table(group._llm_comm.table._replace(max_fused_bytes=2 * HIDDEN))
        assert len(vllm.log.having("; fused with RMSNorm in compiled graphs at every size")) == (dist_rank() == 0)
        assert config.compilation_config.compile_ranges_endpoints == before
        first, second = norms(1e-5, 1e-6)

        def model(x: torch.Tensor) -> Any:
            total = tensor_model_parallel_all_reduce(x)
            return second(tensor_model_parallel_all_reduce(first(total) * 3), total)

        vllm.check(vllm.trace(model, up_to=1 << 40), model, rows=5)
        row = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(dist_rank())).bfloat16()
        # Each batch in a graph of its own, as in ranges of vLLM's.
        alone = vllm.trace(model, up_to=1)(row)
        vllm.fused_calls.clear()
        for rows in (3, 4096):
            together = vllm.trace(model, up_to=rows)(row.repeat(rows, 1))
            for one, others in zip(alone, together, strict=True):
                assert torch.equal(others, one.expand(rows, -1)), rows
        assert [shape for shape, _ in vllm.fused_calls] == [(3, HIDDEN)] * 2 + [(4096, HIDDEN)] * 2


@scenario(VLLM_BATCH_INVARIANT="1", LLM_COMM_BATCH_INVARIANT_NORM="llm_comm")
def what_llm_comm_does_not_norm_is_an_error_in_batch_invariant_mode() -> None:
    """vLLM's norm would have other bits."""
    with compiler():
        run = torch.ops.llm_comm_vllm.all_reduce_add_rms_norm
        name = parallel_state.get_tp_group().unique_name
        columns, weight = data((HIDDEN, 4)).t(), torch.ones(HIDDEN, dtype=torch.bfloat16)
        normed, total = run(columns, columns, weight, 1e-5, 0.0, None, name)
        again, same = run(columns.contiguous(), columns.contiguous(), weight, 1e-5, 0.0, None, name)
        assert torch.equal(normed, again)
        assert torch.equal(total, same)
        with pytest.raises(UnsupportedInputError, match=r"weight is torch\.float32"):
            run(columns, columns, weight.float(), 1e-5, 0.0, None, name)


@scenario(VLLM_BATCH_INVARIANT="1", LLM_COMM_BATCH_INVARIANT_NORM="llm_comm", LLM_COMM_MAX_MESSAGE_BYTES="1M")
def batch_invariant_norms_are_those_of_vllm_where_messages_are_bounded() -> None:
    why = "max_message_bytes is 1048576 (LLM_COMM_MAX_MESSAGE_BYTES), and norms of larger batches would be vLLM's"
    expect_no_fusion(compiler_config(), why)


@scenario(
    applies=hasattr(PassConfig(), "enable_sp"), VLLM_BATCH_INVARIANT="1", LLM_COMM_BATCH_INVARIANT_NORM="llm_comm"
)
def batch_invariant_norms_are_those_of_vllm_where_sequences_are_split() -> None:
    config = compiler_config()
    config.compilation_config.pass_config.enable_sp = True
    assert "sequence parallelism (enable_sp)" in why_not_in_all_batches(config)


@scenario(VLLM_BATCH_INVARIANT="1", LLM_COMM_BATCH_INVARIANT_NORM="llm_comm")
def batch_invariant_norms_are_those_of_vllm_where_sizes_have_graphs() -> None:
    config = compiler_config()
    config.compilation_config.compile_sizes = [1, 2]
    assert "compile_sizes is [1, 2]" in why_not_in_all_batches(config)


@scenario(VLLM_BATCH_INVARIANT="1", LLM_COMM_BATCH_INVARIANT_NORM="llm_comm")
def batch_invariant_norms_are_those_of_vllm_in_a_model_with_an_encoder() -> None:
    config = with_model(compiler_config())
    config.model_config.is_encoder_decoder = True
    assert "a model with an encoder" in why_not_in_all_batches(config)


@scenario(LLM_COMM_BATCH_INVARIANT_NORM="llm_comm")
def large_batches_keep_their_norms_outside_of_batch_invariant_mode() -> None:
    with compiler() as vllm:
        group = parallel_state.get_tp_group().device_communicator
        assert group._llm_comm.config.batch_invariant_norm == "engine"
        assert group.fused_sizes == ((0, group._llm_comm.table.max_fused_bytes),)
        assert not vllm.log.having("at every size")


@scenario()
def eager_mode_is_not_fused() -> None:
    config = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))
    expect_no_fusion(config, "vLLM does not compile the model")


@scenario(LLM_COMM_ENABLE="0")
def llm_comm_enable_0_leaves_the_compiler_untouched() -> None:
    config = compiler_config()
    before = config.compute_hash()
    with compiler(config):
        assert current_platform.get_pass_manager_cls() == plugin.THEIR_PASS_MANAGER
        assert config.compute_hash() == before


@scenario()
def compiled_graphs_are_kept_apart_by_what_they_hold() -> None:
    config, again = compiler_config(), compiler_config()
    untouched = config.compute_hash()
    with compiler(config) as vllm:
        fused = config.compute_hash()
        assert fused != untouched
        with set_current_vllm_config(again):
            communicator = parallel_state.get_tp_group().device_communicator
            assert communicator._set_up_fusion(communicator._llm_comm)
        assert again.compute_hash() == fused, "not the same at every start"
        backend = vllm.backend()
        backend.configure_post_pass()
        theirs = PostGradPassManager()
        theirs.configure(config)
        with pass_context(Range(1, 8)):
            assert backend.pass_manager.uuid() != theirs.uuid()


@scenario(smoke=True)
def a_graph_that_was_compiled_before_finds_its_operator() -> None:
    """The process that loads it runs no pass, so nothing but the communicator has defined the operator."""
    with compiler() as vllm:
        assert not vllm.backends
        assert hasattr(torch.ops.llm_comm_vllm, "all_reduce_add_rms_norm")


@scenario()
def a_compiler_that_llm_comm_does_not_know_is_left_alone() -> None:
    with compiler() as vllm, mock.patch.object(plugin, "THEIR_PASS_MANAGER", "vllm.passes.Renamed"):
        assert current_platform.get_pass_manager_cls().startswith("vllm.")
        assert vllm.log.having("llm_comm does not fuse: the pass manager is vllm.compilation.passes.pass_manager")


def why_not_in_all_batches(config: VllmConfig) -> str:
    """What the log is to say of norms under ``config``; none may be fused."""
    with compiler(compiler_config()), set_current_vllm_config(config):
        group = parallel_state.get_tp_group().device_communicator
        said: str = group._set_up_fusion(group._llm_comm)
    assert said.startswith("; not fused with RMSNorm: "), said
    return said
