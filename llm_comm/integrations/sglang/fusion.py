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
    """Note ``group``, the tensor-parallel one, as that over which norms are to sum."""
    State.group = group
    if State.their_gate is None:
        State.their_gate = load(str(TABLE.first_of(GATE)))
    State.overwrites_residuals = not _speculates()


def activate(at_every_size: bool = False) -> None:
    """Norms sum from now on. To be called on all ranks, before there is a model.

    Args:
        at_every_size: See ``State``.
    """
    State.is_active, State.at_every_size = True, at_every_size


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


def _speculates() -> bool:
    """Whether there is, or may be, a draft model."""
    try:
        return get_spec().speculative_algorithm is not None
    except ValueError:  # nothing is published: groups without a server
        return True


# ---- Models that leave sums to their norms --------------------------------------------------------------------------


def around_gate(theirs: Any, batch_size: int) -> bool:
    return (norms_of_boundaries_sum() and batch_size > 0) or theirs(batch_size)


def make_boundary(theirs: Any, boundary: Any, *args: Any, **kwargs: Any) -> None:
    theirs(boundary, *args, **kwargs)
    # By now all groups are made. Kept with the layer: its forward may be compiled.
    boundary.llm_comm_defers = State.is_active and _why_not_deferred() is None


def around_deferral(theirs: Any, boundary: Any, forward_batch: Any) -> bool:
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
