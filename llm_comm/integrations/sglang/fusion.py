"""SGLang's norms with the all-reduce before them in one kernel of llm_comm.

Most models of SGLang leave a sum to the norm that follows it, where ``flashinfer_ar_fusion_applies`` (before 0.5.22:
``apply_flashinfer_allreduce_fusion``) says that FlashInfer's kernel takes both; all of them end in
``_forward_with_allreduce_fusion``. Both are hooked: the former says yes, and the latter asks llm_comm. That function
reduces whatever the kernel declines: SGLang's own of 0.5.17 would norm what has not been reduced.

The sum of an attention has one reader, the norm after it. That of an MLP is left to the next layer, and before 0.5.21
(``layer_boundary``) SGLang leaves it whoever else may read it: the next stage of a pipeline, a draft model, what adds
features of images or splits a batch between layers. There the yes to that question stays SGLang's own, but where nobody
else can be (``_why_not_deferred``).

Older dense models reduce in linears: see ``dense_models``.

The hooks are set when the tensor-parallel group is made and llm_comm serves it, and only then: the modules that they
import belong to the processes with models. They do nothing until ``activate``, which waits for all ranks to have set
them: ranks that leave a sum to different places would wait for each other.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import pkgutil
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_exec, get_parallel, get_server_args, get_spec

from llm_comm.integrations.sglang import dense_models as dense
from llm_comm.integrations.sglang.fused_norm import State, around_norm, norms_of_boundaries_sum
from llm_comm.integrations.sglang.hooks import hook

logger = logging.getLogger("sglang.llm_comm")

_NORM = "sglang.srt.layers.layernorm._forward_with_allreduce_fusion"
_BOUNDARY = "sglang.srt.layers.communicator.LayerCommunicator"


def set_up(group: Any) -> None:
    """Hooks SGLang, once, so that norms can sum over ``group``, the tensor-parallel one, themselves.

    Raises:
        RuntimeError: SGLang could not be hooked. It works as before then.
    """
    State.group = group
    if State.is_hooked:
        return
    gate = _gate()
    State.their_gate = pkgutil.resolve_name(gate)
    hook(_NORM, around_norm, HookType.AROUND)
    if _defers_to_anyone():
        hook(f"{_BOUNDARY}.__init__", _after_boundary_init, HookType.AFTER)
        hook(f"{_BOUNDARY}.should_fuse_mlp_allreduce_with_next_layer", _around_deferral, HookType.AROUND)
        hook(f"{dense.QWEN3}.Qwen3DecoderLayer.forward", dense.around_qwen3_layer, HookType.AROUND)
        hook(f"{dense.QWEN3}.Qwen3Model.__init__", dense.after_qwen3_init, HookType.AFTER)
    hook(gate, _around_gate, HookType.AROUND)
    if _llama_reduces_in_its_linears():
        hook(f"{dense.LLAMA}.LlamaDecoderLayer.forward", dense.around_llama_layer, HookType.AROUND)
        hook(f"{dense.LLAMA}.LlamaModel.__init__", dense.after_llama_init, HookType.AFTER)
    State.is_hooked = True


def activate(at_every_size: bool = False) -> None:
    """Norms sum from now on. To be called on all ranks, before there is a model.

    Args:
        at_every_size: See ``State``.
    """
    State.is_active, State.at_every_size = True, at_every_size
    State.overwrites_residuals = not _speculates()


def deactivate() -> bool:
    """The opposite, as long as there is no model; returns whether norms did."""
    was_active, State.is_active = State.is_active, False
    return was_active


def forget(group: Any) -> None:
    """If norms sum over ``group``: not any more. It is being destroyed, and the process may start another engine."""
    if State.group is group:
        State.is_active, State.computes_linears, State.group = False, False, None
        _why_not_deferred.cache_clear()
        _say_why_not_deferred.cache_clear()


def has_norms_for_all_batches() -> bool:
    """Whether this SGLang has a model of which all batches take the same norms that sum."""
    return _llama_reduces_in_its_linears()


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
    return not hasattr(importlib.import_module(dense.LLAMA).LlamaDecoderLayer, "stage_facts")


# ---- Models that leave sums to their norms --------------------------------------------------------------------------


def _around_gate(theirs: Any, batch_size: int) -> bool:
    return (norms_of_boundaries_sum() and batch_size > 0) or theirs(batch_size)


def _after_boundary_init(_: None, boundary: Any, *args: Any, **kwargs: Any) -> None:
    # By now all groups are made. Kept with the layer: its forward may be compiled.
    boundary.llm_comm_defers = State.is_active and _why_not_deferred() is None


def _around_deferral(theirs: Any, boundary: Any, forward_batch: Any) -> bool:
    """Whether a layer leaves the sum of its MLP to the next one."""
    leaves = bool(theirs(boundary, forward_batch))
    if not leaves or not State.is_active or getattr(boundary, "llm_comm_defers", False):
        return leaves
    if not torch.compiler.is_compiling():
        _say_why_not_deferred()
    return bool(State.their_gate(forward_batch.input_ids.shape[0]))  # it has them: the gate has been asked


@functools.cache
def _say_why_not_deferred() -> None:
    why_not = _why_not_deferred()
    if why_not is not None and dist.get_rank() == 0:
        logger.info("llm_comm: sums of MLPs and experts are not fused with the next layer's norm: %s", why_not)


@functools.cache
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
