"""Whether algorithms by the NVLink switch are right on this machine, and how fast: one command, one report to send.

    torchrun --standalone --nproc-per-node 8 tests/gpu/switch_acceptance.py --json switch.json

It refuses to start where a variable forbids NVLink multicast. Then, each only if the one before was right: capability
and the self-test of a communicator; random cases, eager and replayed, each compared with the fp32 sum in rank order bit
by bit, or where the switch sums with the float64 sum, and with the other ranks; drills in which a rank is killed; times
beside LL, HB and NCCL. On emulated devices (``--device emulated``) it takes fewer cases and no times.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import GraphPool, Recording, Session, parser, report, run, session
from drill_losses import SWITCH_LOSSES
from fused_cases import FusedRunner, draw_fused_case
from values import DTYPES, Inputs, beyond_bound, differs, draw_values, rank_order_sum

from llm_comm import Communicator, Config
from llm_comm.bench import timing
from llm_comm.config import multicast_state

#: Algorithms, and whether their sums are in rank order and alike on all ranks.
ALGORITHMS = {
    "two_shot_switch": (True, True),
    "two_shot_ld_reduce": (False, True),
    "one_shot_ld_reduce": (False, False),
    "ld_reduce": (False, True),
    "push_switch": (True, False),
}
OPERATIONS = {"ld_reduce": "reduce_scatter", "push_switch": "all_gather"}
FUSED = ("two_shot_switch", "two_shot_ld_reduce")
FUSED_SHARE = 0.2  # of the random cases
TIMED = ("one_shot", "two_shot", "two_shot_hb", "two_shot_switch", "two_shot_ld_reduce", "one_shot_ld_reduce")
TIMED_SIZES = (8 << 10, 64 << 10, 512 << 10, 4 << 20, 32 << 20)
REFUSED = 2
COMPARE_EVERY = 50
MOST_FAILURES = 10
_DRILL_LIMIT_S = 200.0


# ---- Right? ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_communicators(ranks: Session) -> Iterator[dict[str, Communicator]]:
    """One for each algorithm. Whoever cannot use it plans another one, which `check_plans` notices."""
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(
                Communicator(ranks.group, ranks.device, Config.load(algorithm=name, multicast="1", sum="any"))
            )
            for name in ALGORITHMS
        }


def why_not_usable(communicators: dict[str, Communicator], device: torch.device) -> list[str]:
    """What of capability or self-test is wrong."""
    x = torch.zeros(840 * 8, dtype=torch.bfloat16, device=device)  # equal parts for every number of ranks
    wrong = []
    for name, comm in communicators.items():
        operation = OPERATIONS.get(name, "all_reduce")
        plan = comm.plan(x) if operation == "all_reduce" else getattr(comm, f"plan_{operation}")(x)
        if not comm.multicast.is_up:
            wrong.append(comm.multicast.why)
        elif plan.algorithm != name:
            wrong.append(f"{operation} runs {plan.algorithm}, not {name}: {plan.reason}")
    row = torch.zeros(1, 512, dtype=torch.bfloat16, device=device)
    for name in FUSED:
        plan = communicators[name].plan_all_reduce_add_rms_norm(row, row[0])
        if communicators[name].multicast.is_up and plan.algorithm != name:
            wrong.append(f"the fused one runs {plan.algorithm}, not {name}: {plan.reason}")
    return list(dict.fromkeys(wrong))


class Cases:
    """Random calls, drawn alike on all ranks, whose results each rank can tell."""

    def __init__(self, ranks: Session, communicators: dict[str, Communicator], options: argparse.Namespace) -> None:
        self._ranks, self._communicators, self._options = ranks, communicators, options
        self._inputs = Inputs(ranks.device, ranks.world)
        self._graph_pool = GraphPool(ranks.device)
        self._digest = hashlib.sha256()
        self.calls: Counter[str] = Counter()
        self.failures: list[str] = []

    def run(self, cases: int) -> None:
        for case in range(cases):
            self._run(case)
            if case % COMPARE_EVERY == COMPARE_EVERY - 1 or case == cases - 1:
                self._compare(case)
            self._ranks.watchdog.progress(f"case {case}")

    def _run(self, case: int) -> None:
        rng = random.Random(f"{self._options.seed} {case}")
        name, dtype = rng.choice(list(ALGORITHMS)), rng.choice(DTYPES)
        world, rank = self._ranks.world, self._ranks.rank
        count = 1 + int(self._options.max_count ** rng.random())
        in_rank_order, is_alike = ALGORITHMS[name]
        operation = OPERATIONS.get(name, "all_reduce")
        whole = count * world if operation == "reduce_scatter" else count
        rows = self._inputs.rows(draw_values(rng, dtype), whole, dtype, rng.getrandbits(40))
        x = rows[rank].clone()
        call = partial(getattr(self._communicators[name], operation), x)
        replays = rng.choice((1, 3)) if rng.random() < 0.2 else 0
        if replays:
            recording = Recording(call, self._ranks.device, self._graph_pool.handle)
            for _ in range(replays):
                got = recording.replay()
        else:
            got = call()
        self.calls[f"{operation}/{name}/{'graph' if replays else 'eager'}"] += 1
        if operation == "all_gather":
            wrong = differs(got, rows.flatten())
        else:
            own = rows[:, rank * count : (rank + 1) * count] if operation == "reduce_scatter" else rows
            wrong = differs(got, rank_order_sum(own)) if in_rank_order else beyond_bound(got, own)
        number = int(wrong.sum())
        if number:
            self.failures.append(f"case {case}: {operation}/{name}, {count} {dtype}: {number} elements are wrong")
        if operation == "all_reduce" and is_alike:
            # NaNs of one sum may differ in their bits.
            self._digest.update(
                got.nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0).view(torch.uint8).cpu().numpy().tobytes()
            )

    def _compare(self, case: int) -> None:
        mine = torch.frombuffer(bytearray(self._digest.digest()), dtype=torch.uint8)
        everyone = self._ranks.gather(mine)
        if bool((everyone != everyone[0]).any()):
            self.failures.append(f"up to case {case}: ranks have other bits")


def run_fused_cases(
    ranks: Session, communicators: dict[str, Communicator], options: argparse.Namespace, cases: int
) -> tuple[Counter[str], list[str]]:
    """With the residual add and the norm, as ``random_cases.py --fused`` draws and judges them.

    Returns the number of calls by name, and the failures.
    """
    drawn_by = argparse.Namespace(
        seed=options.seed, max_count=options.max_count, graph_share=0.2, few_calls=ranks.shares_gpu, only=None
    )
    runner = FusedRunner(ranks, {name: communicators[name] for name in FUSED}, drawn_by)
    failures: list[str] = []
    for number in range(cases):
        runner.run(draw_fused_case(number, drawn_by, ranks.world, FUSED))
        if number % COMPARE_EVERY == COMPARE_EVERY - 1 or number == cases - 1:
            failures += runner.verdicts.settle()
        ranks.watchdog.progress(f"fused case {number}")
    return Counter({f"fused/{name}/{how}": calls for (name, how), calls in runner.calls.items()}), failures


# ---- When a rank dies, and how fast ----------------------------------------------------------------------------


def drill(ranks: Session, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A killed rank in each algorithm, among ranks of their own, which rank 0 starts. The others wait."""
    found: list[dict[str, Any]] = []
    for name in SWITCH_LOSSES:
        ranks.watchdog.progress(f"drill: {name}")
        if ranks.rank == 0:
            found.append(_drill(name, ranks.world, options.device))
        ranks.barrier()
    return found


