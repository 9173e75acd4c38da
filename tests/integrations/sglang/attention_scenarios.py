"""SGLang's attention layers by llm_comm: run by ``test_sglang_attention.py``, as ``scenarios.py`` is by its test.

Attention layers, RoPE, pool of the KV cache and the backend of FlashInfer are excerpts, as in ``fusion_scenarios.py``.
The kernels are made here: attention reads the cache as FlashInfer's wrapper does. Each result of llm_comm is compared
with that of SGLang's own forward, which uses a second pool with the same content.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fusion_scenarios import excerpt, layernorm, names_in, no, source_of
from linear_scenarios import check_untouched, fill, generator, layer_calls, linear, not_on_policy, numbers, served
from lost_seams import lose
from rank_processes import Log, dist_rank, scenario, serve
from scenarios import ours
from sglang.srt.environ import envs
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import nn

from llm_comm import _core
from llm_comm.communicator import Communicator
from llm_comm.integrations.sglang import seams

HIDDEN, HEAD, HEADS, KV_HEADS = 256, 64, 4, 2  # of both ranks together
LAYER, FIRST_LAYER = 5, 4
SLOTS, HISTORY = 100, 3
MOST = _core.rope_max_tokens
QKV_SHAPE = ((HEADS + 2 * KV_HEADS) // 2 * HEAD, HIDDEN)

# ---- Excerpts -------------------------------------------------------------------------------------------------------


class Operator(nn.Module):
    """The base of SGLang's operators, which chooses by platform."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)  # type: ignore[operator]


def make_rotary() -> ModuleType:
    platforms = ("_is_hip", "_is_xpu", "_is_npu", "_is_musa", "_is_mps", "_is_cpu", "_is_cpu_amx_available")
    package = ModuleType("sglang.srt.layers.rotary_embedding")
    package.__path__ = []
    sys.modules[package.__name__] = package
    utils = excerpt(f"{package.__name__}.utils", "apply_rotary_emb")
    others = {
        "apply_rotary_emb": utils.apply_rotary_emb,
        "publish_role": no,  # since 0.5.21
        "envs": envs,
        "get_exec": not_on_policy,
        "current_platform": SimpleNamespace(is_out_of_tree=no),
        "_is_cuda": True,
        **dict.fromkeys(platforms, False),
        **dict.fromkeys(("MultiPlatformOp", "BaseFusedOp"), Operator),  # the latter since 0.5.18
    }
    base = excerpt(f"{package.__name__}.base", "RotaryEmbedding", **others)
    others |= {"RotaryEmbedding": base.RotaryEmbedding, "math": importlib.import_module("math")}
    excerpt(f"{package.__name__}.rope_variant", "Llama3RotaryEmbedding", **others)
    excerpt(f"{package.__name__}.mrope", "MRotaryEmbedding", **others, Dict=dict, List=list)
    return package


def make_radix_attention() -> ModuleType:
    attention_type = SimpleNamespace(DECODER="decoder")
    contexts = ("get_tc_piecewise_forward_context", "is_in_breakable_cuda_graph", "is_in_full_prefill_graph")
    return excerpt(
        "sglang.srt.layers.radix_attention",
        "RadixAttention",
        AttentionType=attention_type,
        get_attn_backend=importlib.import_module("sglang.srt.model_executor.forward_context").get_attn_backend,
        eager_on_graph=lambda function: function,
        **dict.fromkeys((*contexts, "is_in_prefill_graph_scope", "padded_extend_real_tokens"), no),
    )


