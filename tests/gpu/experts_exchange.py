"""Dispatch and combine of experts: random cases compared bit by bit, and with ``--time`` beside NCCL.

    torchrun --standalone --nproc-per-node 8 tests/gpu/experts_exchange.py
    torchrun --standalone --nproc-per-node 2 tests/gpu/experts_exchange.py --cases 0 --time

All ranks draw the tokens of all ranks, so each knows what it must get. A case is eager, or a CUDA graph that is
replayed with other choices. ``--time`` takes graphs of 8 pairs, where tokens choose their experts at random. NCCL
gathers tokens, ids and weights and scatters the sums, as vLLM's ``allgather_reducescatter`` does, or exchanges a copy
of all tokens for each rank by all-to-all.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import GraphPool, Recording, Session, add_seconds, parser, report, run, session

from llm_comm import Communicator
from llm_comm.bench.layer_chains import time_chain

MOST_FAILURES = 10
PAIRS = 8
REPS = 15


class Case(NamedTuple):
    dtype: torch.dtype
    tokens: tuple[int, ...]  # of each rank
    most: int
    hidden: int
    top_k: int
    rank_experts: int
    replays: int  # 0: eager


class Tokens(NamedTuple):
    x: torch.Tensor  # [tokens, hidden]
    ids: torch.Tensor  # [tokens, top_k]
    weights: torch.Tensor


def draw(seed: int, world: int) -> Case:
    chance = random.Random(seed)
    most = chance.choice((1, 3, 8, 17, 64, 128))
    tokens = tuple(chance.choice((most, most, chance.randint(0, most), 0)) for _ in range(world))
    return Case(
        chance.choice((torch.bfloat16, torch.float16)),
        tokens,
        most,
        8 * chance.choice((1, 3, 36, 256, 360, 512, 1024)),
        chance.choice((1, 2, 4, 8, 16)),
        chance.choice((1, 2, 8, 16, 40)),
        chance.choice((0, 0, 1, 2)),
    )


def tokens_of(case: Case, rank: int, generator: torch.Generator, device: torch.device) -> Tokens:
    count, experts = case.tokens[rank], case.rank_experts * len(case.tokens)
    ids = torch.randint(0, experts, (count, case.top_k), generator=generator, device=device)
    missing = torch.rand(ids.shape, generator=generator, device=device) < 0.1
    x = torch.empty(count, case.hidden, device=device).normal_(generator=generator).to(case.dtype)
    return Tokens(x, ids.masked_fill(missing, -1).int(), torch.rand(ids.shape, generator=generator, device=device))


def of_rank(ids: torch.Tensor, rank: int, case: Case) -> torch.Tensor:
    """Numbers among a rank's experts, or -1."""
    local = ids - rank * case.rank_experts
    return torch.where((local >= 0) & (local < case.rank_experts), local, -1)


