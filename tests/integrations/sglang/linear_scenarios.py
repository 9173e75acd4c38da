"""SGLang's linear layers by llm_comm: run by ``test_sglang_linear.py``, as ``scenarios.py`` is by its test.

The layers are excerpts, as the norms of ``fusion_scenarios.py`` are, which also makes what llm_comm hooks for these.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fusion_scenarios import SIZES, Norm, empty_package, excerpt, layernorm, names_in, no, server, source_of
from lost_seams import lose
from rank_processes import Log, dist_rank, scenario, serve, shared_directory
from scenarios import distributed, group, load_plugins, make_groups, ours, sglang_groups
from torch import nn

from llm_comm.config import Config
from llm_comm.integrations import layer_tuning
from llm_comm.integrations.layer_tuning import LayerBench
from llm_comm.integrations.sglang import seams
from llm_comm.planning.catalogue import find_table, table_text
from llm_comm.planning.layers import LayerRow

INPUTS, OUTPUTS = 256, 128  # of all ranks together
_LAYERS, _UNQUANTIZED = "sglang.srt.layers.linear", "sglang.srt.layers.quantization.unquant"

# ---- Excerpts -------------------------------------------------------------------------------------------------------


def make_unquantized() -> Any:
    empty_package("sglang.srt.layers.quantization")
    utils = importlib.import_module("sglang.srt.utils")
    return excerpt(
        _UNQUANTIZED,
        "Bf16GemmBackend",
        "UnquantizedLinearMethod",
        "get_bf16_gemm_backend",
        F=F,
        Enum=enum.Enum,
        Parameter=nn.Parameter,
        LinearMethodBase=object,
        set_weight_attrs=utils.set_weight_attrs,
        use_intel_amx_backend=utils.use_intel_amx_backend,
        _BF16_GEMM_BACKEND=None,
        **dict.fromkeys(("_is_cpu", "_is_cpu_amx_available"), False),
    )


def parallel_of_layers() -> Any:
    """The context that layers are made in."""
    return SimpleNamespace(**{**vars(SIZES), "tp_rank": dist_rank()}, tp_group=group("tp"), attn_tp_group=group("tp"))


FORWARD = SimpleNamespace(sp_active=False)


def make_layers() -> Any:
    # Since 0.5.22 a layer has its group.
    groups = {"ReplicatedParallelGroup", "_LogicalGroup", "_ReplicatedGroup", "_resolve_linear_group"}
    groups &= names_in(source_of(_LAYERS)[1].body)
    distributed_package = importlib.import_module("sglang.srt.distributed")
    names = ("divide", "split_tensor_along_last_dim", "tensor_model_parallel_all_reduce")
    return excerpt(
        _LAYERS,
        "LinearBase",
        "ReplicatedLinear",
        "RowParallelLinear",
        "ColumnParallelLinear",
        "MergedColumnParallelLinear",
        "QKVParallelLinear",
        *groups,
        **{name: getattr(distributed_package, name) for name in names},
        msgspec=importlib.import_module("msgspec"),
        get_group_rank_size=lambda group: (0, 1) if group is None else (group.rank_in_group, group.world_size),
        get_tp_group=lambda: group("tp"),
        get_parallel=parallel_of_layers,
        get_forward=lambda: FORWARD,
        use_symmetric_memory=lambda *_, **__: nullcontext(),
        is_allocation_symmetric=no,
        should_skip_mlp_all_reduce=no,
        wrap_method_with_debug_kernel_once=no,
        Parameter=nn.Parameter,
        set_weight_attrs=importlib.import_module("sglang.srt.utils").set_weight_attrs,
        WEIGHT_LOADER_V2_SUPPORTED=(),
        **dict.fromkeys(("_disable_hip_linear_quant", "_is_cpu"), False),
    )


def make_activation() -> Any:
    return excerpt(
        "sglang.srt.layers.activation",
        "SiluAndMul",
        F=F,
        publish_role=no,  # since 0.5.21
        get_exec=not_on_policy,
        **dict.fromkeys(("MultiPlatformOp", "BaseFusedOp"), Norm),  # the latter since 0.5.18
    )


def not_on_policy() -> Any:
    return SimpleNamespace(deterministic=SimpleNamespace(rl_on_policy_target=None))


def make_mlp(module: str, name: str) -> Any:
    """An MLP, beside what ``fusion_scenarios.py`` has of its module."""
    others = {key: value for key, value in vars(sys.modules.get(module, object)).items() if not key.startswith("__")}
    others |= {each: getattr(linear, each) for each in ("MergedColumnParallelLinear", "RowParallelLinear")}
    others |= {"SiluAndMul": activation.SiluAndMul, "get_exec": not_on_policy}
    others |= {"add_prefix": lambda name, prefix: f"{prefix}.{name}"}
    # Since 0.5.22 and 0.5.23; idle but on Blackwell.
    others |= {"DualGemm": lambda *_: SimpleNamespace(mode=None, can_run=no)}
    others |= {"DenseSiluAndMulQuant": lambda _: SimpleNamespace(forward_decode=lambda x, act_fn, _: act_fn(x))}
    return getattr(excerpt(module, name, **others), name)


unquantized, linear, activation = make_unquantized(), make_layers(), make_activation()
MLPS = make_mlp("sglang.srt.models.llama", "LlamaMLP"), make_mlp("sglang.srt.models.qwen2", "Qwen2MLP")


class QuantizedMethod:
    """A layer with scales."""

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], **_: Any
    ) -> None:
        shape = (sum(output_partition_sizes), input_size_per_partition)
        layer.weight = nn.Parameter(torch.ones(shape, dtype=torch.int8), requires_grad=False)

    def apply(self, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return F.linear(x, layer.weight.to(x.dtype) * 0.5, bias)


# ---- Scenarios ------------------------------------------------------------------------------------------------------


@scenario(smoke=True, LLM_COMM_FUSE_LINEAR="1")
def row_parallel_layers_are_computed_by_llm_comm() -> None:
    with served() as (log, calls):
        assert len(log.having("; fused with RMSNorm; linear layers of up to 64 tokens by llm_comm")) == (
            dist_rank() == 0
        )
        assert not log.having("first linear layer")
        for dtype in (torch.bfloat16, torch.float16):
            layer = row_parallel(params_dtype=dtype)
            norm = layernorm.RMSNorm(OUTPUTS, eps=1e-5, weight_dtype=dtype)
            for shape in ((1, INPUTS // 2), (64, INPUTS // 2), (2, 3, INPUTS // 2)):
                check(layer, shape)
                if len(shape) == 2:
                    check_with_norm(layer, norm, shape)
            assert calls == [1, 1, 64, 64, 6], calls
            calls.clear()
        assert len(log.having("llm_comm: first linear layer computed by llm_comm (2 ranks, shape (1, 128)")) == (
            dist_rank() == 0
        )
        assert len(log.having("first linear layer")) == (dist_rank() == 0)


@scenario(LLM_COMM_FUSE_LINEAR="1")
def column_parallel_layers_are_computed_by_llm_comm() -> None:
    with served() as (log, calls):
        layer = column_parallel()
        assert layer.weight.shape == (OUTPUTS // 2, INPUTS)
        for shape in ((1, INPUTS), (64, INPUTS), (2, 3, INPUTS)):
            x = numbers(shape)
            close(layer(x)[0], product(layer, x))
        assert calls == [1, 64, 6], calls
        said = (
            f"first linear layer computed by llm_comm (2 ranks, shape (1, {INPUTS}), weight ({OUTPUTS // 2}, {INPUTS}))"
        )
        assert len(log.having(said)) == (dist_rank() == 0)
        x = numbers((65, INPUTS))
        close(layer(x)[0], product(layer, x))
        x = numbers((4, INPUTS))
        for other in (column_parallel(output_size=192), column_parallel(**of_one_rank())):
            close(other(x)[0], product(other, x))
        assert len(calls) == 3, calls


@scenario(LLM_COMM_FUSE_LINEAR="1")
def a_bias_goes_with_its_layer() -> None:
    with served() as (_, calls):
        columns, rows = column_parallel(bias=True), row_parallel(bias=True)
        x = numbers((4, INPUTS))
        close(columns(x)[0], product(columns, x), columns.bias.double())
        check(rows, (5, INPUTS // 2))  # whose bias rank 0 alone adds
        assert calls == [4, 5], calls
        weight, bias = columns.weight.data, columns.bias.data
        assert torch.equal(columns(x)[0], ours("tp")._llm_comm.linear(x, weight, bias=bias))
        calls.clear()
        # In place of a parameter: someone may have just made that. And what nobody differentiates.
        fetched = columns.quant_method.apply(columns, x, bias * 1)
        with torch.enable_grad():
            columns.bias.requires_grad_()
            found = columns.quant_method.apply(columns, x, columns.bias)
        assert found.requires_grad
        for result in (fetched, found.detach()):
            close(result, product(columns, x), bias.double())
        assert not calls


@scenario(LLM_COMM_FUSE_LINEAR="1")
def compiled_layers_are_computed_by_llm_comm_as_many_tokens_as_they_get() -> None:
    """Graphs are traced once."""
    with served() as (_, calls):
        layers = row_parallel(), row_parallel(bias=True), row_parallel(output_size=96)
        in_fp32 = row_parallel(params_dtype=torch.float32)
        graphs: list[Any] = []

        def backend(graph: Any, examples: Any) -> Any:
            graphs.append(graph)
            return graph

        def forward(x: torch.Tensor) -> Any:
            results = [layer.quant_method.apply(layer, x * 2, bias=layer.bias) for layer in layers]
            return *results, in_fp32.quant_method.apply(in_fp32, x.float())

        compiled = torch.compile(forward, fullgraph=True, backend=backend)
        for tokens in (4, 7, 65):
            x = numbers((tokens, INPUTS // 2))
            torch._dynamo.maybe_mark_dynamic(x, 0)
            first, with_bias, of_odd_size, last = compiled(x)
            close(first, product(layers[0], x * 2))
            close(with_bias, product(layers[1], x * 2), layers[1].bias.double())
            close(of_odd_size, product(layers[2], x * 2))
            close(last, product(in_fp32, x))
        assert calls == [4, 4, 7, 7]
        assert len(graphs) == 1, "traced anew"
        # The compiler sees all others.
        assert str(graphs[0].graph).count("torch.ops.llm_comm_sglang.linear") == 2, graphs[0].graph


@scenario(LLM_COMM_FUSE_LINEAR="1")
def what_llm_comm_does_not_serve_is_left_to_sglang() -> None:
    with served() as (_, calls):
        quantized = SimpleNamespace(get_quant_method=lambda *_, **__: QuantizedMethod())
        of_attention = row_parallel(use_dp_attention_reduce=True)
        with mock.patch.object(SIZES, "attn_tp_size", 1):
            elsewhere = row_parallel()
        for layer in (
            row_parallel(params_dtype=torch.float32),
            row_parallel(params_dtype=torch.float32, bias=True),
            row_parallel(input_size=192),
            row_parallel(output_size=96),
            elsewhere,
            of_attention,
        ):
            check(layer, (4, layer.weight.shape[1]))
        x = numbers((4, INPUTS))
        layer = row_parallel(**of_one_rank())
        close(layer(x)[0], product(layer, x))
        scaled = linear.RowParallelLinear(INPUTS, OUTPUTS, bias=False, quant_config=quantized)
        x = numbers((4, INPUTS // 2))
        close(scaled(x, skip_all_reduce=True)[0], x.double().sum(-1, keepdim=True).expand(-1, OUTPUTS) / 2)
        assert not calls
        check_calls_that_are_declined(row_parallel(), calls)


def check_calls_that_are_declined(layer: Any, calls: list[int]) -> None:
    """Of a layer that is served otherwise."""
    half = INPUTS // 2
    check(layer, (65, half))
    assert layer(torch.empty(0, half, dtype=torch.bfloat16))[0].shape == (0, OUTPUTS)
    x = numbers((half, 4), torch.bfloat16).t()
    close(layer(x, skip_all_reduce=True)[0], product(layer, x))
    x = numbers((4, half))
    # As weights that are fetched from the host for a pass: a tensor in place of the parameter.
    fetched = {"weight": layer.weight.detach() * 2}
    got = torch.func.functional_call(layer, fetched, (x,), {"skip_all_reduce": True})[0]
    close(got, product(layer, x) * 2)
    kept = layer.weight.data
    layer.weight.data = torch.cat([kept.new_empty(4), kept.reshape(-1)])[4:].view(kept.shape)
    assert layer.weight.data_ptr() % 16
    close(layer(x, skip_all_reduce=True)[0], product(layer, x))
    layer.weight.data = kept
    with torch.enable_grad():
        for tensor in (x, layer.weight):
            tensor.requires_grad_()
            layer(x, skip_all_reduce=True)[0].sum().backward()
            assert tensor.grad is not None
            tensor.requires_grad_(False)
    assert not calls
    check(layer, (4, half))
    assert calls == [4]
    ours("tp").leave()
    close(layer(x, skip_all_reduce=True)[0], product(layer, x))
    assert calls == [4]


@scenario()
def only_the_layers_of_a_table_are_computed_by_llm_comm() -> None:
    half = INPUTS // 2
    use_table(LayerRow("linear", OUTPUTS, half, True, 4, False), LayerRow("linear", OUTPUTS, half, True, 16, True))
    with served() as (log, calls):
        assert len(log.having("; linear layers of up to 16 tokens by llm_comm")) == (dist_rank() == 0)
        layer, other = row_parallel(), row_parallel(output_size=OUTPUTS * 2)
        for tokens in (4, 5, 16, 17):
            check(layer, (tokens, half))
            check(other, (tokens, half))
        assert calls == [5, 16]
        # What the table has not compared with.
        backend = unquantized.Bf16GemmBackend.CUTEDSL
        with mock.patch.object(unquantized, "_BF16_GEMM_BACKEND", backend):
            layers = row_parallel(), row_parallel()
        for layer in layers:
            check(layer, (5, half))
        assert calls == [5, 16]
        said = log.having(
            "fuse_linear is off: the tuning table was measured against cuBLAS, this layer uses backend cutedsl"
        )
        assert len(said) == (dist_rank() == 0), said


@scenario(LLM_COMM_TUNE_AT_START="60")
def layers_of_the_model_measure_themselves() -> None:
    place, half = shared_directory(), INPUTS // 2
    os.environ["LLM_COMM_TABLE_DIR"] = str(place / "tables")
    heads = {"num_attention_heads": 4, "head_dim": 64}
    entries = {"hidden_size": OUTPUTS, "intermediate_size": 384, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, **heads}
    mine = place / f"model{dist_rank()}"
    mine.mkdir()
    (mine / "config.json").write_text(json.dumps(entries))
    options = SimpleNamespace(model_path=str(mine), quantization=None, enable_dp_attention=False)
    times = [(10.0, [(8, 2, 1, 11.0)]), (10.0, [(8, 2, 1, 5.0)])]  # of 1 and 16 tokens
    by_options = mock.patch("sglang.srt.runtime_context.get_server_args", return_value=options)
    with by_options, mock.patch.object(LayerBench, "times", return_value=times), served() as (log, calls):
        said = "; linear layers of up to 16 tokens by llm_comm (3 of 3 that emulated lacks are faster: 3 measured in "
        assert len(log.having(said)) == (dist_rank() == 0), log.having("is active")
        layer, other = row_parallel(), row_parallel(output_size=OUTPUTS * 2)
        for tokens in (1, 2, 16, 17):
            check(layer, (tokens, half))
            check(other, (tokens, half))
        assert calls == [2, 16]


@scenario(LLM_COMM_FUSE_LINEAR="1")
def the_router_of_experts_is_computed_by_llm_comm() -> None:
    experts = 64
    with model_of("qwen3_moe", num_experts=experts), served() as (_, calls):
        router, other = replicated(experts), replicated(experts // 2)
        for tokens in (1, 17, 64, 65):
            x = numbers((tokens, INPUTS))
            close(router(x)[0], product(router, x))
            close(other(x)[0], product(other, x))
        assert calls == [1, 17, 64]
    meet_elsewhere("second")
    of_one_rank = model_of("qwen3_moe", "other", num_experts=experts) if dist_rank() == 0 else model_of("llama")
    with of_one_rank, served() as (_, calls):
        router, x = replicated(experts), numbers((4, INPUTS))
        close(router(x)[0], product(router, x))
        assert calls == []


@scenario(LLM_COMM_TUNE_AT_START="60")
def the_router_of_experts_is_measured_too() -> None:
    with measured("qwen3_moe", "router", num_experts=64) as layers, served():
        assert layers == [("linear", 64, 512)]


@scenario(smoke=True, LLM_COMM_FUSE_LINEAR="1")
def gate_and_up_are_computed_with_silu_and_mul() -> None:
    said = f"layer computed with silu-and-mul (2 ranks, shape (1, {INPUTS}), weight (256, {INPUTS}))"
    with served() as (log, calls):
        activated = layer_calls("linear_silu_and_mul")
        for make in MLPS:
            for dtype in (torch.bfloat16, torch.float16):
                mlp = mlp_of(make, dtype)
                for shape in ((1, INPUTS), (64, INPUTS), (2, 3, INPUTS)):
                    check_mlp(mlp, numbers(shape, dtype))
                # Of gate and up, and of the down-projection.
                assert calls == [1, 1, 64, 64, 6, 6], calls
                assert activated == [1, 64, 6], activated
                calls.clear()
                activated.clear()
        assert len(log.having(said)) == (dist_rank() == 0)
        assert len(log.having("computed with silu-and-mul")) == (dist_rank() == 0)


@scenario(LLM_COMM_FUSE_LINEAR="1")
def down_projections_are_told_of_the_batch_as_sglang_does() -> None:
    with served():
        asked: list[int] = []
        is_decode = lambda: asked.append(1) or True  # noqa: E731
        mode = SimpleNamespace(is_decode=lambda: True, is_decode_or_idle=is_decode)
        for make, times in zip(MLPS, (0, 1), strict=True):
            mlp = mlp_of(make)
            for tokens in (4, 65):  # by llm_comm, and by SGLang
                mlp(numbers((tokens, INPUTS)), SimpleNamespace(forward_mode=mode))
                assert len(asked) == times, (make, tokens)
                asked.clear()


class Adapted(nn.Module):
    """A layer with LoRA: SGLang calls the method of the layer that it has."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.base_layer, self.weight, self.bias = layer, layer.weight, None

    def forward(self, x: torch.Tensor) -> Any:
        return self.base_layer.quant_method.apply(self.base_layer, x) * 2, None


