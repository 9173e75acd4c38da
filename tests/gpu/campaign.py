"""All that is to be right on GPUs, in one command with time limits: one GPU, shared by up to 8 ranks, is enough.

    python tests/gpu/campaign.py --out DIR --commit "$(git rev-parse --short HEAD)"
    python tests/gpu/campaign.py --out DIR --parts random_3,random_5,random_7,random_8,drill --budget-s 560

Writes DIR/campaign.log, what the parts printed, and DIR/campaign.json, their results, anew whenever a part ends. A part
that has not ended within its limit, or when the budget is spent, is killed; one that does not fit any more is not run.
Either fails the campaign. Parts that only have to be right run at once, up to ``--ranks-at-once`` ranks; those that
have time limits or look at the memory of the GPU run alone. ``--list`` says what there is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import Ranks, environment, parser, run, wants_cuda
from memcheck import sanitizer_path
from overlap import mps_control_path
from user_kernels import nvcc_path

HERE = Path(__file__).parent
#: What the others get once a rank has failed, for their own words.
GRACE_S = 10.0
#: So long before it would be killed a part stops by itself, where it can.
STOP_BEFORE_S = 30.0

Figures = Any
#: Says what of the figures of a part does not meet its bar.
Bar = Callable[[Figures], list[str]]


@dataclass(frozen=True)
class Part:
    """One program of this directory.

    Attributes:
        world: its ranks.
        starts_ranks: whether the program starts them itself.
        alone: nothing else runs meanwhile.
        can_stop: whether the program takes ``--seconds``: it stops in time, so that what it has done is not lost.
        bar: by the JSON file that the program writes.
        second: what the name of a second JSON file ends in, and its bar.
        lacks: what this machine lacks for it.
    """

    name: str
    program: str
    options: tuple[str, ...]
    world: int
    limit_s: float
    bar: Bar
    starts_ranks: bool = False
    alone: bool = False
    can_stop: bool = False
    second: tuple[str, Bar] | None = None
    lacks: str = ""


def _is(key: str, wanted: object) -> Bar:
    return lambda figures: [] if figures[key] == wanted else [f"{key} is {figures[key]}, not {wanted}"]


def _all_of(*bars: Bar) -> Bar:
    return lambda figures: [problem for bar in bars for problem in bar(figures)]


def _at_least(key: str, wanted: int) -> Bar:
    return lambda figures: [] if figures[key] >= wanted else [f"{key} is {figures[key]}, less than {wanted}"]


def _drills(figures: Figures) -> list[str]:
    wrong = [drill["name"] for drill in figures["drills"] if drill["problems"]]
    return [f"not as documented: {', '.join(wrong)}"] if wrong or not figures["drills"] else []


def _memcheck(figures: Figures) -> list[str]:
    return [f"rank {one['rank']}: status {one['status']}" for one in figures if one["status"] != 0]


def _cases(cases: int) -> Bar:
    return _all_of(_is("cases", cases), _is("wrong_results", 0))


def _by_status(_figures: Figures) -> list[str]:
    return []


def all_parts(options: argparse.Namespace, on_gpu: bool) -> list[Part]:
    """In the order in which they are started."""
    no_gpu = "" if on_gpu else "a GPU"
    world = options.world
    randoms = [
        Part(
            f"random_{ranks}",
            "random_cases.py",
            ("--both", "--cases", str(options.cases), "--fused-cases", str(options.fused_cases)),
            ranks,
            420,
            _cases(options.cases),
            second=("_fused", _cases(options.fused_cases)),
            can_stop=True,
        )
        for ranks in options.worlds
    ]
    soak = _at_least("calls", options.calls)
    return [
        *randoms,
        Part("drill", "drill.py", ("--world", str(world)), world, 330, _drills, starts_ranks=True, alone=True),
        Part("soak", "soak.py", ("--calls", str(options.calls)), world, 420, soak, alone=True, can_stop=True),
        Part(
            "memcheck",
            "memcheck.py",
            ("--world", str(world), "--limit-s", "280"),
            world,
            300,
            _memcheck,
            starts_ranks=True,
            lacks="compute-sanitizer" if on_gpu and sanitizer_path() is None else "",
        ),
        Part(
            "cycles",
            "cycles.py",
            ("--cycles", str(options.cycles), "--rss-slack", str(32 << 20)),
            options.cycles_world,
            200,
            _is("cycles", options.cycles),
            alone=True,
            can_stop=True,
        ),
        Part("environments", "environments.py", (), world, 200, _by_status, starts_ranks=True),
        Part(
            "user_kernels",
            "user_kernels.py",
            (),
            2,
            120,
            _by_status,
            starts_ranks=True,
            lacks=no_gpu or ("nvcc" if nvcc_path() is None else ""),
        ),
        Part("overlap", "overlap.py", (), 2, 120, _by_status),
        Part(
            "overlap_mps",
            "overlap.py",
            ("--mps", "--world", str(world)),
            world,
            120,
            _by_status,
            starts_ranks=True,
            alone=True,
            lacks=no_gpu or ("nvidia-cuda-mps-control" if mps_control_path() is None else ""),
        ),
        Part(
            "graph_outlives", "graph_outlives.py", (), 2, 200, _by_status, starts_ranks=True, alone=True, lacks=no_gpu
        ),
    ]


@dataclass
class Running:
    part: Part
    directory: tempfile.TemporaryDirectory[str]
    started: Ranks | subprocess.Popen[bytes]
    begin: float
    failed_at: float | None = None

    @property
    def path(self) -> Path:
        return Path(self.directory.name)

    def statuses(self) -> list[int | None]:
        return self.started.statuses if isinstance(self.started, Ranks) else [self.started.poll()]

    def kill(self) -> None:
        if isinstance(self.started, Ranks):
            self.started.kill()
            return
        # Its ranks too, and the tools that they run under.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.started.pid, signal.SIGKILL)
        self.started.wait()

    def outputs(self) -> list[str]:
        return [path.read_text(errors="replace") for path in sorted(self.path.glob("output.*"))]


@dataclass
class Campaign:
    options: argparse.Namespace
    facts: dict[str, Any]
    begin: float = field(default_factory=time.monotonic)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    def left_s(self) -> float:
        return float(self.options.budget_s) - (time.monotonic() - self.begin)

    def run(self, parts: Sequence[Part]) -> None:
        waiting, running = list(parts), list[Running]()
        try:
            while waiting or running:
                for part in [part for part in waiting if self._may_start(part, running)]:
                    if self._may_start(part, running):  # what has been started since counts
                        waiting.remove(part)
                        running.append(self._start(part))
                if self.left_s() <= 0 or (waiting and not running):
                    for part in waiting:
                        self._end(part, {"verdict": "not run", "problems": [part.lacks or "no time was left"]})
                    waiting.clear()
                time.sleep(0.1)
                running = [one for one in running if not self._has_ended(one)]
        finally:
            for one in running:
                one.kill()
                one.directory.cleanup()

    def _may_start(self, part: Part, running: Sequence[Running]) -> bool:
        if part.lacks or self.left_s() < self.options.least_s:
            return False
        if any(one.part.alone for one in running) or (part.alone and running):
            return False
        return not running or sum(one.part.world for one in running) + part.world <= self.options.ranks_at_once

    def _start(self, part: Part) -> Running:
        print(f"{time.monotonic() - self.begin:4.0f} s: {part.name} begins", flush=True)
        directory = tempfile.TemporaryDirectory()
        path = Path(directory.name)
        command = [sys.executable, "-u", str(HERE / part.program), *part.options]
        command += ["--device", self.options.device, "--json", str(path / "result.json")]
        command += ["--watchdog", str(self.options.watchdog)]
        if part.can_stop:
            command += ["--seconds", f"{min(part.limit_s, self.left_s()) - STOP_BEFORE_S:.0f}"]
        started: Ranks | subprocess.Popen[bytes]
        if part.starts_ranks:
            with (path / "output.0").open("wb") as output:
                started = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        else:
            started = Ranks(command, [{}] * part.world, path)
        return Running(part, directory, started, time.monotonic())

    def _has_ended(self, one: Running) -> bool:
        statuses, now = one.statuses(), time.monotonic()
        if any(statuses) and one.failed_at is None:
            one.failed_at = now
        is_late = now - one.begin > one.part.limit_s or self.left_s() <= 0
        has_lost = one.failed_at is not None and now - one.failed_at > GRACE_S
        if None in statuses and not is_late and not has_lost:
            return False
        one.kill()
        problems = []
        if None in statuses and is_late:
            problems.append(f"killed after {now - one.begin:.0f} s: the limit is {one.part.limit_s:g} s")
        if any(statuses):
            problems.append(f"statuses {statuses}")
        found: dict[str, Any] = {}
        bars = [("", one.part.bar), *([one.part.second] if one.part.second else [])]
        for suffix, bar in bars:
            file = one.path / f"result{suffix}.json"
            if not file.exists():
                problems.append(f"no result{suffix}")
                continue
            found[f"figures{suffix}"] = json.loads(file.read_text())["figures"]
            problems += bar(found[f"figures{suffix}"])
        outputs = one.outputs()
        with (self.options.out / "campaign.log").open("a", encoding="utf-8") as log:
            for rank, output in enumerate(outputs):
                if rank == 0 or problems:
                    shown = output if rank == 0 else output[-6000:]
                    log.write(f"======== {one.part.name}, output {rank} of {len(outputs)}\n{shown}\n")
        one.directory.cleanup()
        seconds = round(now - one.begin, 1)
        self._end(
            one.part,
            {"verdict": "FAIL" if problems else "ok", "seconds": seconds, "problems": problems, **found},
        )
        if problems:
            last = outputs[0].strip().splitlines()[-8:] if outputs else []
            print("\n".join([f"  {line[:300]}" for line in [*problems, *last]]), flush=True)
        return True

    def _end(self, part: Part, result: dict[str, Any]) -> None:
        command = " ".join([part.program, *part.options])
        self.results[part.name] = {"world": part.world, "command": command, **result}
        print(f"{time.monotonic() - self.begin:4.0f} s: {part.name}: {result['verdict']}", flush=True)
        content = {"program": "campaign", **self.facts, "ranks_at_once": self.options.ranks_at_once}
        content |= {"seconds": round(time.monotonic() - self.begin, 1), "parts": self.results}
        (self.options.out / "campaign.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def print_table(self, names: Sequence[str]) -> None:
        facts = self.facts
        print(
            f"\ncampaign: {facts['device']}, driver {facts['driver']}, CUDA {facts['cuda']}, torch {facts['torch']}, "
            f"llm_comm {facts['llm_comm']} ({facts['commit']}), {facts['date']}"
        )
        for name in names:
            result = self.results[name]
            said = "; ".join(result["problems"])[:120] or summary(result)
            print(f"{name:15} {result['world']} ranks  {result.get('seconds', 0):6.1f} s  {result['verdict']:7} {said}")
        print(f"{time.monotonic() - self.begin:.0f} s in all", flush=True)


def summary(result: dict[str, Any]) -> str:
    """A few figures of a part that went well."""
    said = []
    for kind in ("figures", "figures_fused"):
        figures = result.get(kind)
        if not isinstance(figures, dict):
            continue
        if "drills" in figures:
            said.append(f"{len(figures['drills'])} drills as documented")
        keys = ("cases", "results", "calls", "cycles", "wrong_results", "device_bytes_growth", "seconds")
        said.append(kind.removeprefix("figures").strip("_"))
        said += [
            f"{key.replace('_', ' ')} {figures[key]}" for key in keys if isinstance(figures.get(key), (int, float))
        ]
    return ", ".join(text for text in said if text)


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--out", type=Path, default=Path("campaign"), help="directory for log and JSON (%(default)s)")
    options.add_argument("--commit", help="of the build that is tested, for the JSON file; default: that of git")
    options.add_argument("--parts", help="names with commas between; default: all")
    options.add_argument("--budget-s", type=float, default=1200, help="for all parts together (%(default)s)")
    options.add_argument("--least-s", type=float, default=60, help="no part starts with less than this (%(default)s)")
    # Two worlds of 8 at once took longer than one after the other: ranks wait for their time slices.
    options.add_argument("--ranks-at-once", type=int, default=8, help="(%(default)s)")
    options.add_argument("--world", type=int, default=8, help="of all parts but random ones (%(default)s)")
    options.add_argument("--worlds", default="8,7,5,3", help="of random cases (%(default)s)")
    options.add_argument("--cases", type=int, default=2000, help="random ones, for each world (%(default)s)")
    options.add_argument("--fused-cases", type=int, default=1000, help="(%(default)s)")
    options.add_argument("--calls", type=int, default=10_000, help="of the soak (%(default)s)")
    options.add_argument("--cycles", type=int, default=1000, help="(%(default)s)")
    options.add_argument("--cycles-world", type=int, default=4, help="(%(default)s)")
    options.add_argument("--list", action="store_true", help="print the parts, and run nothing")
    options.set_defaults(watchdog=120.0)
    arguments = options.parse_args()
    arguments.worlds = [int(world) for world in arguments.worlds.split(",")]
    on_gpu = wants_cuda(arguments.device)
    parts = all_parts(arguments, on_gpu)
    if arguments.list:
        for part in parts:
            how = "alone" if part.alone else "beside others"
            print(f"{part.name:15} {part.world} ranks, {how}, up to {part.limit_s:g} s: {part.program}", *part.options)
        return 0
    names = arguments.parts.split(",") if arguments.parts else [part.name for part in parts]
    unknown = sorted(set(names) - {part.name for part in parts})
    if unknown:
        options.error(f"unknown parts {', '.join(unknown)}; there are {', '.join(part.name for part in parts)}")
    if arguments.json is not None:
        options.error("the JSON file is DIR/campaign.json: use --out")
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "campaign.log").unlink(missing_ok=True)
    facts = environment("cuda" if on_gpu else "cpu", arguments.world)
    del facts["world"]
    campaign = Campaign(arguments, facts | ({"commit": arguments.commit} if arguments.commit else {}))
    # In the order asked for.
    campaign.run(sorted((part for part in parts if part.name in names), key=lambda part: names.index(part.name)))
    campaign.print_table(names)
    return 0 if all(result["verdict"] == "ok" for result in campaign.results.values()) else 1


if __name__ == "__main__":
    run(main)
