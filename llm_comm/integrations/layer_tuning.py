"""Measurement of linear layers when an engine starts: which layers llm_comm computes faster than the engine's kernel,
for how many tokens, and with which tiling.

Shapes come from the model's config.json (``planning/models.py``), so the measurement runs before weights are loaded,
while GPU memory is free. All ranks time each layer, and the slowest rank counts. Rank 0 keeps the rows on disk
(``measured_tables.py``). Layers with rows in the tuning table are not measured. Results of a layer have the same bits
with every tiling.
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

#: Numbers of tokens that are timed; each is ``up_to`` of a row.
TOKENS = (1, 4, 8, 16, 32, 64)
_EMULATED_TOKENS = (1, 16)
#: Default of option ``tune_at_start``, in seconds.
_USUAL_BUDGET_S = 10.0
#: Maximum tilings of a layer that are timed, in the order of the time model. On H100 and H200 one of the first 4 is
#: within 2.1 % of the best in nine of ten cases. One of the first 12 is within 1.1 % (docs/experiments/linear.md, "The
#: kernel's own choice").
_MOST_CHOICES = 6
_REPS = 7
#: llm_comm computes a layer if it is faster by more than this share, by which repeated runs may differ.
_MARGIN = 0.02
#: Times in microseconds for one number of tokens: the engine's fastest kernel, then llm_comm's for each tiling
#: (block_outputs, stages, stage_boxes, time). Both include the time of half a spacer.
Times = tuple[float, list[tuple[int, int, int, float]]]


def budget_s(config: EngineOptions, device: torch.device) -> float:
    """Return the seconds that the measurement may take; 0: nothing is measured."""
    return 0.0 if config.fuse_linear is False else engine_config.seconds_at_start(config, device, _USUAL_BUDGET_S)


def tokens_on(communicator: Communicator) -> tuple[int, ...]:
    """Return the numbers of tokens that layers are timed with."""
    return _EMULATED_TOKENS if communicator.is_emulated else TOKENS


def tune(communicator: Communicator, group: dist.ProcessGroup, layers: Iterable[Layer], log: logging.Logger) -> str:
    """Measure the layers without rows in the communicator's table, and add their rows to it. Collective.

    Args:
        communicator: Communicator of the ranks that share the layers.
        group: gloo group of the same ranks.
        layers: Layers of this rank. Only those that all ranks name are measured.
        log: Takes warnings.

    Returns:
        Summary for the start-up log line; "" if nothing was to measure or a rank could not measure.

    Raises:
        MissingRankError: A rank has ended.
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
    """Run the steps of ``tune``. Each action that may fail on a single rank is a step of the rendezvous.

    A layer whose turn comes after the time limit of any rank is skipped on all ranks.

    Raises:
        RendezvousError: A step has failed on a rank; raised on all ranks.
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
    """Steps of ``_tune`` on this rank."""

    def __init__(self, communicator: Communicator, layers: Iterable[Layer], log: logging.Logger) -> None:
        self._communicator, self._layers, self._log = communicator, layers, log
        self._start = time.monotonic()
        #: Numbers of tokens that each layer is timed with.
        self.tokens = tokens_on(communicator)
        #: Rows by layer, from this start or an earlier one, and the layers that this start measured.
        self.found: dict[LayerKey, list[LayerRow]] = {}
        self.measured: list[LayerKey] = []

    @functools.cached_property
    def _tables(self) -> MeasuredTables:
        return MeasuredTables(self._communicator.device, self._communicator.world_size, self._log)

    @functools.cached_property
    def _bench(self) -> LayerBench:
        return LayerBench(self._communicator)

    def lacking(self) -> list[LayerKey]:
        """Return the served layers without rows in the table, each once."""
        pdl, known = self._communicator.config.pdl, {row.layer() for row in self._communicator.table.layers}
        served = [layer for layer in self._layers if not layer.why_not]
        keys = dict.fromkeys(LayerKey(layer.operation, layer.outputs, layer.inputs, pdl) for layer in served)
        return [key for key in keys if key not in known]

    def kept(self, layer: LayerKey) -> list[LayerRow]:
        """Return a layer's rows from an earlier start, on rank 0; [] on other ranks or without a file."""
        table = self._tables.read(_name(layer)) if self._communicator.rank == 0 else None
        return [] if table is None else [row for row in table.layers if row.layer() == layer]

    def is_late(self) -> bool:
        """Return whether the time limit has passed on this rank."""
        return time.monotonic() - self._start > budget_s(options_of(self._communicator), self._communicator.device)

    def times(self, layer: LayerKey) -> list[Times]:
        """Time a layer with each number of tokens, then release GPU memory."""
        try:
            return self._bench.times(layer)
        finally:
            if self._communicator.device.type == "cuda":
                torch._C._cuda_clearCublasWorkspaces()  # engines size the KV cache by the free memory
                torch.cuda.empty_cache()

    def use(self, layers: int) -> str:
        """Add the rows to the communicator's table, write new ones to disk on rank 0, and return the summary.

        Args:
            layers: Number of layers that the table lacked.
        """
        communicator = self._communicator
        rows = [row for of_layer in self.found.values() for row in of_layer]
        if communicator.rank == 0:
            for layer in self.measured:
                # The file also has the collectives' rows of the current table, which kept() does not read.
                table = communicator.table._replace(layers=tuple(self.found[layer]))
                self._tables.write(_name(layer), table)
        communicator.use_table(communicator.table.with_layers(rows))
        faster, late = {row.layer() for row in rows if row.is_faster}, layers - len(self.found)
        took = f"{len(self.measured)} measured in {time.monotonic() - self._start:.1f} s"
        took += f", no time for {late}" if late else ""
        return f" ({len(faster)} of {layers} that {communicator.table.name} lacks are faster: {took})"


def _name(layer: LayerKey) -> str:
    """Return the file name of a layer's rows, without extension."""
    return f"{layer.operation}_{layer.outputs}x{layer.inputs}{'_pdl' if layer.pdl else ''}"


class LayerBench:
    """Times layers on this rank."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._random = torch.Generator(communicator.device).manual_seed(1)

    def times(self, layer: LayerKey) -> list[Times]:
        """Time a layer with each number of tokens: the engine's kernels, then llm_comm's candidate tilings."""
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
                us = time_chain(_spaced(call, spacer), weights, _REPS, device)
                ours.append((choice.block_outputs, choice.stages, choice.stage_boxes, round(us, 3)))
            found.append((round(theirs, 3), ours))
        communicator.check()
        return found


def _spaced(call: Callable[[torch.Tensor], object], spacer: Callable[[], object]) -> Callable[[torch.Tensor], object]:
    """Return a call of the layer that runs the spacer first, at every other call.

    In a model some layers follow a short kernel, such as qkv, and others a long one, such as the down-projection.
    """
    turns = itertools.cycle((True, False))

    def both(weight: torch.Tensor) -> None:
        if next(turns):
            spacer()
        call(weight)

    return both


def rows_of(layer: LayerKey, tokens: Sequence[int], times: Sequence[Sequence[Times]]) -> list[LayerRow]:
    """Return the rows of a layer.

    Args:
        layer: The layer.
        tokens: Numbers of tokens that were timed.
        times: Times of each rank, for each of ``tokens``.
    """
    return [_row_of(layer, up_to, of_ranks) for up_to, of_ranks in zip(tokens, zip(*times, strict=True), strict=True)]


def _row_of(layer: LayerKey, tokens: int, of_ranks: Sequence[Times]) -> LayerRow:
    """Return the row for up to ``tokens``. The slowest rank counts. Only tilings that all ranks have timed are used."""
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
