"""Ranks that die, stall, disagree, use several streams and groups: do faults end as docs/operate/failures.md says?

    python tests/gpu/drill.py --world 4

A killed rank, and one that stalls for ever, must be named by all others, to `on_error` and by an exception: a killed
one within 3 s, though the time limit of the communicator is 30 s; a stalled one within that limit, and it must hear
of it too. No process may be left 2 s later. Where ranks share a GPU, which serves one of them at a time, also while a
process ends, all of these limits are twice as long. Of the other faults every rank must come back with right sums, or
with the error that is expected, and go on with a new communicator.
torchrun would stop all ranks when one dies, so this program starts them itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import Ranks, end_with_launcher, gpus_or, parser, report, run, session
from drill_losses import ALL_LOSSES, ENDED_BY_WATCHDOG, LOSSES, be_lost
from drill_ranks import survive

SURVIVED = "all others"
START_LIMIT_S = 60.0
#: The file that lets the ranks of a part begin. Importing torch takes them longer than most parts do.
GATE = "gate"
#: In which the processes of the ranks have to end after their time limit.
END_S = 2.0
SURVIVE_LIMIT_S = 100.0


@dataclass(frozen=True)
class Result:
    """One line of the table. ``seconds``: to the end of the last process, or of the drill."""

    name: str
    expected: str
    outcome: str
    seconds: float
    problems: list[str]


def rank_main(arguments: argparse.Namespace) -> int:
    end_with_launcher()
    while not (arguments.directory / GATE).exists():
        time.sleep(0.02)
    with session(arguments) as ranks:
        if arguments.part == SURVIVED:
            survive(ranks, arguments.timeout_s, arguments.directory)
        else:
            be_lost(ranks, ALL_LOSSES[arguments.part], arguments.timeout_s, arguments.directory)
            sys.stdout.flush()
    return 0


# ---- The parent ----------------------------------------------------------------------------------------------------


class Part:
    """The ranks of one part of the drill, in processes of their own, which begin when it is entered."""

    def __init__(self, name: str, world: int, arguments: argparse.Namespace) -> None:
        self._temporary = tempfile.TemporaryDirectory()
        self.name = name
        self.world = world
        self.directory = directory = Path(self._temporary.name)
        command = [sys.executable, __file__, "--part", name, "--directory", str(directory)]
        command += ["--timeout-s", str(arguments.timeout_s), "--device", arguments.device]
        command += ["--watchdog", str(START_LIMIT_S)]
        self.ranks = Ranks(command, [{}] * world, directory)

    def __enter__(self) -> Ranks:
        (self.directory / GATE).touch()
        return self.ranks

    def __exit__(self, *_: object) -> None:
        self.ranks.kill()

    def clean_up(self) -> None:
        self.ranks.kill()
        self._temporary.cleanup()

    def content(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return content


def lose(part: Part, arguments: argparse.Namespace) -> Result:
    name, world = part.name, part.world
    loss, victim = ALL_LOSSES[name], ALL_LOSSES[name].victim(world)
    limit_s = loss.limit_s(arguments.timeout_s) * (arguments.slowness if loss.is_killed else 1)
    end_s = END_S * arguments.slowness
    others = [rank for rank in range(world) if rank != victim]
    problems: list[str] = []
    with part as ranks:
        deadline = time.monotonic() + START_LIMIT_S
        while not part.content("fault") and time.monotonic() < deadline and not ranks.wait(0.02):
            pass
        begin = part.content("fault").get("at", time.monotonic())
        all_ended = ranks.wait(max(0.0, begin + limit_s + end_s - time.monotonic()))
        ended = time.monotonic() - begin
        statuses = ranks.statuses
        outputs = [ranks.output(rank) for rank in range(world)]
    if not all_ended:
        left = [rank for rank, status in enumerate(statuses) if status is None]
        problems.append(f"ranks {left} were still there {limit_s + end_s:g} s after the fault")
    expected_status = -signal.SIGKILL if loss.is_killed else ENDED_BY_WATCHDOG
    if statuses[victim] != expected_status:
        problems.append(f"rank {victim} ended with status {statuses[victim]}, not {expected_status}")
    slowest = 0.0
    named = rf"rank {victim} \(global rank {victim}, pid \d+ on [^)]*\)"
    blame = f"the process of {named} has exited" if loss.is_killed else f"nothing came from {named} "
    for rank in others if loss.is_killed else range(world):
        for how in ("told", "raised") if rank != victim else ("told",):
            outcome = part.content(f"{how}.{rank}")
            if not outcome:
                problems.append(f"rank {rank} (status {statuses[rank]}) was not {how}: {outputs[rank][-1500:]}")
                continue
            slowest = max(slowest, outcome["at"] - begin)
            if outcome["at"] - begin > limit_s:
                problems.append(f"rank {rank} was {how} after {outcome['at'] - begin:.2f} s")
            if not re.search(blame, outcome["text"]):
                problems.append(f"rank {rank} does not name rank {victim}: {outcome['text']}")
            if "State of the ranks of group " not in outcome["text"]:
                problems.append(f"rank {rank} does not say what the ranks were doing: {outcome['text']}")
    names = f"PeerTimeout names {victim}"
    return Result(name, names, f"{names if not problems else 'see below'}, {slowest:.2f} s", round(ended, 2), problems)


def go_on(part: Part, arguments: argparse.Namespace) -> list[Result]:
    limit_s = SURVIVE_LIMIT_S * arguments.slowness
    with part as ranks:
        all_ended = ranks.wait(limit_s)
        statuses = ranks.statuses
        outputs = [ranks.output(rank) for rank in range(part.world)]
    content: Any = part.content("survived")
    results = []
    for drill in content or []:
        distinct = {str(text)[:100] for text in drill["outcome"]}
        what = "not on this device" if distinct == {"None"} else sorted(distinct)[0]
        problems = [] if drill["is_right"] else [f"by rank: {drill['outcome']}"]
        results.append(Result(drill["name"], drill["expected"], what, drill["seconds"], problems))
    if not all_ended or any(statuses):
        text = "; ".join(f"rank {rank} printed {output[-1500:]}" for rank, output in enumerate(outputs))
        results.append(Result(SURVIVED, "all ranks end", f"statuses {statuses}", limit_s, [text]))
    return results


def run_parts(names: Sequence[str], world: int, arguments: argparse.Namespace) -> list[Result]:
    """One after the other. On GPUs, whose machines have cores to spare, the ranks of the next one start meanwhile."""
    results: list[Result] = []
    started: list[Part] = []
    try:
        for name, following in itertools.zip_longest(names, names[1:]):
            part = started.pop() if started else Part(name, world, arguments)
            if arguments.on_gpu and following is not None:
                started.append(Part(following, world, arguments))
            try:
                results += go_on(part, arguments) if name == SURVIVED else [lose(part, arguments)]
            finally:
                part.clean_up()
    finally:
        for part in started:
            part.clean_up()
    return results


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--world", type=int, help="default: one a GPU, up to 8; 8 on the only GPU; 4 emulated ones")
    options.add_argument(
        "--timeout-s", type=float, help="LLM_COMM_TIMEOUT_S of the ranks; default: 3, 6 on a shared GPU"
    )
    options.add_argument("--only", choices=(*ALL_LOSSES, SURVIVED), help="run this part alone")
    options.add_argument("--part", choices=(*ALL_LOSSES, SURVIVED), help=argparse.SUPPRESS)
    options.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--slowness", type=float, help="how many times longer than usual all may take")
    arguments = options.parse_args()
    if arguments.part is not None:
        return rank_main(arguments)

    on_gpu, default_world = gpus_or(arguments.device, emulated=4)
    world = arguments.world or default_world
    arguments.on_gpu = on_gpu
    if arguments.slowness is None:
        arguments.slowness = 2.0 if on_gpu and torch.cuda.device_count() < world else 1.0
    if arguments.timeout_s is None:
        arguments.timeout_s = 3.0 * arguments.slowness
    begin = time.monotonic()
    names = (*LOSSES, SURVIVED) if arguments.only is None else (arguments.only,)
    results = run_parts(names, world, arguments)
    for result in results:
        for problem in result.problems:
            print(f"FAIL {result.name}: {problem}", file=sys.stderr, flush=True)
    table = [("drill", "expected", "outcome", "ended (s)", "")]
    for r in results:
        table.append((r.name, r.expected, r.outcome[:60], f"{r.seconds:.2f}", "FAIL" if r.problems else "ok"))
    figures = {
        "timeout_s": arguments.timeout_s,
        "seconds": round(time.monotonic() - begin, 1),
        "drills": [vars(result) for result in results],
    }
    report("drill", "cuda" if on_gpu else "cpu", world, table, figures, arguments.json)
    return 1 if any(result.problems for result in results) else 0


if __name__ == "__main__":
    run(main)
