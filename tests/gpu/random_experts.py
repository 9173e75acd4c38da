"""Random test: experts of few tokens and routers, compared with float64, and by bits with tokens alone and repeats.

    torchrun --standalone --nproc-per-node 1 tests/gpu/random_experts.py

A case is the weights of a layer, tokens, and what their router chose, drawn from a seed, and calls that are eager or
captured in a CUDA graph, which is replayed with another choice. Ranks draw different cases and take no part in each
other's. Some tokens have no expert, and some numbers are no expert's. A router of as many experts chooses from the
tokens too; a stable sort of its logits tells what it must choose.
"""

from __future__ import annotations

import math
import random
import sys
import time
from typing import Any, NamedTuple

import torch
from common import GraphPool, Recording, Session, add_seconds, parser, report, run, session

from llm_comm import Communicator

MOST_FAILURES = 10
#: Of what a sum of products of rounded numbers may be off, in units of the last place of its largest addend.
BOUND = 4
#: Rows and columns of FP8 weights with one scale.
BLOCK = 128


class Case(NamedTuple):
    dtype: torch.dtype
    activation: str
    tokens: int
    top_k: int
    gate_up: torch.Tensor
    down: torch.Tensor
    #: Of FP8 weights: ``gate_up_scale`` and ``down_scale``.
    scales: dict[str, torch.Tensor]
    factor: float
    all_experts: int  # of which other ranks have some
    replays: int  # 0: eager

    def in_full(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both weights of an expert in float64."""
        gate_up, down = self.gate_up[expert].double(), self.down[expert].double()
        if self.scales:
            gate_up *= _of_elements(self.scales["gate_up_scale"][expert])
            down *= _of_elements(self.scales["down_scale"][expert])
        return gate_up, down


def _of_elements(scales: torch.Tensor) -> torch.Tensor:
    return scales.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


def draw(seed: int, device: torch.device, limit: int) -> Case:
    chance = random.Random(seed)
    generator = torch.Generator(device).manual_seed(seed)
    dtype = chance.choice((torch.bfloat16, torch.float16))
    experts = chance.choice((1, 3, 8, 16, 64, 128, 512))
    is_fp8 = chance.random() < 0.4 and (device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9))
    multiple = BLOCK if is_fp8 else 64
    hidden, intermediate = (multiple * chance.choice((1, 2, 3, 5, 6, 16, 32, 45)) for _ in range(2))
    while experts * hidden * intermediate > limit:
        experts = max(1, experts // 2)
        hidden, intermediate = (max(multiple, size // (2 * multiple) * multiple) for size in (hidden, intermediate))
    scales = {}
    one_scale = chance.random() < 0.2  # for each matrix

    def weight(rows: int, columns: int, scale: str) -> torch.Tensor:
        made = torch.empty(experts, rows, columns, device=device).normal_(generator=generator)
        if not is_fp8:
            return made.div_(columns**0.5).to(dtype)
        blocks = (experts, rows // BLOCK, columns // BLOCK)
        drawn = torch.rand((experts, 1, 1) if one_scale else blocks, device=device, generator=generator)
        scales[scale] = (drawn + 0.5).div_(columns**0.5).expand(blocks)
        return made.to(torch.float8_e4m3fn)

    return Case(
        dtype,
        chance.choice(("silu", "silu", "gelu_tanh")),
        chance.choice((1, 1, 2, 3, 8, 9, 16, 17, 32, 33, 64)),
        min(chance.choice((1, 2, 4, 8, 16)), experts),
        weight(2 * intermediate, hidden, "gate_up_scale"),
        weight(hidden, intermediate, "down_scale"),
        scales,
        chance.choice((1.0, 2.5)),
        experts * chance.choice((1, 1, 2, 16)),
        chance.choice((0, 0, 1, 3)),
    )


def choose(case: Case, generator: torch.Generator) -> dict[str, torch.Tensor]:
    device, experts = case.down.device, len(case.down)
    scores = torch.rand(case.tokens, experts, device=device, generator=generator)
    ids = scores.topk(case.top_k).indices.int()
    drawn = torch.rand(ids.shape, device=device, generator=generator)
    ids[drawn < 0.02] = -1
    ids[(drawn >= 0.02) & (drawn < 0.03)] = experts
    ids[drawn[:, 0] > 0.95, 0] = ids[drawn[:, 0] > 0.95, -1]  # an expert twice
    return {
        "x": torch.empty(case.tokens, case.down.shape[1], device=device).normal_(generator=generator).to(case.dtype),
        "topk_weights": torch.rand(ids.shape, device=device, generator=generator),
        "topk_ids": ids,
    }


def is_near(case: Case, chosen: dict[str, torch.Tensor], out: torch.Tensor) -> bool:
    """Return whether the result is off by no more than its roundings explain."""
    x, ids, factors = chosen["x"].double(), chosen["topk_ids"], chosen["topk_weights"].double()
    expected, size, largest = (torch.zeros(out.shape, dtype=torch.float64, device=out.device) for _ in range(3))
    for expert in ids.unique().tolist():
        if not 0 <= expert < len(case.down):
            continue
        gate_up, down = case.in_full(expert)
        gate, up = (x @ gate_up.T).to(case.dtype).double().chunk(2, -1)
        activated = (
            torch.nn.functional.silu(gate)
            if case.activation == "silu"
            else torch.nn.functional.gelu(gate, approximate="tanh")
        )
        factor = case.factor * ((ids == expert) * factors).sum(-1, keepdim=True)
        state = (activated * up).to(case.dtype).double()
        expected += factor * (state @ down.T)
        size += factor.abs() * (state.abs() @ down.T.abs())
        largest += factor.abs() * state.abs().amax(1, keepdim=True) * down.abs().amax(1)
    # Rounding of the result, and roundings of gate, up and state that fall otherwise than in float64: some of many
    # elements, or that of the largest.
    elements = BOUND * size / math.sqrt(case.down.shape[2]) + largest
    bound = torch.finfo(case.dtype).eps * (expected.abs() + elements + 1e-3)
    return bool(((out.double() - expected).abs() <= bound).all())


def problems_of_router(
    comm: Communicator, case: Case, x: torch.Tensor, generator: torch.Generator, pool: Any
) -> list[str]:
    experts, hidden = len(case.down), x.shape[1]
    made = torch.empty(1 + hidden, experts, device=x.device).normal_(generator=generator)
    weight, bias = made[1:].T.contiguous().div_(hidden**0.5).to(case.dtype), made[0].to(case.dtype)
    options: dict[str, Any] = {
        "bias": bias if case.replays % 2 == 0 else None,
        "renormalize": case.activation == "silu",
    }

    def call() -> tuple[torch.Tensor, ...]:
        return comm.moe_route(x, weight, case.top_k, **options)

    weights, ids, logits = routed = call()
    found = []
    addends = x.double().abs() @ weight.double().abs().T
    exact = x.double() @ weight.double().T + (0 if options["bias"] is None else bias.double())
    bound = torch.finfo(case.dtype).eps * exact.abs() + hidden * torch.finfo(torch.float32).eps * addends + 1e-6
    if not bool(((logits.double() - exact).abs() <= bound).all()):
        found.append("router: logits beyond the float64 bound")
    ordered, expected = logits.float().sort(dim=1, descending=True, stable=True)
    if not torch.equal(ids, expected[:, : case.top_k].int()):
        found.append("router: other experts than those of the largest logits")
    of = ordered[:, : case.top_k] if options["renormalize"] else ordered
    if not torch.allclose(weights, of.softmax(1)[:, : case.top_k], rtol=1e-5, atol=1e-7):
        found.append("router: factors are not the softmax")
    recording = Recording(lambda: torch.cat([part.float().flatten() for part in call()]), comm.device, pool)
    if not torch.equal(recording.replay(), torch.cat([part.float().flatten() for part in routed])):
        found.append("router: a graph has other bits")
    one = slice(case.tokens // 2, case.tokens // 2 + 1)
    alone = comm.moe_route(x[one].clone(), weight, case.top_k, **options)
    if not all(torch.equal(a, b[one]) for a, b in zip(alone, routed, strict=True)):
        found.append(f"router: token {one.start} has other bits alone")
    return found


def problems(comm: Communicator, case: Case, seed: int, pool: GraphPool) -> list[str]:
    generator = torch.Generator(comm.device).manual_seed(seed)
    weights: dict[str, Any] = {"gate_up_weight": case.gate_up, "down_weight": case.down, **case.scales}
    weights |= {"activation": case.activation, "routed_scaling_factor": case.factor, "num_experts": case.all_experts}
    chosen = choose(case, generator)

    def call() -> torch.Tensor:
        return comm.fused_experts(**chosen, **weights)

    found = problems_of_router(comm, case, chosen["x"], generator, pool.handle)
    out = call()
    recording = Recording(call, comm.device, pool.handle) if case.replays else None
    for turn in range(1 + case.replays):
        if recording is not None and turn > 0:
            for tensor, other in zip(chosen.values(), choose(case, generator).values(), strict=True):
                tensor.copy_(other)
            out = recording.replay().clone()
        if not is_near(case, chosen, out):
            found.append(f"turn {turn}: beyond the float64 bound")
        if not torch.equal(call(), out):
            found.append(f"turn {turn}: another call has other bits")
        one = slice(seed % case.tokens, seed % case.tokens + 1)
        alone = comm.fused_experts(**{name: tensor[one].clone() for name, tensor in chosen.items()}, **weights)
        if not torch.equal(alone[0], out[one][0]):
            found.append(f"turn {turn}: token {one.start} has other bits alone")
    return found


def run_cases(ranks: Session, options: Any) -> dict[str, int | float]:
    begin, failures, done = time.monotonic(), [], 0
    pool = GraphPool(ranks.device)
    with Communicator(ranks.group, ranks.device) as comm:
        limit = 1 << (27 if ranks.on_gpu else 16)
        for number in range(options.cases):
            if ranks.is_late(options):
                break
            seed = (options.seed * 1_000_003 + number) * ranks.world + ranks.rank
            case = draw(seed, ranks.device, limit)
            for problem in problems(comm, case, seed, pool):
                weights = f"{tuple(case.gate_up.shape)}, {case.gate_up.dtype}"
                failures.append(
                    f"case {number} ({weights}, {case.dtype}, {case.tokens} tokens, top {case.top_k}, "
                    f"{case.activation}): {problem}"
                )
            done += 1
            if number % 50 == 49:
                ranks.say(f"{number + 1} of {options.cases} cases, {time.monotonic() - begin:.0f} s")
        comm.check()
    for failure in failures[:MOST_FAILURES]:
        print(f"rank {ranks.rank}: WRONG {failure}", file=sys.stderr)
    wrong = int(ranks.gather(torch.tensor([len(failures)])).sum())
    return {"cases": done * ranks.world, "wrong_results": wrong, "seconds": round(time.monotonic() - begin, 1)}


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    add_seconds(options)
    options.add_argument("--cases", type=int, help="of each rank; default: 500 on GPUs, else 40")
    options.add_argument("--seed", type=int, default=1)
    arguments = options.parse_args()
    with session(arguments) as ranks:
        if arguments.cases is None:
            arguments.cases = 500 if ranks.on_gpu else 40
        figures = run_cases(ranks, arguments)
        if ranks.rank == 0:
            table = [(name, str(value)) for name, value in figures.items()]
            report("random experts", ranks.device.type, ranks.world, table, figures, arguments.json)
    return 1 if figures["wrong_results"] else 0


if __name__ == "__main__":
    run(main)
