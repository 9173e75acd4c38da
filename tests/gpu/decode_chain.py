"""What an all-reduce and its norm cost among the kernels of a model: a decode step of dense layers, without an engine.

    torchrun --standalone --nproc-per-node 4 tests/gpu/decode_chain.py

The linear layers of a tensor-parallel Llama (cuBLAS), activations and norms (compiled by inductor) run in a CUDA graph
that holds two all-reduces a layer; a multiplication stands in for attention. Arms: `none`, neither all-reduce nor
norm; `free`, the norm of an uninitialised tensor; `apart`, an all-reduce and a norm; `fused`, both in one kernel; the
last two also without programmatic dependent launch; `nccl`, its all-reduce and a norm. Printed is what each takes
longer than `none`, in microseconds for one of the all-reduces.

How fast a linear layer is depends by a microsecond on where its input lies, and an arm's allocations decide where that
is. So there are several graphs of each arm, and in each the tensors of the layers lie in other places, drawn at random,
the same for all arms.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Session, parser, report, run, session
from torch import Tensor

from llm_comm import Communicator, Config
from llm_comm.bench import timing
from llm_comm.bench.fused import add_rms_norm

SHAPES = Path(__file__).parents[2] / "bench_serving" / "model_shapes"
EPS = 1e-5
WARM_UP = 2

#: Takes a partial sum, the residual and the norm's weight; returns the normed sum and the new residual.
Join = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def activate(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class Model:
    """This rank's shard of the layers, with random weights that no cache holds."""

    def __init__(self, shape: dict[str, Any], layers: int, ranks: Session) -> None:
        hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
        head = shape.get("head_dim") or hidden // heads
        self.queries = heads * head // ranks.world
        keys = shape["num_key_value_heads"] * head // ranks.world
        inner = shape["intermediate_size"] // ranks.world

        def weights(outputs: int, inputs: int) -> list[Tensor]:
            return [
                torch.randn(outputs, inputs, dtype=torch.bfloat16, device=ranks.device) * 0.02 for _ in range(layers)
            ]

        self.qkv, self.out = weights(self.queries + 2 * keys, hidden), weights(hidden, self.queries)
        self.up, self.down = weights(2 * inner, hidden), weights(hidden, inner)
        self.norm = torch.ones(hidden, dtype=torch.bfloat16, device=ranks.device)
        self.attend = torch.compile(lambda x: x[:, : self.queries] * 1.5, dynamic=False)
        self.activate = torch.compile(activate, dynamic=False)

    def step(self, x: Tensor, join: Join, places: random.Random, kept: list[Tensor]) -> Tensor:
        """One token of each sequence, x: [batch, hidden]. ``kept`` takes what is to keep its place."""

        def move() -> None:
            for _ in range(places.randrange(3)):
                kept.append(torch.empty(places.randrange(1, 64) * 512, dtype=torch.uint8, device=x.device))

        residual = x.clone()
        for qkv, out, up, down in zip(self.qkv, self.out, self.up, self.down, strict=True):
            move()
            part = F.linear(self.attend(F.linear(x, qkv)), out)
            move()
            x, residual = join(part, residual, self.norm)
            kept.append(x)
            move()
            part = F.linear(self.activate(F.linear(x, up)), down)
            move()
            x, residual = join(part, residual, self.norm)
            kept.append(residual)
        return x


