"""Linear layers that measure themselves when an engine starts: which of them llm_comm computes faster than the engine's
own kernel, for how many tokens, and by which tiling.

The layers are those of the model's config.json (``planning/models.py``), so nothing waits for weights, and the GPU's
memory is free. Every rank times them, and the slowest counts. Rank 0 keeps what was found (``measured_tables.py``).
Layers that the tuning table has are not measured. Bits do not depend on it: a layer has the same ones by every tiling.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from llm_comm.bench.layer_chains import (
    behind,
    call_of_choice,
    calls_of_others,
    choices_of,
    cold_weights,
    quantization_before,
    spacer_of,
    time_chain,
    time_fastest,
    unit_scales,
)
from llm_comm.communicator import Communicator
from llm_comm.config import EngineOptions
from llm_comm.errors import MissingRankError, RendezvousError
from llm_comm.integrations import engine_config
from llm_comm.integrations.engine_config import options_of
from llm_comm.integrations.joining import ENGINE_TIMEOUT_S
from llm_comm.integrations.measured_tables import MeasuredTables
from llm_comm.operations.fp8 import FP8
from llm_comm.planning.layers import LayerKey, LayerRow, has_block_scales, is_fp8, weights_of
from llm_comm.planning.models import Layer
from llm_comm.runtime.rendezvous import Rendezvous

#: Each is the largest number that a row is for.
TOKENS = (1, 4, 8, 16, 32, 64)
_EMULATED_TOKENS = (1, 16)
#: Seconds, of option ``tune_at_start``.
_USUAL_BUDGET_S = 10.0
#: Tilings of a layer that are timed: for nine of ten layers one of the first 4 is within 2.1 % of the best of all, one
#: of the first 12 within 1.1 % (docs/experiments/linear.md, "The kernel's own choice").
_MOST_CHOICES = 6
_REPS = 7
#: A layer is the engine's unless llm_comm's is faster by more than repeated runs differ.
_MARGIN = 0.02
#: Of a number of tokens: microseconds of a layer by the engine's kernel, and of llm_comm's by tiling: outputs of a
#: block, stages, boxes of a stage. Half a spacer is in both.
Times = tuple[float, list[tuple[int, int, int, float]]]


def budget_s(config: EngineOptions, device: torch.device) -> float:
    """Seconds that measuring may take; 0 where nothing is measured."""
    return 0.0 if config.fuse_linear is False else engine_config.seconds_at_start(config, device, _USUAL_BUDGET_S)


def tokens_on(communicator: Communicator) -> tuple[int, ...]:
    """The numbers of tokens that layers are timed with."""
    return _EMULATED_TOKENS if communicator.is_emulated else TOKENS


def tune(communicator: Communicator, group: dist.ProcessGroup, layers: Iterable[Layer], log: logging.Logger) -> str:
    """Measure those of ``layers`` that the table of ``communicator`` lacks, and add their rows to it. Collective.

    Args:
        communicator: Of the ranks among which the layers are split.
        group: gloo group of the same ranks.
        layers: Of this rank. One counts that all ranks have.
        log: Takes warnings.

    Returns:
        What was found, for the line in the log that says what llm_comm does.

    Raises:
        MissingRankError: A rank is gone.
    """
    if budget_s(options_of(communicator), communicator.device) <= 0:
        return ""
    tuning = _Tuning(communicator, layers, log)
    try:
        return _tune(Rendezvous(group, ENGINE_TIMEOUT_S), tuning)
    except MissingRankError:
        raise
    except RendezvousError as error:  # the same on all ranks
        log.warning("llm_comm: linear layers were not measured, and are chosen by their sizes: %s", error)
        return ""


def _tune(rendezvous: Rendezvous, tuning: _Tuning) -> str:
    """Do what ``tune`` says. Whatever can fail on a rank alone is a step.

    Raises:
        RendezvousError: A step has failed on a rank.
    """
    lacking = rendezvous.collect("linear layers to measure", tuning.lacking)
    # A rank that could not read the model's config.json has none.
    layers = [LayerKey(*layer) for layer in lacking[0] if all(layer in of_rank for of_rank in lacking)]
    if not layers:
        return ""
    for layer in layers:
        name = f"linear layer {layer.outputs}x{layer.inputs}"
        kept = rendezvous.collect(f"rows of {name}", partial(tuning.kept, layer))[0]
        if kept:
            tuning.found[layer] = [LayerRow(*row) for row in kept]
        elif not any(rendezvous.collect(f"time for {name}", tuning.is_late)):
            times = rendezvous.collect(f"measurement of {name}", partial(tuning.times, layer))
            tuning.found[layer] = rows_of(layer, tuning.tokens, times)
            tuning.measured.append(layer)
    return rendezvous.attempt("choice of linear layers", partial(tuning.use, len(layers)))


class _Tuning:
    """The steps of ``_tune`` on this rank."""

    def __init__(self, communicator: Communicator, layers: Iterable[Layer], log: logging.Logger) -> None:
        self._communicator, self._layers, self._log = communicator, layers, log
        self._start = time.monotonic()
        #: Of each layer that is timed.
        self.tokens = tokens_on(communicator)
        #: Rows by layer, and the layers that were measured now.
        self.found: dict[LayerKey, list[LayerRow]] = {}
        self.measured: list[LayerKey] = []

    @functools.cached_property
    def _tables(self) -> MeasuredTables:
        return MeasuredTables(self._communicator.device, self._communicator.world_size, self._log)

    @functools.cached_property
    def _bench(self) -> LayerBench:
        return LayerBench(self._communicator)

    def lacking(self) -> list[LayerKey]:
        """The layers that the table lacks."""
        pdl, known = self._communicator.config.pdl, {row.layer() for row in self._communicator.table.layers}
        served = [layer for layer in self._layers if not layer.why_not]
        keys = dict.fromkeys(LayerKey(layer.operation, layer.outputs, layer.inputs, pdl) for layer in served)
        return [key for key in keys if key not in known]

    def kept(self, layer: LayerKey) -> list[LayerRow]:
        """Rows of an earlier start, on rank 0."""
        table = self._tables.read(_name(layer)) if self._communicator.rank == 0 else None
        return [] if table is None else [row for row in table.layers if row.layer() == layer]

    def is_late(self) -> bool:
        """Return whether the time is over."""
        return time.monotonic() - self._start > budget_s(options_of(self._communicator), self._communicator.device)

    def times(self, layer: LayerKey) -> list[Times]:
        """Time a layer with each number of tokens."""
        try:
            return self._bench.times(layer)
        finally:
            if self._communicator.device.type == "cuda":
                torch._C._cuda_clearCublasWorkspaces()  # the engine counts what is free
                torch.cuda.empty_cache()

    def use(self, layers: int) -> str:
        """Add what was found to the table of the communicator, and return what to log.

        Args:
            layers: How many were looked for.
        """
        communicator = self._communicator
        rows = [row for of_layer in self.found.values() for row in of_layer]
        if communicator.rank == 0:
            for layer in self.measured:
                # A file has rows of sums, of which nothing is taken.
                table = communicator.table._replace(layers=tuple(self.found[layer]))
                self._tables.write(_name(layer), table)
        communicator.use_table(communicator.table.with_layers(rows))
        faster, late = {row.layer() for row in rows if row.is_faster}, layers - len(self.found)
        took = f"{len(self.measured)} measured in {time.monotonic() - self._start:.1f} s"
        took += f", no time for {late}" if late else ""
        return f" ({len(faster)} of {layers} that {communicator.table.name} lacks are faster: {took})"


def _name(layer: LayerKey) -> str:
    """Return the name of the file of a layer."""
    return f"{layer.operation}_{layer.outputs}x{layer.inputs}{'_pdl' if layer.pdl else ''}"


class LayerBench:
    """Times layers on this rank."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._random = torch.Generator(communicator.device).manual_seed(1)

    def times(self, layer: LayerKey) -> list[Times]:
        """Time a layer with each number of tokens."""
        operation, outputs, inputs, _ = layer
        communicator = self._communicator
        device = communicator.device
        dtype = FP8 if is_fp8(operation) else torch.bfloat16
        weights = cold_weights((weights_of(operation) * outputs, inputs), dtype, device)
        spacer = spacer_of(communicator)
        found = []
        for tokens in tokens_on(communicator):
            x = torch.empty(tokens, inputs, device=device).normal_(generator=self._random).to(dtype)
            scales: tuple[torch.Tensor, ...] = ()
            if dtype is FP8:
                scales = unit_scales(x, len(weights[0]), has_block_scales(operation))
            of_layer = (
                x,
                torch.empty(tokens, outputs, dtype=torch.bfloat16, device=device),
                scales,
                weights_of(operation) > 1,
            )
            quantize = quantization_before(x, scales)
            theirs = time_fastest([_spaced(call, spacer) for call in calls_of_others(*of_layer)], weights, _REPS)
            ours = []
            for choice in choices_of(communicator, *of_layer)[:_MOST_CHOICES]:
                call = behind(quantize, call_of_choice(communicator, *of_layer, choice))
                us = time_chain(_spaced(call, spacer), weights, _REPS)
                ours.append((choice.block_outputs, choice.stages, choice.stage_boxes, round(us, 3)))
            found.append((round(theirs, 3), ours))
        communicator.check()
        return found


