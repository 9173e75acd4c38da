"""Linear layers in graphs of vLLM's compiler: run by ``test_vllm_linear.py``, as ``scenarios.py`` is by its test.

The layers are vLLM's own ``RowParallelLinear``, its norms come after them, and ``compiler_harness.py`` compiles both.
Data and weights are small whole numbers, so a layer's result is the same in any order of summation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from compiler_harness import (
    FP8_SCALE,
    HIDDEN,
    OUR_PASS,
    Compiler,
    Model,
    compiler,
    compiler_config,
    expect_no_fusion,
    gemma_norms,
    matches,
    norms,
    quantization,
    with_model,
)
from fusion_scenarios import OF_GROUPS, group_quantization, same_fp4
from rank_processes import data, dist_rank, scenario, shared_directory
from scenarios import parallel_state, tensor_model_parallel_all_reduce
from vllm._custom_ops import scaled_fp4_quant
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.config.utils import Range
from vllm.model_executor.layers import linear as layers_module
from vllm.model_executor.layers.linear import ReplicatedLinear, RowParallelLinear

from llm_comm.communicator import Communicator
from llm_comm.config import EngineOptions
from llm_comm.errors import ConfigError
from llm_comm.integrations.layer_tuning import LayerBench
from llm_comm.integrations.vllm.configuration import choose_pdl, layers
from llm_comm.planning.catalogue import find_table, table_text
from llm_comm.planning.layers import LayerRow
from llm_comm.runtime.devices import make_limits

BF16 = torch.bfloat16
INPUTS = 128
WEIGHT = (HIDDEN, INPUTS)
LINEAR_PASS, COLUMN_PASS = "LinearNormPass", "ColumnLinearPass"

# ---- What is fused --------------------------------------------------------------------------------------------------


@scenario(smoke=True, LLM_COMM_FUSE_LINEAR="1")
def linear_layers_go_into_the_operator_of_their_norm() -> None:
    with compiler() as vllm:
        layers = [linear_layer() for _ in range(4)]
        first, second, third, last = norms(1e-5, 1e-6, 3e-6, 0.1)
        quantize = quantization()
        scale = torch.tensor([FP8_SCALE])

        def model(x: torch.Tensor) -> Any:
            x = residual = layers[0](wide(x))
            x, residual = second(layers[1](wide(first(x))), residual)
            normed, residual = third(layers[2](wide(x)), residual)
            # A batch of one sequence, as models of transformers are given. Nobody takes the last residual.
            end, _ = last(layers[3](wide(x).unsqueeze(0)), residual.unsqueeze(0))
            return quantize(normed, scale)[0], end

        expect_linear(vllm, model, fused=4)
        flat = ((4, INPUTS), WEIGHT)
        ways = [(*flat, None), (*flat, None), (*flat, "static"), ((1, 4, INPUTS), WEIGHT, None)]
        assert vllm.linear_calls == ways, vllm.linear_calls

        is_rank_0 = dist_rank() == 0
        said = "llm_comm fused 4 of 4 all-reduces with RMSNorm of a graph for batches of 1 to 64 tokens with the linear"
        assert len(vllm.log.having(said)) == is_rank_0
        said = (
            "llm_comm: first linear layer fused with its all-reduce and RMSNorm (2 ranks, shape (4, 128), weight (64, "
        )
        assert len(vllm.log.having(said)) == is_rank_0
        assert len(vllm.log.having("first linear layer")) == is_rank_0
        (line,) = vllm.log.having("is active for group tp:0") if is_rank_0 else [""]
        said = "; fused with RMSNorm in compiled graphs; linear layers of up to 64 tokens by llm_comm"
        assert line.endswith(said * is_rank_0), line


@scenario(LLM_COMM_FUSE_LINEAR="1")
def results_are_those_of_llm_comm_and_alike_on_all_ranks() -> None:
    with compiler() as vllm:
        for dtype in (torch.bfloat16, torch.float16):
            for weight_bias in (0.0, 1.0):
                check_results(vllm, dtype, weight_bias)


def check_results(vllm: Compiler, dtype: torch.dtype, weight_bias: float) -> None:
    torch.manual_seed(7)
    xs, weights = torch.randn(2, 5, INPUTS).to(dtype), torch.randn(2, HIDDEN, INPUTS).to(dtype)
    before = torch.randn(5, HIDDEN).to(dtype)
    layer, (norm,) = linear_layer(dtype=dtype), norms(1e-5) if weight_bias == 0 else gemma_norms(1e-5)
    layer.weight.data, norm.weight.data = weights[dist_rank()], norm.weight.data.to(dtype)

    def model(x: torch.Tensor) -> Any:
        return norm(layer(x[:, :INPUTS] * 1), x[:, INPUTS:] * 1)

    vllm.linear_calls.clear()
    normed, residual = vllm.trace(model, 64)(torch.cat([xs[dist_rank()], before], -1))
    assert len(vllm.linear_calls) == 1
    ours = parallel_state.get_tp_group().device_communicator._llm_comm
    y = ours.linear(xs[dist_rank()], weights[dist_rank()])
    one_by_one = ours.all_reduce_add_rms_norm(y, before, norm.weight, 1e-5, weight_bias=weight_bias)
    assert torch.equal(normed, one_by_one[0])
    assert torch.equal(residual, one_by_one[1])
    told: list[Any] = [None, None]
    dist.all_gather_object(told, [result.view(torch.int16).tolist() for result in (normed, residual)])
    assert told[0] == told[1]

    parts = torch.einsum("rti,roi->rto", xs.double(), weights.double())
    total = parts.sum(0) + before.double()
    # By what rounding changes a number at most, and a little for sums in fp32.
    rounding = 1.01 * torch.finfo(dtype).eps / 2
    # Each rank's part is rounded, their sum, and the new residual.
    bound = rounding * (parts.abs().sum(0) + parts.sum(0).abs() + total.abs())
    assert bool(((residual.double() - total).abs() <= bound).all())
    factor = (residual.double().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    want = residual.double() * factor * (norm.weight.double() + weight_bias)
    torch.testing.assert_close(normed.double(), want, rtol=rounding, atol=1e-6)


@scenario(LLM_COMM_FUSE_LINEAR="1")
def layers_before_norms_that_quantize_by_groups_or_blocks_stay_vllms() -> None:
    """The norm is fused with its quantization all the same, and the layer becomes no column-parallel one."""
    with compiler(compiler_config(custom_ops=["+quant_fp8"])) as vllm:
        layer, (norm,), quantize = linear_layer(outputs=OF_GROUPS), norms(1e-5, hidden=OF_GROUPS), group_quantization()
        scale = torch.tensor([300.0])

        def with_groups(x: torch.Tensor) -> Any:
            normed, residual = norm(layer(x[:, :INPUTS] * 1), x * 1)
            return *quantize(normed), residual

        def with_blocks(x: torch.Tensor) -> Any:
            normed, residual = norm(layer(x[:, :INPUTS] * 1), x * 1)
            return *scaled_fp4_quant(normed, scale), residual

        x = data((4, OF_GROUPS))
        vllm.check(vllm.trace(with_groups, 64), with_groups, 4, OF_GROUPS)
        same_fp4(vllm.trace(with_blocks, 64)(x), with_blocks(x), "behind a layer")
        assert vllm.fused_calls == [((4, OF_GROUPS), "group"), ((4, OF_GROUPS), "nvfp4")], vllm.fused_calls
        assert (vllm.linear_calls, vllm.column_calls) == ([], [])


@scenario()
def a_table_says_which_layers_and_batches() -> None:
    """Through inductor, as for a model: one graph for the batches that the table prefers, and one for larger ones."""
    use_table([row(4, True), row(6, False), row(8, True), LayerRow("linear", HIDDEN, 256, False, 64, False)])
    config = with_model(compiler_config(norms_by="native"))
    before = config.compilation_config.compile_ranges_endpoints
    with compiler(config) as vllm:
        assert config.compilation_config.compile_ranges_endpoints == [8, *before]
        (line,) = vllm.log.having("is active for group tp:0") if dist_rank() == 0 else ["of up to 8 tokens by llm_comm"]
        assert line.endswith("of up to 8 tokens by llm_comm"), line
        preferred, not_faster, not_measured = linear_layer(), linear_layer(inputs=256), linear_layer(inputs=64)
        first, second, third = norms(1e-5, 1e-6, 3e-6)

        def model(x: torch.Tensor) -> Any:
            a, residual = first(preferred(wide(x)), x * 1)
            b, residual = second(not_faster(wide(wide(x))), residual)
            return a, b, *third(not_measured(x), residual)

        compiled = vllm.compile(model)

        def check(rows: int, linear: bool) -> None:
            vllm.linear_calls.clear()
            vllm.fused_calls.clear()
            vllm.check(compiled, model, rows)
            assert vllm.linear_calls == [((rows, INPUTS), WEIGHT, None)] * linear, (rows, vllm.linear_calls)
            assert vllm.fused_calls == [((rows, HIDDEN), None)] * (3 - linear), (rows, vllm.fused_calls)

        for rows, linear in ((8, True), (4, True), (6, False)):
            check(rows, linear)
        group = parallel_state.get_tp_group().device_communicator
        with mock.patch.object(type(group), "linear_all_reduce_add_rms_norm", side_effect=AssertionError):
            check(9, False)
        assert matches(LINEAR_PASS) == 1
        is_rank_0 = dist_rank() == 0
        said = "llm_comm fused 1 of 3 all-reduces with RMSNorm of a graph for batches of 1 to 8 tokens with the linear"
        assert len(vllm.log.having(said)) == is_rank_0
        assert len(vllm.log.having("with the linear layers before them")) == is_rank_0


def decoder() -> VllmConfig:
    """Of a model whose o_proj is the layer of ``linear_layer``, on two ranks."""
    config = with_model(compiler_config())
    entries = {"num_attention_heads": 4, "head_dim": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    config.model_config.hf_config.to_dict.return_value = {"hidden_size": HIDDEN, "rms_norm_eps": 1e-5, **entries}
    config.model_config.quantization = None
    return config


@scenario(LLM_COMM_TUNE_AT_START="60")
def layers_of_the_model_measure_themselves() -> None:
    os.environ["LLM_COMM_TABLE_DIR"] = str(shared_directory() / "tables")
    times = [(10.0, [(8, 2, 1, 11.0)]), (10.0, [(8, 2, 1, 5.0)])]  # of 1 and 16 tokens
    for measured in (5, 0):
        with mock.patch.object(LayerBench, "times", return_value=times), compiler(decoder()) as vllm:
            said = "; linear layers of up to 16 tokens by llm_comm (5 of 5 that emulated lacks are faster: "
            said += f"{measured} measured in "
            assert len(vllm.log.having(said)) == (dist_rank() == 0), vllm.log.having("is active")
            layer, (norm,) = linear_layer(), norms(1e-5)

            def model(x: torch.Tensor, norm: Model = norm, layer: Model = layer) -> Any:
                return norm(layer(wide(x)), x * 1)

            compiled = vllm.trace(model, 16)
            for rows in (1, 2, 16):
                vllm.linear_calls.clear()
                vllm.check(compiled, model, rows)
                assert vllm.linear_calls == [((rows, INPUTS), WEIGHT, None)] * (rows > 1), (rows, vllm.linear_calls)


@scenario(LLM_COMM_TUNE_AT_START="60")
def dependent_launches_come_with_layers_that_will_be_measured() -> None:
    hopper = make_limits(64 << 20, 132, 16, 90)
    older = make_limits(64 << 20, 108, 1, 80)
    quantized, without_layers = decoder(), decoder()
    quantized.model_config.quantization = "awq"
    without_layers.model_config.hf_config.to_dict.side_effect = AttributeError("renamed")
    not_compiled = decoder()
    not_compiled.compilation_config.mode = CompilationMode.NONE
    for config, limits, options, expected in (
        (decoder(), hopper, {}, True),
        (decoder(), hopper, {"tune_at_start": 0}, True),  # by size
        (decoder(), older, {}, False),
        (decoder(), hopper, {"fuse_linear": False}, False),
        (decoder(), hopper, {"pdl": False}, False),
        (quantized, hopper, {}, False),
        (without_layers, hopper, {}, False),
        (not_compiled, hopper, {}, False),
        (decoder(), hopper, {"fuse": False}, False),
    ):
        by_limits = mock.patch("llm_comm.integrations.vllm.configuration.limits_of", return_value=limits)
        with set_current_vllm_config(config), by_limits:
            chosen = choose_pdl(EngineOptions.load(**options), torch.device("cpu"), 2)
        assert chosen.pdl is expected, (options, chosen)


@scenario(smoke=True)
def layers_with_block_scales_are_measured_only_if_the_operator_asks() -> None:
    config = decoder()
    config.model_config.quantization = "fp8"
    of_blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config.model_config.hf_config.to_dict.return_value["quantization_config"] = of_blocks
    with set_current_vllm_config(config):
        assert layers(2, EngineOptions.load()) == ()
        (asked,) = layers(2, EngineOptions.load(fuse_linear=True))
    assert (asked.name, asked.operation) == ("o_proj", "linear_fp8_blocks")


# ---- What is not ----------------------------------------------------------------------------------------------------


@scenario(LLM_COMM_FUSE_LINEAR="1")
def layers_that_llm_comm_does_not_compute_are_left_alone() -> None:
    with compiler() as vllm:
        layer, odd, transposed, long = linear_layer(), linear_layer(96), linear_layer(HIDDEN), linear_layer(outputs=128)
        transposed.weight.data = transposed.weight.data.t()
        square = linear_layer(HIDDEN).weight
        norm, *others = norms(*[1e-5] * 5)

        def of(y: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return norm(tensor_model_parallel_all_reduce(y), residual)[0]

        def model(x: torch.Tensor) -> Any:
            twice, beside = F.linear(wide(x), layer.weight), F.linear(wide(x) * 2, layer.weight)
            whole = torch.cat([wide(x), x], -1)
            return (
                of(F.linear(wide(x)[:, :96] * 1, odd.weight), x * 1),
                of(F.linear(x * 3, transposed.weight), x * 2),
                of(x @ square, x * 7),
                # A weight that a kernel ahead has written, and rows that lie apart.
                of(F.linear(wide(x), layer.weight * 2), x * 3),
                of(F.linear(whole[:, :INPUTS], layer.weight), x * 4),
                # A second use of the result: by others, and as the residual.
                of(twice, x * 5),
                twice,
                of(beside, beside),
                # Rows that are split.
                others[0](tensor_model_parallel_all_reduce(F.linear(wide(x), long.weight).view(-1, HIDDEN))),
            )

        expect_linear(vllm, model, fused=0, norms_alone=8)


@scenario(LLM_COMM_FUSE_LINEAR="1")
def a_bias_is_added_by_the_rank_that_has_it() -> None:
    """By rank 0 alone, in vLLM: the others have a layer without bias, whose sum is the same operation."""
    with compiler() as vllm:
        layer = linear_layer(bias=True)
        layer.bias.data.copy_(torch.arange(HIDDEN))
        norm, other = norms(1e-5, 1e-6)

        def model(x: torch.Tensor) -> Any:
            normed, residual = norm(layer(wide(x)), x * 1)
            # A bias that a kernel ahead has written leaves the layer to vLLM, on this rank alone.
            bias = layer.bias * 2 if dist_rank() == 0 else None
            total = tensor_model_parallel_all_reduce(F.linear(wide(x), layer.weight, bias))
            return normed, *other(total, residual)

        is_rank_0 = dist_rank() == 0
        expect_linear(vllm, model, fused=2 - is_rank_0, norms_alone=is_rank_0)
        x, ours = data((5, HIDDEN)), parallel_state.get_tp_group().device_communicator._llm_comm
        normed, *_ = vllm.trace(model, 64)(x)
        bias = layer.bias.data if is_rank_0 else None
        weights = layer.weight.data, x, norm.weight.data
        assert torch.equal(normed, ours.linear_all_reduce_add_rms_norm(wide(x), *weights, 1e-5, bias=bias)[0])


@scenario(world=4, LLM_COMM_FUSE_LINEAR="1")
def layers_of_other_groups_are_left_alone() -> None:
    with compiler(tensor_parallel=2, pipeline_parallel=2) as vllm:
        layer = linear_layer(reduce_results=False)
        first, second = norms(1e-5, 1e-6)

        def model(x: torch.Tensor) -> Any:
            x, residual = first(parallel_state.get_pp_group().all_reduce(layer(wide(x))), x * 1)
            return second(tensor_model_parallel_all_reduce(layer(wide(x))), residual)

        expect_linear(vllm, model, fused=1)


# ---- Nothing is left out when the kernel declines -------------------------------------------------------------------


@scenario(LLM_COMM_FUSE_LINEAR="1", LLM_COMM_MAX_MESSAGE_BYTES="1024")
def what_is_declined_is_computed_and_reduced_all_the_same() -> None:
    with compiler() as vllm:
        layer = linear_layer()
        norm, other = norms(1e-5, 1e-6)
        quantize = quantization()
        scale = torch.tensor([FP8_SCALE])

        def model(x: torch.Tensor) -> Any:
            normed, residual = norm(layer(wide(x)), x * 1)
            return normed, residual, quantize(other(layer(wide(x * 2))), scale)[0]

        compiled = vllm.trace(model, 64)
        for rows, served in ((9, 0), (8, 2)):  # 1,152 bytes
            vllm.check(compiled, model, rows)
            assert len(vllm.linear_calls) == served
            assert not vllm.fused_calls

        operator = torch.ops.llm_comm_vllm.linear_all_reduce_add_rms_norm
        x, residual = wide(data((8, HIDDEN))), torch.ones(8, HIDDEN, dtype=torch.bfloat16)
        given = [t.clone() for t in (x, layer.weight, residual)]
        want = operator(x, layer.weight, None, None, None, residual, norm.weight, 1e-5, 0.0, None, "tp:0")
        assert len(vllm.linear_calls) == 3
        for t, before in zip((x, layer.weight, residual), given, strict=True):
            assert torch.equal(t, before), "an input of the operator was changed"
        # A weight that begins at an odd place is read by torch. The other rank goes on as ever.
        shifted = torch.empty(layer.weight.numel() + 1, dtype=torch.bfloat16)[1:].view_as(layer.weight)
        weight = shifted.copy_(layer.weight) if dist_rank() == 1 else layer.weight
        got = operator(x, weight, None, None, None, residual, norm.weight, 1e-5, 0.0, None, "tp:0")
        assert all(map(torch.equal, got, want))
        assert len(vllm.linear_calls) == 3 + (dist_rank() == 0)
        # A residual that lies apart is declined by all.
        apart = torch.ones(8, HIDDEN + 8, dtype=torch.bfloat16)[:, :HIDDEN]
        got = operator(x, layer.weight, None, None, None, apart, norm.weight, 1e-5, 0.0, None, "tp:0")
        assert torch.equal(got[1], want[1])
        # Without a communicator of llm_comm, the graph is as right.
        parallel_state.get_tp_group().device_communicator._llm_comm = None
        calls = len(vllm.linear_calls)
        vllm.check(compiled, model, 8)
        assert len(vllm.linear_calls) == calls


# ---- Switches and caches --------------------------------------------------------------------------------------------


@scenario()
def without_a_row_graphs_are_as_before() -> None:
    why = "linear layers are vLLM's: fuse_linear is 'auto', and emulated has no layer that is faster with pdl off"
    expect_no_linear(why)


@scenario()
def layers_of_the_table_bring_dependent_launches() -> None:
    use_table([row(8, True)._replace(pdl=True)])
    with compiler(with_model(compiler_config())) as vllm:
        communicator = parallel_state.get_tp_group().device_communicator._llm_comm
        assert communicator.config.pdl
        assert len(vllm.log.having("linear layers of up to 8 tokens by llm_comm")) == (dist_rank() == 0)


@scenario()
def launches_do_not_depend_where_no_layer_gains_or_somebody_has_said() -> None:
    by_pdl = row(8, True)._replace(pdl=True)
    with_hidden, without_model = with_model(compiler_config()), compiler_config()
    wider = with_model(compiler_config())
    wider.model_config.get_hidden_size.return_value = 2 * HIDDEN
    for number, (config, layer, options, expected) in enumerate(
        [
            (with_hidden, by_pdl, {}, True),
            (with_hidden, by_pdl, {"pdl": False}, False),
            (with_hidden, by_pdl, {"fuse_linear": False}, False),
            (with_hidden, by_pdl._replace(is_faster=False), {}, False),
            (with_hidden, row(8, True), {}, False),
            (wider, by_pdl, {}, False),
            (without_model, by_pdl, {}, False),
            (wider, row(8, False), {"fuse_linear": True}, True),
            (wider, row(8, False), {"fuse_linear": True, "pdl": False}, False),
        ]
    ):
        use_table([layer], f"{number}.yaml")
        with set_current_vllm_config(config):
            chosen = choose_pdl(EngineOptions.load(**options), torch.device("cpu"), 2)
        assert chosen.pdl is expected, (number, chosen)
    os.environ["LLM_COMM_TABLE"] = "/nowhere.yaml"
    error = ""
    try:
        choose_pdl(EngineOptions.load(), torch.device("cpu"), 2)
    except ConfigError as caught:
        error = str(caught)
    assert error.startswith("option table (LLM_COMM_TABLE): "), error


@scenario(LLM_COMM_FUSE_LINEAR="0")
def a_variable_switches_linear_layers_off() -> None:
    use_table([row(8, True)])
    expect_no_linear("linear layers are vLLM's: fuse_linear is false (LLM_COMM_FUSE_LINEAR)")


@scenario(LLM_COMM_FUSE_LINEAR="1")
def weights_that_come_from_the_host_are_left_to_vllm() -> None:
    in_host = "linear layers are vLLM's: weights lie in the host's memory (cpu_offload_gb, offload_group_size)"
    config = compiler_config()
    config.offload_config.prefetch.offload_group_size = 2
    with compiler(config) as vllm:
        assert len(vllm.log.having(f"in compiled graphs; {in_host}")) == (dist_rank() == 0)
        group = parallel_state.get_tp_group().device_communicator
        assert group.max_linear_tokens == 0
        # Nor is a configuration that has changed: one rank is enough, and norms are fused.
        again = compiler_config()
        if dist_rank() == 1:
            again.offload_config = None
        with set_current_vllm_config(again):
            said = group._set_up_fusion(group._llm_comm)
        wanted = "linear layers are vLLM's: rank 1 (global rank 1): it cannot be set up"
        assert f"fused with RMSNorm in compiled graphs; {wanted}" in said, said


@scenario(LLM_COMM_FUSE_LINEAR="1", LLM_COMM_FUSE="0")
def layers_go_with_norms_or_not_at_all() -> None:
    why = "fuse is false (LLM_COMM_FUSE); linear layers are vLLM's: norms are not fused"
    expect_no_fusion(compiler_config(), why)


@scenario(LLM_COMM_FUSE_LINEAR="1", VLLM_BATCH_INVARIANT="1")
def batch_invariant_layers_are_those_of_vllm() -> None:
    why = "batch_invariant_norm is 'engine'; linear layers are vLLM's: norms are not fused"
    expect_no_fusion(compiler_config(), f"VLLM_BATCH_INVARIANT is on, and {why}")


@scenario(LLM_COMM_FUSE_LINEAR="1", VLLM_BATCH_INVARIANT="1", LLM_COMM_BATCH_INVARIANT_NORM="llm_comm")
def batch_invariant_layers_are_those_of_vllm_also_before_norms_of_llm_comm() -> None:
    """There are none of llm_comm's for more than 64 tokens."""
    with compiler() as vllm:
        said = "at every size (batch_invariant_norm); linear layers are vLLM's: batches of more than 64 tokens"
        assert len(vllm.log.having(said)) == (dist_rank() == 0)
        group = parallel_state.get_tp_group().device_communicator
        assert (group.max_linear_tokens, group._llm_comm.config.pdl) == (0, False)
        backend = vllm.backend()
        backend.configure_post_pass()
        names = {type(its_pass).__name__ for its_pass in backend.pass_manager.passes}
        assert OUR_PASS in names
        assert not {LINEAR_PASS, COLUMN_PASS} & names


