"""Whole models over SGLang's ``layer_boundary``, since 0.5.21: run by ``test_sglang_boundary.py``.

The package ``layer_boundary`` is SGLang's own, and so are ``LlamaModel``, its layers and its norms, as excerpts.
What decides there which sums are left to which norms is what decides in a server. Of what the package imports, modules
that need Triton or all models are stood in for by names: none of their functions has work to do here, and their answers
are no. Attention and MLP are multiplications by a number that differs from rank to rank. Groups and the registry of
hooks are SGLang's own, as in ``scenarios.py``.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import logging
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from rank_processes import data, dist_rank, scenario, serve
from scenarios import fused_calls, group, ours, parallel_state, sglang_groups
from sglang.srt import runtime_context
from torch import nn

HIDDEN = 64
LAYERS = 3
TOKENS = 4
_SOURCES = Path(parallel_state.__file__).parents[1]


# ---- What stands in -------------------------------------------------------------------------------------------------


class _Name(type):
    """A class by a name that is only imported, or asked: its answer is no."""

    def __call__(cls, *_: Any, **__: Any) -> Any:
        return None


def names_only(module: str, **attributes: Any) -> ModuleType:
    """Puts a module in place of which any name can be imported."""
    made = ModuleType(module)
    made.__path__ = []

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})

    vars(made).update({"__getattr__": __getattr__, **attributes})
    sys.modules[module] = made
    parent, _, name = module.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], name, made)
    return made


def excerpt(module: str, *names: str, **others: Any) -> ModuleType:
    """Puts a module in place that holds ``names`` as in the wheel, and ``others``."""
    path = _SOURCES.joinpath(*module.split(".")[2:]).with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    assert {getattr(node, "name", "") for node in tree.body} == set(names), f"{module} has changed"
    types = {name: getattr(typing, name) for name in ("Any", "Callable", "List", "Optional", "Tuple", "Union")}
    of_context = {
        name: getattr(runtime_context, name) for name in ("get_parallel", "get_exec", "get_lora", "get_forward")
    }
    made = names_only(module, torch=torch, nn=nn, **types, **of_context, **others)
    # Annotations name what is not there.
    exec(compile(tree, str(path), "exec", __future__.annotations.compiler_flag), made.__dict__)
    return made


class Context:
    """What a server with tensor parallelism alone publishes, in front of SGLang's own."""

    def __init__(self, theirs: Any, **ours: Any) -> None:
        self._theirs = theirs
        vars(self).update(ours)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)


class Options:
    """Of a server: what is not given is off."""

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)

    def __getattr__(self, name: str) -> bool:
        return False


class Norm(nn.Module):
    """The base of SGLang's norms, which chooses by platform."""

    def forward(self, *arguments: Any, **_: Any) -> Any:
        return self.forward_native(*arguments)  # type: ignore[operator]

    def fuse_input_quant(self, _: Any) -> None:
        pass


importlib.import_module("sglang.srt.server_args")  # reads some of these modules
for name in (
    "sglang.kernels.ops.layernorm.mhc",
    "sglang.srt.layers.attention",
    "sglang.srt.layers.attention.dsa",
    "sglang.srt.layers.attention.dsa.utils",
    "sglang.srt.layers.attn_residual",
    "sglang.srt.layers.cp",
    "sglang.srt.layers.cp.interleave",
    "sglang.srt.layers.cp.utils",
    "sglang.srt.layers.quantization",
    "sglang.srt.layers.quantization.fp8_utils",
    "sglang.srt.layers.quantization.mxfp4_flashinfer_trtllm_moe",
    "sglang.srt.model_executor.cuda_graph_config",
    "sglang.srt.model_executor.forward_batch_info",
    "sglang.srt.model_executor.runner_backend_utils",
    "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph",
):
    names_only(name)
ALGORITHM = SimpleNamespace(from_string=lambda _: Algorithm())
EXCHANGE = SimpleNamespace(**dict.fromkeys(("is_flashinfer", "is_pplx", "is_flashinfer_megamoe"), lambda: False))
EXCHANGE.is_none = lambda: True


class Algorithm:
    """No speculation."""

    def __getattr__(self, name: str) -> Callable[[], bool]:
        return lambda: name == "is_none"


