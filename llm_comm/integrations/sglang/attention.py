"""Hook in SGLang's attention layers: q, k and v, RMSNorm of their heads, RoPE and the write to the KV cache by one
kernel of llm_comm.

``forward`` of the layers in ``seams.ATTENTIONS`` is hooked. Mistral, Phi-3 and others use these classes too. In a
decode step of few tokens llm_comm computes everything before the attention backend. The hook then calls backend and
output projection as SGLang does, with ``save_kv_cache=False``, since k and v are already in the cache. SGLang itself
does so after its own kernel for RoPE and cache. Everything else is SGLang's whole forward, in which llm_comm may still
compute the layer of q, k and v (``linear.py``).

Which layers. The layer of q, k and v has no quantization, and llm_comm is preferred for its shape with RoPE. RoPE is
SGLang's ``RotaryEmbedding`` or a class that differs in the table of cos and sin alone. Constant conditions are checked
at the first decode step of an attention layer, others in each step. A layer with LoRA is another module, and so is
SGLang's. Weights that SGLang fetches from the host for each pass are no parameters, and are not served. Graphs of
torch.compile keep SGLang's kernels.

Which caches. The pool is a plain ``MHATokenToKVPool`` in the dtype of the model. Its slots are ``out_cache_loc``.
Other pools translate slots, quantize or have another layout, and are SGLang's. So are caches that are split over ranks
(``--dcp-size``). Draft models write to a pool of their own, which is that of their backend too.

A layer involves no other rank, so ranks that chose differently would not hang.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.runtime_context import get_exec

from llm_comm.integrations.sglang import seams
from llm_comm.integrations.sglang.fused_norm import weight_bias_of
from llm_comm.integrations.sglang.linear import BIASES, batches_with_rope, by_llm_comm

# Attribute of an attention layer with its ``_Plan``.
_PLAN = "llm_comm_rope"

#: Key cache, value cache and slots, as ``Communicator.linear_rope`` takes them.
_Cache = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Plan(NamedTuple):
    """Constants of an attention layer.

    Attributes:
        batches: Numbers of tokens that llm_comm computes; empty if the layer is SGLang's.
        norms: Norms of the heads of q and of k; empty if there are none.
    """

    batches: frozenset[int]
    norms: tuple[Any, ...] = ()


def around_forward(
    theirs: Any, attention: Any, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any
) -> torch.Tensor:
    """Hook of ``forward`` of an attention layer: use llm_comm if it serves the layer and the batch."""
    qkv = None if torch.compiler.is_compiling() else _qkv(attention, positions, hidden_states, forward_batch)
    if qkv is None:
        result: torch.Tensor = theirs(attention, positions, hidden_states, forward_batch)
        return result
    q, k, v = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
    output, _ = attention.o_proj(attention.attn(q, k, v, forward_batch, save_kv_cache=False))
    return output  # type: ignore[no-any-return]


def _qkv(attention: Any, positions: torch.Tensor, x: torch.Tensor, forward_batch: Any) -> torch.Tensor | None:
    """Return q, k and v for the attention backend, with k and v in the cache; None if llm_comm declines."""
    if not forward_batch.forward_mode.is_decode():
        return None
    plan = getattr(attention, _PLAN, None)
    if plan is None:
        plan = _plan_of(attention)
        setattr(attention, _PLAN, plan)
    # Without batches x need not be a tensor: FP8 layers get their scales with it.
    if not plan.batches or len(x) not in plan.batches:
        return None
    layer, rotary = attention.qkv_proj, attention.rotary_emb
    weights = [norm.weight for norm in plan.norms]
    # Parameters only: the stream may still be writing a plain tensor.
    if (
        not _is_one_of(layer, seams.QKV)
        or type(layer.bias) not in BIASES
        or any(type(weight) is not torch.nn.Parameter for weight in (layer.weight, *weights))
    ):
        return None
    cache = _cache_of(attention.attn, x.dtype, forward_batch)
    if cache is None:
        return None
    of_norms = {"norm_weights": tuple(weights), "eps": plan.norms[0].variance_epsilon} if weights else {}
    return by_llm_comm(
        "linear_rope",
        x,
        layer.weight,
        positions=positions,
        cos_sin=rotary.cos_sin_cache,
        head_size=attention.head_dim,
        kv_heads=attention.num_kv_heads,
        bias=layer.bias,
        interleaved=not rotary.is_neox_style,
        cache=cache,
        **of_norms,
    )


def _cache_of(attn: Any, dtype: torch.dtype, forward_batch: Any) -> _Cache | None:
    """Return the KV cache and the slots that the backend would write; None if they are not served."""
    backend = get_attn_backend()
    if (
        not _is_one_of(backend, *seams.BACKENDS)
        or getattr(backend, "dcp_size", 1) != 1
        or getattr(forward_batch, "dcp_kv_mask", None) is not None
        or attn.k_scale is not None
        or attn.v_scale is not None
    ):
        return None
    pool = backend.token_to_kv_pool
    if (
        not _is_one_of(pool, seams.KV_POOL)
        or pool.dtype != dtype
        or pool.kv_cache_layout != "nhd"
        or pool.is_quantized_kv_cache
    ):
        return None
    keys, values = pool.get_kv_buffer(attn.layer_id)
    return keys.unsqueeze(1), values.unsqueeze(1), forward_batch.out_cache_loc  # blocks of one slot


def _plan_of(attention: Any) -> _Plan:
    layer, attn = attention.qkv_proj, attention.attn
    norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else ()
    is_served = (
        _is_one_of(attention, *seams.ATTENTIONS)
        and _is_one_of(layer, seams.QKV)
        and _is_one_of(layer.quant_method, seams.UNQUANTIZED_LINEAR)
        and _is_one_of(attn, seams.RADIX_ATTENTION)
        and not layer.skip_bias_add
        and len(layer.weight) == attention.q_size + 2 * attention.kv_size
        and attn.qk_head_dim == attn.v_head_dim == attention.head_dim
        and attn.tp_k_head_num == attn.tp_v_head_num == attention.num_kv_heads
        and not attn.is_cross_attention
        and _is_plain(attention.rotary_emb)
        and all(weight_bias_of(norm) == 0 and norm.weight.dtype == layer.weight.dtype for norm in norms)
        and len({norm.variance_epsilon for norm in norms}) <= 1
        # SGLang's own kernel for norms and RoPE (--enable-fused-qk-norm-rope) computes cos and sin itself.
        and not getattr(attention, "use_fused_qk_norm_rope", False)
        # SGLang then computes RoPE as a training framework does.
        and get_exec().deterministic.rl_on_policy_target is None
    )
    return _Plan(batches_with_rope(layer), norms) if is_served else _Plan(frozenset())


def _is_plain(rotary: Any) -> bool:
    """Return whether ``rotary`` differs from SGLang's ``RotaryEmbedding`` in its table of cos and sin alone."""
    return (
        isinstance(rotary, RotaryEmbedding)
        and all(
            getattr(type(rotary), name) is getattr(RotaryEmbedding, name)
            for name in ("forward", "forward_cuda", "forward_native")
        )
        # SGLang's kernel for other sizes of heads replaces the table by one of another dtype when it is first called.
        # A captured graph would go on reading the old one.
        and not rotary.use_fallback_kernel
    )


def _is_one_of(thing: Any, *symbols: str) -> bool:
    """Return whether the class of ``thing`` is one that ``symbols`` name. A derived class is not."""
    kind = type(thing)
    return f"{kind.__module__}:{kind.__qualname__}" in symbols
