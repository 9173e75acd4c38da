"""Experts of few tokens in the integrations of both engines: which batches llm_comm computes.

With ``fuse_experts="auto"`` llm_comm computes the batches that it has measured to be faster. Engines run a model with a
batch size before they capture it. The first such run times the engine's kernels and llm_comm's, each in a graph of
several calls of that layer. Each call has experts chosen at random, so most of their weights come from device memory.
The result holds for all batches up to the same power of two that are at most a quarter larger. Engines capture the
largest first, so while they serve, few batches are left to measure, except without graphs. Each rank decides for
itself: its part of the sum is right by either kernel. Batches that were not measured are the engine's.

FP8 weights have float32 scales, of blocks of 128 x 128 or one for each expert. Kernels of the engines quantize the
tokens as well. llm_comm does not, so scales that a model gives for tokens are not used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from llm_comm import _core
from llm_comm.bench.layer_chains import time_chain
from llm_comm.config import EngineOptions
from llm_comm.errors import CommunicatorError
from llm_comm.integrations.engine_config import seconds_at_start
from llm_comm.operations.fp8 import GROUP_SIZE
from llm_comm.planning.models import Model

#: Reason why the experts of a model are not hooked.
NO_EXPERTS = "the model has none"
#: Calls of a graph that is timed.
_CALLS = 8
_REPS = 7
#: llm_comm computes a batch if it is faster by more than this share, by which repeated runs may differ.
_MARGIN = 0.02


class Batch(NamedTuple):
    """Operands of ``Communicator.fused_experts`` that belong to the tokens."""

    x: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


class Weights(NamedTuple):
    """Operands of ``Communicator.fused_experts`` that belong to the layer. Scales are None without quantization."""

    gate_up_weight: torch.Tensor
    down_weight: torch.Tensor
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None
    #: Factor of the sum of a token's experts.
    routed_scaling_factor: float = 1.0
    #: Number that the router gives the first expert of the weights.
    first_expert: int = 0
    #: Experts that the router chooses from. None: those of the weights.
    num_experts: int | None = None

    def kind(self) -> tuple[Any, ...]:
        """Return what the time of a call depends on, apart from the batch."""
        gate_up, down, scale = self.gate_up_weight, self.down_weight, self.down_scale
        return gate_up.shape, down.shape, gate_up.dtype, None if scale is None else scale.stride(), self.num_experts


#: A call of the experts of a layer for a batch. None: declined.
Compute = Callable[[Batch], Any]


def are_wanted(config: EngineOptions, device: torch.device) -> bool:
    """Return whether llm_comm may compute experts, by option ``fuse_experts`` and whether it may measure."""
    if config.fuse_experts != "auto":
        return bool(config.fuse_experts)
    return seconds_at_start(config, device, usual_s=1.0) > 0  # a batch takes milliseconds: there is no budget to keep


def why_not_needed(model: Model | None) -> str | None:
    """Return the reason why nothing need be hooked, or None. None also if it is not certain."""
    return None if model is None or model.mentions_experts else NO_EXPERTS


def about_objection(config: EngineOptions, engine: str, why_not: str) -> str:
    """Return the part of the start-up log line about experts of an engine, for a reason that ranks have agreed on."""
    is_expected = why_not == NO_EXPERTS and config.fuse_experts == "auto"
    return "" if is_expected else f"; experts are {engine}'s: {why_not}"


def about_fp8(engine: str, why_not: str | None) -> str:
    """Return the part of the start-up log line about FP8 experts of an engine: "" if llm_comm serves them too."""
    return "" if why_not is None else f"; experts of FP8 are {engine}'s: {why_not}"


def about(config: EngineOptions) -> str:
    """Return the part of the start-up log line about experts."""
    where = ", where it is faster" if config.fuse_experts == "auto" else ""
    return f"; experts of up to {_core.linear_max_tokens} tokens by llm_comm{where} (fuse_experts)"


def unquantized(layer: Any) -> Weights:
    """Return the weights of a layer, by the names that both engines give them."""
    return Weights(layer.w13_weight, layer.w2_weight)


def scaled(layer: Any, block: Sequence[int] | None) -> Weights | None:
    """Return the FP8 weights of a layer with their scales; None if llm_comm cannot compute with the scales.

    Args:
        layer: Layer with the names that both engines give weights and scales.
        block: Rows and columns of a block that has a scale; None: each expert's weight has one scale.
    """
    if block is not None and tuple(block) != (GROUP_SIZE, GROUP_SIZE):
        return None
    gate_up, down = unquantized(layer)[:2]
    suffix = "scale" if block is None else "scale_inv"
    scales = []
    for weight, name in ((gate_up, "w13_weight"), (down, "w2_weight")):
        scale = getattr(layer, f"{name}_{suffix}", None)
        if scale is None or scale.dtype is not torch.float32:
            return None
        # detach returns a plain tensor.
        scale, experts = scale.detach(), len(weight)
        of_blocks = experts, *(size // GROUP_SIZE for size in weight.shape[1:])
        if block is None and scale.shape == (experts,):
            scale = scale.view(experts, 1, 1).expand(of_blocks)
        if scale.shape != of_blocks:  # packed for another kernel, or gate and up have a scale each
            return None
        scales.append(scale)
    return Weights(gate_up, down, *scales)


def computed(compute: Callable[..., torch.Tensor | None], weights: Weights, batch: Batch) -> torch.Tensor | None:
    """Call ``fused_experts`` of an integration's communicator."""
    return compute(**batch._asdict(), **weights._asdict())