INVARIANT = {"VLLM_BATCH_INVARIANT": "1", "LLM_COMM_BATCH_INVARIANT_LINEAR": "llm_comm"}


@scenario(smoke=True, LLM_COMM_BATCH_INVARIANT_NORM="llm_comm", **INVARIANT)
def batch_invariant_layers_can_be_those_of_llm_comm_in_all_batches() -> None:
    with compiler() as vllm, vllms_own_layers() as theirs:
        said = "at every size (batch_invariant_norm); linear layers by llm_comm at every size (batch_invariant_linear)"
        assert len(vllm.log.having(said)) == (dist_rank() == 0)
        assert parallel_state.get_tp_group().device_communicator._llm_comm.config.pdl
        layer, of_odd_size = random_weight(linear_layer()), linear_layer(inputs=96)
        with_bias = random_weight(ReplicatedLinear(INPUTS, HIDDEN, params_dtype=BF16, return_bias=False))
        with_bias.bias.data.copy_(torch.arange(HIDDEN))
        (norm,) = norms(1e-5)
        parts = layer_calls()

        def model(x: torch.Tensor) -> Any:
            sums = norm(layer(wide(x)), x * 1)
            return *sums, with_bias(wide(x)), of_odd_size(wide(x)[:, :96] * 1)

        batch = torch.randn(130, HIDDEN, generator=torch.Generator().manual_seed(dist_rank())).to(BF16)
        together = vllm.trace(model, 1 << 40)(batch)
        assert parts == [(130, WEIGHT)] * 2, parts
        assert not theirs
        assert [shape for shape, _ in vllm.fused_calls] == [(130, HIDDEN)]
        linear = wide(batch).double() @ with_bias.weight.double().t()
        torch.testing.assert_close(together[2].double(), linear + with_bias.bias, rtol=0.02, atol=0.2)
        # Each batch in a graph of its own, as in ranges of vLLM's.
        for first, rows in ((0, 1), (63, 3), (65, 65)):
            some = vllm.trace(model, rows)(batch[first : first + rows])
            for one, others in zip(some[:3], together, strict=False):
                assert torch.equal(one, others[first : first + rows]), (first, rows)
        # As models that are not compiled call it.
        parts.clear()
        assert torch.equal(with_bias(wide(batch[:65])), together[2][:65])
        assert parts == [(65, WEIGHT)]
        assert with_bias(wide(batch[:0])).shape == (0, HIDDEN)
        assert len(vllm.log.having("first linear layer of any number of tokens computed")) == (dist_rank() == 0)


