"""Experts of few tokens in the integrations of both engines: which batches llm_comm computes.

With ``fuse_experts="auto"`` llm_comm computes the batches that it has measured to be faster. Engines run a model with a
batch size before they capture it. The first such run times the engine's kernels and llm_comm's in graphs of several
layers, whose weights together exceed the L2 cache, with experts chosen at random. Each rank decides for itself: its
part of the sum is right by either kernel. Batches that were not measured are the engine's.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from llm_comm import _core
from llm_comm.bench.layer_chains import time_chain
from llm_comm.config import EngineOptions
from llm_comm.integrations.engine_config import seconds_at_start

#: Maximum layers of a graph that is timed.
_MOST_LAYERS = 8
_REPS = 7
#: llm_comm computes a batch if it is faster by more than this share, by which repeated runs may differ.
_MARGIN = 0.02


class Batch(NamedTuple):
    """Operands of ``Communicator.fused_experts`` that belong to the tokens."""

    x: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


#: A call of the experts of a layer for a batch. None: declined.
Compute = Callable[[Any, Batch], Any]


def are_wanted(config: EngineOptions, device: torch.device) -> bool:
    """Return whether llm_comm may compute experts, by option ``fuse_experts`` and whether it may measure."""
    if config.fuse_experts != "auto":
        return bool(config.fuse_experts)
    return seconds_at_start(config, device, usual_s=1.0) > 0  # a batch takes milliseconds: there is no budget to keep


def about(config: EngineOptions) -> str:
    """Return the part of the start-up log line about experts."""
    where = ", where it is faster" if config.fuse_experts == "auto" else ""
    return f"; experts of up to {_core.linear_max_tokens} tokens by llm_comm{where} (fuse_experts)"


def computed(compute: Callable[..., torch.Tensor | None], layer: Any, batch: Batch) -> torch.Tensor | None:
    """Call ``fused_experts`` of an integration's communicator, with the names that both engines give the weights."""
    return compute(
        batch.x,
        layer.w13_weight,
        down_weight=layer.w2_weight,
        topk_weights=batch.topk_weights,
        topk_ids=batch.topk_ids,
    )


class _Layers:
    """Layers with weights of one shape."""

    def __init__(self) -> None:
        self._found: list[weakref.ReferenceType[Any]] = []
        self._are_enough = False

    def add(self, layer: Any) -> None:
        """Add a layer. They are enough when one comes again, since a model runs all of its layers in turn."""
        if not self._are_enough and any(found() is layer for found in self._found):
            self._are_enough = True
        if not self._are_enough:
            self._found.append(weakref.ref(layer))
            self._are_enough = len(self._found) == _MOST_LAYERS

    def to_measure(self) -> list[Any]:
        """Return the layers; [] if they are not enough yet."""
        found = [layer() for layer in self._found] if self._are_enough else []
        return [layer for layer in found if layer is not None]


class Choice:
    """Choice of the batches that llm_comm computes in one engine.

    Args:
        measures: Only batches that were measured to be faster. False: all.
        engine: Name of the engine, for messages.
        log: Takes a line for each measurement.
    """

    def __init__(self, measures: bool, engine: str, log: logging.Logger) -> None:
        self._measures, self._engine, self._log = measures, engine, log
        #: By shapes and dtype of the weights.
        self._layers: dict[tuple[Any, ...], _Layers] = {}
        #: By these, and the numbers of tokens and of experts of a token.
        self._is_faster: dict[tuple[Any, ...], bool] = {}

    def is_ours(self, layer: Any, batch: Batch, theirs: Compute, ours: Compute) -> bool:
        """Return whether llm_comm computes a batch, after a measurement if one is due and can be made.

        Args:
            layer: Layer with ``w13_weight`` and ``w2_weight``.
            batch: The batch, on the current stream.
            theirs, ours: Calls that compute it.
        """
        x, _, ids = batch
        if not self._measures:
            return True
        if not 1 <= len(x) <= _core.linear_max_tokens:
            return False
        shapes = layer.w13_weight.shape, layer.w2_weight.shape, x.dtype
        key = (*shapes, *ids.shape)
        if key not in self._is_faster:
            if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return False
            layers = self._layers.setdefault(shapes, _Layers())
            layers.add(layer)
            links = [(one, _drawn(batch, len(one.w2_weight))) for one in layers.to_measure()]
            if not links:
                return False
            self._is_faster[key] = self._measure(links, theirs, ours)
        return self._is_faster[key]

    def _measure(self, links: list[tuple[Any, Batch]], theirs: Compute, ours: Compute) -> bool:
        """Time both kernels with layers and their batches, and return whether llm_comm is faster."""
        x = links[0][1].x
        if ours(*links[0]) is None:
            return False
        try:
            their_us = time_chain(lambda link: theirs(*link), links, _REPS, x.device)
            our_us = time_chain(lambda link: ours(*link), links, _REPS, x.device)
        except RuntimeError as error:  # no memory, or kernels that cannot be captured
            self._log.warning(
                "llm_comm: experts of %d tokens were not measured and are %s's: %s", len(x), self._engine, error
            )
            return False
        if dist.get_rank() == 0:
            self._log.info("llm_comm: experts of %d tokens: %.1f us, %s's %.1f", len(x), our_us, self._engine, their_us)
        return our_us * (1 + _MARGIN) < their_us


def _drawn(batch: Batch, experts: int) -> Batch:
    """Return a copy of the batch whose tokens have chosen experts at random."""
    x, weights, ids = batch
    drawn = torch.rand(len(ids), experts, device=ids.device).topk(ids.shape[1])
    return Batch(x.clone(), drawn.values.to(weights.dtype), drawn.indices.to(ids.dtype))
