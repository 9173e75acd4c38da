"""SGLang's norms with the all-reduce before them in one kernel of llm_comm.

Most models of SGLang leave a sum to the norm that follows it, where ``flashinfer_ar_fusion_applies`` (before 0.5.22:
``apply_flashinfer_allreduce_fusion``) says that FlashInfer's kernel takes both; all of them end in
``_forward_with_allreduce_fusion``. Both are hooked: the former says yes, and the latter asks llm_comm. That function
reduces whatever the kernel declines: SGLang's own of 0.5.17 would norm what has not been reduced.

The sum of an attention has one reader, the norm after it. That of an MLP is left to the next layer, and before 0.5.21
(``layer_boundary``) SGLang leaves it whoever else may read it: the next stage of a pipeline, a draft model, what adds
features of images or splits a batch between layers. There the yes to that question stays SGLang's own, but where nobody
else can be (``_why_not_deferred``).

Dense Llama takes that path by itself since it has ``stage_facts``, in 0.5.22. Before, its layers reduce in their
linears. There the linears are told not to (``reduce_results``, an option of theirs), and the layer's forward is
replaced by one that sums in its norms. A layer whose output someone but the next layer reads sums at its end: the last
one, those of a model whose hidden states are captured for a draft model. Hooks of the norm and of the linear would do
without a forward of our own, but could not know who reads a tensor that lacks its sum.

The hooks are set when the tensor-parallel group is made and llm_comm serves it, and only then: the modules that they
import belong to the processes with models. They do nothing until ``activate``, which waits for all ranks to have set
them: ranks that leave a sum to different places would wait for each other.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import pkgutil
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.distributed import parallel_state
from sglang.srt.layers import layernorm
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_exec, get_parallel, get_server_args, get_spec

logger = logging.getLogger("sglang.llm_comm")

_NORM = "sglang.srt.layers.layernorm._forward_with_allreduce_fusion"
_BOUNDARY = "sglang.srt.layers.communicator.LayerCommunicator"
_LLAMA = "sglang.srt.models.llama"
# Set on a tensor that still lacks its sum, between layers of Llama.
_OWED = "_llm_comm_owed"

_library = torch.library.Library("llm_comm_sglang", "DEF")
_library.define(
    "all_reduce_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float epsilon, str group_name)"
    " -> (Tensor, Tensor)"
)


def set_up(group: Any) -> None:
    """Hooks SGLang, once, so that norms can sum over ``group``, the tensor-parallel one, themselves.

    Raises:
        RuntimeError: SGLang could not be hooked. It works as before then.
    """
    _Fusion.group = group
    if _Fusion.is_hooked:
        return
    gate = _gate()
    _Fusion.their_gate = pkgutil.resolve_name(gate)
    _hook(_NORM, _around_norm, HookType.AROUND)
    if _defers_to_anyone():
        _hook(f"{_BOUNDARY}.__init__", _after_boundary_init, HookType.AFTER)
        _hook(f"{_BOUNDARY}.should_fuse_mlp_allreduce_with_next_layer", _around_deferral, HookType.AROUND)
    _hook(gate, _around_gate, HookType.AROUND)
    if _llama_reduces_in_its_linears():
        _hook(f"{_LLAMA}.LlamaDecoderLayer.forward", _around_llama_layer, HookType.AROUND)
        _hook(f"{_LLAMA}.LlamaModel.__init__", _after_llama_init, HookType.AFTER)
    _Fusion.is_hooked = True


def activate() -> None:
    """Norms sum from now on. To be called on all ranks, before there is a model."""
    _Fusion.is_active = True
    _Fusion.overwrites_residuals = not _speculates()


def deactivate() -> bool:
    """The opposite, as long as there is no model; returns whether norms did."""
    was_active, _Fusion.is_active = _Fusion.is_active, False
    return was_active


def _hook(target: str, function: Any, kind: HookType) -> None:
    before = pkgutil.resolve_name(target)
    HookRegistry.register(target, function, kind)
    HookRegistry.apply_hooks()  # logs what it cannot do, and goes on
    if pkgutil.resolve_name(target) is before:
        raise RuntimeError(f"{target} cannot be hooked")


class _Fusion:
    """What the hooks share.

    Attributes:
        group: The one that they serve.
        is_hooked: Whether all of them are set.
        is_active: Whether norms sum. Looked at by every hook, and the same on all ranks.
        their_gate: SGLang's own decision, without ours.
        overwrites_residuals: Whether a norm may write the residual that it is given, as norms of SGLang do. A draft
            model's captures are not copied where SGLang takes the norm for one that leaves it alone.
    """

    group: Any = None
    is_hooked = False
    is_active = False
    their_gate: Any = None
    overwrites_residuals = False


def _gate() -> str:
    """The function by which SGLang decides whether a norm is to sum."""
    if _defers_to_anyone():
        return "sglang.srt.layers.communicator.apply_flashinfer_allreduce_fusion"
    module = importlib.import_module("sglang.srt.layers.layer_boundary.residual.add_norm")
    newer = "flashinfer_ar_fusion_applies"
    return f"{module.__name__}.{newer if hasattr(module, newer) else 'apply_flashinfer_allreduce_fusion'}"


def _defers_to_anyone() -> bool:
    """Whether this SGLang leaves the sum of an MLP to the next layer whoever else may read it: before 0.5.21."""
    return importlib.util.find_spec("sglang.srt.layers.layer_boundary") is None


def _speculates() -> bool:
    """Whether there is, or may be, a draft model."""
    try:
        return get_spec().speculative_algorithm is not None
    except ValueError:  # nothing is published: groups without a server
        return True


def _llama_reduces_in_its_linears() -> bool:
    return not hasattr(importlib.import_module(_LLAMA).LlamaDecoderLayer, "stage_facts")


# ---- Models that leave sums to their norms --------------------------------------------------------------------------


def _around_gate(theirs: Any, batch_size: int) -> bool:
    return (_Fusion.is_active and _all_sums_are_of_the_group() and batch_size > 0) or theirs(batch_size)


def _after_boundary_init(_: None, boundary: Any, *args: Any, **kwargs: Any) -> None:
    # By now all groups are made. Kept with the layer: its forward may be compiled.
    boundary.llm_comm_defers = _Fusion.is_active and _may_defer()


def _around_deferral(theirs: Any, boundary: Any, forward_batch: Any) -> bool:
    """Whether a layer leaves the sum of its MLP to the next one."""
    leaves = bool(theirs(boundary, forward_batch))
    if not leaves or not _Fusion.is_active or getattr(boundary, "llm_comm_defers", False):
        return leaves
    return bool(_Fusion.their_gate(forward_batch.input_ids.shape[0]))  # it has them: the gate has been asked


@functools.cache
def _may_defer() -> bool:
    why_not = _why_not_deferred()
    if why_not is not None and dist.get_rank() == 0:
        logger.info("llm_comm: sums of MLPs and experts are not fused with the next layer's norm: %s", why_not)
    return why_not is None


def _why_not_deferred() -> str | None:
    """Why the output of an MLP may be read by someone but the next layer, or changed before that reads it, if so."""
    if get_parallel().pp_size > 1:
        return "with pipeline parallelism, the next stage reads that of the last layer"
    if _speculates():
        return "with speculative decoding, the draft model reads some"
    try:
        from sglang.srt.arg_groups.overrides import _FLASHINFER_ALLREDUCE_FUSION_ARCHS as known

        exchange = get_exec().moe.moe_a2a_backend
        model = get_server_args().get_model_config().hf_config
        architecture = model.architectures[0]
    except Exception as error:
        return f"this version of SGLang does not tell what it serves ({type(error).__name__}: {error})"
    if exchange != "none":
        return f"with --moe-a2a-backend {exchange}, batches may be split between layers"
    if getattr(getattr(model, "vision_config", None), "deepstack_visual_indexes", None):
        return f"{architecture} adds features of images between layers"
    return None if architecture in known else f"SGLang does not do so for {architecture}"


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
    if residual is None or not _Fusion.is_active or not _all_sums_are_of_the_group():
        return theirs(norm_module, x, residual, post_residual_addition, weight, use_attn_tp_group)
    if post_residual_addition is not None:
        residual = residual + post_residual_addition
        return _sum_and_norm(norm_module, x, residual, may_overwrite=True)
    return _sum_and_norm(norm_module, x, residual, may_overwrite=_Fusion.overwrites_residuals)


def _sum_and_norm(
    norm: Any, x: torch.Tensor, residual: torch.Tensor, may_overwrite: bool, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """``norm`` of (the sum of ``x`` + ``residual``), and what was normed.

    Args:
        norm: Of SGLang.
        x: This rank's addend; nobody's afterwards, as where SGLang reduces it in place.
        residual: Like ``x``, the same on all ranks.
        may_overwrite: Whether what was normed may take the place of ``residual``.
        options: What SGLang's norm is given besides, where it takes over.
    """
    if x.shape[0] == 0:
        return x, residual
    group = _Fusion.group
    if torch.compiler.is_compiling():
        # Graphs are functional: a tensor that is written in them would be copied anyway.
        if _is_plain(norm):
            result: tuple[torch.Tensor, torch.Tensor] = torch.ops.llm_comm_sglang.all_reduce_add_rms_norm(
                x, residual, norm.weight.data, norm.variance_epsilon, group.unique_name
            )
            return result
        normed, new_residual = norm.forward(group.all_reduce(x.clone()), residual.clone(), None, **options)
        return normed, new_residual
    if _is_plain(norm):
        fused = _fused(group, x, residual, norm.weight.data, norm.variance_epsilon)
        if fused is not None:
            return fused
    # What SGLang does where it does not fuse, in the tensors that it would use.
    residual = residual if may_overwrite else residual.clone()
    normed, new_residual = norm.forward(group.all_reduce(x), residual, None, **options)
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
    """The same for a plain norm, in new tensors: the operator of compiled graphs."""
    reference = parallel_state._groups.get(group_name)
    group = None if reference is None else reference()
    if group is None:
        raise ValueError(f"there is no group {group_name!r} in this process (any more)")
    result = _fused(group, x, residual, weight, epsilon)
    return _one_by_one(_sum(group, x), residual, weight, epsilon) if result is None else result


def _fused(
    group: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """By llm_comm, in new tensors; None if it declines, or has left the group."""
    fused = getattr(group.ca_comm, "all_reduce_add_rms_norm", None)
    return None if fused is None else fused(x, residual, weight, epsilon)


def _sum(group: Any, x: torch.Tensor) -> torch.Tensor:
    """The sum of ``x``, which is left as it is, in a new tensor."""
    by_llm_comm = getattr(group.ca_comm, "sum_of", None)
    total: torch.Tensor | None = None if by_llm_comm is None else by_llm_comm(x)
    if total is None:
        # SGLang may sum in place, but a graph may go on to read its tensor.
        total = group.all_reduce(x.clone())
    return total


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
        # 0.5.18 to 0.5.21: a norm quantizes for the linear that it is given.
        self._norms_quantize = "quant_linear" in inspect.signature(layernorm.RMSNorm.forward_cuda).parameters

    def options(self, block: Any, linear: str) -> dict[str, Any]:
        """What Llama gives a norm, besides tensors, whose output the linear of ``block`` reads."""
        return {"quant_linear": getattr(block, linear)} if self._norms_quantize else {}

    def carries_on(self) -> bool:
        """Whether the sum of the layer's output is left to the next layer, which alone reads it."""
        return not (self._is_last or self._model.layers_to_capture)