class Choice:
    """Choice of the batches that llm_comm computes in one engine.

    Args:
        measures: Only batches that were measured to be faster. False: all.
        engine: Name of the engine, for messages.
        log: Takes a line for each measurement.
        numbers_own: The engine numbers the experts of a rank from 0, and gives -1 for those of other ranks.
    """

    def __init__(self, measures: bool, engine: str, log: logging.Logger, numbers_own: bool) -> None:
        self._measures, self._engine, self._log, self._numbers_own = measures, engine, log, numbers_own
        #: By the kind of the weights, the dtypes of the batch, and the numbers of experts and of tokens, the latter as
        #: the exponent of a power of two: most tokens that were tried, and whether llm_comm was faster.
        self._measured: dict[tuple[Any, ...], tuple[int, bool]] = {}

    def is_ours(self, weights: Weights, batch: Batch, theirs: Compute, ours: Compute) -> bool:
        """Return whether llm_comm computes a batch, after a measurement if one is due and can be made.

        Args:
            weights: Weights of the layer.
            batch: The batch, on the current stream.
            theirs, ours: Calls that compute it.
        """
        x, _, ids = batch
        if not self._measures:
            return True
        if not 1 <= len(x) <= _core.linear_max_tokens:
            return False
        dtypes = (operand.dtype for operand in batch)
        key = (*weights.kind(), *dtypes, ids.shape[1], (len(x) - 1).bit_length())
        tokens, is_faster = self._measured.get(key, (0, False))
        if 4 * len(x) > 5 * tokens:
            is_capturing = x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if is_capturing or ours(batch) is None:
                return False
            found = self._measure(weights, batch, theirs, ours)
            is_faster = is_faster if found is None else found
            self._measured[key] = len(x), is_faster
        return is_faster

    def _measure(self, weights: Weights, batch: Batch, theirs: Compute, ours: Compute) -> bool | None:
        """Time both kernels with batches of experts chosen at random, and return whether llm_comm is faster; None if
        they could not be timed."""
        tokens, device, own = len(batch.x), batch.x.device, len(weights.down_weight)
        experts = weights.num_experts or own

        try:
            random = torch.Generator(device).manual_seed(1)  # the engine's draws stay as they are
            numbered = own if self._numbers_own else experts
            batches = [_drawn(batch, experts, numbered, random) for _ in range(_CALLS)]
            their_us = time_chain(theirs, batches, _REPS, device)
            our_us = time_chain(ours, batches, _REPS, device)
        except CommunicatorError:
            raise
        except Exception as error:  # no memory, kernels that cannot be captured, and whatever the engine's may raise
            self._log.warning(
                "llm_comm: experts of %d tokens were not measured and are %s's: %s", tokens, self._engine, error
            )
            return None
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()  # what the graphs had
        if dist.get_rank() == 0:
            self._log.info("llm_comm: experts of %d tokens: %.1f us, %s's %.1f", tokens, our_us, self._engine, their_us)
        return our_us * (1 + _MARGIN) < their_us


def _drawn(batch: Batch, experts: int, numbered: int, random: torch.Generator) -> Batch:
    """Return a copy of the batch whose tokens have chosen among ``experts`` at random. The first ``numbered`` of these
    have numbers, the others -1."""
    x, weights, ids = batch
    drawn = torch.rand(len(ids), experts, device=ids.device, generator=random).topk(ids.shape[1])
    chosen = torch.where(drawn.indices < numbered, drawn.indices, -1)
    return Batch(x.clone(), drawn.values.to(weights.dtype), chosen.to(ids.dtype))
