"""Times all tilings of linear layers beside cuBLAS, one GPU, cold weights, in CUDA graphs.

    torchrun --standalone --nproc-per-node 1 tests/gpu/linear_choices.py --list fitted --json FILE
    torchrun --standalone --nproc-per-node 1 tests/gpu/linear_choices.py --list judged --json FILE

The files are what the kernel's own choice is fitted to, and judged by (docs/experiments/linear.md). Of FP8 the layer
beside it is ``torch._scaled_mm``; of silu-and-mul it is cuBLAS alone, without the activation. Of ``--list blocks``, FP8
with scales of blocks, it is the fastest of torch's kernel and, where vLLM is installed, vLLM's kernels. Then vLLM's
quantization stands before all layers but FlashInfer's, which quantizes itself. Where there is no GPU, a small layer is
timed on an emulated one.

Layers are timed with dependent launches, in two kinds of chains. In a ``row`` one stands behind another: where a layer
leaves multiprocessors free, the next one runs beside it. In engines that is so of gate and up and the layer behind
them. All others stand behind a kernel that lets them begin only when the layer before has ended, as the fused
all-reduce does: ``spaced``, with a layer of 64 outputs, which takes about as long, before each. Times are of both.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import Session, add_seconds, parser, report, run, session
from linear_shapes import LISTS, Layer

from llm_comm import Communicator, Config, _core
from llm_comm.bench.layer_chains import (
    behind,
    call_of_choice,
    calls_of_others,
    cold_weights,
    layer_by_torch,
    quantization_before,
    spacer_of,
    time_chain,
    time_fastest,
    unit_scales,
)

TOKENS = (1, 16, 32, 64)
EMULATED = (
    Layer("linear", 192, 256, "emulated"),
    Layer("linear_silu_and_mul_fp8", 64, 256, "emulated"),
    Layer("linear_fp8_blocks", 192, 256, "emulated"),
)
EMULATED_CHOICES = ((16, 2, 2), (64, 4, 1))
#: Stages of the ring, and boxes of each.
RINGS = (
    *((stages, 1) for stages in (6, 8, 12, 16)),
    *((stages, 2) for stages in (2, 3, 4, 5, 6, 8, 10, 12, 16)),
    *((stages, 4) for stages in (2, 3, 4, 5, 7)),
    *((stages, 8) for stages in (2, 3)),
)
REPS = 5


def choices_of(layer: Layer, sm_count: int) -> Iterator[tuple[int, int, int]]:
    """Outputs of a block, stages, and boxes of a stage: of half a block for each multiprocessor and more."""
    rows = 2 * layer.outputs if layer.has_silu else layer.outputs
    least = 16 if layer.has_silu else 8
    for block_outputs in range(least, 65, least):
        blocks = rows / block_outputs
        if (blocks >= 0.4 * sm_count or block_outputs == least) and (blocks <= 6 * sm_count or block_outputs >= 40):
            for stages, boxes in RINGS:
                yield block_outputs, stages, boxes


class Bench:
    """Layers of one rank."""

    def __init__(self, at: Session, comm: Communicator) -> None:
        self._at, self._comm = at, comm
        self._random = torch.Generator(at.device).manual_seed(1)
        self._spacer = spacer_of(comm)

    def layer(self, layer: Layer) -> dict[str, Any]:
        """All times of a layer."""
        rows = 2 * layer.outputs if layer.has_silu else layer.outputs
        dtype = torch.float8_e4m3fn if layer.is_fp8 else torch.bfloat16
        weights = cold_weights((rows, layer.inputs), dtype, self._at.device)
        of_tokens = [self._tokens(layer, weights, tokens) for tokens in (TOKENS if self._at.on_gpu else TOKENS[:2])]
        return {**layer._asdict(), "tokens": of_tokens}

    def _tokens(self, layer: Layer, weights: list[torch.Tensor], tokens: int) -> dict[str, Any]:
        device, like = self._at.device, weights[0]
        x = torch.empty(tokens, layer.inputs, device=device).normal_(generator=self._random).to(like.dtype)
        scales: tuple[torch.Tensor, ...] = ()
        if layer.is_fp8:
            scales = unit_scales(x, len(like), layer.has_blocks)
        found: dict[str, Any] = {"tokens": tokens, "other_us": None, "other_spaced_us": None}
        if self._at.on_gpu:
            others = self._others(layer, x, len(like), scales)
            found["other_us"] = round(time_fastest(others, weights, REPS), 3)
            found["other_spaced_us"] = round(time_fastest(list(map(self._spaced, others)), weights, REPS), 3)
        found["choices"] = []
        choices = choices_of(layer, self._comm.limits.sm_count) if self._at.on_gpu else EMULATED_CHOICES
        for choice in [(0, 0, 0), *choices]:
            call = self._ours(layer, x, scales, choice)
            if call is not None:
                times = [time_chain(call, weights, REPS, device), time_chain(self._spaced(call), weights, REPS, device)]
                found["choices"].append(" ".join(f"{number:.5g}" for number in (*choice, *times)))
        self._comm.check()
        found["choices"] = "; ".join(found["choices"])  # a line of the file
        return found

    def spacer_us(self) -> float:
        """What it takes alone."""
        weights = [torch.empty(0, device=self._at.device)] * 100
        return round(time_chain(lambda _: self._spacer(), weights, REPS, weights[0].device), 3)

    def _spaced(self, call: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], object]:
        def both(weight: torch.Tensor) -> None:
            self._spacer()
            call(weight)

        return both

    def _others(
        self, layer: Layer, x: torch.Tensor, rows: int, scales: tuple[torch.Tensor, ...]
    ) -> list[Callable[[torch.Tensor], object]]:
        out = torch.empty(len(x), rows, dtype=torch.bfloat16, device=x.device)
        return calls_of_others(x, out, scales, False) if layer.has_blocks else [layer_by_torch(x, out, scales)]

    def _ours(
        self,
        layer: Layer,
        x: torch.Tensor,
        scales: tuple[torch.Tensor, ...],
        choice: tuple[int, int, int],
    ) -> Callable[[torch.Tensor], object] | None:
        """None where the kernel does not take the choice."""
        out = torch.empty(len(x), layer.outputs, dtype=torch.bfloat16, device=x.device)
        tiling = _core.LinearChoice(block_outputs=choice[0], stages=choice[1], stage_boxes=choice[2])
        try:
            call = call_of_choice(self._comm, x, out, scales, layer.has_silu, tiling)
            return behind(quantization_before(x, scales), call)
        except ValueError:
            return None


def _own_and_best(choices: str) -> tuple[str, str]:
    """Spaced, microseconds."""
    times = [float(choice.split()[4]) for choice in choices.split("; ")]
    return str(times[0]), str(min(times))


def main(options: argparse.Namespace) -> int:
    with session(options, measures=True) as at:
        comm = Communicator(at.group, at.device, Config(pdl=True))
        with contextlib.suppress(ImportError):
            importlib.import_module("vllm.model_executor.kernels.linear")  # its operators
        bench = Bench(at, comm)
        spacer_us = bench.spacer_us()
        rows = []
        for layer in LISTS[options.list] if at.on_gpu else EMULATED:
            if at.is_late(options):
                break
            start = time.monotonic()
            rows.append(bench.layer(layer))
            at.watchdog.progress(str(layer))
            at.say(f"{layer}: {time.monotonic() - start:.1f} s")
        sm_count = comm.limits.sm_count
        comm.close()
        head = [["layer", "tokens", "other, us", "own choice", "best"]]
        table = [
            [
                f"{row['operation']} {row['outputs']}x{row['inputs']}",
                str(of["tokens"]),
                str(of["other_spaced_us"]),
                *_own_and_best(of["choices"]),
            ]
            for row in rows
            for of in row["tokens"]
        ]
        figures = {"list": options.list, "reps": REPS, "sm_count": sm_count, "spacer_us": spacer_us, "layers": rows}
        report("linear_choices", at.device.type, at.world, head + table, figures, options.json)
    return 0


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--list", choices=tuple(LISTS), default="fitted")
    add_seconds(options)
    run(lambda: main(options.parse_args()))