def _drill(name: str, world: int, device: str) -> dict[str, Any]:
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
    environment = {k: v for k, v in os.environ.items() if k not in outer and not k.startswith("TORCHELASTIC")}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "drill.json"
        command = [sys.executable, str(Path(__file__).with_name("drill.py")), "--only", name, "--world", str(world)]
        command += ["--device", device, "--json", str(file)]
        if device == "emulated":
            command += ["--slowness", "5"]  # other programs may have the cores
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=_DRILL_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return {"name": name, "is_right": False, "said": f"it had not ended after {_DRILL_LIMIT_S:g} s"}
        figures = json.loads(file.read_text())["figures"]["drills"] if file.exists() else []
    is_right = done.returncode == 0 and bool(figures)
    return {"name": name, "is_right": is_right, "drills": figures, "said": "" if is_right else done.stderr[-2000:]}


def times(ranks: Session) -> dict[str, dict[str, float]]:
    """Microseconds of an all-reduce by bytes and algorithm: on GPUs that no ranks share."""
    found: dict[str, dict[str, float]] = {str(size): {} for size in TIMED_SIZES}
    nccl = dist.new_group(backend="nccl")
    schedule = timing.Schedule.by("aligned", 20, 9)
    for name in TIMED:
        with Communicator(ranks.group, ranks.device, Config.load(algorithm=name, multicast="1", sum="any")) as comm:
            for size in TIMED_SIZES:
                x = torch.ones(size // 2, dtype=torch.bfloat16, device=ranks.device)
                if comm.plan(x).algorithm == name:
                    us = timing.time_graph(partial(comm.all_reduce, x), lambda: None, schedule, ranks.control).us
                    found[str(size)][name] = round(us, 2)
                ranks.watchdog.progress(f"{name} of {size} bytes")
    for size in TIMED_SIZES:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=ranks.device)
        us = timing.time_graph(partial(dist.all_reduce, x, group=nccl), x.zero_, schedule, ranks.control).us
        found[str(size)]["NCCL"] = round(us, 2)
        ranks.watchdog.progress(f"NCCL of {size} bytes")
    dist.destroy_process_group(nccl)
    return found


