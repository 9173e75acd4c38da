"""Operator of vLLM's compiled graphs for a qkv layer with norms of heads, rotary embedding and cache write.

``rope_pass.py`` puts the operator into graphs. This module also replaces vLLM's cache write, which follows it.

A graph does not name the attention layer that its k and v are for: vLLM splits graphs at the operator that writes the
cache. So the operator learns the layer of a weight. ``do_kv_cache_update`` is called with k and v after the operator.
If they are views of the operator's result, the weight belongs to the layer of that call, and the operator's next run
writes into the cache of this layer.

No cache content depends on that assumption. vLLM's write is skipped only if all of these hold:

- k and v of the call are views of the result of the operator's last run, at the places where it left them.
- That run was in the same forward pass (vLLM's forward context), and wrote this layer's cache at the same slots.

In all other cases vLLM writes the slots, with the values that belong there, before the attention reads them. The
operator writes a layer's cache once in a forward pass, and not after another write to the same layer.

The operator and the call must run in the same mode. With ``cudagraph_mode`` PIECEWISE a CUDA graph has the operator,
and the call runs outside, with slots that the graph does not know. There vLLM writes the cache. Under a full CUDA graph
both are captured, and vLLM's slots lie in persistent tensors.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar, NamedTuple

import torch
import vllm.ir.ops
from torch.utils.weak import WeakTensorKeyDictionary
from vllm import _custom_ops
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.v1.attention.backend import AttentionType

from llm_comm.integrations.vllm import operators

_Tensor = torch.Tensor


class _Run(NamedTuple):
    """Run of the operator by llm_comm.

    Attributes:
        context: Weak reference to vLLM's forward context of the run.
        weight: Weight of the layer, as the graph passes it.
        key, value: k and v in the result, [tokens, kv_heads, head_size].
        layer: Attention layer whose cache the run has written; None: none.
        slots: Slots that it has written.
    """

    context: Any
    weight: _Tensor
    key: _Tensor
    value: _Tensor
    layer: Any
    slots: _Tensor | None


class _Target(NamedTuple):
    """Cache that the operator may write."""

    layer: Any
    slots: _Tensor

    @property
    def cache(self) -> tuple[_Tensor, _Tensor, _Tensor]:
        """Caches of k and v as ``Communicator.linear_rope`` takes them, and slots.

        The layout is that of vLLM's FlashAttention: [blocks, kv_heads, block_size, 2 * head_size].
        """
        key_cache, value_cache = self.layer.kv_cache.transpose(1, 2).split(self.layer.head_size, dim=-1)
        return key_cache, value_cache, self.slots


class _State:
    """State of the process.

    Attributes:
        class_written: Class of vLLM whose ``do_kv_cache_update`` is replaced; None: it is not, and vLLM writes caches.
        last: Last run of the operator, until a cache write has looked at it.
        layers: Weak references to attention layers, by the weight of their qkv layer.
        contexts: Weak reference to the forward context of the last write, by attention layer.
    """

    class_written: Any = None
    last: _Run | None = None
    layers: ClassVar[Any] = WeakTensorKeyDictionary()
    contexts: ClassVar[Any] = weakref.WeakKeyDictionary()


def activate_writes() -> None:
    """Have the operator write caches, once ``do_kv_cache_update`` is replaced."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    _State.class_written = FlashAttentionImpl


# ---- The operator ---------------------------------------------------------------------------------------------------


def _linear_rope(
    x: _Tensor,
    weight: _Tensor,
    bias: _Tensor | None,
    positions: _Tensor,
    cos_sin: _Tensor,
    q_norm_weight: _Tensor | None,
    k_norm_weight: _Tensor | None,
    epsilon: float,
    head_size: int,
    kv_heads: int,
    interleaved: bool,
    group_name: str,
) -> _Tensor:
    """Compute a qkv layer with the norms of q and k and their rotary embedding; return qkv, [tokens, outputs].

    Args:
        x, weight, bias: As in ``operators.py``, without FP8. Rows of the weight: q, k and v.
        positions: [tokens].
        cos_sin: [positions, rotary_dim], vLLM's ``cos_sin_cache``.
        q_norm_weight, k_norm_weight: [head_size], weights of the norms of each head; None: no norms.
        epsilon: Of the norms.
        head_size, kv_heads: Elements of a head, and heads of k as of v.
        interleaved: Pairs of elements follow one another (``is_neox_style`` is false).
        group_name: vLLM's name of the group.

    Raises:
        ValueError: The process has no group of this name, or it was destroyed.
    """
    ours = getattr(operators.find_group(group_name).device_communicator, "linear_rope", None)
    norm_weights = None if q_norm_weight is None else (q_norm_weight, k_norm_weight)
    result = target = None
    if ours is not None:
        options = {
            "head_size": head_size,
            "kv_heads": kv_heads,
            "bias": bias,
            "norm_weights": norm_weights,
            "eps": epsilon,
            "interleaved": interleaved,
        }
        target = _target(weight, len(x))
        if target is not None:
            result = ours(x, weight, positions, cos_sin, cache=target.cache, **options)
        if result is None:
            target, result = None, ours(x, weight, positions, cos_sin, **options)
    if result is None:
        qkv = operators._linear(x, weight, bias, None, None, None, group_name)
        _rotate(qkv, positions, cos_sin, norm_weights, epsilon, head_size, kv_heads, interleaved)
        return qkv
    _note(weight, result, head_size, kv_heads, target)
    return result  # type: ignore[no-any-return]


