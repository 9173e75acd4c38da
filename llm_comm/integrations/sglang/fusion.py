"""Hooks by which SGLang's norms include the all-reduce before them, in one kernel of llm_comm.

Most models of SGLang leave an all-reduce to the norm after it if SGLang's gate says that FlashInfer's kernel computes
both. The gate is ``flashinfer_ar_fusion_applies``, in older releases ``apply_flashinfer_allreduce_fusion`` (``GATE`` in
``seams.py``). The norm is ``_forward_with_allreduce_fusion``. Both are hooked: the gate says yes, and the norm tries
llm_comm. The norm's hook all-reduces whatever the kernel declines, since SGLang's own function of 0.5.17 would then
apply the norm without an all-reduce.

Hidden states after attention have one reader, the norm after it. The all-reduce of an MLP is left to the next layer.
SGLang before 0.5.21 (``layer_boundary``) does so even if others read those hidden states: the next pipeline stage, a
draft model, or code that adds image features or splits a batch between layers. In these releases llm_comm's gate counts
only where no such reader can exist (``_why_not_deferred``); elsewhere SGLang's own gate decides.

``dense_models`` has the hooks for older dense models, which all-reduce in linear layers.

The hooks are set when the tensor-parallel group is made and llm_comm serves it, since they import modules that only
processes with models need. They have no effect until ``activate``, which must wait until every rank has set them: ranks
that all-reduce at different places of the model would wait for each other.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.runtime_context import get_exec, get_parallel, get_server_args, get_spec

from llm_comm.integrations.seams import load
from llm_comm.integrations.sglang.fused_norm import State, norms_of_boundaries_sum
from llm_comm.integrations.sglang.seams import GATE, TABLE

logger = logging.getLogger("sglang.llm_comm")


def set_up(group: Any) -> None:
    """Store SGLang's tensor-parallel ``group``, and SGLang's own gate. Called before the hooks are set."""
    State.group = group
    if State.their_gate is None:
        State.their_gate = load(str(TABLE.first_of(GATE)))
    State.overwrites_residuals = not _speculates()


def activate(at_every_size: bool = False) -> None:
    """Give the hooks effect. Must be called on all ranks, before a model is made.

    Args:
        at_every_size: Whether SGLang is in deterministic mode, see ``State``.
    """
    State.is_active, State.at_every_size = True, at_every_size


def deactivate() -> bool:
    """Switch fused norms off, before a model is made. Return whether they were on."""
    was_active, State.is_active = State.is_active, False
    return was_active


def forget(group: Any) -> None:
    """Reset the state if ``group``, which is being destroyed, is the stored one. The process may start another
    engine."""
    if State.group is group:
        State.is_active, State.computes_linears, State.group = False, False, None
        _why_not_deferred.cache_clear()
        _say_why_not_deferred.cache_clear()


def _speculates() -> bool:
    """Return whether there may be a draft model. True if SGLang does not tell."""
    try:
        return get_spec().speculative_algorithm is not None
    except ValueError:  # SGLang raises this in a process that makes groups without a server
        return True


# ---- Models that leave sums to their norms --------------------------------------------------------------------------


def around_gate(theirs: Any, batch_size: int) -> bool:
    """Hook of SGLang's gate (``GATE``): say yes whenever llm_comm's hook of the norm is in effect."""
    return (norms_of_boundaries_sum() and batch_size > 0) or theirs(batch_size)


def make_boundary(theirs: Any, boundary: Any, *args: Any, **kwargs: Any) -> None:
    """Hook of ``LayerCommunicator.__init__``: decide whether MLPs may leave their all-reduces to the next layer."""
    theirs(boundary, *args, **kwargs)
    # Decided once, when layers are made: all groups exist by then. The result is an attribute of the layer because the
    # layer's forward may be compiled.
    boundary.llm_comm_defers = State.is_active and _why_not_deferred() is None


def around_deferral(theirs: Any, boundary: Any, forward_batch: Any) -> bool:
    """Hook of ``LayerCommunicator.should_fuse_mlp_allreduce_with_next_layer``: return whether a layer leaves its MLP's
    all-reduce to the next layer."""
    leaves = bool(theirs(boundary, forward_batch))
    if not leaves or not State.is_active or getattr(boundary, "llm_comm_defers", False):
        return leaves
    if not torch.compiler.is_compiling():
        _say_why_not_deferred()
    # ``input_ids`` exist: SGLang's method, which said yes, has read them for its own gate.
    return bool(State.their_gate(forward_batch.input_ids.shape[0]))


@functools.cache
def _say_why_not_deferred() -> None:
    why_not = _why_not_deferred()
    if why_not is not None and dist.get_rank() == 0:
        logger.info("llm_comm: sums of MLPs and experts are not fused with the next layer's norm: %s", why_not)


@functools.cache
def _why_not_deferred() -> str | None:
    """Return the reason why an MLP's output may have other readers than the next layer, or may change before that layer
    reads it. None: neither is possible."""
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
