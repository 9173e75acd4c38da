"""SGLang's norms with the all-reduce before them: run by ``test_sglang_fusion.py``, as ``scenarios.py`` is by its test.

The modules of norms and models import all of SGLang. Here they hold excerpts: the functions and classes that llm_comm
relies on, with their source out of the published wheel; what those need of other modules is made here. Groups and the
registry of hooks are SGLang's own, as in ``scenarios.py``.
"""

from __future__ import annotations
import __future__

import ast
import dataclasses
import enum
import functools
import importlib.util
import logging
import os
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from rank_processes import Log, data, dist_rank, expected_sum, scenario, serve, shared_directory
from scenarios import distributed, fused_calls, group, load_plugins, make_groups, ours, parallel_state, sglang_groups
from sglang.srt.runtime_context import get_exec
from torch import nn

from llm_comm.errors import UnsupportedInputError

HIDDEN = 64
IS_OLD = importlib.util.find_spec("sglang.srt.layers.layer_boundary") is None  # before 0.5.21
_SOURCES = Path(parallel_state.__file__).parents[1]

# ---- Excerpts -------------------------------------------------------------------------------------------------------


#: The sizes of groups, which SGLang reads off the options of its server.
SIZES = SimpleNamespace(
    **dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), 2),
    **dict.fromkeys(("attn_dp_size", "attn_cp_size", "moe_ep_size", "pp_size", "dwdp_size"), 1),
    **dict.fromkeys(("tp_rank", "attn_tp_rank", "attn_cp_rank"), 0),
    moe_dense_tp_size=None,
    pp_group=SimpleNamespace(is_first_rank=True, is_last_rank=True, rank_in_group=0, world_size=1),
)
SPECULATION = SimpleNamespace(speculative_algorithm=None)
SEQUENCE_PARALLELISM = SimpleNamespace(layernorm_sp_enabled=lambda: False)
ATTENTION = SimpleNamespace(input_scattered=False)
EXPERTS = SimpleNamespace(moe_a2a_backend="none")
MODEL = SimpleNamespace(architectures=["Qwen3MoeForCausalLM"])


def parallel() -> Any:
    return SIZES


def source_of(module: str) -> tuple[Path, ast.Module]:
    """A module of the wheel."""
    path = _SOURCES.joinpath(*module.split(".")[2:]).with_suffix(".py")
    return path, ast.parse(path.read_text(encoding="utf-8"))


def names_in(body: list[ast.stmt]) -> set[str]:
    """Functions and classes there."""
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def excerpt(module: str, *names: str, **others: Any) -> ModuleType:
    """Puts a module in place that holds ``names`` as in the wheel, and ``others``."""
    path, tree = source_of(module)
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    assert names_in(tree.body) == set(names), f"{module} has changed"
    made = ModuleType(module)
    made.__dict__.update({name: getattr(typing, name) for name in ("Any", "Callable", "Optional", "Tuple", "Union")})
    made.__dict__.update(torch=torch, nn=nn, get_parallel=parallel, get_exec=get_exec, _use_aiter=False)
    made.__dict__.update(others)
    sys.modules[module] = made  # dataclasses look for it there
    # Annotations name what is not there.
    exec(compile(tree, str(path), "exec", __future__.annotations.compiler_flag), made.__dict__)
    parent, _, name = module.rpartition(".")
    setattr(importlib.import_module(parent), name, made)
    return made


class Norm(nn.Module):
    """The base of SGLang's norms, which chooses by platform."""

    def forward(self, *args: Any, quant_linear: Any = None) -> Any:
        return self.forward_native(*args)  # type: ignore[operator]


layernorm = excerpt(
    "sglang.srt.layers.layernorm",
    "RMSNorm",
    "GemmaRMSNorm",
    "_forward_with_allreduce_fusion",
    **dict.fromkeys(("MultiPlatformOp", "BaseFusedOp"), Norm),  # the latter since 0.5.18
)


class Another(layernorm.RMSNorm):  # type: ignore[name-defined,misc]
    def forward(self, x: torch.Tensor, residual: torch.Tensor, _: None) -> Any:
        residual = residual + x
        values = residual.float()
        values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (values * (2 + self.weight.float())).to(x.dtype), residual


def no(*_: Any, **__: Any) -> Any:
    return None


ADD_NORM = "sglang.srt.layers.layer_boundary.residual.add_norm"
GATE = "apply_flashinfer_allreduce_fusion"
if not IS_OLD and GATE not in names_in(source_of(ADD_NORM)[1].body):
    GATE = "flashinfer_ar_fusion_applies"