class GeluAndMul(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.gelu(gate) * up


@scenario(LLM_COMM_FUSE_LINEAR="1")
def silu_and_mul_is_sglangs_where_llm_comm_does_not_compute_both() -> None:
    with served() as (_, calls):
        activated = layer_calls("linear_silu_and_mul")
        ours_of_mlps = sys.modules["llm_comm.integrations.sglang.gated_mlps"]
        x = numbers((4, INPUTS))
        for make in MLPS:
            mlp = mlp_of(make)
            check_mlp(mlp, numbers((65, INPUTS)))
            check_mlp(mlp_of(make, torch.float32), x.float())
            with mock.patch.object(SIZES, "attn_tp_size", 1):
                elsewhere = mlp_of(make)
            check_mlp(elsewhere, x)
            assert not calls
            check_mlp(mlp_of(make, inner=192), x)
            assert calls == [4]  # the layer of gate and up, each of which is too narrow
            check_parts_that_are_declined(mlp, x)
            with mock.patch.object(ours_of_mlps, "get_forward", return_value=SimpleNamespace(sp_active=True)):
                check_mlp(mlp, x)
            if hasattr(mlp, "dual_gemm"):
                with mock.patch.object(mlp.dual_gemm, "mode", "unquant"):
                    check_mlp(mlp, x)
            assert not activated
            check_mlp(mlp, x)
            assert activated == [4]
            calls.clear()
            activated.clear()
        assert merged([128, 128]).llm_comm_activates
        for sizes, options in (([128, 384], {}), ([128] * 4, {}), ([128] * 2, {"gather_output": True})):
            assert not merged(sizes, **options).llm_comm_activates
        assert not merged([128, 128], **of_one_rank()).llm_comm_activates
        assert not column_parallel().llm_comm_activates
        quantized = SimpleNamespace(get_quant_method=lambda *_, **__: QuantizedMethod())
        scaled = MLPS[0](INPUTS, 256, "silu", quant_config=quantized)
        assert scaled(x).shape == x.shape
        ours("tp").leave()
        check_mlp(mlp, x)
        assert not calls


def check_parts_that_are_declined(mlp: Any, x: torch.Tensor) -> None:
    """Of an MLP that is served otherwise."""
    layer, act_fn = mlp.gate_up_proj, mlp.act_fn
    mlp.gate_up_proj = Adapted(layer)
    check_mlp(mlp, x, factor=2)
    mlp.gate_up_proj = merged([256, 256], bias=True)
    check_mlp(mlp, x)
    mlp.gate_up_proj = layer
    mlp.act_fn = GeluAndMul()
    check_mlp(mlp, x, activate=F.gelu)
    mlp.act_fn = act_fn
    kept = layer.weight.data
    layer.weight.data = torch.cat([kept.new_empty(4), kept.reshape(-1)])[4:].view(kept.shape)
    check_mlp(mlp, x)
    layer.weight.data = kept
    # As weights that are fetched from the host for a pass.
    fetched = {"gate_up_proj.weight": layer.weight.detach() * 2}
    rounding = torch.finfo(x.dtype).eps
    torch.testing.assert_close(
        torch.func.functional_call(mlp, fetched, (x,)).double(),
        expected_mlp(mlp, x, factor=2),
        rtol=4 * rounding,
        atol=64 * rounding,
    )


@scenario(LLM_COMM_FUSE_LINEAR="1")
def compiled_mlps_have_silu_and_mul_apart() -> None:
    with served() as (_, calls):
        activated, mlp, graphs = layer_calls("linear_silu_and_mul"), mlp_of(MLPS[0]), []

        def backend(graph: Any, examples: Any) -> Any:
            graphs.append(graph)
            return graph

        mlp.down_proj.forward = lambda x: (x, None)
        compiled = torch.compile(lambda x: mlp(x * 2), fullgraph=True, backend=backend)
        for tokens in (4, 65):
            x = numbers((tokens, INPUTS))
            torch._dynamo.maybe_mark_dynamic(x, 0)
            gate, up = product(mlp.gate_up_proj, x * 2).chunk(2, -1)
            torch.testing.assert_close(compiled(x).double(), F.silu(gate) * up, rtol=0.03, atol=0.03)
        assert (calls, activated) == ([4], [])
        assert len(graphs) == 1, "traced anew"


@scenario()
def gate_and_up_are_together_where_that_is_faster_and_apart_where_the_layer_is() -> None:
    use_table(
        LayerRow("linear_silu_and_mul", 128, INPUTS, True, 4, True),
        LayerRow("linear_silu_and_mul", 128, INPUTS, True, 16, False),
        LayerRow("linear", 256, INPUTS, True, 16, True),
    )
    with served() as (_, calls):
        activated = layer_calls("linear_silu_and_mul")
        for make in MLPS:
            for tokens in (4, 5, 17):
                check_mlp(mlp_of(make), numbers((tokens, INPUTS)))
            check_mlp(mlp_of(make, inner=1024), numbers((4, INPUTS)))
            assert (calls, activated) == ([4, 5], [4]), (calls, activated)
            calls.clear()
            activated.clear()


@scenario(LLM_COMM_FUSE_LINEAR="1")
def without_one_of_the_mlps_layers_are_still_computed_and_silu_and_mul_is_sglangs() -> None:
    lose(seams.TABLE, "sglang.srt.models.qwen2:Qwen2MLP.forward")
    before = [make.forward for make in MLPS]
    with measured("llama") as layers, served() as (log, calls):
        assert layers == [("linear", 1024, 512)]
        activated = layer_calls("linear_silu_and_mul")
        assert [make.forward for make in MLPS] == before
        assert len(log.having("gate and up with silu-and-mul: off, SGLang ", logging.WARNING)) == (dist_rank() == 0)
        for make in MLPS:
            check_mlp(mlp_of(make), numbers((4, INPUTS)))
        assert (calls, activated) == ([4] * 4, [])


@scenario(LLM_COMM_TUNE_AT_START="60")
def gate_and_up_are_measured_both_ways_where_silu_and_mul_may_be_computed_with_them() -> None:
    with measured("llama") as layers, served():
        assert layers == [("linear_silu_and_mul", 512, 512), ("linear", 1024, 512)]


@scenario(LLM_COMM_TUNE_AT_START="60")
def gate_and_up_of_other_mlps_are_measured_alone() -> None:
    with measured("glm4") as layers, served():
        assert layers == [("linear", 1024, 512)]


@contextmanager
def measured(kind: str, name: str = "gate_up_proj", **others: int) -> Iterator[list[tuple[str, int, int]]]:
    """What of the layers of ``name`` is measured at the start of a server with a model of ``kind``."""
    found: list[tuple[str, int, int]] = []

    def tune(communicator: Any, group: Any, layers: Any, log: Any) -> str:
        found.extend(layer[1:4] for layer in layers if layer.name == name)
        return ""

    with model_of(kind, hidden_size=512, **others), mock.patch.object(layer_tuning, "tune", tune):
        yield found


@contextmanager
def model_of(kind: str, name: str = "", **others: int) -> Iterator[None]:
    """A server's model of ``kind``, with ``others`` in its config.json."""
    entries = {"num_attention_heads": 8, "hidden_size": INPUTS, "intermediate_size": 1024, "num_hidden_layers": 1}
    place = shared_directory() / f"{kind}{name}{dist_rank()}"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({**entries, "rms_norm_eps": 1e-5, "model_type": kind, **others}))
    options = SimpleNamespace(model_path=str(place), quantization=None, enable_dp_attention=False)
    with mock.patch("sglang.srt.runtime_context.get_server_args", return_value=options):
        yield