def make_pool() -> ModuleType:
    sys.modules["sglang.srt.model_executor.runner"] = ModuleType("sglang.srt.model_executor.runner")
    sys.modules["sglang.srt.model_executor.runner"].get_is_capture_mode = no  # type: ignore[attr-defined]
    module = "sglang.srt.mem_cache.memory_pool"
    names = {"KVWriteLoc", "unwrap_write_loc", "write_loc_is_physical", "_set_kv_buffer_impl"}
    return excerpt(
        module,
        "KVCache",
        "MHATokenToKVPool",
        *(names & names_in(source_of(module)[1].body)),  # the third since 0.5.22
        abc=abc,
        dataclass=dataclasses.dataclass,
        UnquantizedKVCacheMethod=type("UnquantizedKVCacheMethod", (), {}),
        **dict.fromkeys(("maybe_detect_oob", "maybe_detect_kernel_facing_loc"), no),
        **dict.fromkeys(("_is_cuda", "_is_hip", "_is_cpu", "_is_xpu", "_is_npu"), False),
    )


def make_backend() -> Any:
    package = "sglang.srt.layers.attention"
    others = {"ABC": abc.ABC, "abstractmethod": abc.abstractmethod, "is_npu": no, "debug_kernel_api": lambda f: f}
    base = excerpt(f"{package}.base_attn_backend", "AttentionBackend", **others)
    return excerpt(
        f"{package}.flashinfer_backend",
        "FlashInferAttnBackend",
        AttentionBackend=base.AttentionBackend,
        KVWriteLoc=pools.KVWriteLoc,
        **others,
    ).FlashInferAttnBackend


def make_utils() -> ModuleType:
    of_server = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=None))
    return excerpt(
        "sglang.srt.models.utils",
        "apply_qk_norm",
        "_reshape_for_qk_norm",
        envs=envs,
        get_exec=lambda: of_server,
        get_is_capture_mode=no,
        can_use_fused_qk_norm_cpu=no,  # since 0.5.20
        _is_cuda=False,
    )


rotary, radix, pools = make_rotary(), make_radix_attention(), make_pool()
Backend, utils = make_backend(), make_utils()
modes = excerpt(
    "sglang.srt.model_executor.forward_batch_info", "ForwardMode", IntEnum=enum.IntEnum, auto=enum.auto
).ForwardMode
EXEC = SimpleNamespace(
    deterministic=SimpleNamespace(rl_on_policy_target=None), kernel=SimpleNamespace(enable_fused_qk_norm_rope=False)
)
ROPE: dict[str, Any] = {}  # how the next layers rotate


def get_rope(head_dim: int, rotary_dim: int, max_position: int, base: float, **others: Any) -> Any:
    arguments = (head_dim, rotary_dim, 64, base, ROPE.get("is_neox_style", True), torch.get_default_dtype())
    if ROPE.get("llama3"):
        return rotary.rope_variant.Llama3RotaryEmbedding(*arguments, 8.0, 1.0, 4.0, 32)
    if ROPE.get("mrope"):
        return rotary.mrope.MRotaryEmbedding(*arguments, mrope_section=[16, 8, 8])
    return rotary.base.RotaryEmbedding(*arguments)


def make_attention(symbol: str) -> Any:
    """An attention layer, beside what other files have of its module."""
    module, name = symbol.split(":")
    others = {key: value for key, value in vars(sys.modules.get(module, object)).items() if not key.startswith("__")}
    others |= {each: getattr(linear, each) for each in ("QKVParallelLinear", "RowParallelLinear")}
    others |= {
        "RadixAttention": radix.RadixAttention,
        "MRotaryEmbedding": rotary.mrope.MRotaryEmbedding,
        "RotaryEmbedding": rotary.base.RotaryEmbedding,
        "RMSNorm": layernorm.RMSNorm,
        "apply_qk_norm": utils.apply_qk_norm,
        "get_rope": get_rope,
        "get_exec": lambda: EXEC,
        "add_prefix": lambda name, prefix: f"{prefix}.{name}",
        "compute_yarn_parameters": lambda _: (1.0, 0, 0, 1.0),
        **dict.fromkeys(("can_use_fused_qk_norm_rope", "enable_fused_set_kv_buffer"), no),
        **dict.fromkeys(("_is_npu", "_is_cuda", "_is_cpu", "_is_xpu"), False),
        **dict.fromkeys(("_has_fused_qk_norm_mrope", "_has_fused_qk_norm_rope"), False),
    }
    return getattr(excerpt(module, name, **others), name)