@scenario(**INVARIANT)
def batch_invariant_layers_of_llm_comm_need_no_norms_of_it_and_have_graphs_of_their_own() -> None:
    config = compiler_config()
    before = config.compute_hash()
    with compiler(config) as vllm, vllms_own_layers() as theirs:
        assert config.compute_hash() != before
        said = "batch_invariant_norm is 'engine'; linear layers by llm_comm at every size (batch_invariant_linear)"
        assert len(vllm.log.having(said)) == (dist_rank() == 0)
        layer, parts = random_weight(linear_layer(reduce_results=False)), layer_calls()
        x = wide(data((4, HIDDEN)))
        y = vllm.trace(layer)(x)
        assert (parts, theirs) == ([(4, WEIGHT)], [])
        torch.testing.assert_close(y.float(), x.float() @ layer.weight.float().t(), rtol=0.02, atol=0.02)
        # What a layer alone decides: a weight at an odd place, and the end of llm_comm.
        kept = layer.weight.data
        layer.weight.data = torch.empty(kept.numel() + 1, dtype=BF16)[1:].view_as(kept).copy_(kept)
        layer(x)
        layer.weight.data = kept
        parallel_state.get_tp_group().device_communicator._llm_comm = None
        layer(x)
        assert (parts, theirs) == ([(4, WEIGHT)], [(4, INPUTS)] * 2)


