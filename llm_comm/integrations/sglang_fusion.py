"""SGLang's norms with the all-reduce before them in one kernel of llm_comm.

Most models of SGLang leave a sum to the norm that follows it, where ``flashinfer_ar_fusion_applies`` (before 0.5.23:
``apply_flashinfer_allreduce_fusion``) says that FlashInfer's kernel takes both; all of them end in
``_forward_with_allreduce_fusion``. Both are hooked: the former says yes, and the latter asks llm_comm. That function
reduces whatever the kernel declines: SGLang's own of 0.5.17 would norm what has not been reduced.

Dense Llama takes that path by itself since it has ``stage_facts``, in 0.5.23. Before, its layers reduce in their
linears. There the linears are told not to (``reduce_results``, an option of theirs), and the layer's forward is
replaced by one that sums in its norms. A layer whose output someone but the next layer reads sums at its end: the last
one, those of a model whose hidden states are captured for a draft model. Hooks of the norm and of the linear would do
without a forward of our own, but could not know who reads a tensor that lacks its sum.

The hooks are set when the tensor-parallel group is made and llm_comm serves it, and only then: the modules that they
import belong to the processes with models.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from typing import Any

import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.layers import layernorm
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel

_NORM = "sglang.srt.layers.layernorm._forward_with_allreduce_fusion"
_LLAMA = "sglang.srt.models.llama"
# Set on a tensor that still lacks its sum, between layers of Llama.
_OWED = "_llm_comm_owed"

_library = torch.library.Library("llm_comm_sglang", "DEF")
_library.define(
    "all_reduce_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float epsilon, str group_name)"
    " -> (Tensor, Tensor)"
)


def set_up(group: Any) -> None:
    """Hooks SGLang, once, so that norms sum over ``group``, the tensor-parallel one, themselves.

    Raises:
        RuntimeError: SGLang could not be hooked. It works as before then.
    """
    first = _Fusion.group is None
    _Fusion.group = group
    if not first:
        return
    # In this order: nothing leaves a sum to a norm that does not make it.
    _hook(_NORM, _around_norm, HookType.AROUND)
    _hook(_gate(), _around_gate, HookType.AROUND)
    if _llama_reduces_in_its_linears():
        _hook(f"{_LLAMA}.LlamaDecoderLayer.forward", _around_llama_layer, HookType.AROUND)
        _hook(f"{_LLAMA}.LlamaModel.__init__", _after_llama_init, HookType.AFTER)


def _hook(target: str, function: Any, kind: HookType) -> None:
    before = pkgutil.resolve_name(target)
    HookRegistry.register(target, function, kind)
    HookRegistry.apply_hooks()  # logs what it cannot do, and goes on
    if pkgutil.resolve_name(target) is before:
        raise RuntimeError(f"{target} cannot be hooked")


class _Fusion:
    """Where the hooks find the group that they serve."""

    group: Any = None


def _gate() -> str:
    """The function by which SGLang decides whether a norm is to sum."""
    if importlib.util.find_spec("sglang.srt.layers.layer_boundary") is None:
        return "sglang.srt.layers.communicator.apply_flashinfer_allreduce_fusion"
    module = importlib.import_module("sglang.srt.layers.layer_boundary.residual.add_norm")
    newer = "flashinfer_ar_fusion_applies"
    return f"{module.__name__}.{newer if hasattr(module, newer) else 'apply_flashinfer_allreduce_fusion'}"


def _llama_reduces_in_its_linears() -> bool:
    return not hasattr(importlib.import_module(_LLAMA).LlamaDecoderLayer, "stage_facts")


# ---- Models that leave sums to their norms --------------------------------------------------------------------------


def _around_gate(theirs: Any, batch_size: int) -> bool:
    return (_all_sums_are_of_the_group() and batch_size > 0) or theirs(batch_size)


def _all_sums_are_of_the_group() -> bool:
    """Whether attention and experts sum over the ranks of the tensor-parallel group, all of them."""
    parallel = get_parallel()
    size = parallel.tp_size
    return (
        not is_dp_attention_enabled()
        and parallel.attn_tp_size == size
        and size in (parallel.moe_tp_size, parallel.moe_ep_size)
    )


def _around_norm(
    theirs: Any,
    norm_module: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    post_residual_addition: torch.Tensor | None,
    weight: torch.Tensor,
    use_attn_tp_group: bool = True,
) -> Any:
    if residual is None or not _all_sums_are_of_the_group():
        return theirs(norm_module, x, residual, post_residual_addition, weight, use_attn_tp_group)
    if post_residual_addition is not None:
        residual = residual + post_residual_addition
    return _sum_and_norm(norm_module, x, residual)


def _sum_and_norm(norm: Any, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``norm`` of (the sum of ``x`` + ``residual``), and what was normed, in new tensors."""
    if x.shape[0] == 0:
        return x, residual
    if _is_plain(norm):
        name = _Fusion.group.unique_name
        if torch.compiler.is_compiling():
            result: tuple[torch.Tensor, torch.Tensor] = torch.ops.llm_comm_sglang.all_reduce_add_rms_norm(
                x, residual, norm.weight.data, norm.variance_epsilon, name
            )
            return result
        return _all_reduce_add_rms_norm(x, residual, norm.weight.data, norm.variance_epsilon, name)
    normed, new_residual = norm.forward(_Fusion.group.all_reduce(x.clone()), residual.clone(), None)
    return normed, new_residual