def arms(ranks: Session, ours: Communicator, undependent: Communicator) -> dict[str, Join]:
    norm = torch.compile(add_rms_norm, dynamic=False)
    nccl = dist.new_group(backend="nccl")

    def by_nccl(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x.clone()
        dist.all_reduce(total, group=nccl)
        return norm(total, residual, weight)

    def apart(communicator: Communicator, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return norm(communicator.all_reduce(x), residual, weight)

    def fused(communicator: Communicator, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return communicator.all_reduce_add_rms_norm(x, residual, weight, EPS)

    return {
        "none": lambda x, residual, weight: (x, residual),
        "free": lambda x, residual, weight: norm(torch.empty_like(x), residual, weight),
        "apart": partial(apart, ours),
        "fused": partial(fused, ours),
        "apart, no PDL": partial(apart, undependent),
        "fused, no PDL": partial(fused, undependent),
        "nccl": by_nccl,
    }


def measure(model: Model, joins: dict[str, Join], ranks: Session, batch: int, options: argparse.Namespace) -> Any:
    """Milliseconds of a step by arm, one figure for each order of places, on the slowest rank."""
    x = torch.randn(batch, len(model.norm), dtype=torch.bfloat16, device=ranks.device)
    graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}
    for name, join in joins.items():
        model.step(x, join, random.Random(0), [])
        for order in range(options.orders):
            kept: list[Tensor] = []
            ranks.synchronize()
            graph = graphs[name, order] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                model.step(x, join, random.Random(1000 * order + batch), kept)
        ranks.watchdog.progress(f"captured {name}, batch {batch}")

    def align() -> None:
        torch.cuda._sleep(timing.ALIGNING_DELAY_CYCLES)
        for _ in range(2):  # the ranks begin together
            joins["apart"](x, x, model.norm)

    clock = timing.CudaClock()
    times: dict[tuple[str, int], list[float]] = {key: [] for key in graphs}
    for rep in range(WARM_UP + options.reps):
        for key, graph in graphs.items():

            def run(graph: torch.cuda.CUDAGraph = graph) -> None:
                graph.replay()
                graph.replay()

            seconds, _ = timing.timed_run(run, align, clock, ranks.control)
            if rep >= WARM_UP:
                times[key].append(seconds * 1e3 / 2)
    mine = torch.tensor([statistics.median(times[key]) for key in graphs], dtype=torch.float64)
    slowest = dict(zip(graphs, ranks.gather(mine).max(dim=0).values.tolist(), strict=True))
    return {name: [slowest[name, order] for order in range(options.orders)] for name in joins}


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--model", default="llama-2-70b", help="of bench_serving/model_shapes (%(default)s)")
    options.add_argument("--layers", type=int, default=20, help="(%(default)s)")
    options.add_argument("--batch-sizes", default="1,4,16,64", metavar="N,N", help="(%(default)s)")
    options.add_argument("--orders", type=int, default=3, help="graphs of each arm (%(default)s)")
    options.add_argument("--reps", type=int, default=7, help="timed runs of each graph (%(default)s)")
    arguments = options.parse_args()
    shape = json.loads((SHAPES / arguments.model / "config.json").read_text(encoding="utf-8"))
    figures: dict[str, Any] = {"model": arguments.model, "layers": arguments.layers, "batches": {}}
    table: list[tuple[str, ...]] = []
    with session(arguments, measures=True) as ranks:
        if not ranks.on_gpu:
            raise SystemExit("decode_chain.py measures GPUs")
        torch.manual_seed(ranks.rank)
        config = Config.load()
        with (
            Communicator(ranks.group, ranks.device, config) as ours,
            Communicator(ranks.group, ranks.device, dataclasses.replace(config, pdl=False)) as undependent,
        ):
            model = Model(shape, arguments.layers, ranks)
            joins = arms(ranks, ours, undependent)
            table.append(("batch", *(name for name in joins if name != "none"), "ms of none"))
            for batch in map(int, arguments.batch_sizes.split(",")):
                ms = measure(model, joins, ranks, batch, arguments)
                none = statistics.mean(ms["none"])
                us = {name: [(one - none) * 1e3 / (2 * arguments.layers) for one in ms[name]] for name in joins}
                figures["batches"][str(batch)] = {
                    "none_ms": round(none, 4),
                    "us": {name: [round(one, 3) for one in us[name]] for name in us},
                }
                table.append((str(batch), *(_cell(us[name]) for name in joins if name != "none"), f"{none:.3f}"))
            ranks.barrier()
        if ranks.rank == 0:
            report("decode_chain", ranks.device.type, ranks.world, table, figures, arguments.json)
    return 0


def _cell(us: list[float]) -> str:
    return f"{statistics.mean(us):.2f} ({min(us):.2f}-{max(us):.2f})"


if __name__ == "__main__":
    run(main)