@scenario(**INVARIANT)
def batch_invariant_layers_are_those_of_vllm_where_a_rank_cannot_have_others() -> None:
    missing = {"llm_comm.integrations.vllm.invariant_linear": None} if dist_rank() == 1 else {}
    config = compiler_config()
    before = config.compute_hash()
    with mock.patch.dict("sys.modules", missing), compiler(config) as vllm, vllms_own_layers() as theirs:
        said = "batch_invariant_norm is 'engine'; linear layers are vLLM's: rank 1 (global rank 1): it cannot be set"
        assert len(vllm.log.having(said)) == (dist_rank() == 0)
        assert config.compute_hash() == before
        linear_layer(reduce_results=False)(wide(data((4, HIDDEN))))
        assert theirs == [(4, INPUTS)]


@scenario(**INVARIANT)
def batch_invariant_layers_are_those_of_vllm_in_another_engine_of_the_process() -> None:
    with compiler() as first:
        assert len(first.log.having("(batch_invariant_linear)")) == (dist_rank() == 0)
    os.environ["LLM_COMM_BATCH_INVARIANT_LINEAR"] = "engine"
    os.environ["SHARED_DIRECTORY"] = str(shared_directory() / "second")  # where its ranks meet
    shared_directory().mkdir(exist_ok=True)
    with compiler(), vllms_own_layers() as theirs:
        linear_layer(reduce_results=False)(wide(data((4, HIDDEN))))
        assert theirs == [(4, INPUTS)]