def made_of(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """What a rank's experts make of rows: exact multiples, so that every rank knows them."""
    return (rows.float() * (rank + 1)).to(rows.dtype)


def problems(comm: Communicator, case: Case, seed: int, pool: GraphPool) -> list[str]:
    rank, world, device = comm.rank, comm.world_size, comm.device
    generator = torch.Generator(device).manual_seed(seed)
    everyone = [tokens_of(case, each, generator, device) for each in range(world)]
    own, experts = everyone[rank], case.rank_experts * world

    def call() -> tuple[torch.Tensor, ...]:
        received = comm.moe_dispatch(own.x, own.ids, own.weights, experts, case.most)
        rows, ids, _ = received
        made = torch.where((ids >= 0).any(1, keepdim=True), made_of(rows, rank), torch.nan)  # nobody may read these
        return (*received, comm.moe_combine(made, ids, own.ids, experts))

    found = []
    results = call()
    recording = Recording(call, device, pool.handle) if case.replays else None
    for turn in range(1 + case.replays):
        if recording is not None and turn > 0:
            everyone = [tokens_of(case, each, generator, device) for each in range(world)]
            for tensor, other in zip(own, everyone[rank], strict=True):
                tensor.copy_(other)
            results = recording.replay()
        rows, ids, weights, out = results
        for source, sent in enumerate(everyone):
            place = slice(source * case.most, source * case.most + len(sent.x))
            due = of_rank(sent.ids, rank, case)
            is_here = (due >= 0).any(1)
            if not torch.equal(ids[place], due) or bool((ids[place.stop : (source + 1) * case.most] != -1).any()):
                found.append(f"turn {turn}: ids of tokens of rank {source}")
            if not torch.equal(weights[place], torch.where(due >= 0, sent.weights, 0.0)):
                found.append(f"turn {turn}: weights of tokens of rank {source}")
            if not torch.equal(rows[place][is_here], sent.x[is_here]):
                found.append(f"turn {turn}: rows of tokens of rank {source}")
        mine = everyone[rank]
        total = torch.zeros(mine.x.shape, device=device)
        for owner in range(world):
            is_there = (of_rank(mine.ids, owner, case) >= 0).any(1, keepdim=True)
            total = torch.where(is_there, total + made_of(mine.x, owner).float(), total)
        if not torch.equal(out, total.to(case.dtype)):
            found.append(f"turn {turn}: sums")
    return found


def run_cases(ranks: Session, options: Any) -> dict[str, Any]:
    failures, done = [], 0
    pool = GraphPool(ranks.device)
    with Communicator(ranks.group, ranks.device) as comm:
        for number in range(options.cases):
            if ranks.is_late(options):
                break
            seed = options.seed * 1_000_003 + number
            case = draw(seed, ranks.world)
            failures += [f"case {number} ({case}): {problem}" for problem in problems(comm, case, seed, pool)]
            done += 1
            ranks.watchdog.progress(f"case {number}")
        comm.check()
    for failure in failures[:MOST_FAILURES]:
        print(f"rank {ranks.rank}: WRONG {failure}", file=sys.stderr)
    return {"cases": done, "wrong_results": int(ranks.gather(torch.tensor([len(failures)])).sum())}


# ---- Time ------------------------------------------------------------------------------------------------------------


def arms_of(ranks: Session, comm: Communicator, nccl: Any, most: int, experts: int) -> dict[str, Callable[..., Any]]:
    """Pairs of a dispatch and a combine, by name. Each takes tokens."""
    world = ranks.world

    def llm_comm(own: Tokens) -> Any:
        rows, ids, _ = comm.moe_dispatch(own.x, own.ids, own.weights, experts, most)
        return comm.moe_combine(rows, ids, own.ids, experts)

    def llm_comm_gathers(own: Tokens) -> Any:
        gathered = [comm.all_gather(each) for each in own]
        return comm.reduce_scatter(gathered[0])

    def gathers(own: Tokens) -> Any:
        gathered = [each.new_empty((world * len(each), each.shape[1])) for each in own]
        for one, whole in zip(own, gathered, strict=True):
            dist.all_gather_into_tensor(whole, one, group=nccl)
        out = torch.empty_like(own.x)
        dist.reduce_scatter_tensor(out, gathered[0], group=nccl)
        return out

    def exchanges(own: Tokens) -> Any:
        results = []
        for one in own:
            sent = one.expand(world, *one.shape).reshape(-1, one.shape[1])
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=nccl)
            results.append(received)
        back = torch.empty_like(results[0])
        dist.all_to_all_single(back, results[0], group=nccl)
        return back.view(world, *own.x.shape).sum(0)

    found: dict[str, Callable[..., Any]] = {"llm_comm": llm_comm, "llm_comm gathers": llm_comm_gathers}
    return found | ({} if nccl is None else {"NCCL gathers": gathers, "NCCL all-to-all": exchanges})


def times_of(ranks: Session, options: Any) -> list[dict[str, Any]]:
    nccl = dist.new_group(backend="nccl") if ranks.on_gpu else None
    rows = []
    shapes = ((2048, 128, 8), (4096, 128, 8), (2880, 128, 4), (7168, 256, 8)) if ranks.on_gpu else ((128, 8, 2),)
    with Communicator(ranks.group, ranks.device) as comm:
        for hidden, experts, top_k in shapes:
            for most in options.tokens if ranks.on_gpu else (2,):
                case = Case(torch.bfloat16, (most,) * ranks.world, most, hidden, top_k, experts // ranks.world, 0)
                generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
                batches = [tokens_of(case, ranks.rank, generator, ranks.device) for _ in range(PAIRS)]
                row: dict[str, Any] = {"hidden": hidden, "experts": experts, "top_k": top_k, "tokens": most}
                for name, call in arms_of(ranks, comm, nccl, most, experts).items():
                    us = time_chain(call, batches, REPS, ranks.device)
                    row[name] = round(float(ranks.gather(torch.tensor([us])).max()), 1)
                rows.append(row)
                ranks.watchdog.progress(f"hidden {hidden}, {most} tokens")
    return rows


def main() -> int:
    options: argparse.ArgumentParser = parser((__doc__ or "").partition("\n")[0])
    add_seconds(options)
    options.add_argument("--cases", type=int, help="default: 500 on GPUs, else 40")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--time", action="store_true", help="needs a GPU for each rank")
    options.add_argument("--tokens", type=int, nargs="+", default=(8, 32, 128), help="of a rank, for --time")
    arguments = options.parse_args()
    with session(arguments, measures=arguments.time) as ranks:
        if arguments.cases is None:
            arguments.cases = 500 if ranks.on_gpu else 40
        figures = run_cases(ranks, arguments)
        rows = times_of(ranks, arguments) if arguments.time else []
        if ranks.rank == 0:
            table = [(name, str(value)) for name, value in figures.items()]
            for row in rows:
                arms = {name: value for name, value in row.items() if "llm_comm" in name or "NCCL" in name}
                what = f"hidden {row['hidden']}, top {row['top_k']}, {row['tokens']} tokens"
                table.append((what, ", ".join(f"{name} {value}" for name, value in arms.items())))
            title = "dispatch and combine"
            report(title, ranks.device.type, ranks.world, table, figures | {"us": rows}, arguments.json)
    return 1 if figures["wrong_results"] else 0


if __name__ == "__main__":
    run(main)