names_only("sglang.srt.speculative.spec_info", SpeculativeAlgorithm=ALGORITHM)
names_only(
    "sglang.srt.layers.flashinfer_comm_fusion",
    flashinfer_allreduce_residual_rmsnorm=lambda **_: (None, None),
    is_flashinfer_allreduce_unavailable=lambda: True,
    uses_cutedsl_ar_fusion=lambda: False,
)
moe_utils = excerpt(
    "sglang.srt.layers.moe.utils",
    "can_merge_post_experts_all_reduce",
    "deferred_post_experts_all_reduce",
    "post_experts_output_is_complete",
    "post_experts_reduction_group",
    "post_experts_sum_is_one_all_reduce",
    get_moe_a2a_backend=lambda: EXCHANGE,
    should_use_flashinfer_cutlass_moe_fp4_allgather=lambda: False,
    envs=importlib.import_module("sglang.srt.environ").envs,
)
names_only("sglang.srt.layers.moe", **{name: each for name, each in vars(moe_utils).items() if name[:2] != "__"})
sys.modules["sglang.srt.layers.moe.utils"] = moe_utils
layernorm = excerpt(
    "sglang.srt.layers.layernorm",
    "RMSNorm",
    "GemmaRMSNorm",
    "_forward_with_allreduce_fusion",
    _use_aiter=False,
    **dict.fromkeys(("MultiPlatformOp", "BaseFusedOp"), Norm),
)
layer_boundary = importlib.import_module("sglang.srt.layers.layer_boundary")
add_norm = importlib.import_module("sglang.srt.layers.layer_boundary.residual.add_norm")


# ---- The model ------------------------------------------------------------------------------------------------------


class Addend(nn.Module):
    """Stands for an attention or an MLP: each rank has an addend of its own, and the sum is owed, or made here."""

    factor = 0.5

    def __init__(self, *_: Any, reduce_results: bool = True, **__: Any) -> None:
        super().__init__()
        self.reduce_results = reduce_results
        self.qkv_proj = self.gate_up_proj = nn.Identity()

    def forward(self, x: Any = None, hidden_states: Any = None, **_: Any) -> torch.Tensor:
        x = hidden_states if x is None else x
        addend = x * self.factor * (1 + dist_rank())
        return group("tp").all_reduce(addend) if self.reduce_results else addend


class Mlp(Addend):
    factor = 0.25


def make_pp_layers(count: int, make: Any, prefix: str, **_: Any) -> Any:
    """As SGLang's, which also wraps the layers for weights that lie in the host's memory."""
    with layer_boundary.layer_stack():
        return nn.ModuleList([make(idx=i, prefix=f"{prefix}.{i}") for i in range(count)]), 0, count


llama = excerpt(
    "sglang.srt.models.llama",
    "LlamaDecoderLayer",
    "LlamaModel",
    LlamaAttention=Addend,
    LlamaMLP=Mlp,
    RMSNorm=layernorm.RMSNorm,
    VocabParallelEmbedding=lambda *_, **__: nn.Identity(),
    add_prefix=lambda name, prefix: f"{prefix}.{name}",
    get_pp_indices=lambda layers, *_: (0, layers),
    make_pp_layers=make_pp_layers,
    resolve_linear_parallel_group=lambda _: (0, 2),
    residual_batch=importlib.import_module("sglang.srt.layers.layer_boundary.residual.batch"),
    AuxHiddenStateList=importlib.import_module("sglang.srt.layers.aux_hidden_states").AuxHiddenStateList,
    **{name: getattr(layer_boundary, name) for name in ("append_stages", "declare_attn", "declare_ffn")},
    NORM_QUANT_READOUT=layer_boundary.NORM_QUANT_READOUT,
)


def make_model() -> Any:
    config = SimpleNamespace(pad_token_id=0, vocab_size=8, hidden_size=HIDDEN, num_hidden_layers=LAYERS)
    config.num_attention_heads = config.num_key_value_heads = 1
    config.intermediate_size, config.hidden_act, config.rms_norm_eps = HIDDEN, "silu", 1e-5
    model = llama.LlamaModel(config)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.rand(parameter.shape).add(0.5).bfloat16()
    return model


def run_model(model: Any, tokens: int = TOKENS) -> Any:
    modes = SimpleNamespace(
        **dict.fromkeys(("is_context_parallel_extend", "is_extend", "is_decode_or_idle"), lambda: False)
    )
    batch = SimpleNamespace(input_ids=torch.arange(tokens), forward_mode=modes, residual_stream=None)
    with torch.no_grad():
        return model(batch.input_ids, None, batch, input_embeds=data((tokens, HIDDEN), rank=0))


def expected(model: Any, tokens: int = TOKENS, captured: int | None = None) -> Any:
    """The same in plain torch, with every sum made at once."""
    factors = [Addend.factor, Mlp.factor]
    hidden, residual = data((tokens, HIDDEN), rank=0), None
    taken = None
    for number, layer in enumerate(model.layers):
        for norm, factor in zip((layer.input_layernorm, layer.post_attention_layernorm), factors, strict=True):
            residual = hidden if residual is None else (hidden.float() + residual.float()).bfloat16()
            if number == captured and factor == factors[0]:
                taken = residual
            normed = plain_norm(norm, residual)
            addends = [normed * factor * (1 + rank) for rank in range(2)]
            hidden = (addends[0].float() + addends[1].float()).bfloat16()
    residual = (hidden.float() + residual.float()).bfloat16()
    result = plain_norm(model.norm, residual)
    return result if captured is None else (result, taken)


def plain_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    values = x.float()
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return (values * norm.weight.float()).bfloat16()


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.float(), want.float(), rtol=0.03, atol=0.03)


