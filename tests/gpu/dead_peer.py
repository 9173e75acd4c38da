"""A rank is killed in the middle of a loop of all-reduces: what the others get, and how soon.

    python tests/gpu/dead_peer.py --world 8

Every other rank must raise llm_comm.PeerTimeout that names the dead one within the time limit of the communicator, and
end by itself. torchrun would stop the others when one dies, so this program starts the ranks itself.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import Ranks, Recording, Session, parser, report, run, session, wants_cuda

from llm_comm import Communicator, Config, PeerTimeout

LOOP_BEFORE_DEATH_S = 1.0
START_LIMIT_S = 90.0
END_LIMIT_S = 20.0


@dataclass(frozen=True)
class Variant:
    """What the ranks do when one dies.

    Attributes:
        sizes: bytes of the bf16 messages of one turn of the loop.
        victim: the rank to die, by world size.
    """

    algorithm: str
    sizes: tuple[int, ...]
    in_graph: bool
    victim: Callable[[int], int]


VARIANTS = {
    "one_shot": Variant("one_shot", (1024, 16384, 4098), False, lambda world: world - 1),
    "two_shot": Variant("two_shot", (256 * 1024, 20036, 1024 * 1024), False, lambda world: 0),
    "graph": Variant("auto", (1024, 65536, 524288, 16384), True, lambda world: world // 2),
}


# ---- A rank ----------------------------------------------------------------------------------------------------


def make_turn(ranks: Session, communicator: Communicator, variant: Variant) -> Callable[[], None]:
    """One turn of the endless loop."""
    inputs = [torch.ones(size // 2, dtype=torch.bfloat16, device=ranks.device) for size in variant.sizes]
    outputs = [torch.empty_like(x) for x in inputs]

    def calls() -> None:
        for x, out in zip(inputs, outputs, strict=True):
            communicator.all_reduce(x, out)

    if not variant.in_graph:
        return calls
    calls()
    recording = Recording(calls, ranks.device)

    def replay() -> None:
        recording.replay()
        ranks.synchronize()
        communicator.check()

    return replay


def rank_main(arguments: argparse.Namespace) -> int:
    variant = VARIANTS[arguments.variant]
    outcome: dict[str, Any] = {}
    with session(arguments) as ranks:
        config = Config.load(timeout_s=arguments.timeout_s, algorithm=variant.algorithm)
        communicator = Communicator(ranks.group, ranks.device, config)
        turn = make_turn(ranks, communicator, variant)
        ranks.barrier()
        begin = time.monotonic()
        if ranks.rank == variant.victim(ranks.world):
            # From a thread, so that death comes anywhere: within a call, between two, while the GPU works.
            threading.Timer(LOOP_BEFORE_DEATH_S, die, [arguments.directory]).start()
        try:
            while time.monotonic() < begin + LOOP_BEFORE_DEATH_S + 3 * arguments.timeout_s:
                turn()
        except PeerTimeout as error:
            # CLOCK_MONOTONIC, which the processes of a machine share.
            outcome = {"at": time.monotonic(), "peer": error.peer, "message": str(error)}
        communicator.close()
    _write(arguments.directory / f"outcome.{ranks.rank}", outcome)
    return 0


def die(directory: Path) -> None:
    _write(directory / "killed", {"at": time.monotonic()})
    os.kill(os.getpid(), signal.SIGKILL)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


# ---- The parent ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    variant: str
    victim: int
    #: Seconds from the death to the exception, by rank that got one.
    seconds: dict[int, float]
    #: What was named, by rank that got an exception.
    named: dict[int, int]
    #: Seconds from the death to the end of the last process.
    ended: float
    problems: list[str]


def run_variant(name: str, world: int, arguments: argparse.Namespace) -> Result:
    victim = VARIANTS[name].victim(world)
    others = [rank for rank in range(world) if rank != victim]
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        killed = directory / "killed"
        command = [sys.executable, __file__, "--variant", name, "--directory", temporary]
        command += ["--timeout-s", str(arguments.timeout_s), "--device", arguments.device]
        command += ["--watchdog", str(START_LIMIT_S)]
        with Ranks(command, [{}] * world, directory) as ranks:
            deadline = time.monotonic() + START_LIMIT_S
            while not killed.exists() and time.monotonic() < deadline and not ranks.wait(0.05):
                pass
            all_ended = ranks.wait(LOOP_BEFORE_DEATH_S + 3 * arguments.timeout_s + END_LIMIT_S)
            end = time.monotonic()
            statuses = ranks.statuses
            outputs = [ranks.output(rank) for rank in range(world)]
        if not all_ended:
            running = [rank for rank, status in enumerate(statuses) if status is None]
            problems.append(f"ranks {running} had to be killed")
        at = json.loads(killed.read_text())["at"] if killed.exists() else None
        if at is None or statuses[victim] != -signal.SIGKILL:
            problems.append(f"rank {victim} did not die as planned: status {statuses[victim]}")
        outcomes = {rank: _outcome(directory, rank) for rank in others}

    got = {rank: outcome for rank, outcome in outcomes.items() if "at" in outcome}
    for rank in others:
        if rank not in got:
            problems.append(f"rank {rank} (status {statuses[rank]}) got no PeerTimeout")
        elif statuses[rank] != 0:
            problems.append(f"rank {rank} ended with status {statuses[rank]} after its exception")
    for rank, outcome in got.items():
        seconds = outcome["at"] - (at or 0.0)
        if outcome["peer"] != victim:
            problems.append(f"rank {rank} named rank {outcome['peer']}, not {victim}: {outcome['message']}")
        if seconds > arguments.timeout_s:
            problems.append(f"rank {rank} got its exception after {seconds:.2f} s")
    speaker = next((rank for rank in others if statuses[rank]), others[0])
    if problems and outputs[speaker].strip():  # those of one rank that failed by itself are enough
        problems.append(f"rank {speaker} printed: {outputs[speaker].strip()[-1500:]}")
    return Result(
        name,
        victim,
        {rank: round(outcome["at"] - (at or 0.0), 3) for rank, outcome in got.items()},
        {rank: outcome["peer"] for rank, outcome in got.items()},
        round(end - (at or end), 3),
        problems,
    )


def _outcome(directory: Path, rank: int) -> dict[str, Any]:
    path = directory / f"outcome.{rank}"
    outcome: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return outcome


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--world", type=int, help="ranks; default: one a GPU, up to 8; 4 emulated ones")
    options.add_argument("--timeout-s", type=float, default=5.0, help="LLM_COMM_TIMEOUT_S of the ranks")
    options.add_argument("--only", choices=tuple(VARIANTS), help="run this variant alone")
    options.add_argument("--repeat", type=int, default=1, help="runs of each variant")
    options.add_argument("--variant", choices=tuple(VARIANTS), help=argparse.SUPPRESS)
    options.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.variant is not None:
        return rank_main(arguments)

    on_gpu = wants_cuda(arguments.device, arguments.world or 2)
    world = arguments.world or (min(8, torch.cuda.device_count()) if on_gpu else 4)
    names = [arguments.only] if arguments.only else list(VARIANTS)
    results = []
    for name in names * arguments.repeat:
        results.append(run_variant(name, world, arguments))
        for problem in results[-1].problems:
            print(f"FAIL {name}: {problem}", file=sys.stderr, flush=True)
    table = [("variant", "victim", "exceptions", "name the victim", "slowest (s)", "all ended (s)", "")]
    for r in results:
        right = sum(peer == r.victim for peer in r.named.values())
        slowest = f"{max(r.seconds.values()):.2f}" if r.seconds else "-"
        expected = f"{len(r.named)} of {world - 1}"
        verdict = "FAIL" if r.problems else "ok"
        table.append((r.variant, str(r.victim), expected, str(right), slowest, f"{r.ended:.2f}", verdict))
    figures = {"timeout_s": arguments.timeout_s, "runs": [vars(result) for result in results]}
    report("dead peer", "cuda" if on_gpu else "cpu", world, table, figures, arguments.json)
    return 1 if any(result.problems for result in results) else 0


if __name__ == "__main__":
    run(main)