def make_gate() -> ModuleType:
    no_flashinfer = {"_is_sm90_supported": False, "_is_sm100_supported": False}
    if not IS_OLD:
        return excerpt(ADD_NORM, GATE, **no_flashinfer)
    return excerpt(
        "sglang.srt.layers.communicator",
        GATE,
        "enable_moe_dense_fully_dp",
        "enable_dwdp",
        "CommunicateContext",
        "CommunicateSimpleFn",
        "CommunicateSummableTensorPairFn",
        "CommunicateWithAllReduceAndLayerNormFn",
        "LayerCommunicator",
        "LayerScatterModes",
        "ScatterMode",
        "_LayerModeComputationContext",
        **no_flashinfer,
        Enum=enum.Enum,
        auto=enum.auto,
        dataclass=dataclasses.dataclass,
        partial=functools.partial,
        apply_aiter_all_reduce_fusion=no,
        attention_tensor_model_parallel_all_reduce=lambda x: group("tp").all_reduce(x),
        SpeculativeAlgorithm=SimpleNamespace(from_string=no),
        layernorm_sp=SEQUENCE_PARALLELISM,
        get_spec=lambda: SPECULATION,
        get_attn_tp_context=lambda: ATTENTION,
        get_moe_a2a_backend=lambda: SimpleNamespace(is_none=lambda: True),
        get_moe_cp_size=lambda: 1,
        _generic_prefill_cp_shards_tokens=no,
        is_dp_attention_enabled=no,
        is_dsa_enable_prefill_cp=no,
        is_enable_moe_cp_allgather=no,
        is_mla_cp_enabled=no,
        is_mla_prefill_cp_enabled=no,
        should_use_flashinfer_cutlass_moe_fp4_allgather=no,
        get_exec=lambda: SimpleNamespace(comm=SimpleNamespace(enable_quant_communications=False)),
        **dict.fromkeys(("_is_npu", "_use_ag_after_qlora"), False),
    )


def empty_package(name: str) -> None:
    """Puts a package in place whose modules are excerpts."""
    package = ModuleType(name)
    package.__path__, package.__spec__ = [], ModuleSpec(name, None, is_package=True)
    sys.modules[name] = package
    parent, _, last = name.rpartition(".")
    setattr(importlib.import_module(parent), last, package)


if not IS_OLD:
    empty_package("sglang.srt.layers.layer_boundary")
    empty_package("sglang.srt.layers.layer_boundary.residual")
gate = make_gate()


