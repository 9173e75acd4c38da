"""Negative controls: each takes one protection out of the sources, and the deterministic driver has to notice.

A control is a protection and an algorithm of the registry. Which there are follows from the sources:

- A protection in a primitive (``Edit``) is taken out there, once, and is tried with every algorithm whose file includes
  the primitive, in schedules of this algorithm alone.
- A protection in the text of an algorithm (``Everywhere``) is looked for in the file of every algorithm. Each place
  that holds it is a control.

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
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import driver
import edits
from edits import SWITCH, Change, Edit, source

REGISTRIES = ("csrc/algorithms/registry.def", "tests/toy/registry.def")
INCLUDES = ("csrc", "csrc/include")
#: What the copy holds.
TREES = ("cmake", "csrc", "tests/deterministic", "tests/toy")

LINE = "csrc/include/llm_comm/line.cuh"
SESSION = "csrc/include/llm_comm/ll_session.cuh"
OPERATION = "csrc/include/llm_comm/operation.cuh"
SEMAPHORE = "csrc/include/llm_comm/semaphore.cuh"
SUSPICION = "csrc/include/llm_comm/suspicion.cuh"
WAIT = "csrc/include/llm_comm/wait.cuh"
CHECK_CALL = "csrc/algorithms/check_call.cuh"
RMS_NORM = "csrc/algorithms/all_reduce_add_rms_norm/rms_norm.cuh"
MESSAGES = "tests/deterministic/message_passing.cuh"
#: The core launches its kernels around those of every algorithm.
AROUND_ALL = CHECK_CALL

# What the driver says of a failure, as regular expressions. Any other failure proves nothing: a crash, a wrong
# option, or a schedule that does not end where nobody should hang.
WRONG_RESULT = r"^((without an error on|(before|behind) the error of|though nobody failed,) )?rank \d+, call \d+"
#: A rank whose operation was cut short ends it as if it were right, or goes on with the next.
UNTOLD = r"^(without an error on|(before|behind) the error of) rank \d+, call \d+"
NOBODY_IS_MISSING = r"^rank \d+: a wait of .* expired"
#: Of the protections of lines and slots: any of these, as it happens.
WRONG = "|".join((WRONG_RESULT, NOBODY_IS_MISSING, "is not armed again", r"counted \d+ operations"))
BLAME = "blames the wrong one"
MISMATCH = r"^rank \d+: mismatch in"
CONCURRENT = r"^rank \d+: concurrent use in"
TOO_LATE = r"ranks went on for \d+ steps after one had stopped"
#: A thread waits for deliveries, which has no bound.
HANGS = "it did not end"
AHEAD = "comes ahead of the one that runs"
LEFT_ALONE = "has ended when another one writes to its memory"

MISHAPS = ("--mishaps",)

#: FP8 with a scale for each row, which blocks of a cluster find together.
FP8 = "+dynamic"
FP8_SUBJECTS = tuple(f"all_reduce_add_rms_norm/{algorithm}{FP8}" for algorithm in ("one_shot", "two_shot"))


class Everywhere:
    """The same for every place of an algorithm's file that one of some regular expressions matches, each with what
    takes its place. A blank is any white space.
    """

    def __init__(self, *alternatives: tuple[str, str]) -> None:
        self.alternatives = tuple((re.compile(old.replace(" ", r"\s+")), new) for old, new in alternatives)

    def places(self, text: str) -> list[re.Match[str]]:
        found = [place for pattern, _ in self.alternatives for place in pattern.finditer(text)]
        return sorted(found, key=lambda place: place.start())

    def replacement(self, place: re.Match[str]) -> str:
        return next(place.expand(new) for pattern, new in self.alternatives if pattern is place.re)


@dataclass(frozen=True)
class Protection:
    """What is protected, the text that takes it out, and within how many schedules that must be noticed.

    ``subjects``: what it is tried with, where that does not follow from the sources. ``exempt``: algorithms (a regular
    expression) with which nobody can notice, and why. ``options``: what else to tell the driver. ``failure``: the
    failures that the missing protection explains, as a regular expression; any other is one of the test.
    """

    name: str
    text: str
    edits: tuple[Edit, ...] | Everywhere
    options: tuple[str, ...] = ()
    budget: int = 2000
    failure: str = WRONG
    subjects: tuple[str, ...] = ()
    exempt: Mapping[str, str] = field(default_factory=dict)
    fp8: bool = False


PROTECTIONS = (
    # ---- Lines ----
    Protection(
        "sentinel_check",
        "a line is taken only when it has arrived",
        (Edit(LINE, "!= kSentinel;", "!= kSentinel || WITHOUT;"),),
        failure=WRONG_RESULT,
    ),
    Protection(
        "all_words_checked",
        "all four words of a sentinel line are looked at",
        (Edit(LINE, "(low > high ? low : high)", "(WITHOUT ? line.word[0] : low > high ? low : high)"),),
        failure=WRONG_RESULT,
    ),
    Protection(
        "sentinel_remap",
        "a word equal to the sentinel is sent as the NaN beside it",
        (Edit(LINE, "line.word[i] < kSentinel - 1 ?", "WITHOUT || line.word[i] < kSentinel - 1 ?"),),
        exempt={"all_reduce_add_rms_norm/.*": "its schedules draw numbers only"},
    ),
    # ---- Operations and their slots ----
    Protection(
        "second_slot",
        "operations take turns with two slots",
        (
            Edit(
                OPERATION,
                "is_odd = static_cast<uint32_t>(arrivals_) & kArrivalsPerOperation;",
                "is_odd = !WITHOUT && static_cast<uint32_t>(arrivals_) & kArrivalsPerOperation;",
            ),
        ),
    ),
    Protection(
        "re_arm",
        "R2: a received line is armed again",
        Everywhere((r"session\.re_arm\(", "if (!WITHOUT) session.re_arm(")),
    ),
    Protection(
        "re_arm_after_receive",
        "a line is armed again after it has been received, not before",
        (
            Edit(
                SESSION,
                "return receive_line(line, op_, peer_, phase);",
                "if (WITHOUT) re_arm_line(const_cast<Line*>(line));\n return receive_line(line, op_, peer_, phase);",
            ),
            Edit(SESSION, "{ re_arm_line(line); }", "{ if (!WITHOUT) re_arm_line(line); }"),
        ),
    ),
    Protection(
        "greeting",
        "R1: a rank ends an operation only when every rank has begun it, also where that does not follow from the data",
        Everywhere((r"greeting = 1;", "greeting = WITHOUT ? 0 : 1;")),
    ),
    Protection(
        "grid_end_performs",
        "a grid's own lines are armed for peers too before the next grid passes grid_dependency_wait()",
        (),
        options=("--unordered-grids",),
        budget=5000,
        exempt={"all_reduce_add_rms_norm/.*": "their grids last long: noticed once, after 5,624 schedules"},
    ),
    Protection(
        "dependency_wait",
        "a grid waits for the grids before it",
        (Edit(SESSION, "grid_dependency_wait_after(", "if (!WITHOUT) grid_dependency_wait_after("),),
        failure=f"{WRONG}|{AHEAD}",  # grids that do not wait let further ones come
    ),
    Protection(
        "one_number_per_operation",
        "the blocks of an operation advance its number once, together",
        (
            Edit(
                OPERATION,
                "block_index() == 0 ? kArrivals",
                "WITHOUT ? kArrivalsPerOperation : block_index() == 0 ? kArrivals",
            ),
        ),
    ),
    Protection(
        "arrive_last",
        "a block arrives after all its threads have begun",
        (
            Edit(
                SESSION,
                "{ return op_.begin(state); }",
                "{ const bool begun = op_.begin(state); if (WITHOUT && thread_index() == 0) op_.arrive();\n"
                " return begun; }",
            ),
            Edit(SESSION, "arrive() const { op_.arrive(); }", "arrive() const { if (!WITHOUT) op_.arrive(); }"),
        ),
    ),
    # ---- Progress ----
    Protection(
        "tickets",
        "P2: blocks of a grid that do not all run at once are numbered as they start",
        (
            Edit(
                OPERATION,
                "comm.takes_tickets != 0 ? take_ticket(state_of(comm), 1)",
                "comm.takes_tickets != 0 && !WITHOUT ? take_ticket(state_of(comm), 1)",
            ),
            Edit(
                OPERATION,
                "comm.takes_tickets != 0 ? take_ticket(state_of(comm), cluster_blocks)",
                "comm.takes_tickets != 0 && !WITHOUT ? take_ticket(state_of(comm), cluster_blocks)",
            ),
        ),
        failure=NOBODY_IS_MISSING,
    ),
    Protection(
        "ticket_before_trigger",
        "a block takes its ticket before it lets the next grid be launched",
        (
            Edit(
                OPERATION,
                "auto* const ticket = shared_memory<uint32_t>();",
                "auto* const ticket = shared_memory<uint32_t>();\n if (WITHOUT) grid_dependency_trigger();",
            ),
        ),
        budget=20_000,
        exempt={
            "all_reduce_add_rms_norm/.*": "numbers beyond the grid are those of rows that do not exist: it crashes"
        },
    ),
    Protection(
        "trigger_after_wait",
        "one grid of a stream at most comes ahead of the one that runs",
        (
            Edit(
                SESSION,
                "rank_(rank), peer_(peer) {}",
                "rank_(rank), peer_(peer) { if (WITHOUT) grid_dependency_trigger(); }",
            ),
        ),
        failure=AHEAD,
    ),
    # ---- In blocks and clusters ----
    Protection(
        "lines_complete",
        "what a block has received, or whether it has begun, is used after all its threads are there",
        Everywhere((r"block_sync\(\);(?! if \([^;{]*\*incomplete [!=]=)", "if (!WITHOUT) block_sync();")),
    ),
    Protection(
        "sums_complete",
        "sums are sent after all threads of the block have made theirs",
        Everywhere((r"block_sync\(\);(?= if \([^;{]*\*incomplete [!=]=)", "if (!WITHOUT) block_sync();")),
        failure=WRONG_RESULT,
    ),
    Protection(
        "contributions_twice",
        "the next tile does not overwrite what slow threads still sum",
        Everywhere((r"parity \^= 1;", "parity ^= WITHOUT ? 0 : 1;")),
        budget=20_000,
        failure=WRONG_RESULT,
    ),
    Protection(
        "cluster_meets",
        "blocks of a cluster deliver only once all of them have set up what counts deliveries",
        Everywhere((r"norm\.meet\(\);", "if (!WITHOUT) norm.meet();")),
        budget=20_000,
        failure=HANGS,
    ),
    Protection(
        "two_sets",
        "rows take turns with two sets of partial sums",
        (
            Edit(RMS_NORM, "return rows_ % 2;", "return WITHOUT ? 0 : rows_ % 2;"),
            Edit(RMS_NORM, "rows_ / 2 % 2", "(WITHOUT ? rows_ : rows_ / 2) % 2"),
        ),
        budget=20_000,
        failure=WRONG_RESULT,
    ),
    Protection(
        "expects_again",
        "a set of partial sums counts deliveries of the row after next too",
        (
            Edit(
                RMS_NORM,
                "if (!SingleRow && thread_index() == 0) expect(set);",
                "if (!WITHOUT && !SingleRow && thread_index() == 0) expect(set);",
            ),
        ),
        failure=HANGS,
        fp8=True,
    ),
    Protection(
        "sets_of_magnitudes",
        "the largest magnitudes of a row meet apart from its sums of squares",
        (
            Edit(RMS_NORM, "contribute(2 + set_of_row()", "contribute((WITHOUT ? 0 : 2) + set_of_row()"),
            Edit(RMS_NORM, "combine_partials(2 + set_of_row()", "combine_partials((WITHOUT ? 0 : 2) + set_of_row()"),
        ),
        failure=f"{WRONG_RESULT}|{HANGS}|{LEFT_ALONE}",
        subjects=FP8_SUBJECTS,
    ),
    Protection(
        "four_chunks_of_a_warp",
        "a warp delivers four chunks at once only where it holds four in a row",
        (Edit(RMS_NORM, "if (fills_warps_ &&", "if ((WITHOUT || fills_warps_) &&"),),
        failure=f"{WRONG_RESULT}|{HANGS}|{LEFT_ALONE}",  # too much or too little is counted
        exempt={"all_reduce_add_rms_norm/one_shot": "its warps hold two chunks"},
    ),
    Protection(
        "nobody_leaves_alone",
        "a block stays as long as others of its cluster deliver to it",
        Everywhere((r"if \(norms \|\| ([^{]*)\) \{", r"if (norms || (!WITHOUT && (\1))) {")),
        budget=20_000,
        failure=LEFT_ALONE,
    ),
    # ---- After an error ----
    Protection(
        "stop_after_an_error",
        "operations behind an expired wait do nothing",
        (Edit(OPERATION, "aborted_ = (state.word", "aborted_ = !WITHOUT && (state.word"),),
        options=MISHAPS,
        budget=20_000,
        failure=UNTOLD,
    ),
    Protection(
        "sends_nothing_in_vain",
        "a thread that may not begin sends nothing",
        Everywhere(
            (r"(\bbegun|!session\.aborted\(\))(?=[^;{}]*\)\s*\{?\s*session\.send\()", r"(WITHOUT || \1)"),
            (r"if \((!session\.begin\w*\([^;{}]*\))\) return;", r"if (\1 && !WITHOUT) return;"),
        ),
        options=MISHAPS,
        budget=20_000,
        failure=UNTOLD,
    ),
    Protection(
        "stores_nothing_in_vain",
        "a thread that may not begin, but goes on for the sake of others, stores no results",
        (Edit(RMS_NORM, "{ stores_ = begun; }", "{ stores_ = WITHOUT || begun; }"),),
        options=MISHAPS,
        budget=20_000,
        failure=UNTOLD,
        fp8=True,
    ),
    Protection(
        "no_sums_of_incomplete_slices",
        "a block whose wait has been aborted sends no sums",
        Everywhere((r"\*incomplete(?= [!=]= 0)", "(WITHOUT ? 0 : *incomplete)")),
        budget=20_000,
        failure=UNTOLD,
    ),
    Protection(
        "stays_to_tell",
        "a thread that may not begin stays to tell its block, which may have begun, that a slice is incomplete",
        Everywhere(
            (
                r"const bool begun = session\.begin\w*\([^;]*\);(?=[\s\S]*\*incomplete = 1)",
                r"\g<0> if (WITHOUT && !begun) return;",
            )
        ),
        options=MISHAPS,
        budget=20_000,
        failure=UNTOLD,
    ),
    Protection(
        "stays_to_deliver",
        "a thread that may not begin stays to deliver what its block, which may have begun, waits for",
        Everywhere(
            (r"norm\.set_begun\(session\.begin\w*\([^;]*\)\);", r"\g<0> if (WITHOUT && session.aborted()) return;")
        ),
        options=MISHAPS,
        budget=20_000,
        failure=HANGS,
    ),
    Protection(
        "abort_ends_the_communicator",
        "operations behind a wait that the host aborted do nothing",
        (
            Edit(
                WAIT,
                "abort_communicator(bounds); return {start, true};",
                "if (!WITHOUT) abort_communicator(bounds);\n return {start, true};",
            ),
        ),
        options=MISHAPS,
        budget=20_000,
        failure=UNTOLD,
    ),
    Protection(
        "exit_ends_waits",
        "a wait for a rank whose process has exited does not last for the time-out",
        (Edit(WAIT, "if (reasons != 0) store", "if (!WITHOUT && reasons != 0) store"),),
        options=MISHAPS,
        budget=20_000,
        failure=TOO_LATE,
    ),
    # ---- Who is to blame ----
    Protection(
        "notes",
        "a rank whose wait expires tells the others",
        (Edit(WAIT, "bounds.suspicions.tell(peer);", "if (!WITHOUT) bounds.suspicions.tell(peer);"),),
        options=MISHAPS,
        budget=20_000,
        failure=f"{BLAME}|{TOO_LATE}",
    ),
    Protection(
        "time_for_notes",
        "a rank whose wait expired hears the others before it blames one",
        (Edit(WAIT, "bounds.timeout_ns / 16", "WITHOUT ? 0 : bounds.timeout_ns / 16"),),
        options=MISHAPS,
        budget=20_000,
        failure=BLAME,
    ),
    Protection(
        "blame_follows_notes",
        "a rank that waits itself is not blamed",
        (Edit(WAIT, "bounds.suspicions.culprit(peer)", "WITHOUT ? peer : bounds.suspicions.culprit(peer)"),),
        options=MISHAPS,
        budget=20_000,
        failure=BLAME,
    ),
    Protection(
        "notes_end_waits",
        "a rank that finds a note in the middle of a wait gives up too",
        (Edit(WAIT, "bounds.suspicions.find(suspect) ||", "(!WITHOUT && bounds.suspicions.find(suspect)) ||"),),
        options=MISHAPS,
        budget=20_000,
        failure=f"{TOO_LATE}|{BLAME}",
    ),
    Protection(
        "silent_rank",
        "where notes lead nowhere, the rank without one is blamed",
        (Edit(SUSPICION, "return silent != world_size_ ?", "return !WITHOUT && silent != world_size_ ?"),),
        options=MISHAPS,
        budget=20_000,
        failure=BLAME,
        exempt={"all_reduce_add_rms_norm/.*": "slow with mishaps: two-shot noticed after 164 s, one-shot not in 600 s"},
    ),
    Protection(
        "notes_that_name_this_rank",
        "a rank is not led to blame itself by notes that name it",
        (Edit(SUSPICION, "if (named != rank_) suspect = named;", "if (WITHOUT || named != rank_) suspect = named;"),),
        options=MISHAPS,
        budget=20_000,
        failure=BLAME,
    ),
    # ---- Comparison of calls ----
    Protection(
        "calls_of_this_operation",
        "the calls that ranks compare are those of the same operation",
        (
            Edit(
                CHECK_CALL,
                "return FlagLine::has_arrived(line, flag);",
                "return WITHOUT || FlagLine::has_arrived(line, flag);",
            ),
        ),
        failure=MISMATCH,
    ),
    Protection(
        "check_dependency_wait",
        "a comparison waits for the grids before it",
        (
            Edit(
                CHECK_CALL,
                "grid_dependency_wait();\n  grid_dependency_trigger();\n  const DeviceComm& comm",
                "if (!WITHOUT) grid_dependency_wait();\n  grid_dependency_trigger();\n  const DeviceComm& comm",
            ),
        ),
        failure=f"{NOBODY_IS_MISSING}|{CONCURRENT}|{AHEAD}",
    ),
    # ---- Message passing ----
    Protection(
        "both_flags_checked",
        "both flags of a packet are looked at",
        (
            Edit(
                LINE,
                "return line.word[1] == flag && line.word[3] == flag;",
                "return line.word[1] == flag && (WITHOUT || line.word[3] == flag);",
            ),
        ),
        failure=WRONG_RESULT,
        subjects=("packets",),
    ),
    Protection(
        "release_before_signal",
        "a signal is a release",
        (
            Edit(
                SEMAPHORE,
                "void signal() const { store_release(",
                "void signal() const { if (WITHOUT) return relaxed_signal(); store_release(",
            ),
        ),
        failure=WRONG_RESULT,
        subjects=("put",),
    ),
    Protection(
        "acquire_in_wait",
        "a wait is an acquire",
        (Edit(SEMAPHORE, "load_acquire(received)", "(WITHOUT ? load_relaxed(received) : load_acquire(received))"),),
        failure=WRONG_RESULT,
        subjects=("put",),
    ),
    Protection(
        "block_before_signal",
        "the block meets before one thread signals for it",
        (
            Edit(
                MESSAGES,
                "    block_sync();\n    if (thread_index() == 0) {\n      channel",
                "    if (!WITHOUT) block_sync();\n    if (thread_index() == 0) {\n      channel",
            ),
        ),
        failure=WRONG_RESULT,
        subjects=("put",),
    ),
    Protection(
        "buffer_free",
        "a buffer is written again after the peer has read it",
        (
            Edit(
                MESSAGES,
                "if (!party.meet(agreed)) return;  // the",
                "if (!WITHOUT && !party.meet(agreed)) return;  // the",
            ),
        ),
        failure=WRONG_RESULT,
        subjects=("put",),
    ),
    Protection(
        "block_before_packets_signal",
        "the block meets before one thread signals that packets are read",
        (
            Edit(
                MESSAGES,
                "block_sync();\n    if (thread_index() == 0) {\n      party",
                "if (!WITHOUT) block_sync();\n    if (thread_index() == 0) {\n      party",
            ),
        ),
        failure=f"{WRONG_RESULT}|{NOBODY_IS_MISSING}",
        subjects=("packets",),
    ),
    Protection(
        "packets_free",
        "packets are written again after the peer has read them",
        (Edit(MESSAGES, "*agreed = party.channel", "*agreed = WITHOUT || party.channel"),),
        failure=f"{WRONG_RESULT}|{NOBODY_IS_MISSING}",
        subjects=("packets",),
    ),
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
            r"^LLM_COMM_ALGORITHM\((\S+), *(\w+)\)", source(registry), flags=re.MULTILINE
        ):
            paths = [f"{directory}/{header}" for directory in (str(Path(registry).parent), *INCLUDES)]
            files = included_by(next(p for p in paths if (driver.REPOSITORY / p).is_file()))
            own = source(files[0])
            names = re.findall(
                r'AlgorithmInfo kInfo\{\s*(?:\.name = )?"(\w+)"', own[own.index(f"struct {descriptor}") :]
            )
            operations = [re.search(r'OperationInfo kInfo\{\s*(?:\.name = )?"(\w+)"', source(file)) for file in files]
            operation = next(match[1] for match in operations if match is not None)
            found.append(Algorithm(f"{operation}/{names[0]}", files[0], files))
    return tuple(found)


ALGORITHMS = read_registry()


# ---- The controls ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Control:
    """A protection that is taken out at one place, and the algorithm whose schedules have to notice."""

    protection: Protection
    subject: str
    number: int  # of the switch that takes it out; 0: nothing is taken out
    place: int = 1  # of several in the algorithm's file

    @property
    def name(self) -> str:
        return f"{self.protection.name}{'' if self.place == 1 else f'.{self.place}'}:{self.subject}"

    @property
    def options(self) -> tuple[str, ...]:
        """Where a primitive is edited, it must be this algorithm that shows it, not the calls beside it."""
        alone = ("--alone",) if isinstance(self.protection.edits, tuple) else ()
        return (*self.protection.options, *alone, *(("--algorithm", self.subject) if self.subject else ()))


def uses(algorithm: Algorithm, edits: Iterable[Edit]) -> bool:
    return all(edit.file in algorithm.included or edit.file == AROUND_ALL for edit in edits)


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
        if isinstance(protection.edits, Everywhere):
            for algorithm in algorithms:
                for index, place in enumerate(protection.edits.places(source(algorithm.file)), start=1):
                    number += 1
                    take_out(algorithm.file, protection.edits, place)
                    controls.append(Control(protection, algorithm.subject, number, index))
        else:
            number += 1
            for edit in protection.edits:
                take_out(edit.file, edit, edit.places(source(edit.file))[0])
            users = [algorithm.subject for algorithm in algorithms if uses(algorithm, protection.edits)]
            users += [f"{subject}{FP8}" for subject in users] if protection.fp8 else []
            controls += [Control(protection, subject, number) for subject in protection.subjects or users]
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
    """The program with all controls."""
    return driver.build(directory / "build", root=edited_copy(directory / "sources")) / driver.PROGRAM


@dataclass(frozen=True)
class Outcome:
    schedules: int  # until the failure, or all there were
    failure: str  # "" if nothing was noticed


def run(control: Control, program: Path, first_seed: int = 1) -> Outcome:
    budget, expected = control.protection.budget, control.protection.failure
    command = [str(program), "--seed", str(first_seed), "--cases", str(budget), *control.options]
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


def table(results: Sequence[Mapping[str, object]]) -> str:
    """The rows of docs/reliability.md: a protection, and for each algorithm the median and the most of its runs."""
    columns = [algorithm.subject for algorithm in ALGORITHMS]
    heads = ["control", "what is taken out", *columns, "message passing", "budget"]
    rows = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    measured = {str(result["name"]): result for result in results}
    for protection in PROTECTIONS:
        cells: dict[str, list[str]] = {}
        for control in CONTROLS:
            if control.protection is not protection:
                continue
            result = measured[control.name]
            algorithm, is_fp8, _ = control.subject.partition("+")
            column = algorithm if algorithm in columns else "message passing"
            what = "" if column == control.subject else "FP8 " if is_fp8 else f"{control.subject} "
            cells.setdefault(column, []).append(f"{what}{result['schedules_median']} ({result['schedules_most']})")
        row = [protection.name, protection.text, *("; ".join(cells.get(c, [])) for c in heads[2:-1])]
        rows.append("| " + " | ".join([*row, str(protection.budget)]) + " |")
    return "".join(row + "\n" for row in rows)


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
    parser.add_argument("--table", action="store_true", help="print the table of docs/reliability.md, and run none")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--runs", type=int, default=9, help="runs of each control, with different seeds")
    parser.add_argument("-k", default="", help="only controls whose names contain this: a protection, an algorithm")
    arguments = parser.parse_args()
    controls = [control for control in CONTROLS if arguments.k in control.name]
    if arguments.list:
        for control in controls:
            print(f"{control.name:60} {control.protection.text}")
        return 0
    if arguments.table:
        print(table(documented_results()), end="")
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