@scenario(LLM_COMM_BATCH_INVARIANT_LINEAR="llm_comm")
def layers_of_large_batches_are_those_of_vllm_outside_of_batch_invariant_mode() -> None:
    with compiler() as vllm:
        assert parallel_state.get_tp_group().device_communicator._llm_comm.config.batch_invariant_linear == "engine"
        assert not vllm.log.having("batch_invariant_linear")


@scenario(LLM_COMM_FUSE_LINEAR="1")
def one_rank_that_lacks_the_pass_takes_the_others_along() -> None:
    missing = {"llm_comm.integrations.vllm.linear_passes": None} if dist_rank() == 1 else {}
    with mock.patch.dict("sys.modules", missing):
        expect_no_linear("linear layers are vLLM's: rank 1 (global rank 1): it cannot be set up in vLLM")


@scenario(LLM_COMM_FUSE_LINEAR="1", LLM_COMM_MAX_MESSAGE_BYTES="16384")
def batches_of_layers_are_no_larger_than_those_of_norms() -> None:
    config = with_model(compiler_config())
    before = config.compilation_config.compile_ranges_endpoints
    # Rotary embeddings have a range of their own (``rope_scenarios.py``).
    with mock.patch.object(Communicator, "max_preferred_rope_tokens", 0), compiler(config):
        assert config.compilation_config.compile_ranges_endpoints == [64, 128, *before]  # of 128 bytes each
        group = parallel_state.get_tp_group().device_communicator
        communicator = group._llm_comm
        for limit, tokens, said in (
            (4096, 32, "of up to 32 tokens"),
            (100, 0, "norms are fused up to 100 B, less than"),
        ):
            communicator.use_table(communicator.table._replace(max_fused_bytes=limit))
            again = with_model(compiler_config())
            with set_current_vllm_config(again):
                assert said in group._set_up_fusion(communicator)
            assert group.max_linear_tokens == tokens
            assert again.compilation_config.compile_ranges_endpoints == [tokens, *before][tokens == 0 :]


