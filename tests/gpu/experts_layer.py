"""Times one layer of experts and its router with cold weights, by llm_comm and with ``--sglang`` by SGLang's kernels.

    torchrun --standalone --nproc-per-node 1 tests/gpu/experts_layer.py --sglang --json FILE

With ``--fp8`` weights are FP8 with a scale for each 128 rows and columns; SGLang quantizes tokens, llm_comm does not. A
graph has 12 calls, each with tokens and experts of its own; routers are in graphs of their own. SGLang's Triton
kernels are timed with the engine's choice of a tiling, and with others. Its router is cuBLAS and ``fused_topk``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from common import Session, parser, report, run, session

from llm_comm import Communicator
from llm_comm.bench.layer_chains import time_chain

CALLS = 12
REPS = 15
#: Bytes of weights that together exceed the L2 cache.
COLD_BYTES = 150_000_000


class Shape(NamedTuple):
    hidden: int
    intermediate: int
    experts: int
    top_k: int


SHAPES = {
    "qwen3-30b tp2": Shape(2048, 384, 128, 8),
    "qwen3-235b tp8": Shape(4096, 192, 128, 8),
    "mixtral tp8": Shape(4096, 1792, 8, 2),
    "gpt-oss-120b tp8, no bias": Shape(2880, 384, 128, 4),
}
#: Sizes are multiples of 128.
FP8_SHAPES = {
    "qwen3-30b tp2": SHAPES["qwen3-30b tp2"],
    "qwen3-235b tp4": Shape(4096, 384, 128, 8),
    "deepseek-v3 tp8": Shape(7168, 256, 257, 9),
}
EMULATED = {"small": Shape(128, 128, 4, 2)}


class Call(NamedTuple):
    x: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router: torch.Tensor
    #: Of FP8 weights: those of both, as keywords of ``fused_experts``.
    scales: dict[str, torch.Tensor]


def calls_of(shape: Shape, tokens: int, device: torch.device, fp8: bool) -> list[Call]:
    hidden, intermediate, experts, top_k = shape
    random = torch.Generator(device).manual_seed(1)

    def normal(*sizes: int, deviation: float = 1.0) -> torch.Tensor:
        return torch.empty(sizes, device=device).normal_(0, deviation, generator=random).bfloat16()

    def weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not fp8:
            return normal(experts, rows, columns, deviation=columns**-0.5), None
        scales = torch.full((experts, rows // 128, columns // 128), columns**-0.5, device=device)
        return normal(experts, rows, columns).to(torch.float8_e4m3fn), scales

    bytes_of_layer = (3 if fp8 else 6) * experts * hidden * intermediate
    cold = -(-COLD_BYTES // bytes_of_layer) if device.type == "cuda" else 1
    weights = []
    for _ in range(min(cold, CALLS)):
        (gate_up, gate_up_scale), (down, down_scale) = weight(2 * intermediate, hidden), weight(hidden, intermediate)
        scales = {"gate_up_scale": gate_up_scale, "down_scale": down_scale}
        weights.append((gate_up, down, {name: scale for name, scale in scales.items() if scale is not None}))
    calls = []
    for i in range(CALLS):
        scores, ids = torch.rand(tokens, experts, device=device, generator=random).topk(top_k)
        router = normal(experts, hidden, deviation=hidden**-0.5)
        gate_up, down, scales = weights[i % len(weights)]
        calls.append(Call(normal(tokens, hidden), gate_up, down, scores, ids.int(), router, scales))
    return calls


def router_of_sglang(one: Call) -> Any:
    from sglang.srt.layers.moe.topk import fused_topk

    logits = torch.nn.functional.linear(one.x, one.router)
    return fused_topk(one.x, logits, one.topk_ids.shape[1], renormalize=True)


def kernels_of_sglang() -> Callable[[list[Call], torch.device], dict[str, float]]:
    """A function that times SGLang's kernels, by tilings."""
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.moe.moe_runner.triton_utils import override_config
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts_impl
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method="tcp://127.0.0.1:0", backend="gloo"
    )
    initialize_model_parallel(1)

    def timed(calls: list[Call], device: torch.device) -> dict[str, float]:
        def call(one: Call) -> Any:
            of_fp8: dict[str, Any] = {}
            if one.scales:
                of_fp8 = {"use_fp8_w8a8": True, "block_shape": [128, 128]}
                of_fp8 |= {"w1_scale": one.scales["gate_up_scale"], "w2_scale": one.scales["down_scale"]}
            return fused_experts_impl(*one[:5], inplace=False, **of_fp8)

        found = {"own": time_chain(call, calls, REPS, device)}
        tilings = [(16, n, k, s) for n, k, s in ((64, 128, 4), (128, 64, 4), (32, 256, 3), (64, 256, 3))]
        tilings += [(16, n, k, s) for n, k, s in ((128, 128, 3), (64, 64, 5), (32, 128, 5))]
        if len(calls[0].x) >= 64:
            tilings += [(32, 64, 128, 4), (32, 128, 64, 4)]
        for m, n, k, stages in tilings:
            if k > 128 and calls[0].scales:
                continue  # a tile has columns of one block of scales
            sizes = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": 1}
            with override_config(sizes | {"num_warps": 4, "num_stages": stages}):
                call(calls[0])  # compiles
                found[f"{m}/{n}/{k}/{stages}"] = time_chain(call, calls, REPS, device)
        return found

    return timed


def rows_of(ranks: Session, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with Communicator(ranks.group, ranks.device) as comm:
        theirs = kernels_of_sglang() if options.sglang else None
        shapes = FP8_SHAPES if options.fp8 else SHAPES
        for name, shape in (shapes if ranks.on_gpu else EMULATED).items():
            for tokens in options.tokens:
                calls = calls_of(shape, tokens, ranks.device, options.fp8)
                us = time_chain(lambda one: comm.fused_experts(*one[:5], **one.scales), calls, REPS, ranks.device)
                router_us = time_chain(
                    lambda one: comm.moe_route(one.x, one.router, one.topk_ids.shape[1]), calls, REPS, ranks.device
                )
                active = sum(len(call.topk_ids.unique()) for call in calls) / len(calls)
                row = {"shape": name, "tokens": tokens, "active": round(active, 1), "llm_comm_us": round(us, 1)}
                row["router_us"] = round(router_us, 1)
                if theirs is not None:
                    found = theirs(calls, ranks.device)
                    best = min(found, key=lambda tiling: found[tiling])
                    row |= {"triton_default_us": round(found["own"], 1), "triton_best_us": round(found[best], 1)}
                    row |= {"triton_best": best, "ratio": round(found[best] / us, 2)}
                    row["sglang_router_us"] = round(time_chain(router_of_sglang, calls, REPS, ranks.device), 1)
                rows.append(row)
                ranks.watchdog.progress(f"{name}, {tokens} tokens")
    return rows


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--tokens", type=int, nargs="+", default=(1, 4, 16, 64))
    options.add_argument("--sglang", action="store_true", help="time the kernels of SGLang too")
    options.add_argument("--fp8", action="store_true", help="FP8 weights")
    arguments = options.parse_args()
    with session(arguments, measures=True) as ranks:
        rows = rows_of(ranks, arguments)
        table = [
            (
                f"{row['shape']}, {row['tokens']} tokens",
                f"{row['llm_comm_us']} us {row.get('ratio', '')}, "
                f"router {row['router_us']} us {row.get('sglang_router_us', '')}",
            )
            for row in rows
        ]
        report("experts of one layer", ranks.device.type, ranks.world, table, {"rows": rows}, arguments.json)
    return 0


if __name__ == "__main__":
    run(main)
