"""Layers of q, k and v with rotary position embedding: random cases against torch, and times with cold weights.

    torchrun --standalone --nproc-per-node 1 tests/gpu/rope_layer.py --cases 200 --time --json FILE

Each case compares a layer with torch in fp32, a token of it with the same token alone, and the cache with the result.
Calls that are timed in graphs each come after a short layer, which stands for an all-reduce. Times are those of a call
with its short layer, and of the short layer by itself. cuBLAS and ``Communicator.linear`` compute the layer alone,
without norms, rotation and cache.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

import torch
from common import Session, parser, report, run, session
from rope_reference import normed_and_rotated

from llm_comm import Communicator
from llm_comm.bench.layer_chains import cold_weights, spacer_of, time_chain

REPS = 15
TOKENS = (1, 4, 8, 16, 32)
EPS = 1e-6


class Shape(NamedTuple):
    inputs: int
    q_heads: int
    kv_heads: int
    normed: bool = False
    head_size: int = 128
    rotary_size: int = 128
    interleaved: bool = False

    @property
    def outputs(self) -> int:
        return (self.q_heads + 2 * self.kv_heads) * self.head_size


SHAPES = {
    "llama-70b tp8": Shape(8192, 8, 1),
    "llama-70b tp4": Shape(8192, 16, 2),
    "llama-70b tp2": Shape(8192, 32, 4),
    "llama-8b tp2": Shape(4096, 16, 4),
    "qwen3-32b tp8": Shape(5120, 8, 1, True),
    "qwen3-32b tp4": Shape(5120, 16, 2, True),
    "qwen3-30b-a3b tp2": Shape(2048, 16, 2, True),
}
EMULATED = {"small": Shape(128, 2, 1, True)}


class Call(NamedTuple):
    """Operands of a layer."""

    shape: Shape
    x: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    bias: torch.Tensor | None
    norms: tuple[torch.Tensor, torch.Tensor] | None
    cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def run(self, comm: Communicator, weight: torch.Tensor) -> torch.Tensor:
        return comm.linear_rope(
            *(self.x, weight, self.positions, self.cos_sin),
            head_size=self.shape.head_size,
            kv_heads=self.shape.kv_heads,
            bias=self.bias,
            norm_weights=self.norms,
            eps=EPS,
            interleaved=self.shape.interleaved,
            cache=self.cache,
        )

    def token(self, i: int) -> Call:
        """Return the call of one token, with a cache of its own."""
        keys, values, slots = self.cache
        one = slice(i, i + 1)
        cache = torch.zeros_like(keys), torch.zeros_like(values), slots[one]
        return self._replace(x=self.x[one], positions=self.positions[one], cache=cache)


def call_of(shape: Shape, tokens: int, device: torch.device, dtype: torch.dtype, biased: bool, fp32: bool) -> Call:
    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=device).to(dtype)

    blocks, block_slots = 33, 16
    caches = [normal(blocks, block_slots, shape.kv_heads, shape.head_size) for _ in range(2)]
    norms = (normal(shape.head_size), normal(shape.head_size)) if shape.normed else None
    angles = torch.rand(128, shape.rotary_size // 2, device=device) * 6.3
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(torch.float32 if fp32 else dtype)
    positions = torch.randint(128, (tokens,), device=device)
    slots = torch.randperm(blocks * block_slots, device=device)[:tokens]
    bias = normal(shape.outputs) if biased else None
    return Call(shape, normal(tokens, shape.inputs), positions, cos_sin, bias, norms, (caches[0], caches[1], slots))


def by_torch(call: Call, weight: torch.Tensor) -> torch.Tensor:
    qkv = call.x.float() @ weight.float().T + (0 if call.bias is None else call.bias.float())
    return normed_and_rotated(
        *(qkv.to(call.x.dtype), call.positions, call.cos_sin),
        head_size=call.shape.head_size,
        kv_heads=call.shape.kv_heads,
        norm_weights=call.norms,
        eps=EPS,
        interleaved=call.shape.interleaved,
    )


def is_wrong(comm: Communicator, draw: random.Random, device: torch.device) -> str:
    """Run one random case. Return what is wrong, or ""."""
    head_size = draw.choice((64, 128, 256))
    shape = Shape(
        64 * draw.randint(1, 40),
        draw.randint(1, 9),
        draw.randint(1, 3),
        draw.random() < 0.5,
        head_size,
        head_size // draw.choice((1, 1, 2)),
        draw.random() < 0.3,
    )
    most_tokens = 16 if shape.normed and head_size > 128 else 32
    tokens, dtype = draw.randint(1, most_tokens), draw.choice((torch.bfloat16, torch.float16))
    call = call_of(shape, tokens, device, dtype, draw.random() < 0.5, draw.random() < 0.5)
    weight = (torch.randn(shape.outputs, shape.inputs, device=device) / shape.inputs**0.5).to(dtype)
    found, wanted = call.run(comm, weight), by_torch(call, weight)
    if not torch.allclose(found.float(), wanted.float(), rtol=0.03, atol=0.06):
        return f"{shape} {tokens} {dtype}: {(found.float() - wanted.float()).abs().max().item()} off"
    one = draw.randrange(tokens)
    if not torch.equal(call.token(one).run(comm, weight)[0], found[one]):
        return f"{shape} {tokens} {dtype}: token {one} has other bits by itself"
    heads = found.unflatten(1, (-1, head_size))
    for cache, first in zip(call.cache, (shape.q_heads, shape.q_heads + shape.kv_heads), strict=False):
        if not torch.equal(cache.flatten(0, 1)[call.cache[2]], heads[:, first : first + shape.kv_heads]):
            return f"{shape} {tokens} {dtype}: the cache has other values"
    return ""


def wrong_cases(ranks: Session, comm: Communicator, cases: int) -> list[str]:
    draw = random.Random(1)
    torch.manual_seed(1)
    wrong = []
    for i in range(cases):
        text = is_wrong(comm, draw, ranks.device)
        wrong += [text] if text else []
        ranks.watchdog.progress(f"case {i}")
    return wrong


def times(ranks: Session, comm: Communicator) -> list[dict[str, Any]]:
    rows = []
    spacer = spacer_of(comm)
    for name, shape in (SHAPES if ranks.on_gpu else EMULATED).items():
        weights = cold_weights((shape.outputs, shape.inputs), torch.bfloat16, ranks.device)
        for tokens in TOKENS:
            call = call_of(shape, tokens, ranks.device, torch.bfloat16, biased=False, fp32=True)
            row: dict[str, Any] = {"shape": name, "outputs": shape.outputs, "inputs": shape.inputs, "tokens": tokens}
            for kind, one in kernels(comm, call, spacer).items():
                row[f"{kind}_us"] = round(time_chain(one, weights, REPS, ranks.device), 2)
            rows.append(row)
            ranks.watchdog.progress(f"{name}, {tokens} tokens")
    return rows


def kernels(
    comm: Communicator, call: Call, spacer: Callable[[], object]
) -> dict[str, Callable[[torch.Tensor], object]]:
    """Calls by name, each behind the short layer."""
    out = call.x.new_empty(len(call.x), call.shape.outputs)

    def behind(one: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], object]:
        return lambda weight: (spacer(), one(weight))

    return {
        "spacer": behind(lambda _: None),
        "cublas": behind(lambda weight: torch.mm(call.x, weight.t(), out=out)),
        "linear": behind(lambda weight: comm.linear(call.x, weight, out=out)),
        "linear_rope": behind(lambda weight: call.run(comm, weight)),
    }


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--cases", type=int, default=50)
    options.add_argument("--time", action="store_true", help="time layers of models too")
    arguments = options.parse_args()
    with session(arguments, measures=arguments.time) as ranks, Communicator(ranks.group, ranks.device) as comm:
        wrong = wrong_cases(ranks, comm, arguments.cases)
        rows = times(ranks, comm) if arguments.time else []
        table = [("random cases", f"{len(wrong)} of {arguments.cases} wrong {wrong[:3]}")]
        table += [
            (
                f"{row['shape']}, {row['tokens']} tokens",
                f"{row['linear_rope_us']} us; layer alone: cuBLAS {row['cublas_us']}, linear {row['linear_us']}; "
                f"without any {row['spacer_us']}",
            )
            for row in rows
        ]
        figures = {"cases": arguments.cases, "wrong": len(wrong), "rows": rows}
        report("layers of q, k and v", ranks.device.type, ranks.world, table, figures, arguments.json)
    return 1 if wrong else 0


if __name__ == "__main__":
    run(main)