def _spaced(call: Callable[[torch.Tensor], object], spacer: Callable[[], object]) -> Callable[[torch.Tensor], object]:
    """The layer, behind a short one at every other call. In a model qkv stands behind a short kernel, and the
    down-projection behind a long one."""
    turns = itertools.cycle((True, False))

    def both(weight: torch.Tensor) -> None:
        if next(turns):
            spacer()
        call(weight)

    return both


def rows_of(layer: LayerKey, tokens: Sequence[int], times: Sequence[Sequence[Times]]) -> list[LayerRow]:
    """Rows of a layer by what each rank has measured with these numbers of tokens."""
    return [_row_of(layer, up_to, of_ranks) for up_to, of_ranks in zip(tokens, zip(*times, strict=True), strict=True)]


def _row_of(layer: LayerKey, tokens: int, of_ranks: Sequence[Times]) -> LayerRow:
    """The row for up to ``tokens``: the slowest rank counts, and tilings that all ranks have timed."""
    theirs = max(us for us, _ in of_ranks)
    timed = [{tuple(tiling): us for *tiling, us in ours} for _, ours in of_ranks]
    slowest = {
        tiling: max(times[tiling] for times in timed) for tiling in timed[0] if all(tiling in times for times in timed)
    }
    if not slowest:
        return LayerRow(*layer, tokens, False, cublas_us=theirs)
    tiling, us = min(slowest.items(), key=lambda one: one[1])
    block_outputs, stages, stage_boxes = tiling
    is_faster = us * (1 + _MARGIN) < theirs
    return LayerRow(*layer, tokens, is_faster, block_outputs, stages, stage_boxes, us, theirs)
