"""Makes mutants, small bugs in a copy of the tree, and looks whether the tests notice: ``make mutants``.

All of them by default; ``--seconds`` takes as many as fit, in an order that ``--seed`` decides. A mutant that passes
the checks of its row is tried with wider ones. The exit status is 1 if fewer than 95 % of those that can be noticed
are, or if one survives without an explanation, or if one is noticed that is said to be equivalent.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mutant import REPOSITORY, Mutant
from table import MUTANTS
from workplace import Builds, Worker

LEAST_NOTICED = 0.95

#: For what the checks of its row have let through. Not the tests that compare the sources with a list of edits.
WIDER_OF_CPP = (
    "driver --cases 3000",
    "tests/emulated/test_mismatch.py tests/emulated/test_sequences.py tests/unit/test_selection.py"
    " tests/unit/test_fused_selection.py",
    "tests/emulated/test_fused.py tests/emulated/test_all_reduce.py",
)
WIDER_OF_PYTHON = (
    "tests/unit --ignore=tests/unit/test_layering.py --ignore=tests/unit/test_user_kernel.py"
    " --ignore=tests/unit/test_bare_sources.py",
    "tests/emulated/test_use_table.py tests/emulated/test_inputs.py tests/emulated/test_generic.py"
    " tests/emulated/test_compile.py tests/emulated/test_rendezvous.py",
    "tests/emulated/test_watchdog.py tests/emulated/test_fused.py",
)
WIDER_OF_SERVING = ("tests/serving",)


def wider(mutant: Mutant) -> tuple[str, ...]:
    if mutant.is_cpp:
        return WIDER_OF_CPP
    return WIDER_OF_SERVING if mutant.file.startswith("bench_serving") else WIDER_OF_PYTHON


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    noticed_by: str  # "" if nobody has
    seconds: float
    broken: str = ""  # why a check could not be run

    @property
    def verdict(self) -> str:
        if self.broken:
            return "BROKEN"
        if self.noticed_by:
            return "NOTICED THOUGH CALLED EQUIVALENT" if self.mutant.equivalent else "noticed"
        return "equivalent" if self.mutant.equivalent else "SURVIVED"

    @property
    def is_as_it_should_be(self) -> bool:
        return self.verdict in ("noticed", "equivalent")


class Baseline:
    """Checks pass without a mutant: each is tried once, when a mutant is said to be noticed by it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tried: dict[tuple[str, bool], Future[None]] = {}

    def require(self, check: str, mutant: Mutant, worker: Worker) -> None:
        """Raises RuntimeError if ``check`` fails without the mutant too."""
        key = check, mutant.is_cpp
        with self._lock:
            is_first = key not in self._tried
            tried = self._tried.setdefault(key, Future())
        if is_first:
            try:
                failed = worker.check(mutant, 0, check).noticed_by
                if failed:
                    raise RuntimeError(f"{check} fails without any mutant: {failed}")
                tried.set_result(None)
            except BaseException as error:
                tried.set_exception(error)
        tried.result()


def examine(mutant: Mutant, number: int, worker: Worker, baseline: Baseline, is_narrow: bool) -> Outcome:
    """The narrowest checks first, then wider ones; those of an equivalent mutant are its own alone."""
    start = time.monotonic()
    for check in (*mutant.checks, *(() if is_narrow or mutant.equivalent else wider(mutant))):
        noticed_by = worker.check(mutant, number, check).noticed_by
        if noticed_by:
            seconds = time.monotonic() - start
            baseline.require(check, mutant, worker)
            return Outcome(mutant, noticed_by, seconds)
    return Outcome(mutant, "", time.monotonic() - start)


def examine_all(mutants: Sequence[Mutant], jobs: int, seconds: float, is_narrow: bool) -> list[Outcome]:
    """In the order given, as many as ``seconds`` allow; 0 allows all."""
    start = time.monotonic()
    builds = Builds(MUTANTS)
    all_workers = [Worker(number, builds) for number in range(jobs)]
    workers: queue.Queue[Worker] = queue.Queue()
    for worker in all_workers:
        workers.put(worker)
    baseline = Baseline()

    def task(mutant: Mutant) -> Outcome | None:
        if seconds and time.monotonic() - start > seconds:
            return None
        worker = workers.get()
        try:
            outcome = examine(mutant, MUTANTS.index(mutant) + 1, worker, baseline, is_narrow)
        except RuntimeError as error:
            outcome = Outcome(mutant, "", 0.0, str(error))
        finally:
            workers.put(worker)
        found = outcome.noticed_by or outcome.broken
        print(f"{outcome.verdict:10} {mutant.name:60} {outcome.seconds:6.1f} s  {found}", flush=True)
        return outcome

    try:
        with ThreadPoolExecutor(jobs) as pool:
            return [outcome for outcome in pool.map(task, mutants) if outcome is not None]
    finally:
        for worker in all_workers:
            worker.stop()


def report(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """For docs/results."""
    import torch

    import llm_comm

    git = ["git", "-C", str(REPOSITORY)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    compiler = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True, check=True).stdout
    versions = {"llm_comm": llm_comm.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {
        "command": "python tests/mutation/run.py",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit.strip(),
        "versions": {**versions, "g++": compiler.strip()},
        "mutants": len(outcomes),
        "noticed": sum(outcome.verdict == "noticed" for outcome in outcomes),
        "equivalent": sum(outcome.verdict == "equivalent" for outcome in outcomes),
        "results": [
            {
                "name": outcome.mutant.name,
                "file": outcome.mutant.file,
                "noticed_by": outcome.noticed_by,
                **({"equivalent": outcome.mutant.equivalent} if outcome.mutant.equivalent else {}),
                "seconds": round(outcome.seconds, 1),
            }
            for outcome in outcomes
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the mutants and who should notice, and make none")
    parser.add_argument("-k", default="", help="only mutants whose names or files contain this")
    parser.add_argument("--python", action="store_true", help="only mutants of Python, which need no build")
    parser.add_argument("--seconds", type=float, default=0, help="begin no mutant later than this; in another order")
    parser.add_argument("--seed", type=int, default=datetime.date.today().toordinal(), help="of that order")
    parser.add_argument("--narrow", action="store_true", help="the checks of each row only, no wider ones")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once")
    parser.add_argument("--json", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if arguments.k in mutant.name or arguments.k in mutant.file]
    mutants = [mutant for mutant in mutants if not (arguments.python and mutant.is_cpp)]
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.name:60} {mutant.file}: {'; '.join(mutant.checks)}")
        return 0
    if arguments.seconds:
        print(f"mutants in the order of --seed {arguments.seed}", flush=True)
        random.Random(arguments.seed).shuffle(mutants)
    outcomes = examine_all(mutants, arguments.jobs, arguments.seconds, arguments.narrow)
    noticed = sum(outcome.verdict == "noticed" for outcome in outcomes)
    possible = sum(not outcome.mutant.equivalent for outcome in outcomes)
    share = noticed / possible if possible else 1.0
    print(f"{noticed} of {possible} mutants noticed ({share:.0%}), {len(outcomes) - possible} equivalent")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report(outcomes), indent=1) + "\n", encoding="utf-8")
    for outcome in outcomes:
        if not outcome.is_as_it_should_be:
            print(f"{outcome.verdict}: {outcome.mutant.name} ({outcome.mutant.file})")
    is_good = share >= LEAST_NOTICED and all(outcome.is_as_it_should_be for outcome in outcomes)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