class Attention(nn.Module):
    def __init__(self, hidden_size: int, **_: Any) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = nn.Identity(), RowParallelLinear(0.5)

    def forward(self, positions: Any, hidden_states: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        return self.o_proj(hidden_states)


class AttentionThatLeavesItsSum(Attention):
    def __init__(self, hidden_size: int, **_: Any) -> None:
        super().__init__(hidden_size)
        self.o_proj.reduce_results = False


class Mlp(nn.Module):
    def __init__(self, hidden_size: int, **_: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Identity(), RowParallelLinear(0.25)

    def forward(self, x: torch.Tensor, forward_batch: Any = None) -> torch.Tensor:
        return self.down_proj(x)


class RowParallelLinear(nn.Module):
    """As SGLang's, the matrix apart: each rank has an addend of its own."""

    of_data_parallel_attention = False

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.reduce_results = True
        self.tp_size = 2
        self.use_dp_attention_reduce, self.use_decode_attn_tp = self.of_data_parallel_attention, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        addend = x * self.factor * (1 + dist_rank())
        return group("tp").all_reduce(addend) if self.reduce_results else addend


def make_layers(count: int, make: Any, prefix: str, **_: Any) -> Any:
    return nn.ModuleList([make(idx=i, prefix=f"{prefix}.{i}") for i in range(count)]), 0, count


#: What the excerpts of models need besides. ``LlamaConfig`` and the like are only named in annotations.
OF_MODELS: dict[str, Any] = {
    "RMSNorm": layernorm.RMSNorm,
    "VocabParallelEmbedding": lambda *_, **__: nn.Identity(),
    "add_prefix": lambda name, prefix: f"{prefix}.{name}",
    "get_pp_group": lambda: SIZES.pp_group,
    "get_pp_indices": lambda layers, *_: (0, layers),
    "make_layers": make_layers,
}


def make_llama() -> ModuleType:
    attention_and_mlp = {"LlamaAttention": Attention, "LlamaMLP": Mlp}
    return excerpt("sglang.srt.models.llama", "LlamaDecoderLayer", "LlamaModel", **OF_MODELS, **attention_and_mlp)


def make_qwen3() -> ModuleType:
    others = {
        "get_exec": lambda: SimpleNamespace(deterministic=SimpleNamespace(rl_on_policy_target=None)),
        "is_dp_attention_enabled": no,
        "get_stream": no,
        **dict.fromkeys(("_is_cuda", "_is_npu"), False),
    }
    of_layers = {"Qwen3Attention": AttentionThatLeavesItsSum, "Qwen3MLP": Mlp}
    of_layers |= {name: getattr(gate, name) for name in ("LayerCommunicator", "LayerScatterModes")}
    base = excerpt("sglang.srt.models.qwen2", "Qwen2Model", Qwen2DecoderLayer=None, **OF_MODELS, **others)
    names = ("Qwen3DecoderLayer", "Qwen3Model")
    return excerpt("sglang.srt.models.qwen3", *names, Qwen2Model=base.Qwen2Model, **OF_MODELS, **others, **of_layers)


_LLAMA_BODY = source_of("sglang.srt.models.llama")[1].body
_LLAMA_MEMBERS = names_in(
    next(node.body for node in _LLAMA_BODY if isinstance(node, ast.ClassDef) and node.name == "LlamaDecoderLayer")
)
#: Whether Llama reduces in its linears: before 0.5.22.
LLAMA_REDUCES = "stage_facts" not in _LLAMA_MEMBERS
if LLAMA_REDUCES:
    llama = make_llama()
else:
    llama = ModuleType("sglang.srt.models.llama")
    llama.LlamaDecoderLayer = type("LlamaDecoderLayer", (), dict.fromkeys(_LLAMA_MEMBERS))  # type: ignore[attr-defined]
    sys.modules["sglang.srt.models.llama"] = llama
if IS_OLD:
    qwen3 = make_qwen3()


# ---- Scenarios ------------------------------------------------------------------------------------------------------


@scenario(smoke=True)
def norms_of_sglang_sum_by_the_fused_kernel() -> None:
    with sglang_groups() as log, server():
        calls = fused_calls()
        assert gate_says(4)
        check_norm(norm(1e-5))
        check_norm(norm(0.1), use_attn_tp_group=False)
        assert calls == [(4, HIDDEN)] * 2
        assert len(log.having("; fused with RMSNorm")) == (dist_rank() == 0)


@scenario(world=4, LLM_COMM_MULTI_NODE="1")
def norms_over_two_nodes_are_fused_with_the_last_phase() -> None:
    os.environ["LLM_COMM_NODE"] = f"node-{dist_rank() // 2}"
    with sglang_groups(tp=4) as log, server():
        calls, everyone = fused_calls(), (0, 1, 2, 3)
        check_norm(norm(1e-5), everyone)
        check_norm(norm(0.1), everyone)
        assert calls == [(4, HIDDEN)] * 2
        assert len(log.having("; fused with RMSNorm")) == (dist_rank() == 0)
        assert ours("tp")._llm_comm.stats().by_operation()["all_reduce_add_rms_norm"].calls == 2


@scenario()
def an_addition_to_the_residual_is_made_before() -> None:
    with sglang_groups(), server():
        calls = fused_calls()
        x, residual = data((4, HIDDEN)), torch.ones(4, HIDDEN, dtype=torch.bfloat16)
        addition = torch.full_like(residual, 2)
        _, new_residual = forward(norm(1e-5), x, residual, addition)
        assert torch.equal(new_residual, expected_sum((4, HIDDEN)) + 3)
        assert len(calls) == 1


@scenario(LLM_COMM_MAX_MESSAGE_BYTES="256")
def what_the_kernel_declines_is_reduced_all_the_same() -> None:
    with sglang_groups(), server():
        calls = fused_calls()
        assert gate_says(4)
        check_norm(norm(1e-5))
        check_norm(gemma_norm(1e-5))
        check_compiled(gemma_norm(1e-5), 4)
        assert not calls
        # Also once llm_comm has left the group.
        ours("tp").leave()
        check_norm(norm(1e-5))
        check_norm(gemma_norm(1e-5))


@scenario()
def norms_that_compute_something_else_are_summed_and_left_to_sglang() -> None:
    with sglang_groups(), server():
        calls = fused_calls()
        for other in (Another(HIDDEN, eps=1e-5), layernorm.RMSNorm(HIDDEN, cast_x_before_out_mul=True)):
            other.weight.data = torch.rand(HIDDEN).bfloat16()
            check_norm(other)
        check_norm(layernorm.RMSNorm(HIDDEN, weight_dtype=torch.float32))
        check_norm(layernorm.GemmaRMSNorm(HIDDEN))  # of fp32
        assert not calls


@scenario(smoke=True)
def compiled_norms_sum_by_the_fused_kernel() -> None:
    with sglang_groups(), server(), torch.no_grad():
        calls = fused_calls()
        for norm_ in (norm(1e-5), gemma_norm(1e-6)):
            check_compiled(norm_, 4, 7)
        assert calls == [(4, HIDDEN), (7, HIDDEN)] * 2


def check_compiled(norm_: Any, *batches: int) -> None:
    def model(x: torch.Tensor, residual: torch.Tensor) -> Any:
        return layernorm._forward_with_allreduce_fusion(norm_, x * 2, residual, None, norm_.weight)

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for rows in batches:
            residual = torch.ones(rows, HIDDEN, dtype=torch.bfloat16)
            got, new_residual = compiled(data((rows, HIDDEN)), residual)
            total = expected_sum((rows, HIDDEN)) * 2
            want, _ = norm_.forward_native(total, residual)
            assert torch.equal(new_residual, total + residual)
            close(got, want)


@scenario(smoke=True)
def norms_of_gemma_sum_by_the_fused_kernel() -> None:
    with sglang_groups(), server():
        calls = fused_calls()
        check_norm(gemma_norm(1e-6))
        assert calls == [(4, HIDDEN)]


@scenario()
def where_attention_sums_in_other_groups_norms_are_left_alone() -> None:
    with sglang_groups(), server():
        assert gate_says(4)
        with mock.patch.object(SIZES, "attn_tp_size", 1):
            assert not gate_says(4)
        with mock.patch("llm_comm.integrations.sglang.fused_norm.is_dp_attention_enabled", return_value=True):
            assert not gate_says(4)


@scenario(smoke=True, applies=IS_OLD)
def an_mlp_leaves_its_sum_to_the_next_layer() -> None:
    """Later versions ask who reads it."""
    assert mlp_leaves_its_sum()


@scenario(applies=IS_OLD)
def with_pipeline_parallelism_an_mlp_sums_itself() -> None:
    """The last layer of a stage is not the last one of the model."""
    with mock.patch.object(SIZES, "pp_size", 2):
        assert not mlp_leaves_its_sum("with pipeline parallelism")


@scenario(applies=IS_OLD)
def with_speculative_decoding_an_mlp_sums_itself() -> None:
    with mock.patch.object(SPECULATION, "speculative_algorithm", "EAGLE3"):
        assert not mlp_leaves_its_sum("with speculative decoding")


@scenario(applies=IS_OLD)
def where_sglang_does_not_an_mlp_sums_itself() -> None:
    with mock.patch.object(MODEL, "architectures", ["Another"]):
        assert not mlp_leaves_its_sum("SGLang does not do so for Another")


@scenario(applies=IS_OLD)
def where_batches_may_be_split_an_mlp_sums_itself() -> None:
    """Two-batch overlap slices what a layer hands over; the parts do not say that their sum is owed."""
    with mock.patch.object(EXPERTS, "moe_a2a_backend", "deepep"):
        assert not mlp_leaves_its_sum("with --moe-a2a-backend deepep")


@scenario(applies=IS_OLD)
def where_features_of_images_are_added_an_mlp_sums_itself() -> None:
    """To its output, on every rank, or not at all where the next layer sums."""
    vision = SimpleNamespace(deepstack_visual_indexes=[8, 16, 24])
    with mock.patch.object(MODEL, "vision_config", vision, create=True):
        assert not mlp_leaves_its_sum("Qwen3MoeForCausalLM adds features of images")


@scenario(applies=IS_OLD)
def where_sglang_leaves_the_sum_of_an_mlp_we_follow() -> None:
    with mock.patch.object(SIZES, "pp_size", 2), mock.patch.dict(vars(gate), flashinfer_applies()):
        assert mlp_leaves_its_sum("with pipeline parallelism")


@scenario()
def another_engine_of_the_process_keeps_its_norms() -> None:
    """One that llm_comm does not serve, with the hooks of the first one still there."""
    with sglang_groups(), server():
        assert gate_says(4)
    os.environ["LLM_COMM_ENABLE"] = "0"
    os.environ["SHARED_DIRECTORY"] = str(shared_directory() / "another")  # groups meet in a file there
    shared_directory().mkdir(exist_ok=True)
    with sglang_groups(), server():
        assert not gate_says(4), "sums would be left to norms that make them in a group that is gone"
        around_norm = sys.modules["llm_comm.integrations.sglang.fused_norm"].around_norm
        tensors = [torch.ones(4, HIDDEN, dtype=torch.bfloat16)] * 2
        assert around_norm(lambda *_: "theirs", norm(1e-5), *tensors, None, tensors[0]) == "theirs"


DETERMINISTIC = {"SGLANG_ENABLE_DETERMINISTIC_INFERENCE": "1", "LLM_COMM_DETERMINISTIC": "1"}


@scenario(**DETERMINISTIC)
def in_deterministic_mode_norms_are_those_of_sglang() -> None:
    before = (layernorm._forward_with_allreduce_fusion, gate_function())
    with sglang_groups() as log, server():
        assert (layernorm._forward_with_allreduce_fusion, gate_function()) == before
        said = "not fused with RMSNorm: deterministic inference is on, and batch_invariant_norm is 'engine'"
        assert len(log.having(said)) == (dist_rank() == 0)


@scenario(smoke=True, applies=LLAMA_REDUCES, LLM_COMM_BATCH_INVARIANT_NORM="llm_comm", **DETERMINISTIC)
def in_deterministic_mode_all_batches_of_llama_can_have_norms_of_llm_comm() -> None:
    unfused = make_model()
    with sglang_groups() as log, server():
        communicator = ours("tp")._llm_comm
        # Without the option a row would be fused, and two would not.
        communicator.use_table(communicator.table._replace(max_fused_bytes=2 * HIDDEN))
        calls, model = fused_calls(), make_model()
        close(run_model(model), run_model(unfused))
        row = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
        alone = run_model(model, row)
        calls.clear()
        for rows in (3, 4096):
            assert torch.equal(run_model(model, row.repeat(rows, 1)), alone.expand(rows, -1)), rows
        assert calls == [(3, HIDDEN)] * 5 + [(4096, HIDDEN)] * 5
        said = "; fused with RMSNorm at every size (batch_invariant_norm); linear layers are SGLang's: batches of more"
        assert len(log.having(said)) == (dist_rank() == 0)


@scenario(applies=LLAMA_REDUCES, LLM_COMM_BATCH_INVARIANT_NORM="llm_comm", **DETERMINISTIC)
def in_deterministic_mode_what_llm_comm_does_not_norm_is_an_error() -> None:
    """SGLang's norm would have other bits."""
    with sglang_groups(), server():
        sum_and_norm = sys.modules["llm_comm.integrations.sglang.fused_norm"].sum_and_norm
        columns = data((HIDDEN, 4)).t()
        normed, _ = sum_and_norm(norm(1e-5), columns, columns, may_overwrite=False)
        again, _ = sum_and_norm(norm(1e-5), columns.contiguous(), columns.contiguous(), may_overwrite=False)
        assert torch.equal(normed, again)
        with pytest.raises(UnsupportedInputError, match=r"residual .*torch\.float32"):
            sum_and_norm(norm(1e-5), columns, columns.float(), may_overwrite=False)


@scenario(applies=LLAMA_REDUCES, LLM_COMM_BATCH_INVARIANT_NORM="llm_comm", **DETERMINISTIC)
def in_deterministic_mode_norms_that_sglang_leaves_sums_to_are_its_own() -> None:
    """It decides so for each batch."""
    with sglang_groups(), server():
        calls = fused_calls()
        assert not gate_says(4)
        around_norm = sys.modules["llm_comm.integrations.sglang.fused_norm"].around_norm
        tensors = [torch.ones(4, HIDDEN, dtype=torch.bfloat16)] * 2
        assert around_norm(lambda *_: "theirs", norm(1e-5), *tensors, None, tensors[0]) == "theirs"
        if IS_OLD:
            model = make_model(qwen3.Qwen3Model)
            assert not any(hasattr(layer, "llm_comm_position") for layer in model.layers)
        assert not calls


@scenario(applies=not LLAMA_REDUCES, LLM_COMM_BATCH_INVARIANT_NORM="llm_comm", **DETERMINISTIC)
def in_deterministic_mode_norms_of_a_newer_sglang_are_its_own() -> None:
    with sglang_groups() as log, server():
        assert not gate_says(4)
        said = "not fused with RMSNorm: this version of SGLang has no model of which llm_comm knows"
        assert len(log.having(said)) == (dist_rank() == 0)


@scenario(LLM_COMM_BATCH_INVARIANT_NORM="llm_comm", LLM_COMM_MAX_MESSAGE_BYTES="1M", **DETERMINISTIC)
def in_deterministic_mode_norms_are_those_of_sglang_where_messages_are_bounded() -> None:
    with sglang_groups() as log, server():
        assert not gate_says(4)
        said = (
            "max_message_bytes is 1048576 (LLM_COMM_MAX_MESSAGE_BYTES), and norms of larger batches would be SGLang's"
        )
        assert len(log.having(said)) == (dist_rank() == 0)


@scenario(LLM_COMM_BATCH_INVARIANT_NORM="llm_comm")
def outside_of_deterministic_mode_large_batches_keep_their_norms() -> None:
    with sglang_groups() as log, server():
        assert ours("tp")._llm_comm.config.batch_invariant_norm == "engine"
        assert gate_says(4)
        assert not log.having("at every size")


@scenario()
def prefills_beside_decodes_sum_in_their_own_group() -> None:
    unfused = make_model() if LLAMA_REDUCES else None
    load_plugins()
    log = Log("sglang")
    with mock.patch("sglang.srt.utils.is_cuda", return_value=True), distributed():
        make_groups(2, 1, 1, 1, pdmux=True)
        with server():
            of_decodes, of_prefills = fused_calls("tp"), fused_calls("pdmux_prefill_tp_group")
            assert not gate_says(4)
            if LLAMA_REDUCES:
                close(run_model(make_model()), run_model(unfused))
            assert not of_decodes
            assert not of_prefills
        assert len(log.having("fused norms are off: --enable-pdmux")) == (dist_rank() == 0)


@scenario()
def one_rank_that_cannot_be_hooked_takes_the_others_along() -> None:
    if dist_rank() == 1:
        del layernorm._forward_with_allreduce_fusion
    unfused = make_model() if LLAMA_REDUCES else None
    with sglang_groups() as log, server():
        assert not gate_says(4)
        said = "not fused with RMSNorm: rank 1 (global rank 1): it cannot be set up in SGLang"
        assert len(log.having(said)) == (dist_rank() == 0)
        if LLAMA_REDUCES:
            calls = fused_calls()
            close(run_model(make_model()), run_model(unfused))
            assert not calls


@scenario(LLM_COMM_FUSE="0")
def a_variable_switches_fusion_off() -> None:
    before = (layernorm._forward_with_allreduce_fusion, gate_function())
    with sglang_groups() as log:
        assert (layernorm._forward_with_allreduce_fusion, gate_function()) == before
        assert len(log.having("not fused with RMSNorm: fuse is false (LLM_COMM_FUSE)")) == (dist_rank() == 0)
        assert torch.equal(group("tp").all_reduce(data((4, HIDDEN))), expected_sum((4, HIDDEN)))


@scenario()
def a_norm_that_cannot_be_hooked_keeps_its_sums() -> None:
    del layernorm._forward_with_allreduce_fusion
    before = gate_function()
    with sglang_groups() as log:
        assert gate_function() is before, "sums would be left to norms that do not make them"
        assert len(log.having("not fused with RMSNorm: it cannot be set up in SGLang")) == (dist_rank() == 0)
        assert torch.equal(group("tp").all_reduce(data((4, HIDDEN))), expected_sum((4, HIDDEN)))


@scenario(smoke=True, applies=LLAMA_REDUCES)
def dense_llama_is_fused() -> None:
    """Where its linears reduce; else it takes the path of the other models."""
    check_dense(llama.LlamaModel, 6, run_model)


@scenario(applies=LLAMA_REDUCES)
def dense_llama_is_fused_in_a_compiled_graph() -> None:
    """Of several layers: the mark on what they hand over is seen by the compiler."""
    unfused = make_model()
    with sglang_groups(), server(), torch.no_grad():
        calls, model = fused_calls(), make_model()
        for captures, fused in (([], 5), ([1], 3)):
            model.layers_to_capture = unfused.layers_to_capture = captures
            torch._dynamo.reset()
            calls.clear()
            compiled = torch.compile(model.forward, fullgraph=True, dynamic=True, backend="aot_eager")
            got = compiled(None, torch.arange(4), None, input_embeds=data((4, HIDDEN), rank=0))
            want = run_model(unfused)
            if captures:
                (got, captured), (want, wanted) = got, want
                close(captured[0], wanted[0])
            close(got, want)
            assert calls == [(4, HIDDEN)] * fused, calls


@scenario(applies=LLAMA_REDUCES)
def linears_of_llama_that_sum_elsewhere_are_left_alone() -> None:
    with sglang_groups() as log, server():
        calls = fused_calls()
        with mock.patch.object(RowParallelLinear, "of_data_parallel_attention", True):
            model = make_model()
        assert not any(hasattr(layer, "llm_comm_position") for layer in model.layers)
        run_model(model)
        assert not calls
        assert len(log.having("norms of LlamaModel are not fused: its linears sum in another")) == (dist_rank() == 0)


@scenario(smoke=True, applies=IS_OLD)
def dense_qwen3_is_fused() -> None:
    """Its attention leaves the sum to a norm by itself, its MLP does not."""
    check_dense(qwen3.Qwen3Model, 3, run_unfused)


@scenario(applies=IS_OLD)
def dense_qwen3_is_fused_in_a_compiled_graph() -> None:
    unfused = make_model(qwen3.Qwen3Model)
    with sglang_groups(), server(), torch.no_grad():
        calls, model = fused_calls(), make_model(qwen3.Qwen3Model)
        compiled = torch.compile(model.forward, fullgraph=True, dynamic=True, backend="aot_eager")
        got = compiled(None, torch.arange(4), None, input_embeds=data((4, HIDDEN), rank=0))
        close(got, run_unfused(unfused))
        assert calls == [(4, HIDDEN)] * 5, calls


@scenario(applies=IS_OLD, LLM_COMM_MAX_MESSAGE_BYTES="256")
def dense_qwen3_is_reduced_where_the_kernel_declines() -> None:
    check_dense_where_declined(qwen3.Qwen3Model, run_unfused)


@scenario(applies=IS_OLD)
def models_derived_from_qwen3_keep_the_sums_of_their_mlps() -> None:
    """That of Qwen3-VL adds features of images between layers."""
    derived = type("Qwen3LLMModel", (qwen3.Qwen3Model,), {})
    with sglang_groups(), server():
        model = make_model(derived)
        assert not any(hasattr(layer, "llm_comm_position") for layer in model.layers)
        assert all(layer.mlp.down_proj.reduce_results for layer in model.layers)


@scenario(applies=IS_OLD)
def mlps_of_qwen3_that_sum_elsewhere_are_left_alone() -> None:
    """With --moe-dense-tp-size 1 an MLP is not split, and what it makes is gathered behind it."""
    with sglang_groups() as log, server(), mock.patch.object(SIZES, "moe_dense_tp_size", 1):
        model = make_model(qwen3.Qwen3Model)
        assert not any(hasattr(layer, "llm_comm_position") for layer in model.layers)
        assert len(log.having("norms of Qwen3Model are not fused: its linears sum in another")) == (dist_rank() == 0)


@scenario(applies=IS_OLD and importlib.util.find_spec("sglang.srt.layers.layernorm_sp") is not None)
def qwen3_with_sequence_parallelism_keeps_the_sums_of_its_mlps() -> None:
    """They are scattered in prefills (``--enable-layernorm-sp``)."""
    is_on = mock.patch.object(SEQUENCE_PARALLELISM, "layernorm_sp_enabled", return_value=True)
    with sglang_groups(), server(), is_on:
        model = make_model(qwen3.Qwen3Model)
        assert not any(hasattr(layer, "llm_comm_position") for layer in model.layers)


@scenario(LLM_COMM_MAX_MESSAGE_BYTES="256")
def a_residual_that_nobody_else_reads_is_not_copied() -> None:
    with speculation_is_known(None), sglang_groups(), server():
        assert residual_that_a_norm_gets() == "as it is"


@scenario(LLM_COMM_MAX_MESSAGE_BYTES="256")
def a_residual_that_a_draft_model_may_read_is_copied() -> None:
    with speculation_is_known("EAGLE3"), sglang_groups(), server():
        assert residual_that_a_norm_gets() == "copied"


@scenario(applies=LLAMA_REDUCES, LLM_COMM_MAX_MESSAGE_BYTES="256")
def dense_llama_is_reduced_where_the_kernel_declines() -> None:
    check_dense_where_declined(llama.LlamaModel, run_model)


@scenario(applies=LLAMA_REDUCES, LLM_COMM_MAX_MESSAGE_BYTES="256")
def norms_that_quantize_for_a_linear_are_told_of_it() -> None:
    """Those of 0.5.18 to 0.5.21; here the norm of 0.5.17 with their signature."""
    given: list[Any] = []

    def forward(norm_: Any, *tensors: Any, quant_linear: Any = None) -> Any:
        given.append(quant_linear)
        return norm_.forward_native(*tensors)

    unfused = make_model()
    patches = dict.fromkeys(("forward", "forward_cuda"), forward)
    with mock.patch.multiple(layernorm.RMSNorm, **patches), sglang_groups(), server():
        model = make_model()
        close(run_model(model), run_model(unfused))
        linears = [linear for layer in model.layers for linear in (layer.self_attn.qkv_proj, layer.mlp.gate_up_proj)]
        assert given[: len(linears)] == linears


# ---- What they are made of ------------------------------------------------------------------------------------------


def norm(epsilon: float) -> Any:
    torch.manual_seed(0)
    made = layernorm.RMSNorm(HIDDEN, eps=epsilon, weight_dtype=torch.bfloat16)
    made.weight.data.uniform_(0.5, 1.5)
    return made


def gemma_norm(epsilon: float) -> Any:
    torch.manual_seed(0)
    made = layernorm.GemmaRMSNorm(HIDDEN, eps=epsilon)
    made.weight.data = torch.empty(HIDDEN).uniform_(-0.5, 0.5).bfloat16()
    return made


def forward(module: Any, x: torch.Tensor, residual: torch.Tensor, addition: Any = None, **options: Any) -> Any:
    with torch.no_grad():
        return layernorm._forward_with_allreduce_fusion(module, x, residual, addition, module.weight, **options)


def check_norm(module: Any, ranks: tuple[int, ...] = (0, 1), **options: Any) -> None:
    total = expected_sum((4, HIDDEN), ranks)
    x, residual = data((4, HIDDEN)), torch.ones(4, HIDDEN, dtype=torch.bfloat16)
    normed, new_residual = forward(module, x, residual, **options)
    assert torch.equal(residual, torch.ones_like(residual)), "the residual was changed"
    assert torch.equal(new_residual, total + 1), "not reduced"
    want, _ = module(total, torch.ones_like(residual), None)
    close(normed, want)


def check_dense(model_type: Any, linears: int, run_reference: Callable[[Any], Any]) -> None:
    """A model of three layers is fused, and computes what ``run_reference`` makes of one that was made before."""
    unfused = make_model(model_type)  # before anything is hooked
    with sglang_groups() as log, server():
        calls, model = fused_calls(), make_model(model_type)
        close(run_model(model), run_reference(unfused))
        assert calls == [(4, HIDDEN)] * 5, calls  # of 6: the last sum is of no layer's norm
        said = f"llm_comm: {linears} of the linears of {model_type.__name__} leave their sums"
        assert len(log.having(said)) == (dist_rank() == 0)
        assert len(log.having("llm_comm: first all-reduce fused with its RMSNorm")) == (dist_rank() == 0)
        assert not log.having("sums of MLPs and experts are not fused")
        calls.clear()
        # Someone else reads what lies between the layers.
        model.layers_to_capture = unfused.layers_to_capture = [1]
        (got, captured), (want, wanted) = run_model(model), run_reference(unfused)
        close(got, want)
        close(captured[0], wanted[0])
        assert len(calls) == 3


def check_dense_where_declined(model_type: Any, run_reference: Callable[[Any], Any]) -> None:
    unfused = make_model(model_type)
    with sglang_groups(), server():
        calls = fused_calls()
        close(run_model(make_model(model_type)), run_reference(unfused))
        assert not calls


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.float(), want.float(), rtol=0.02, atol=0.02)


def gate_function() -> Any:
    return getattr(gate, GATE)


def gate_says(batch_size: int) -> bool:
    return bool(gate_function()(batch_size))


def mlp_leaves_its_sum(why_not: str = "") -> bool:
    """What a layer of SGLang's is told, and that the log says ``why_not``."""
    batch = SimpleNamespace(input_ids=torch.zeros(4))
    modes = gate.LayerScatterModes.init_new(
        num_layers=3, layer_id=1, is_layer_sparse=True, is_previous_layer_sparse=True, is_next_layer_sparse=True
    )
    with speculation_is_known(SPECULATION.speculative_algorithm), sglang_groups() as log, server():
        leaves = gate.LayerCommunicator(modes, None, None).should_fuse_mlp_allreduce_with_next_layer(batch)
        last = gate.LayerCommunicator(modes, None, None, is_last_layer=True)
        assert not last.should_fuse_mlp_allreduce_with_next_layer(batch)
        assert gate_says(4), "the sum of an attention has one reader"
        said = log.having("sums of MLPs and experts are not fused with the next layer's norm: " + why_not)
        assert len(said) == (bool(why_not) and dist_rank() == 0), said
        return bool(leaves)


def flashinfer_applies() -> dict[str, Any]:
    comm = SimpleNamespace(flashinfer_allreduce_fusion_backend="auto")
    return {
        "_is_sm90_supported": True,
        "_is_flashinfer_available": True,
        "is_flashinfer_allreduce_unavailable": no,
        "get_exec": lambda: SimpleNamespace(comm=comm),
        "FUSE_ALLREDUCE_MAX_BATCH_SIZE": 2048,
    }


@contextmanager
def speculation_is_known(algorithm: str | None) -> Iterator[None]:
    """As in a server, which has published its options."""
    spec, arguments = SimpleNamespace(speculative_algorithm=algorithm), mock.Mock()
    arguments.get_model_config.return_value.hf_config = MODEL
    with (
        mock.patch("llm_comm.integrations.sglang.fusion.get_spec", return_value=spec),
        mock.patch("llm_comm.integrations.sglang.fusion.get_server_args", return_value=arguments),
        mock.patch("llm_comm.integrations.sglang.fusion.get_exec", return_value=SimpleNamespace(moe=EXPERTS)),
    ):
        yield


def residual_that_a_norm_gets() -> str:
    """Where llm_comm declines and SGLang's norm, which may write it, takes over."""
    norm_ = norm(1e-5)
    residual = torch.ones(4, HIDDEN, dtype=torch.bfloat16)
    places = []
    original = norm_.forward
    norm_.forward = lambda x, residual, _: places.append(residual.data_ptr()) or original(x, residual, None)
    _, new_residual = forward(norm_, data((4, HIDDEN)), residual)
    assert torch.equal(new_residual, expected_sum((4, HIDDEN)) + 1), "not reduced"
    return "as it is" if places == [residual.data_ptr()] else "copied"


def make_model(model_type: Any = None) -> Any:
    """Of Llama unless told otherwise."""
    config = SimpleNamespace(pad_token_id=0, vocab_size=8, hidden_size=HIDDEN, num_hidden_layers=3, rms_norm_eps=1e-5)
    config.num_attention_heads = config.num_key_value_heads = 1
    config.intermediate_size, config.hidden_act, config.attention_bias = HIDDEN, "silu", False
    model = (model_type or llama.LlamaModel)(config)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.rand(parameter.shape).add(0.5).bfloat16()
    return model


def without_data_parallelism() -> bool:  # a mock cannot be compiled
    return False


@contextmanager
def server() -> Iterator[None]:
    """The options of a server with these groups, as the hooks see them."""
    with (
        mock.patch("llm_comm.integrations.sglang.fusion.get_parallel", parallel),
        mock.patch("llm_comm.integrations.sglang.fused_norm.get_parallel", parallel),
        mock.patch("llm_comm.integrations.sglang.fused_norm.is_dp_attention_enabled", without_data_parallelism),
    ):
        yield


def run_model(model: Any, rows: torch.Tensor | None = None) -> Any:
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode_or_idle=lambda: True))
    rows = data((4, HIDDEN), rank=0) if rows is None else rows
    with torch.no_grad():
        return model(None, torch.arange(len(rows)), batch, input_embeds=rows)


def run_unfused(model: Any) -> Any:
    """The same with the hooks idle, of a model that was made before they were set."""
    with mock.patch("llm_comm.integrations.sglang.fused_norm.State.is_active", False):
        return run_model(model)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)  # as SGLang does
    serve(globals(), "sglang_scheduler_{}")