LLAMA, MIXTRAL, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE = KINDS = tuple(map(make_attention, seams.ATTENTIONS))
#: Arguments of their constructors besides sizes.
OPTIONS: dict[Any, dict[str, Any]] = {
    LLAMA: {"config": SimpleNamespace(head_dim=HEAD)},
    QWEN3: {"head_dim": HEAD, "rms_norm_eps": 1e-6},
    QWEN3_MOE: {"head_dim": HEAD, "rms_norm_eps": 1e-5},
}


class Wrapper:
    """FlashInfer's decode attention: token t reads the slots of its history and its own.

    Attributes:
        slots: Of each token.
    """

    def __init__(self, slots: torch.Tensor) -> None:
        self.slots = slots

    def forward(self, q: torch.Tensor, caches: Any, sm_scale: float, **_: Any) -> torch.Tensor:
        keys, values = (cache[self.slots].double() for cache in caches)  # [tokens, slots, heads, head]
        groups = q.shape[1] // keys.shape[2]
        keys, values = (each.repeat_interleave(groups, 2) for each in (keys, values))
        scores = torch.einsum("thd,tshd->ths", q.double(), keys) * sm_scale
        return torch.einsum("ths,tshd->thd", scores.softmax(-1), values).to(q.dtype)


# ---- Scenarios ------------------------------------------------------------------------------------------------------