@contextmanager
def server(reduction: str = "rs+rsv", speculation: str | None = None) -> Iterator[None]:
    """The options of a server with these groups, and what it makes of ``--boundary-reduction``."""
    tp = group("tp")
    sizes = {
        **dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), 2),
        **dict.fromkeys(("attn_dp_size", "attn_cp_size", "moe_ep_size", "moe_dp_size", "pp_size", "dwdp_size"), 1),
        **dict.fromkeys(("tp_rank", "attn_tp_rank", "moe_tp_rank"), dist_rank()),
        **dict.fromkeys(("attn_dp_rank", "attn_cp_rank", "pp_rank"), 0),
        **dict.fromkeys(("tp_group", "attn_tp_group", "moe_tp_group"), tp),
        **dict.fromkeys(("attn_dp_enabled", "disable_attn_tp_gather", "enable_prefill_cp"), False),
        **dict.fromkeys(("enable_attn_tp_input_scattered", "enable_cp_tp_group_sharing"), False),
        "moe_dense_tp_size": None,
        "pp_group": SimpleNamespace(is_first_rank=True, is_last_rank=True, rank_in_group=0, world_size=1),
    }
    comm = Options(flashinfer_allreduce_fusion_backend=None, boundary_reduction=reduction)
    spec = Options(speculative_algorithm=speculation)
    bags = {"exec": Options(comm=comm, overlap=Options()), "spec": spec, "lora": Options()}
    theirs = runtime_context._CONTEXT
    context = Context(theirs, config_bag=lambda name: bags[name] if name in bags else theirs.config_bag(name))
    with (
        mock.patch.object(runtime_context, "_PARALLEL", Context(runtime_context._PARALLEL, **sizes)),
        mock.patch.object(runtime_context, "_CONTEXT", context),
    ):
        yield


# ---- Scenarios ------------------------------------------------------------------------------------------------------


@scenario()
def a_model_is_fused() -> None:
    """Sums of attentions and of MLPs are left to norms, all but the last one, which is of no layer's norm."""
    with sglang_groups() as log, server():
        calls, model = fused_calls(), make_model()
        close(run_model(model), expected(model))
        assert calls == [(TOKENS, HIDDEN)] * (2 * LAYERS - 1), calls
        assert len(log.having("llm_comm: first all-reduce fused with its RMSNorm")) == (dist_rank() == 0)
        assert len(log.having("; fused with RMSNorm")) == (dist_rank() == 0)


@scenario()
def models_that_reduce_and_do_not_scatter_are_fused_alike() -> None:
    with sglang_groups(), server("ar"):
        calls, model = fused_calls(), make_model()
        close(run_model(model), expected(model))
        assert calls == [(TOKENS, HIDDEN)] * (2 * LAYERS - 1), calls


@scenario()
def batches_follow_each_other() -> None:
    """Of other sizes, too: what a batch owes is not kept with the layers."""
    with sglang_groups(), server():
        calls, model = fused_calls(), make_model()
        for tokens in (1, 7, TOKENS):
            close(run_model(model, tokens), expected(model, tokens))
        assert len(calls) == 3 * (2 * LAYERS - 1)


@scenario()
def what_a_draft_model_reads_between_layers_is_right() -> None:
    with sglang_groups(), server(speculation="EAGLE3"):
        calls, model = fused_calls(), make_model()
        model.layers_to_capture = [1]
        got, captured = run_model(model)
        want, wanted = expected(model, captured=1)
        close(got, want)
        close(captured[0], wanted)
        assert calls, "norms are fused all the same"


@scenario(LLM_COMM_MAX_MESSAGE_BYTES="256")
def what_the_kernel_declines_is_reduced_all_the_same() -> None:
    with sglang_groups(), server():
        calls, model = fused_calls(), make_model()
        close(run_model(model), expected(model))
        assert not calls


@scenario(LLM_COMM_FUSE="0")
def without_fusion_layers_make_their_sums() -> None:
    with sglang_groups(), server():
        calls, model = fused_calls(), make_model()
        close(run_model(model), expected(model))
        assert not calls


@scenario()
def a_group_that_is_left_is_summed_by_sglang() -> None:
    with sglang_groups(), server():
        calls, model = fused_calls(), make_model()
        ours("tp").leave()
        close(run_model(model), expected(model))
        assert not calls


@scenario()
def the_gate_that_llm_comm_hooks_is_the_one_that_layers_ask() -> None:
    """``fusions/allreduce.py`` imports it by name, so the hook has to reach that name too."""
    allreduce = importlib.import_module("sglang.srt.layers.layer_boundary.fusions.allreduce")
    with sglang_groups(), server():
        for module in (add_norm, allreduce):
            assert module.flashinfer_ar_fusion_applies(TOKENS)
            assert not module.flashinfer_ar_fusion_applies(0)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)  # as SGLang does
    serve(globals(), "sglang_scheduler_{}")