@scenario()
def without_such_a_table_sglang_is_left_alone_and_another_engine_may_have_one() -> None:
    before = methods()
    with served() as (log, calls):
        assert methods() == before
        said = "; linear layers are SGLang's: fuse_linear is 'auto', and emulated has no layer"
        check_untouched(log, calls, said)
    use_table(LayerRow("linear", OUTPUTS, INPUTS // 2, False, 16, True))  # without dependent launches
    meet_elsewhere("second")
    with served() as (log, calls):
        assert methods() == before
        check_untouched(log, calls, "mine.yaml has no layer that is faster with pdl on")
    for options, said in (
        ({"FUSE_LINEAR": "1"}, ""),
        ({"FUSE_LINEAR": "0"}, "fuse_linear is false (LLM_COMM_FUSE_LIN"),
    ):
        os.environ.update({f"LLM_COMM_{name}": value for name, value in options.items()})
        meet_elsewhere(f"fuse_linear{options['FUSE_LINEAR']}")
        with served() as (log, calls):
            assert methods() != before
            if said:  # the hooks are there by now
                check_untouched(log, calls, said)
            else:
                check(row_parallel(), (4, INPUTS // 2))
                assert calls == [4]


@scenario(LLM_COMM_FUSE_LINEAR="1", LLM_COMM_DETERMINISTIC="1", SGLANG_ENABLE_DETERMINISTIC_INFERENCE="1")
def in_deterministic_mode_layers_are_those_of_sglang() -> None:
    """It has a matrix product of its own, in the place of torch's."""
    before = methods()
    with served() as (log, calls):
        assert methods() == before
        check_untouched(log, calls, "batch_invariant_norm is 'engine'; linear layers are SGLang's: norms are not fused")


INVARIANT = {
    "LLM_COMM_BATCH_INVARIANT_LINEAR": "llm_comm",
    "LLM_COMM_DETERMINISTIC": "1",
    "SGLANG_ENABLE_DETERMINISTIC_INFERENCE": "1",
}


@scenario(smoke=True, **INVARIANT)
def in_deterministic_mode_layers_can_be_those_of_llm_comm_in_all_batches() -> None:
    with served() as (log, calls):
        said = "batch_invariant_norm is 'engine'; linear layers by llm_comm at every size (batch_invariant_linear)"
        assert len(log.having(said)) == (dist_rank() == 0), log.having("is active for group")
        half = INPUTS // 2
        layer, with_bias = row_parallel(), column_parallel(bias=True)
        x = numbers((130, INPUTS))
        together, biased = layer(x[:, :half] * 1, skip_all_reduce=True)[0], with_bias(x)[0]
        assert calls == [130] * 2, calls
        close(together, product(layer, x[:, :half]))
        close(biased, product(with_bias, x), with_bias.bias.double())
        for first, rows in ((0, 1), (63, 3), (65, 65)):
            some = x[first : first + rows]
            alone = layer(some[:, :half] * 1, skip_all_reduce=True)[0]
            assert torch.equal(alone, together[first : first + rows]), (first, rows)
            assert torch.equal(with_bias(some)[0], biased[first : first + rows]), (first, rows)
        assert with_bias(x[:0])[0].shape == (0, OUTPUTS // 2)
        assert len(log.having("first linear layer of any number of tokens computed by llm_comm")) == (dist_rank() == 0)
        check(layer, (65, half))
        check_those_that_are_left_to_sglang(layer, calls)


def check_those_that_are_left_to_sglang(served: Any, calls: list[int]) -> None:
    """Whatever the batch."""
    calls.clear()
    half = INPUTS // 2
    for other in (row_parallel(params_dtype=torch.float32), row_parallel(input_size=192), row_parallel(output_size=96)):
        for tokens in (4, 65):
            check(other, (tokens, other.weight.shape[1]))
    x = numbers((4, half))
    fetched = {"weight": served.weight.detach() * 2}
    close(torch.func.functional_call(served, fetched, (x,), {"skip_all_reduce": True})[0], product(served, x) * 2)
    kept = served.weight.data
    served.weight.data = torch.cat([kept.new_empty(4), kept.reshape(-1)])[4:].view(kept.shape)
    check(served, (4, half))
    served.weight.data = kept
    assert not calls
    ours("tp").leave()
    close(served(x, skip_all_reduce=True)[0], product(served, x))
    assert not calls


@scenario(**INVARIANT)
def in_deterministic_mode_compiled_layers_take_batches_of_any_size() -> None:
    with served() as (_, calls):
        layer, graphs = column_parallel(), []

        def backend(graph: Any, examples: Any) -> Any:
            graphs.append(graph)
            return graph

        compiled = torch.compile(lambda x: layer.quant_method.apply(layer, x * 2), fullgraph=True, backend=backend)
        for tokens in (4, 65):
            x = numbers((tokens, INPUTS))
            torch._dynamo.maybe_mark_dynamic(x, 0)
            close(compiled(x), product(layer, x * 2))
        assert calls == [4, 65]
        assert len(graphs) == 1, "traced anew"


@scenario(**INVARIANT)
def in_deterministic_mode_layers_are_those_of_sglang_in_another_engine_of_the_process() -> None:
    with served() as (log, _):
        assert len(log.having("(batch_invariant_linear)")) == (dist_rank() == 0)
    os.environ["LLM_COMM_BATCH_INVARIANT_LINEAR"] = "engine"
    meet_elsewhere("second")
    module = sys.modules["llm_comm.integrations.sglang.invariant_linear"]
    with served(), mock.patch.object(module, "_batch_invariant_linear", side_effect=AssertionError("not SGLang's")):
        check(row_parallel(), (4, INPUTS // 2))


@scenario(**INVARIANT)
def in_deterministic_mode_one_rank_that_cannot_be_hooked_takes_the_others_along() -> None:
    missing = {"llm_comm.integrations.sglang.invariant_linear": None} if dist_rank() == 1 else {}
    with mock.patch.dict("sys.modules", missing), served() as (log, calls):
        said = "; linear layers are SGLang's: rank 1 (global rank 1): it cannot be set up in SGLang "
        check_untouched(log, calls, said)


@scenario(LLM_COMM_FUSE_LINEAR="1")
def one_rank_that_cannot_be_hooked_takes_the_others_along() -> None:
    row_parallel_linear = linear.RowParallelLinear
    if dist_rank() == 1:
        del linear.RowParallelLinear
    with served() as (log, calls):
        linear.RowParallelLinear = row_parallel_linear
        said = "; linear layers are SGLang's: rank 1 (global rank 1): it cannot be set up in SGLang "
        check_untouched(log, calls, said)
        assert len(log.having("; fused with RMSNorm")) == (dist_rank() == 0)


@scenario(LLM_COMM_FUSE_LINEAR="1")
def beside_prefills_in_a_group_of_their_own_layers_are_those_of_sglang() -> None:
    load_plugins()
    with mock.patch("sglang.srt.utils.is_cuda", return_value=True), distributed():
        make_groups(2, 1, 1, 1, pdmux=True)
        with server(), torch.no_grad():
            calls = layer_calls()
            check(row_parallel(), (4, INPUTS // 2))
            assert not calls


# ---- What they are made of ------------------------------------------------------------------------------------------


@contextmanager
def served() -> Iterator[tuple[Log, list[int]]]:
    """A server with two ranks; its log, and the tokens of the layers that llm_comm computes."""
    with sglang_groups() as log, server(), torch.no_grad():
        yield log, layer_calls()


def layer_calls(*methods: str) -> list[int]:
    """The tokens of layers that llm_comm computes from here on, by ``methods`` or by any."""
    tokens: list[int] = []
    communicator = ours("tp")._llm_comm

    def counted(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def linear_of(x: torch.Tensor, weight: torch.Tensor, **scales: Any) -> torch.Tensor:
            result = original(x, weight, **scales)
            tokens.append(x.numel() // x.shape[-1])
            return result

        return linear_of

    for method in methods or ("linear", "linear_silu_and_mul", "batch_invariant_linear"):
        setattr(communicator, method, counted(getattr(communicator, method)))
    return tokens


def row_parallel(input_size: int = INPUTS, output_size: int = OUTPUTS, **options: Any) -> Any:
    options = {"bias": False, "params_dtype": torch.bfloat16, **options}
    return fill(linear.RowParallelLinear(input_size, output_size, **options))


def column_parallel(output_size: int = OUTPUTS, **options: Any) -> Any:
    options = {"bias": False, "params_dtype": torch.bfloat16, **options}
    return fill(linear.ColumnParallelLinear(INPUTS, output_size, **options))


def replicated(output_size: int) -> Any:
    return fill(linear.ReplicatedLinear(INPUTS, output_size, bias=False, params_dtype=torch.bfloat16))


def merged(output_sizes: list[int], **options: Any) -> Any:
    options = {"bias": False, "params_dtype": torch.bfloat16, **options}
    return fill(linear.MergedColumnParallelLinear(INPUTS, output_sizes, **options))


def mlp_of(make: Any, dtype: torch.dtype = torch.bfloat16, inner: int = 256) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        mlp = make(INPUTS, inner, "silu")
    finally:
        torch.set_default_dtype(before)
    fill(mlp.gate_up_proj)
    fill(mlp.down_proj)
    return mlp


def fill(layer: Any) -> Any:
    """Gives ``layer`` numbers of this rank, and a bias that is the same on all."""
    layer.weight.data.copy_(torch.randn(layer.weight.shape, generator=generator(dist_rank())) / 16)
    if layer.bias is not None:
        layer.bias.data.copy_(torch.randn(layer.bias.shape, generator=generator(7)))
    return layer


def of_one_rank() -> dict[str, Any]:
    """Has a layer not be split."""
    has_sizes = "tp_size" in inspect.signature(linear.RowParallelLinear.__init__).parameters  # before 0.5.22
    return {"tp_rank": 0, "tp_size": 1} if has_sizes else {"parallel_group": "replicated"}


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Input of this rank."""
    return torch.randn(shape, generator=generator(2 + dist_rank())).to(dtype)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def product(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """What ``layer`` makes of ``x`` on this rank, exactly."""
    return F.linear(x.double(), layer.weight.double())


def check(layer: Any, shape: tuple[int, ...]) -> None:
    """A layer of both ranks, with its sum."""
    x = numbers(shape, layer.weight.dtype)
    got = layer(x)[0]
    terms = of_all_ranks(product(layer, x))
    if layer.bias is not None:
        terms.append(layer.bias.double())
    close(got, *terms)
    assert all(torch.equal(got, other) for other in of_all_ranks(got)), "the ranks have other bits"


def check_mlp(mlp: Any, x: torch.Tensor, **options: Any) -> None:
    got, rounding = mlp(x), torch.finfo(x.dtype).eps
    torch.testing.assert_close(got.double(), expected_mlp(mlp, x, **options), rtol=4 * rounding, atol=64 * rounding)
    assert all(torch.equal(got, other) for other in of_all_ranks(got)), "the ranks have other bits"


def expected_mlp(mlp: Any, x: torch.Tensor, factor: float = 1, activate: Any = F.silu) -> torch.Tensor:
    """What an MLP of both ranks makes of ``x``.

    Args:
        factor: Of what its layer of gate and up makes.
        activate: What multiplies up, of gate.
    """
    y = product(mlp.gate_up_proj, x) * factor
    if mlp.gate_up_proj.bias is not None:
        y = y + mlp.gate_up_proj.bias.double()
    gate, up = y.chunk(2, -1)
    return torch.stack(of_all_ranks(product(mlp.down_proj, activate(gate) * up))).sum(0)


def check_with_norm(layer: Any, norm: Any, shape: tuple[int, ...]) -> None:
    """A layer that leaves its sum to a norm."""
    x = numbers(shape, layer.weight.dtype)
    residual = torch.randn((*shape[:-1], OUTPUTS), generator=generator(5)).to(x.dtype)
    addend, _ = layer(x, skip_all_reduce=True)
    close(addend, product(layer, x))
    results = layernorm._forward_with_allreduce_fusion(norm, addend, residual, None, norm.weight)
    normed, new_residual = results
    close(new_residual, *of_all_ranks(product(layer, x)), residual.double())
    rows = new_residual.double()
    want = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    torch.testing.assert_close(normed.double(), want, rtol=0.01, atol=0.01)
    for got in results:
        assert all(torch.equal(got, other) for other in of_all_ranks(got)), "the ranks have other bits"


def close(got: torch.Tensor, *terms: torch.Tensor) -> None:
    """That ``got`` is the sum of ``terms``, each of which may have been rounded, as may what is added up to any."""
    stacked = torch.stack(torch.broadcast_tensors(*terms))
    want = stacked.sum(0)
    sizes = stacked.abs().sum(0) if len(terms) > 1 else torch.zeros(())
    rounding = torch.finfo(got.dtype).eps / 2
    error = (got.double() - want).abs()
    assert (error <= 1.01 * rounding * (2 * sizes + want.abs()) + 1e-5).all(), error.max()


def of_all_ranks(x: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x.contiguous(), group=group("tp").cpu_group)
    return parts


def methods() -> tuple[Any, ...]:
    """What llm_comm hooks."""
    method = unquantized.UnquantizedLinearMethod
    return method.apply, method.create_weights


def check_untouched(log: Log, calls: list[int], said: str) -> None:
    """That layers are SGLang's, and the line at start says so."""
    assert len(log.having(said)) == (dist_rank() == 0), log.having("is active for group")
    check(row_parallel(), (4, INPUTS // 2))
    assert not calls
    assert not log.having("first linear layer")


def use_table(*rows: LayerRow) -> None:
    path = shared_directory() / f"rank{dist_rank()}" / "mine.yaml"  # ranks compare names
    path.parent.mkdir(exist_ok=True)
    table = find_table("emulated", 2, 1, Config.load({}))._replace(layers=rows)
    path.write_text(table_text("emulated", 2, table, {}))
    os.environ["LLM_COMM_TABLE"] = str(path)


def meet_elsewhere(name: str) -> None:
    """For another engine of the process: groups meet in a file."""
    place = shared_directory() / name
    place.mkdir(exist_ok=True)
    os.environ["SHARED_DIRECTORY"] = str(place)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)  # as SGLang does
    serve(globals(), "sglang_scheduler_{}")