def _rotate(
    qkv: _Tensor,
    positions: _Tensor,
    cos_sin: _Tensor,
    norm_weights: Any,
    epsilon: float,
    head_size: int,
    kv_heads: int,
    interleaved: bool,
) -> None:
    """Norm and rotate q and k in place, by vLLM's kernels."""
    kv_size = kv_heads * head_size
    q, k, _ = qkv.split([qkv.shape[1] - 2 * kv_size, kv_size, kv_size], dim=-1)
    for part, weight in zip((q, k), norm_weights or (), strict=False):
        heads = part.unflatten(-1, (-1, head_size))
        heads.copy_(operators._run_ir(vllm.ir.ops.rms_norm, heads, weight, epsilon))
    _custom_ops.rotary_embedding(positions, q, k, head_size, cos_sin, not interleaved)


def _fake_linear_rope(x: _Tensor, weight: _Tensor, *others: Any) -> _Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


linear_rope = operators.define(
    "linear_rope(Tensor x, Tensor weight, Tensor? bias, Tensor positions, Tensor cos_sin, Tensor? q_norm_weight, "
    "Tensor? k_norm_weight, float epsilon, int head_size, int kv_heads, bool interleaved, str group_name) -> Tensor",
    _linear_rope,
    _fake_linear_rope,
)

# ---- Cache writes ---------------------------------------------------------------------------------------------------


def _target(weight: _Tensor, tokens: int) -> _Target | None:
    """Return the cache that a run with ``weight`` may write; None if vLLM must."""
    reference = None if _State.class_written is None else _State.layers.get(weight)
    layer = None if reference is None else reference()
    if layer is None or not is_forward_context_available():
        return None
    context = get_forward_context()
    if context.cudagraph_runtime_mode is CUDAGraphMode.PIECEWISE or not isinstance(context.slot_mapping, dict):
        return None
    slots = context.slot_mapping.get(layer.layer_name)
    if slots is None or len(slots) > tokens or context.no_compile_layers.get(layer.layer_name) is not layer:
        return None
    before, kv_cache = _State.contexts.get(layer), layer.kv_cache
    if before is not None and before() is context:
        return None
    has_layout = kv_cache.dim() == 4 and kv_cache.shape[3] == 2 * layer.head_size
    return _Target(layer, slots) if has_layout else None


def _note(weight: _Tensor, qkv: _Tensor, head_size: int, kv_heads: int, target: _Target | None) -> None:
    """Remember a run of the operator for the cache write after it."""
    _State.last = None
    if _State.class_written is None or not is_forward_context_available():
        return
    context = weakref.ref(get_forward_context())
    *_, key, value = qkv.unflatten(-1, (-1, head_size)).split(
        [qkv.shape[1] // head_size - 2 * kv_heads, kv_heads, kv_heads], dim=1
    )
    layer, slots = (None, None) if target is None else target
    _State.last = _Run(context, weight, key, value, layer, slots)
    if layer is not None:
        _State.contexts[layer] = context


def do_kv_cache_update(
    theirs: Any, impl: Any, layer: Any, key: _Tensor, value: _Tensor, kv_cache: _Tensor, slot_mapping: _Tensor
) -> None:
    """Replacement of ``FlashAttentionImpl.do_kv_cache_update``: nothing if the operator has written k and v."""
    if not _is_written(impl, layer, key, value, kv_cache, slot_mapping):
        theirs(impl, layer, key, value, kv_cache, slot_mapping)


def _is_written(impl: Any, layer: Any, key: _Tensor, value: _Tensor, kv_cache: _Tensor, slot_mapping: _Tensor) -> bool:
    """Return whether the operator's last run has written k and v of this call. Learn the layer of its weight."""
    run, _State.last = _State.last, None
    if run is None or not is_forward_context_available() or run.context() is not get_forward_context():
        return False
    _State.contexts[layer] = run.context
    if not _is_same(run.key, key) or not _is_same(run.value, value) or not _is_served(impl, layer, kv_cache, key):
        _State.layers.pop(run.weight, None)
        return False
    known = _State.layers.get(run.weight)
    if known is None or known() is not layer:
        _State.layers[run.weight] = weakref.ref(layer)
    return run.layer is layer and run.slots is slot_mapping


def _is_same(one: _Tensor, other: _Tensor) -> bool:
    """Return whether both are the same elements in memory."""
    return (
        one.data_ptr() == other.data_ptr()
        and (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    )  # fmt: skip


def _is_served(impl: Any, layer: Any, kv_cache: _Tensor, key: _Tensor) -> bool:
    """Return whether ``_Target.cache`` is what vLLM writes for this layer, without quantization."""
    return (
        type(impl) is _State.class_written  # subclasses write other layouts
        and impl is layer.impl
        and impl.attn_type == AttentionType.DECODER
        and layer.kv_cache_dtype == "auto"
        and layer.kv_cache is kv_cache
        and kv_cache.dtype == key.dtype
        and kv_cache.dim() == 4
        and kv_cache.stride(-1) == 1
        and (kv_cache.shape[1], kv_cache.shape[3]) == (key.shape[1], 2 * key.shape[2])
        and layer.head_size == key.shape[2]
        and layer.kv_sharing_target_layer_name is None
    )