@scenario()
def compiled_graphs_are_kept_apart_by_the_layers_that_they_hold() -> None:
    with compiler() as vllm:
        assert hasattr(torch.ops.llm_comm_vllm, "linear_all_reduce_add_rms_norm"), "a graph from the cache needs it"
        group = parallel_state.get_tp_group().device_communicator
        communicator = group._llm_comm
        at_start = vllm.config.compute_hash()
        found = []
        for layers in ((), (row(8, True),), (row(8, False), row(16, True)), (row(8, True), row(16, True))):
            communicator.use_table(communicator.table._replace(layers=layers))
            again = compiler_config()
            with set_current_vllm_config(again):
                assert group._set_up_fusion(communicator)
                key = again.compute_hash()
                backend = vllm._replace(config=again).backend()
                backend.configure_post_pass()
            with pass_context(Range(1, 8)):
                found.append((key, backend.pass_manager.uuid()))
        assert found[0][0] == at_start, "not the same at every start"
        for keys in zip(*found, strict=True):
            assert len(set(keys)) == len(found), keys


# ---- What they are made of ------------------------------------------------------------------------------------------


def linear_layer(
    inputs: int = INPUTS, outputs: int = HIDDEN, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> RowParallelLinear:
    """Of so many inputs on each rank, where the weights are others."""
    world = parallel_state.get_tp_group().world_size
    options = {"bias": False, "return_bias": False, **options}
    layer = RowParallelLinear(world * inputs, outputs, params_dtype=dtype, **options)
    torch.manual_seed(dist_rank())
    layer.weight.data = torch.randint(-1, 2, layer.weight.shape).to(dtype)
    return layer


def random_weight(layer: Any) -> Any:
    """Whose sums depend on their order."""
    layer.weight.data = torch.randn(layer.weight.shape).to(BF16)
    return layer


@contextmanager
def vllms_own_layers() -> Iterator[list[tuple[int, ...]]]:
    """torch's in place of the kernel of batch-invariant mode, which is Triton's. The shapes that it is given, but for
    those in graphs."""
    calls: list[tuple[int, ...]] = []

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            calls.append(tuple(x.shape))
        return F.linear(x, weight, bias)

    ours = sys.modules.get("llm_comm.integrations.vllm.invariant_linear")
    with ExitStack() as stack:
        for module in (layers_module, ours):
            if module is not None:
                stack.enter_context(mock.patch.object(module, "linear_batch_invariant", linear))
        yield calls


def layer_calls() -> list[tuple[int, tuple[int, ...]]]:
    """The tokens and the weight of the layers of all batches that llm_comm computes from now on."""
    calls: list[tuple[int, tuple[int, ...]]] = []
    communicator = parallel_state.get_tp_group().device_communicator._llm_comm
    original = communicator.batch_invariant_linear

    def batch_invariant_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        calls.append((len(x), tuple(weight.shape)))
        return original(x, weight)

    communicator.batch_invariant_linear = batch_invariant_linear
    return calls


def wide(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x * 2], -1)