@scenario(smoke=True, LLM_COMM_FUSE_LINEAR="1")
def attention_layers_are_computed_by_llm_comm_up_to_their_backend() -> None:
    with attended() as (log, calls):
        for kind in KINDS:
            layer = attention(kind)
            for tokens in (1, MOST // 2 + 1, MOST):
                check(layer, tokens)
            assert calls == [1, MOST // 2 + 1, MOST], (kind, calls)
            once = AssertionError("k and v are written again")
            with mock.patch.object(pools.MHATokenToKVPool, "set_kv_buffer", side_effect=once):
                run(layer, 4)
            calls.clear()
        check(attention(QWEN3, torch.float16), 4)
        assert calls == [4]
        said = f"llm_comm: first qkv with rope and cache write computed by llm_comm (2 ranks, shape (1, {HIDDEN}), "
        assert len(log.having(f"{said}weight {QKV_SHAPE})")) == (dist_rank() == 0), log.having("first qkv")
        assert len(log.having("first qkv")) == (dist_rank() == 0)


@scenario(LLM_COMM_FUSE_LINEAR="1")
def each_form_of_rope_and_bias_is_served() -> None:
    with attended() as (_, calls):
        for rope in ({"is_neox_style": False}, {"llama3": True}):
            with mock.patch.dict(ROPE, rope):
                layer = attention(LLAMA, bias=True)
            assert layer.qkv_proj.bias is not None
            check(layer, 4)
        with mock.patch.object(OPTIONS[LLAMA]["config"], "partial_rotary_factor", 0.5, create=True):
            check(attention(LLAMA), 4)
        assert calls == [4] * 3


@scenario(LLM_COMM_FUSE_LINEAR="1")
def layers_that_llm_comm_does_not_compute_are_sglangs() -> None:
    with attended() as (_, calls):
        with mock.patch.dict(ROPE, {"mrope": True}):
            check(attention(QWEN3), 4)
        derived = type("Ministral3Attention", (LLAMA,), {})
        OPTIONS[derived] = OPTIONS[LLAMA]
        check(attention(derived), 4)
        check(attention(QWEN2, torch.float32), 4)
        for change in (
            lambda layer: setattr(layer.rotary_emb, "use_fallback_kernel", True),
            lambda layer: setattr(layer.qkv_proj, "quant_method", Quantized(layer.qkv_proj.quant_method)),
            lambda layer: setattr(layer, "qkv_proj", Adapted(layer.qkv_proj)),
            lambda layer: setattr(layer, "use_fused_qk_norm_rope", True),
            lambda layer: setattr(layer.k_norm, "variance_epsilon", 0.1),
            lambda layer: setattr(layer, "q_norm", layernorm.GemmaRMSNorm(HEAD)),
            lambda layer: setattr(layer.q_norm, "cast_x_before_out_mul", True),
            lambda layer: setattr(layer.attn, "is_cross_attention", True),
        ):
            layer = attention(QWEN3)
            change(layer)
            assert rows_of(layer, 4) is None
        from llm_comm.integrations.sglang import attention as hooks  # it imports the excerpts

        on_policy = SimpleNamespace(deterministic=SimpleNamespace(rl_on_policy_target="fsdp"))
        with mock.patch.object(hooks, "get_exec", return_value=on_policy):
            check(attention(QWEN2), 4)
        with mock.patch.object(ours("tp").communicator, "prefers_linear_rope", lambda *shape: shape[2] == 3):
            layer = attention(QWEN2)
            check(layer, 4)
            assert not calls
            check(layer, 3)
        assert calls == [3]


@scenario(LLM_COMM_FUSE_LINEAR="1")
def batches_that_llm_comm_does_not_compute_are_sglangs() -> None:
    with attended() as (_, calls):
        layer = attention(QWEN3)
        check(layer, MOST + 1)
        for mode in set(modes) - {modes.DECODE, modes.IDLE}:
            check(layer, 4, mode=mode)
        for change in (
            lambda backend: setattr(backend, "dcp_size", 2),
            lambda backend: setattr(backend.token_to_kv_pool, "kv_cache_layout", "vectorized"),
            lambda backend: setattr(backend.token_to_kv_pool, "quant_method", None),
            lambda backend: setattr(backend.token_to_kv_pool, "dtype", torch.float8_e4m3fn),
            lambda backend: setattr(backend, "__class__", type("Another", (Backend,), {})),
            lambda backend: setattr(
                backend.token_to_kv_pool, "__class__", type("Unified", (pools.MHATokenToKVPool,), {})
            ),
        ):
            assert rows_of(layer, 4, change) is None
        for name in ("k_scale", "v_scale"):
            with mock.patch.object(layer.attn, name, 1.0):
                assert rows_of(layer, 4) is None
        assert rows_of(layer, 4, dcp_kv_mask=torch.ones(4, dtype=torch.bool)) is None
        assert not calls
        assert rows_of(layer, 4) is not None
        check(layer, 4)
        check_weights_that_are_declined(layer, calls)


def check_weights_that_are_declined(layer: Any, calls: list[int]) -> None:
    """Of a layer that is served otherwise: as weights that are fetched from the host for a pass, and not aligned."""
    calls.clear()
    for name in ("qkv_proj.weight", "q_norm.weight"):
        owner = layer.get_submodule(name.rpartition(".")[0])
        fetched = {name: owner.weight.detach() * 1}
        backend, batch = backend_of(layer, 4), batch_of(4)
        with forward_context(ForwardContext(attn_backend=backend)):
            torch.func.functional_call(layer, fetched, (batch.positions, numbers((4, HIDDEN)), batch))
    kept = layer.qkv_proj.weight.data
    layer.qkv_proj.weight.data = torch.cat([kept.new_empty(4), kept.reshape(-1)])[4:].view(kept.shape)
    check(layer, 4)
    layer.qkv_proj.weight.data = kept
    assert not calls
    adapted, layer.qkv_proj = layer.qkv_proj, Adapted(layer.qkv_proj)  # after its first step
    check(layer, 4)
    layer.qkv_proj = adapted
    assert not calls
    check(layer, 4)
    assert calls == [4]
    ours("tp").leave()
    check(layer, 4)
    assert calls == [4]


@scenario(LLM_COMM_FUSE_LINEAR="1")
def compiled_attention_layers_are_sglangs() -> None:
    with attended() as (_, calls):
        layer, graphs = attention(QWEN3), []
        check(layer, 4)
        calls.clear()

        def backend(graph: Any, examples: Any) -> Any:
            graphs.append(graph)
            return graph

        layer.attn.forward = lambda q, k, v, forward_batch, save_kv_cache: q * save_kv_cache
        layer.o_proj.forward = lambda x: (x, None)
        batch, x = batch_of(4), numbers((4, HIDDEN))
        with mock.patch.dict(sys.modules["sglang.srt.models.utils"].__dict__, envs=mock.MagicMock()):
            q = torch.compile(layer, backend=backend)(batch.positions, x, batch)
        assert q.any()
        assert not calls
        assert graphs


@scenario()
def without_a_table_attention_layers_are_sglangs() -> None:
    before = [kind.forward for kind in KINDS]
    with attended() as (log, calls):
        assert [kind.forward for kind in KINDS] == before
        check_untouched(log, calls, "; linear layers are SGLang's: fuse_linear is 'auto', and emulated has no layer")
        check(attention(QWEN3), 4)
        assert not log.having("first qkv")


@scenario(LLM_COMM_FUSE_LINEAR="1")
def without_one_of_the_kinds_qkv_alone_is_computed() -> None:
    lose(seams.TABLE, seams.ATTENTIONS[1] + ".forward")
    before = [kind.forward for kind in KINDS]
    with attended() as (log, calls):
        alone = layer_calls("linear")
        assert [kind.forward for kind in KINDS] == before
        assert len(log.having(f"{seams.ROPE}: off, SGLang ", logging.WARNING)) == (dist_rank() == 0)
        check(attention(QWEN3), 4)
        assert (calls, alone) == ([], [4] * 4)  # q, k and v, and the output, of two passes


# ---- What they are made of ------------------------------------------------------------------------------------------


class Quantized:
    """A method with scales, which only its class shows."""

    def __init__(self, method: Any) -> None:
        self.apply = method.apply


class Adapted(nn.Module):
    """A layer with LoRA."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.base_layer, self.weight, self.bias = layer, layer.weight, None

    def forward(self, x: torch.Tensor) -> Any:
        return self.base_layer(x)[0] * 2, None


@contextmanager
def attended() -> Iterator[tuple[Log, list[int]]]:
    """A server with two ranks; its log, and the tokens of the attention layers that llm_comm computes."""
    with served() as (log, _), rope_calls() as calls:
        hooks = sys.modules.get("llm_comm.integrations.sglang.attention")
        with nullcontext() if hooks is None else mock.patch.object(hooks, "get_exec", return_value=EXEC):
            yield log, calls


@contextmanager
def rope_calls() -> Iterator[list[int]]:
    """The tokens of the attention layers that llm_comm computes."""
    tokens: list[int] = []
    original = Communicator.try_linear_rope

    def counted(communicator: Communicator, x: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor | None:
        result = original(communicator, x, *others, **options)
        if result is not None:
            tokens.append(len(x))
        return result

    with mock.patch.object(Communicator, "try_linear_rope", counted):
        yield tokens


def attention(kind: Any, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    sizes = {"hidden_size": HIDDEN, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "layer_id": LAYER}
    try:
        layer = kind(**sizes, **OPTIONS.get(kind, {}), **options)
    finally:
        torch.set_default_dtype(before)
    fill(layer.qkv_proj)
    fill(layer.o_proj)
    for norm in (getattr(layer, name, None) for name in ("q_norm", "k_norm")):
        if norm is not None:
            norm.weight.data.copy_(1 + torch.randn(HEAD, generator=generator(3)) / 8)
    return layer


def batch_of(tokens: int, mode: Any = modes.DECODE, dcp_kv_mask: torch.Tensor | None = None) -> Any:
    places = torch.randperm(SLOTS, generator=generator(11))
    return SimpleNamespace(
        forward_mode=mode,
        positions=torch.arange(tokens) % 60,
        out_cache_loc=places[:tokens],
        out_cache_loc_is_physical=False,
        dcp_kv_mask=dcp_kv_mask,
    )


def backend_of(layer: Any, tokens: int) -> Any:
    """A backend with a pool whose slots have numbers."""
    pool = object.__new__(pools.MHATokenToKVPool)
    dtype, heads = layer.qkv_proj.weight.dtype, layer.num_kv_heads
    shape = (2, SLOTS, heads, HEAD)
    buffers = [torch.randn(shape, generator=generator(seed)).to(dtype) for seed in (20, 21)]
    vars(pool).update(
        k_buffer=[each[0] for each in buffers],
        v_buffer=[each[1] for each in buffers],
        start_layer=FIRST_LAYER,
        dtype=dtype,
        store_dtype=dtype,
        size=SLOTS - 1,
        page_size=1,
        kernel_page_blocks=1,  # in 0.5.20 and 0.5.21
        layer_transfer_counter=None,
        kv_cache_layout="nhd",
        use_hnd=False,
        row_dim=heads * HEAD,
        v_row_dim=heads * HEAD,
        alt_stream=None,
        device_module=None,
        quant_method=pools.UnquantizedKVCacheMethod(),
    )
    backend = object.__new__(Backend)
    history = torch.randint(SLOTS, (tokens, HISTORY), generator=generator(12))
    slots = torch.cat([history, batch_of(tokens).out_cache_loc[:, None]], 1)
    vars(backend).update(
        token_to_kv_pool=pool,
        num_wrappers=1,
        decode_uses_dequant_workspace=False,
        forward_metadata=SimpleNamespace(decode_wrappers=[Wrapper(slots)], swa_out_cache_loc=None),
        kv_cache_quant_method=SimpleNamespace(needs_global_scale=lambda: False),
    )
    # Of a prefill, this one reads what a decode step reads.
    backend.forward_extend = backend.forward_decode
    return backend


def run(layer: Any, tokens: int, mode: Any = modes.DECODE) -> list[torch.Tensor]:
    """Output of ``layer``, and the keys and values of the pool."""
    backend, batch = backend_of(layer, tokens), batch_of(tokens, mode)
    x = numbers((tokens, HIDDEN), layer.qkv_proj.weight.dtype)
    with forward_context(ForwardContext(attn_backend=backend)):
        output = layer(positions=batch.positions, hidden_states=x, forward_batch=batch)
    pool = backend.token_to_kv_pool
    return [output, *pool.k_buffer, *pool.v_buffer]


def rows_of(layer: Any, tokens: int, change: Any = no, **others: Any) -> torch.Tensor | None:
    """q, k and v of ``layer`` that llm_comm computes; None if it leaves them to SGLang."""
    from llm_comm.integrations.sglang import attention as hooks

    backend, batch = backend_of(layer, tokens), batch_of(tokens, **others)
    change(backend)
    with forward_context(ForwardContext(attn_backend=backend)):
        return hooks._qkv(layer, batch.positions, numbers((tokens, HIDDEN)), batch)


def check(layer: Any, tokens: int, **options: Any) -> None:
    """That ``layer`` and the cache are as by SGLang's own forward."""
    got = run(layer, tokens, **options)
    with mock.patch.object(type(ours("tp")), "linear_rope", no):
        expected = run(layer, tokens, **options)
    rounding = torch.finfo(got[0].dtype).eps
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=4 * rounding, atol=8 * rounding)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)  # as SGLang does
    serve(globals(), "sglang_scheduler_{}")
