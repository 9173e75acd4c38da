"""Linear layers in the integrations of both engines: which layers llm_comm computes, their calls, and log lines."""

from __future__ import annotations

from typing import Any

import torch

from llm_comm import _core
from llm_comm.communicator import Communicator
from llm_comm.integrations.engine_config import options_of
from llm_comm.integrations.layer_tuning import budget_s
from llm_comm.operations.operands import ALIGNMENT
from llm_comm.planning.layers import LINEAR_GELU_TANH_AND_MUL, LINEAR_SILU_AND_MUL, takes_features

#: Scales of FP8 operands: of x, and of the weight.
Scales = tuple[torch.Tensor, torch.Tensor]

#: Log lines of the first layer of each kind, once on rank 0. Arguments: number of ranks, shape of x, shape of the
#: weight. They show that a layer was really computed by llm_comm, which setup alone does not.
#:
#: First layer fused with its all-reduce and norm.
FIRST_FUSED_LINEAR = (
    "llm_comm: first linear layer fused with its all-reduce and RMSNorm (%d ranks, shape %s, weight %s)"
)

#: First layer computed alone, where the operation after it is unknown.
FIRST_LINEAR = "llm_comm: first linear layer computed by llm_comm (%d ranks, shape %s, weight %s)"

#: First layer without an all-reduce after it.
FIRST_COLUMN_LINEAR = (
    "llm_comm: first column-parallel linear layer computed by llm_comm (%d ranks, shape %s, weight %s)"
)

#: First layer of gate and up with its activation, by the communicator's method.
FIRST_ACTIVATED = {
    LINEAR_SILU_AND_MUL: (
        "llm_comm: first column-parallel linear layer computed with silu-and-mul (%d ranks, shape %s, weight %s)"
    ),
    LINEAR_GELU_TANH_AND_MUL: (
        "llm_comm: first column-parallel linear layer computed with gelu-tanh-and-mul (%d ranks, shape %s, weight %s)"
    ),
}

#: First layer of q, k and v with RoPE and the write to the KV cache.
FIRST_ROPE = "llm_comm: first qkv with rope and cache write computed by llm_comm (%d ranks, shape %s, weight %s)"

#: First layer in batch-invariant mode.
FIRST_INVARIANT_LINEAR = (
    "llm_comm: first linear layer of any number of tokens computed by llm_comm (%d ranks, shape %s, weight %s)"
)

#: First experts of few tokens. The weight is that of gate and up.
FIRST_EXPERTS = "llm_comm: first experts computed by llm_comm (%d ranks, shape %s, weight %s)"

#: First router of experts.
FIRST_ROUTER = "llm_comm: first router computed by llm_comm (%d ranks, shape %s, weight %s)"

#: Part of the start-up line if llm_comm computes linear layers at every batch size.
LINEAR_AT_EVERY_SIZE = "; linear layers by llm_comm at every size (batch_invariant_linear)"


def why_not_any(communicator: Communicator) -> str | None:
    """Return why llm_comm computes no linear layers of decode steps, or None if it may. The same on all ranks."""
    config = communicator.config
    if config.batch_invariant_norm == "llm_comm":  # set only in batch-invariant mode
        return f"batches of more than {_core.linear_max_tokens} tokens would run the engine's kernel with other bits"
    if config.fuse_linear is False:
        return f"fuse_linear is false ({config.origins.get('fuse_linear', 'Python')})"
    return None if budget_s(options_of(communicator), communicator.device) > 0 else why_not_preferred(communicator)


def why_not_preferred(communicator: Communicator) -> str | None:
    """Return why no layer is preferred, or None if one is. The same on all ranks."""
    if communicator.max_preferred_tokens > 0:
        return None
    config = communicator.config
    pdl = "on" if config.pdl else "off"
    return f"fuse_linear is 'auto', and {communicator.table.name} has no layer that is faster with pdl {pdl}"


def prefers_some(
    communicator: Communicator,
    outputs: int,
    inputs: int,
    most_tokens: int,
    silu_and_mul: bool = False,
    fp8: bool = False,
    block_scales: bool = False,
) -> bool:
    """Return whether llm_comm is preferred for a layer of this shape at any number of tokens up to ``most_tokens``.

    Args:
        communicator: The group's communicator.
        outputs, inputs: As in ``Communicator.prefers_linear``, or in ``prefers_linear_silu_and_mul``.
        most_tokens: Largest number of tokens that is considered.
        silu_and_mul: The layer is gate and up with its activation.
        fp8: x and the weight are FP8.
        block_scales: The scales of FP8 operands are block scales.
    """
    prefers = communicator.prefers_linear_silu_and_mul if silu_and_mul else communicator.prefers_linear
    kind = {"fp8": fp8, "block_scales": block_scales}
    return any(prefers(outputs, inputs, tokens, **kind) for tokens in range(1, most_tokens + 1))


def takes_all_batches_of(weight: torch.Tensor) -> bool:
    """Return whether ``batch_invariant_linear`` supports ``weight``. The answer holds for all batch sizes."""
    return (
        weight.dtype in (torch.bfloat16, torch.float16)
        and weight.dim() == 2
        and weight.is_contiguous()
        and all(takes_features(features) for features in weight.shape)
    )


def batch_invariant_linear(communicator: Communicator, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute ``x @ weight.T`` for any number of rows, 0 included. The bits of a row do not depend on other rows.

    Args:
        communicator: The group's communicator.
        x: [..., inputs], of the dtype of ``weight``. Copied if it is not contiguous.
        weight: [outputs, inputs], accepted by ``takes_all_batches_of`` and ``is_aligned``.

    Raises:
        UnsupportedInputError: An operand is not supported. The engine's kernel is no fallback: its bits differ.
        CommunicatorError: An earlier call has failed.
    """
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], weight.shape[0]))
    return communicator.batch_invariant_linear(x.contiguous(), weight)


def optional_operands(bias: torch.Tensor | None, scales: Scales | None) -> dict[str, Any]:
    """Return bias and scales as keyword arguments of the communicator's methods.

    ``detach`` turns scales of parameter subclasses of engines into plain tensors.
    """
    operands = {"bias": bias}
    if scales is not None:
        operands |= {"x_scale": scales[0].detach(), "weight_scale": scales[1].detach()}
    return operands


def is_aligned(weight: torch.Tensor) -> bool:
    """Return whether the address of a weight is a multiple of ``ALIGNMENT``.

    The ``accepts_linear*`` queries do not check it, because the answer may differ between ranks.
    """
    return weight.data_ptr() % ALIGNMENT == 0


def about_linear(communicator: Communicator, engine: str, why_not: str | None, most_tokens: int) -> str:
    """Return the part of the start-up log line about linear layers.

    Args:
        communicator: The group's communicator.
        engine: Name of the engine.
        why_not: Reason why the engine computes all layers; None if llm_comm computes some.
        most_tokens: Largest batch, in tokens, whose layers llm_comm computes.
    """
    if options_of(communicator).batch_invariant_linear == "llm_comm":  # LINEAR_AT_EVERY_SIZE is logged instead
        return ""
    if why_not is not None:
        return f"; linear layers are {engine}'s: {why_not}"
    return f"; linear layers of up to {most_tokens} tokens by llm_comm"