def _is_plain(norm: Any) -> bool:
    """Whether ``norm`` computes what the fused kernel does. Norms of Gemma, for one, add 1 to the weights in fp32."""
    return (
        type(norm) is layernorm.RMSNorm
        and norm.variance_size_override is None
        and not norm.cast_x_before_out_mul
        and not norm.fp32_residual
        and norm.override_orig_dtype is None
        and norm.weight.dtype in (torch.bfloat16, torch.float16)
    )


def _all_reduce_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for a plain norm; an operator of compiled graphs as well."""
    reference = parallel_state._groups.get(group_name)
    group = None if reference is None else reference()
    if group is None:
        raise ValueError(f"there is no group {group_name!r} in this process (any more)")
    fused = getattr(group.ca_comm, "all_reduce_add_rms_norm", None)
    result = None if fused is None else fused(x, residual, weight, epsilon)
    if result is not None:
        return result  # type: ignore[no-any-return]
    # A copy: where llm_comm declines, SGLang may sum in place, but a graph may go on to read its tensor.
    return _one_by_one(group.all_reduce(x.clone()), residual, weight, epsilon)


def _one_by_one(
    total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What SGLang's norm makes of a sum, in new tensors."""
    kernel = getattr(layernorm, "fused_add_rmsnorm", None)
    if kernel is not None and total.is_cuda:
        new_residual = residual.clone()
        kernel(total, new_residual, weight, epsilon)  # in place; the sum is nobody else's
        return total, new_residual
    new_residual = total + residual
    values = new_residual.float()
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + epsilon)
    return (values * weight.float()).to(total.dtype), new_residual


def _fake(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(residual)


_library.impl("all_reduce_add_rms_norm", _all_reduce_add_rms_norm, "CompositeExplicitAutograd")
torch.library.register_fake("llm_comm_sglang::all_reduce_add_rms_norm", _fake, lib=_library)


# ---- Dense Llama before stage_facts ---------------------------------------------------------------------------------


class _Place:
    """Where a layer stands in its model. Not a module, so that the model is not a child of its layer."""

    def __init__(self, model: Any, is_last: bool) -> None:
        self._model = model
        self._is_last = is_last

    def carries_on(self) -> bool:
        """Whether the sum of the layer's output is left to the next layer, which alone reads it."""
        return not (self._is_last or self._model.layers_to_capture)


def _after_llama_init(_: None, model: Any, *args: Any, **kwargs: Any) -> None:
    from sglang.srt.models.llama import LlamaDecoderLayer

    group = _Fusion.group
    layers = [layer for layer in model.layers if type(layer) is LlamaDecoderLayer]
    linears = [linear for layer in layers for linear in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    if not all(
        linear.reduce_results
        and linear.tp_size == group.world_size
        and not linear.use_dp_attention_reduce
        and not linear.use_decode_attn_tp
        for linear in linears
    ):
        return
    for linear in linears:
        linear.reduce_results = False
    for layer in layers:
        # The last layer of this pipeline stage.
        layer.llm_comm_place = _Place(model, is_last=layer is layers[-1])


def _around_llama_layer(
    theirs: Any,
    layer: Any,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    forward_batch: Any,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    place = getattr(layer, "llm_comm_place", None)
    if place is None:
        result: tuple[torch.Tensor, torch.Tensor] = theirs(layer, positions, hidden_states, forward_batch, residual)
        return result
    if residual is None:
        residual = hidden_states
        hidden_states = layer.input_layernorm(hidden_states)
    elif getattr(hidden_states, _OWED, False):
        hidden_states, residual = _sum_and_norm(layer.input_layernorm, hidden_states, residual)
    else:
        hidden_states, residual = layer.input_layernorm(hidden_states, residual)
    hidden_states = layer.self_attn(positions=positions, hidden_states=hidden_states, forward_batch=forward_batch)
    hidden_states, residual = _sum_and_norm(layer.post_attention_layernorm, hidden_states, residual)
    hidden_states = layer.mlp(hidden_states)
    if place.carries_on():
        setattr(hidden_states, _OWED, True)
    else:
        hidden_states = _Fusion.group.all_reduce(hidden_states)
    return hidden_states, residual