def row(up_to: int, is_faster: bool) -> LayerRow:
    """Of a tuning table, about a layer as ``linear_layer`` makes it, without dependent launches as in vLLM."""
    return LayerRow("linear", *WEIGHT, pdl=False, up_to=up_to, is_faster=is_faster)


def use_table(layers: list[LayerRow], name: str = "layers.yaml") -> None:
    """Tuned for emulated GPUs, with rows of linear layers."""
    path = shared_directory() / f"rank{dist_rank()}" / name
    path.parent.mkdir(exist_ok=True)
    table = find_table("emulated", 2, 1, EngineOptions.load({}))._replace(layers=tuple(layers))
    path.write_text(table_text("emulated", 2, table, {}))
    os.environ["LLM_COMM_TABLE"] = str(path)


def expect_linear(vllm: Compiler, model: Model, fused: int, norms_alone: int = 0) -> None:
    """Compiles and runs ``model``, of whose layers ``fused`` go with their norms; ``norms_alone`` are fused without."""
    vllm.linear_calls.clear()
    vllm.fused_calls.clear()
    before = matches(LINEAR_PASS)
    vllm.check(vllm.trace(model, 64), model)
    assert matches(LINEAR_PASS) - before == fused, f"{matches(LINEAR_PASS) - before} instead of {fused}"
    assert (len(vllm.linear_calls), len(vllm.fused_calls)) == (fused, norms_alone)


def expect_no_linear(why: str) -> None:
    """All layers are vLLM's, and the graphs those of a vLLM whose norms alone are fused."""
    with compiler() as vllm:
        lines = vllm.log.having(f"; fused with RMSNorm in compiled graphs; {why}")
        assert len(lines) == (dist_rank() == 0), vllm.log.having("is active")
        backend = vllm.backend()
        backend.configure_post_pass()
        names = [type(its_pass).__name__ for its_pass in backend.pass_manager.passes]
        assert OUR_PASS in names
        assert not {LINEAR_PASS, COLUMN_PASS} & set(names)
        layer = linear_layer()
        (norm,) = norms(1e-5)

        def model(x: torch.Tensor) -> Any:
            return norm(layer(wide(x)), x * 1)

        expect_linear(vllm, model, fused=0, norms_alone=1)
