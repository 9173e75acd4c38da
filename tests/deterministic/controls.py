"""Negative controls: each takes one protection out of the sources, and the deterministic driver has to notice.

A control is a protection and an algorithm of the registry. Which there are follows from the sources:

- A protection in a primitive (``Edit``) is taken out there, once, and is tried with every algorithm whose file includes
  the primitive, in schedules of this algorithm alone.
- A protection in the text of an algorithm (``Everywhere``) is looked for in the file of every algorithm. Each place
  that holds it is a control, and one more of an algorithm whose name ends in ``_switch``, if that has the same kernel.

So an algorithm gets its controls by its row in the registry. All are edited into one copy of the sources, where
``WITHOUT`` stands for "this control is the one that is on". The text of an edit has to be there, so a control also
fails when the sources change and it has to be thought through again.

``--list`` prints the controls; ``--json FILE`` measures how many schedules each takes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import driver
import edits
from edits import SWITCH, Change, Edit, source
from protection import CHECK_CALL, FP8, Everywhere, Protection
from protections_of_channels import OF_CHANNELS
from protections_of_copies import OF_COPIES
from protections_of_errors import OF_ERRORS
from protections_of_experts import OF_EXPERTS
from protections_of_linear import OF_LINEAR
from protections_of_messages import OF_MESSAGES
from protections_of_operations import OF_OPERATIONS
from protections_of_ports import OF_PORTS
from protections_of_rope import OF_ROPE
from protections_of_router import OF_ROUTER
from protections_of_switch import OF_SWITCH
from protections_of_symmetric import OF_SYMMETRIC

REGISTRIES = ("csrc/algorithms/registry.def", "csrc/optional/registry.def", "tests/toy/registry.def")
INCLUDES = ("csrc", "csrc/include")
#: What the copy holds.
TREES = ("cmake", "csrc", "tests/deterministic", "tests/toy")

#: The core launches its kernels around those of every algorithm.
AROUND_ALL = CHECK_CALL

PROTECTIONS = (
    *OF_OPERATIONS,
    *OF_CHANNELS,
    *OF_SWITCH,
    *OF_SYMMETRIC,
    *OF_PORTS,
    *OF_COPIES,
    *OF_ERRORS,
    *OF_MESSAGES,
    *OF_LINEAR,
    *OF_EXPERTS,
    *OF_ROUTER,
    *OF_ROPE,
)


# ---- The algorithms ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Algorithm:
    subject: str  # as the driver names it: operation/algorithm
    file: str
    included: tuple[str, ...]  # files, itself first, the nearest first


def included_by(file: str) -> tuple[str, ...]:
    found = [file]
    for name in found:  # grows
        for header in re.findall(r'^#include "(.+)"', source(name), flags=re.MULTILINE):
            paths = [f"{directory}/{header}" for directory in (*INCLUDES, str(Path(name).parent))]
            found += [p for p in paths if p not in found and (driver.REPOSITORY / p).is_file()]
    return tuple(found)


def read_registry() -> tuple[Algorithm, ...]:
    found = []
    for registry in REGISTRIES:
        for header, descriptor in re.findall(
            r"^LLM_COMM_ALGORITHM\((\S+), *(\w+),", source(registry), flags=re.MULTILINE
        ):
            paths = [f"{directory}/{header}" for directory in (str(Path(registry).parent), *INCLUDES)]
            files = included_by(next(p for p in paths if (driver.REPOSITORY / p).is_file()))
            own = source(files[0])
            names = re.findall(
                r'AlgorithmInfo kInfo\{\s*(?:\.name = )?"(\w+)"', own[own.index(f"struct {descriptor}") :]
            )
            named = r'OperationInfo kInfo(?:\{| =\s+\w+\(\s*\{)\s*(?:\.name = )?"(\w+)"'
            operations = [re.search(named, source(file)) for file in files]
            operation = next(match[1] for match in operations if match is not None)
            found.append(Algorithm(f"{operation}/{names[0]}", files[0], files))
    return tuple(found)


ALGORITHMS = read_registry()
#: Headers with the body of several algorithms' kernels.
SHARED_KERNELS = ("csrc/algorithms/shard_exchange.cuh",)


# ---- The controls ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Control:
    """A protection that is taken out at one place, and the algorithm whose schedules have to notice."""

    protection: Protection
    subject: str
    number: int  # of the switch that takes it out; 0: nothing is taken out
    place: int = 1  # of several in the algorithm's files

    @property
    def name(self) -> str:
        return f"{self.protection.name}{'' if self.place == 1 else f'.{self.place}'}:{self.subject}"

    @property
    def options(self) -> tuple[str, ...]:
        """Where a primitive is edited, it must be this algorithm that shows it, not the calls beside it."""
        is_primitive = isinstance(self.protection.edits, tuple) and not self.protection.with_others
        alone = ("--alone",) if is_primitive else ()
        return (*self.protection.options, *alone, *(("--algorithm", self.subject) if self.subject else ()))


def uses(algorithm: Algorithm, edits: Iterable[Edit]) -> bool:
    return all(edit.file in algorithm.included or edit.file == AROUND_ALL for edit in edits)


def shared_by(algorithm: Algorithm) -> tuple[str, ...]:
    """Files with the kernel of ``algorithm`` that other algorithms have too, perhaps with another second hop."""
    others = {other.file for other in ALGORITHMS if f"{other.subject}_switch" == algorithm.subject}
    return tuple(file for file in algorithm.included if file in others or file in SHARED_KERNELS)


def find_controls() -> tuple[tuple[Control, ...], tuple[Change, ...]]:
    controls: list[Control] = []
    changes: list[Change] = []
    number = 0

    def take_out(file: str, edit: Edit | Everywhere, place: re.Match[str]) -> None:
        changes.append(Change.behind_switch(file, place, edit.replacement(place), number))

    for protection in PROTECTIONS:
        exempt = "|".join(protection.exempt) or "(?!)"
        algorithms = [algorithm for algorithm in ALGORITHMS if not re.fullmatch(exempt, algorithm.subject)]
        before = len(controls)
        places: Counter[str] = Counter()
        if isinstance(protection.edits, Everywhere):
            for file in dict.fromkeys([*(algorithm.file for algorithm in algorithms), *SHARED_KERNELS]):
                users = [a for a in algorithms if file in (a.file, *shared_by(a))]
                for place in protection.edits.places(source(file)):
                    number += 1
                    take_out(file, protection.edits, place)
                    for user in users:
                        places[user.subject] += 1
                        controls.append(Control(protection, user.subject, number, places[user.subject]))
        else:
            number += 1
            for edit in protection.edits:
                take_out(edit.file, edit, edit.places(source(edit.file))[0])
            subjects = [algorithm.subject for algorithm in algorithms if uses(algorithm, protection.edits)]
            subjects += [f"{subject}{FP8}" for subject in subjects] if protection.fp8 else []
            controls += [Control(protection, subject, number) for subject in protection.subjects or subjects]
        if len(controls) == before:
            raise ValueError(f"{protection.name}: no algorithm holds what is to be taken out")
    return tuple(controls), tuple(changes)


CONTROLS, CHANGES = find_controls()


def edited_sources() -> dict[str, bytes]:
    """The sources, by path, in which the environment variable of ``edits.SWITCH`` takes out one protection."""
    found = [path for tree in TREES for path in (driver.REPOSITORY / tree).rglob("*") if path.is_file()]
    files = [str(p.relative_to(driver.REPOSITORY)) for p in found if "__pycache__" not in p.parts]
    return edits.switched(files, CHANGES)


def edited_copy(directory: Path) -> Path:
    """Brings ``directory`` to hold ``edited_sources()``."""
    return edits.write(directory, edited_sources())


def build(directory: Path = driver.REPOSITORY / "build" / "controls") -> Path:
    """The program with all controls, which are noticed within few schedules."""
    sources = edited_copy(directory / "sources")
    return driver.build(directory / "build", sources, ["-DLLM_COMM_OPTIMIZE_KERNELS=-O0"]) / driver.PROGRAM


@dataclass(frozen=True)
class Outcome:
    schedules: int  # until the failure, or all there were
    failure: str  # "" if nothing was noticed


def run(control: Control, program: Path, first_seed: int = 1, more: Sequence[str] = ()) -> Outcome:
    budget, expected = control.protection.budget, control.protection.failure
    command = [str(program), "--seed", str(first_seed), "--cases", str(budget), *control.options, *more]
    environment = {**os.environ, SWITCH: str(control.number)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    found = re.search(r"^FAILED: seed \d+ \(schedule (\d+) of this run\): (.*)$", done.stdout, flags=re.MULTILINE)
    if done.returncode != (0 if found is None else 1):
        raise RuntimeError(f"{control.name}: the program ended with {done.returncode}: {done.stdout}{done.stderr}")
    if found is None:
        return Outcome(budget, "")
    if not re.search(expected, found[2]):
        raise RuntimeError(f"{control.name}: not what this leads to ({expected}): {found[0]}")
    return Outcome(int(found[1]), found[2])


def measure(control: Control, program: Path, runs: int) -> dict[str, object]:
    """Schedules until the failure, in runs with seeds that are far apart."""
    start = time.monotonic()
    outcomes = []
    for i in range(runs):
        try:
            outcomes.append(run(control, program, 1 + 1_000_000 * i))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(error, file=sys.stderr, flush=True)
            outcomes.append(Outcome(control.protection.budget, ""))
    counts = sorted(outcome.schedules for outcome in outcomes)
    return {
        "name": control.name,
        "schedules_median": counts[len(counts) // 2],
        "schedules_most": counts[-1],
        "budget": control.protection.budget,
        "noticed": sum(bool(outcome.failure) for outcome in outcomes),
        "runs": runs,
        "seconds": round((time.monotonic() - start) / runs, 2),
        "first_failure": outcomes[0].failure,
    }


def documented_results() -> list[dict[str, object]]:
    """The newest in docs/results."""
    files = sorted((driver.REPOSITORY / "docs" / "results").glob("*_negative_controls.json"))
    return json.loads(files[-1].read_text(encoding="utf-8"))["controls"]


#: For a run of a control in every run of the tests.
SLOW_S = 5.0


def fast_controls() -> list[Control]:
    """All but pairs of a primitive and an algorithm that took long when they were measured."""
    slow = {r["name"] for r in documented_results() if r["seconds"] > SLOW_S}  # type: ignore[operator]
    return [c for c in CONTROLS if isinstance(c.protection.edits, Everywhere) or c.name not in slow]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the controls and what each takes out, and run none")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--runs", type=int, default=9, help="runs of each control, with different seeds")
    parser.add_argument("-k", default="", help="only controls whose names contain this: a protection, an algorithm")
    arguments = parser.parse_args()
    controls = [control for control in CONTROLS if arguments.k in control.name]
    if arguments.list:
        for control in controls:
            print(f"{control.name:60} {control.protection.text}")
        return 0
    program = build()
    results = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for result in pool.map(lambda control: measure(control, program, arguments.runs), controls):
            results.append(result)
            print(
                f"{result['name']:60} {result['noticed']}/{result['runs']} noticed, median"
                f" {result['schedules_median']}, most {result['schedules_most']} schedules,"
                f" {result['seconds']} s: {result['first_failure']}",
                flush=True,
            )
    if arguments.json:
        command = f"python tests/deterministic/controls.py --runs {arguments.runs}"
        arguments.json.write_text(
            json.dumps({"command": command, "controls": results}, indent=1) + "\n", encoding="utf-8"
        )
    return 0 if all(result["noticed"] == result["runs"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