def _after_llama_init(_: None, model: Any, *args: Any, **kwargs: Any) -> None:
    from sglang.srt.models.llama import LlamaDecoderLayer

    if not _Fusion.is_active:
        return
    group = _Fusion.group
    layers = [layer for layer in model.layers if type(layer) is LlamaDecoderLayer]
    linears = [linear for layer in layers for linear in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    sum_alike = all(
        linear.reduce_results
        and linear.tp_size == group.world_size
        and not linear.use_dp_attention_reduce
        and not linear.use_decode_attn_tp
        for linear in linears
    )
    if sum_alike:
        for linear in linears:
            linear.reduce_results = False
        for layer in layers:
            # The last layer of this pipeline stage.
            layer.llm_comm_place = _Place(model, is_last=layer is layers[-1])
    if linears and dist.get_rank() == 0:
        name = type(model).__name__
        if sum_alike:
            logger.info("llm_comm: %d of the linears of %s leave their sums to norms", len(linears), name)
        else:
            logger.info("llm_comm: norms of %s are not fused: its linears sum in another group or not at all", name)


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
    norm, options = layer.input_layernorm, place.options(layer.self_attn, "qkv_proj")
    if residual is None:
        residual = hidden_states
        hidden_states = norm(hidden_states, **options)
    elif getattr(hidden_states, _OWED, False):
        hidden_states, residual = _sum_and_norm(norm, hidden_states, residual, may_overwrite=True, **options)
    else:
        hidden_states, residual = norm(hidden_states, residual, **options)
    hidden_states = layer.self_attn(positions=positions, hidden_states=hidden_states, forward_batch=forward_batch)
    norm, options = layer.post_attention_layernorm, place.options(layer.mlp, "gate_up_proj")
    hidden_states, residual = _sum_and_norm(norm, hidden_states, residual, may_overwrite=True, **options)
    hidden_states = layer.mlp(hidden_states)
    if place.carries_on():
        setattr(hidden_states, _OWED, True)
    else:
        hidden_states = _Fusion.group.all_reduce(hidden_states)
    return hidden_states, residual