# ---- The report ------------------------------------------------------------------------------------------------


def accept(ranks: Session, options: argparse.Namespace) -> dict[str, Any]:
    """All steps, as far as each is right."""
    figures: dict[str, Any] = {"seed": options.seed, "accepted": False}
    with open_communicators(ranks) as communicators:
        wrong = why_not_usable(communicators, ranks.device)
        figures["self_test"] = wrong or "right"
        if wrong:
            return figures
        ranks.say("capability and self-test: right")
        begin = time.monotonic()
        fused = int(options.cases * FUSED_SHARE)
        cases = Cases(ranks, communicators, options)
        cases.run(options.cases - fused)
        fused_calls, failures = run_fused_cases(ranks, communicators, options, fused)
        cases.failures += failures
        failed = ranks.gather(torch.tensor([len(cases.failures)]))
        figures["random_cases"] = {
            "cases": options.cases,
            "seconds": round(time.monotonic() - begin, 1),
            "wrong_by_rank": failed.flatten().tolist(),
            "calls": dict(sorted((cases.calls + fused_calls).items())),
            "first": cases.failures[:MOST_FAILURES],
        }
    for failure in cases.failures[:MOST_FAILURES]:
        print(f"WRONG rank {ranks.rank}: {failure}", file=sys.stderr, flush=True)
    if bool(failed.any()):
        return figures
    ranks.say(f"{options.cases} random cases: right")
    figures["drills"] = drill(ranks, options)
    is_right = ranks.gather(torch.tensor([all(found["is_right"] for found in figures["drills"])]))
    if not bool(is_right.all()):
        return figures
    ranks.say(f"{len(SWITCH_LOSSES)} drills: right")
    figures["us"] = times(ranks) if ranks.on_gpu and not ranks.shares_gpu else "not measured: no GPU for each rank"
    figures["accepted"] = True
    return figures


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    options.set_defaults(watchdog=300.0)
    options.add_argument("--cases", type=int, help="random cases; default: 2000, 100 on emulated devices")
    options.add_argument("--max-count", type=int, help="elements; default: 1048576, 5000 on emulated devices")
    options.add_argument("--seed", type=int, default=1)
    arguments = options.parse_args()
    # Before there is a CUDA context, a process group or a communicator.
    may, why = multicast_state(Config.load())
    if not may:
        print(f"refused: {why} forbids NVLink multicast on this machine; nothing of it was tried", file=sys.stderr)
        return REFUSED
    with session(arguments) as ranks:
        arguments.cases = arguments.cases or (2000 if ranks.on_gpu else 100)
        arguments.max_count = arguments.max_count or (1 << 20 if ranks.on_gpu else 5000)
        figures = accept(ranks, arguments)
        if ranks.rank == 0:
            outcomes = {name: value for name, value in figures.items() if name in ("self_test", "us", "accepted")}
            table = [("step", "outcome"), *((name, str(value)) for name, value in outcomes.items())]
            report("switch acceptance", ranks.device.type, ranks.world, table, figures, arguments.json)
    return 0 if figures["accepted"] else 1


if __name__ == "__main__":
    run(main)
