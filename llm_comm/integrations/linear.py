"""What the engine integrations share about linear layers: whether llm_comm computes them, and what to log."""

from __future__ import annotations

from typing import Any

import torch

from llm_comm import _core
from llm_comm.communicator import Communicator
from llm_comm.integrations.engine_config import options_of
from llm_comm.integrations.layer_tuning import budget_s
from llm_comm.operations.linear import ALIGNMENT
from llm_comm.planning.layers import LINEAR_GELU_TANH_AND_MUL, LINEAR_SILU_AND_MUL, takes_features

#: Of FP8: of x, and of the weight.
Scales = tuple[torch.Tensor, torch.Tensor]

#: Logged once by rank 0, with number of ranks, and shapes of x and of the weight: that layers are set up to be fused
#: does not mean that any is.
FIRST_FUSED_LINEAR = (
    "llm_comm: first linear layer fused with its all-reduce and RMSNorm (%d ranks, shape %s, weight %s)"
)

#: The same where an engine's layer is computed alone, and what comes behind it is not known.
FIRST_LINEAR = "llm_comm: first linear layer computed by llm_comm (%d ranks, shape %s, weight %s)"

#: The same where nothing is summed behind it.
FIRST_COLUMN_LINEAR = (
    "llm_comm: first column-parallel linear layer computed by llm_comm (%d ranks, shape %s, weight %s)"
)

#: Said of the first layer of gate and up, by the communicator's method that computes it with its activation.
FIRST_ACTIVATED = {
    LINEAR_SILU_AND_MUL: (
        "llm_comm: first column-parallel linear layer computed with silu-and-mul (%d ranks, shape %s, weight %s)"
    ),
    LINEAR_GELU_TANH_AND_MUL: (
        "llm_comm: first column-parallel linear layer computed with gelu-tanh-and-mul (%d ranks, shape %s, weight %s)"
    ),
}


#: In the mode in which a token's result must not depend on its batch.
FIRST_INVARIANT_LINEAR = (
    "llm_comm: first linear layer of any number of tokens computed by llm_comm (%d ranks, shape %s, weight %s)"
)

#: Said of linear layers, at start, where they are llm_comm's in all batches.
LINEAR_AT_EVERY_SIZE = "; linear layers by llm_comm at every size (batch_invariant_linear)"


def why_not_any(communicator: Communicator) -> str | None:
    """Why no linear layer of an engine may be computed by llm_comm where few tokens are faster so, if none may. The
    same on all ranks."""
    config = communicator.config
    if config.batch_invariant_norm == "llm_comm":  # the engine is in its batch-invariant mode
        return f"batches of more than {_core.linear_max_tokens} tokens would be the engine's, with other bits"
    if config.fuse_linear is False:
        return f"fuse_linear is false ({config.origins.get('fuse_linear', 'Python')})"
    return None if budget_s(options_of(communicator), communicator.device) > 0 else why_not_preferred(communicator)


def why_not_preferred(communicator: Communicator) -> str | None:
    """Why none is known to be faster, if so. The same on all ranks."""
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
    """Whether a layer of this shape is to be computed by llm_comm for some number of tokens up to ``most_tokens``.

    Args:
        outputs, inputs: As ``Communicator.prefers_linear`` takes them, or ``prefers_linear_silu_and_mul``.
        silu_and_mul: Whether the layer is a gate-and-up projection with its activation.
        fp8: Whether x and the weight are FP8.
        block_scales: Whether scales of FP8 are those of blocks.
    """
    prefers = communicator.prefers_linear_silu_and_mul if silu_and_mul else communicator.prefers_linear
    kind = {"fp8": fp8, "block_scales": block_scales}
    return any(prefers(outputs, inputs, tokens, **kind) for tokens in range(1, most_tokens + 1))


def takes_all_batches_of(weight: torch.Tensor) -> bool:
    """Whether ``linear_of_any_batch`` computes the layer of ``weight``. It does so for all batches or for none."""
    return (
        weight.dtype in (torch.bfloat16, torch.float16)
        and weight.dim() == 2
        and weight.is_contiguous()
        and all(takes_features(features) for features in weight.shape)
    )


def linear_of_any_batch(communicator: Communicator, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` of any number of rows. The bits of a row depend on nothing beside it.

    Args:
        x: [..., inputs], of the dtype of ``weight``.
        weight: [outputs, inputs], which ``takes_all_batches_of`` takes and ``is_aligned``.

    Raises:
        UnsupportedInputError: Something does not fit. An engine's kernel would have other bits.
        CommunicatorError: An earlier call has failed.
    """
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], weight.shape[0]))
    return communicator.linear_of_any_batch(x.contiguous(), weight)


def optional_operands(bias: torch.Tensor | None, scales: Scales | None) -> dict[str, Any]:
    """Return bias and scales as the communicator's methods take them. Scales may be of classes of engines."""
    operands = {"bias": bias}
    if scales is not None:
        operands |= {"x_scale": scales[0].detach(), "weight_scale": scales[1].detach()}
    return operands


def is_aligned(weight: torch.Tensor) -> bool:
    """Whether a weight begins where llm_comm can read it, which ``accepts_linear`` and its kin do not say: it may be
    so on some ranks alone."""
    return weight.data_ptr() % ALIGNMENT == 0


def about_linear(communicator: Communicator, engine: str, why_not: str | None, most_tokens: int) -> str:
    """For the line in the log that says what llm_comm does: with the linear layers of ``engine``.

    Args:
        why_not: They are computed by the engine; None: by llm_comm, up to ``most_tokens``.
    """
    if options_of(communicator).batch_invariant_linear == "llm_comm":  # of which something else is said
        return ""
    if why_not is not None:
        return f"; linear layers are {engine}'s: {why_not}"
    return f"; linear layers of up to {most_tokens} tokens by llm_comm"
