"""Negative controls: each takes one protection out of the kernels, and the deterministic driver has to notice.

All controls are edited into one copy of the sources, where ``WITHOUT`` stands for "this control is the one that is on".
The text that an edit replaces has to be there once, so a control also fails when the sources change and it has to be
thought through again.

``python tests/deterministic/controls.py --json FILE`` measures how many schedules each takes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import driver

CHANNEL = "csrc/include/llm_comm/memory_channel.cuh"
COMM = "csrc/include/llm_comm/device_comm.cuh"
LINE = "csrc/include/llm_comm/line.cuh"
SEMAPHORE = "csrc/include/llm_comm/semaphore.cuh"
TYPES = "csrc/include/llm_comm/platform_types.h"
SUSPICION = "csrc/include/llm_comm/suspicion.cuh"
WAIT = "csrc/include/llm_comm/wait.cuh"
CHECK_CALL = "csrc/kernels/check_call.cuh"
ONE_SHOT = "csrc/kernels/all_reduce/one_shot.cuh"
TWO_SHOT = "csrc/kernels/all_reduce/two_shot.cuh"
FUSED_ONE_SHOT = "csrc/kernels/fused/one_shot.cuh"
FUSED_TWO_SHOT = "csrc/kernels/fused/two_shot.cuh"
RMS_NORM = "csrc/kernels/fused/rms_norm.cuh"
BROADCAST = "tests/deterministic/broadcast.cuh"
MESSAGES = "tests/deterministic/message_passing.cuh"

SWITCH = "LLM_COMM_TEST_CONTROL"

# What the driver says of a failure, as regular expressions. Any other failure proves nothing: a crash, a wrong
# option, or a schedule that does not end where nobody should hang.
WRONG_RESULT = r"^((without an error on|before the error of|though nobody failed,) )?rank \d+, call \d+"
#: A rank whose operation was cut short ends it as if it were right.
UNTOLD = r"^(without an error on|before the error of) rank \d+, call \d+"
NOBODY_IS_MISSING = r"^rank \d+: a wait of .* expired"
#: Of the protections of lines and slots: any of these, as it happens.
WRONG = "|".join((WRONG_RESULT, NOBODY_IS_MISSING, "is not armed again", r"counted \d+ operations"))
BLAME = "blames the wrong one"
MISMATCH = r"^rank \d+: mismatch in"
CONCURRENT = r"^rank \d+: concurrent use in"
TOO_LATE = r"ranks went on for \d+ steps after one had stopped"
#: A thread waits for deliveries, which has no bound.
HANGS = "it did not end"
LEFT_ALONE = "has ended when another one writes to its memory"


@dataclass(frozen=True)
class Edit:
    """Text of a source, and what takes its place: the same, unless ``WITHOUT``."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Control:
    """A protection, the text that takes it out, and within how many schedules that must be noticed.

    ``algorithm``: schedules about this only; ``options``: what else to tell the driver. ``failure``: the failures that
    the missing protection explains, as a regular expression; any other is one of the test.
    """

    name: str
    protection: str
    edits: tuple[Edit, ...]
    algorithm: str = ""
    options: tuple[str, ...] = ()
    budget: int = 2000
    failure: str = WRONG


CONTROLS = (
    Control(
        "sentinel_check",
        "a line is taken only when it has arrived",
        (
            Edit(
                LINE,
                "return (low > high ? low : high) != kSentinel;",
                "return WITHOUT || (low > high ? low : high) != kSentinel;",
            ),
        ),
        failure=WRONG_RESULT,
    ),
    Control(
        "all_words_checked",
        "all four words of a sentinel line are looked at",
        (Edit(LINE, "(low > high ? low : high) !=", "(WITHOUT ? line.word[0] : low > high ? low : high) !="),),
        failure=WRONG_RESULT,
    ),
    Control(
        "both_flags_checked",
        "both flags of a packet are looked at",
        (
            Edit(
                LINE,
                "return line.word[1] == flag && line.word[3] == flag;",
                "return line.word[1] == flag && (WITHOUT || line.word[3] == flag);",
            ),
        ),
        "packets",
        failure=WRONG_RESULT,
    ),
    Control(
        "sentinel_remap",
        "a word equal to the sentinel is sent as the NaN beside it",
        (
            Edit(
                LINE,
                "line.word[i] < kSentinel - 1 ?",
                "WITHOUT || line.word[i] < kSentinel - 1 ?",
            ),
        ),
    ),
    Control(
        "second_slot",
        "operations take turns with two slots",
        (
            Edit(
                COMM,
                "is_odd = static_cast<uint32_t>(arrivals_) & kArrivalsPerOperation;",
                "is_odd = !WITHOUT && static_cast<uint32_t>(arrivals_) & kArrivalsPerOperation;",
            ),
        ),
    ),
    Control(
        "re_arm",
        "R2: a received line is armed again",
        (Edit(CHANNEL, "store_line_relaxed(line, armed", "if (!WITHOUT) store_line_relaxed(line, armed"),),
    ),
    Control(
        "re_arm_gathered",
        "R2 in two-shot's second phase",
        (
            Edit(
                TWO_SHOT,
                "op, self.peer, 1));\n    re_arm_line(incoming + gather + i);",
                "op, self.peer, 1));\n    if (!WITHOUT) re_arm_line(incoming + gather + i);",
            ),
        ),
        "two_shot",
    ),
    Control(
        "re_arm_after_receive",
        "a line is armed again after it has been received, not before",
        (
            Edit(ONE_SHOT, "if (!is_own && line < lines) re_arm", "if (!WITHOUT && !is_own && line < lines) re_arm"),
            Edit(
                ONE_SHOT,
                "if (begun && !is_own && line < lines) send_line(",
                "if (WITHOUT && !is_own && line < lines) re_arm_line(incoming + (tile - first));\n"
                "    if (begun && !is_own && line < lines) send_line(",
            ),
        ),
        "one_shot",
    ),
    Control(
        "grid_end_performs",
        "a grid's own lines are armed for peers too before the next grid passes grid_dependency_wait()",
        (),
        options=("--unordered-grids",),
        budget=5000,
    ),
    Control(
        "wait_for_all",
        "R1: a rank ends an operation only when every rank has begun it",
        (
            Edit(BROADCAST, "send_line(slot(peer) + args.lines", "if (!WITHOUT) send_line(slot(peer) + args.lines"),
            Edit(
                BROADCAST, "receive_line(slot(rank) + args.lines", "if (!WITHOUT) receive_line(slot(rank) + args.lines"
            ),
            Edit(BROADCAST, "re_arm_line(slot(rank) + args.lines", "if (!WITHOUT) re_arm_line(slot(rank) + args.lines"),
        ),
        "broadcast",
    ),
    Control(
        "one_number_per_operation",
        "the blocks of an operation advance its number once, together",
        (
            Edit(
                COMM,
                "block_index() == 0 ? kArrivals",
                "WITHOUT ? kArrivalsPerOperation : block_index() == 0 ? kArrivals",
            ),
        ),
    ),
    Control(
        "arrive_last",
        "a block arrives after all its threads have begun",
        (
            Edit(
                ONE_SHOT,
                "bool begun = op.begin();",
                "bool begun = op.begin();\n  if (WITHOUT && thread_index() == 0) op.arrive();",
            ),
            Edit(ONE_SHOT, "if (tile == first && thread", "if (!WITHOUT && tile == first && thread"),
        ),
        "one_shot",
    ),
    Control(
        "one_shot_sends_nothing_in_vain",
        "a thread that may not begin sends nothing",
        (Edit(ONE_SHOT, "if (begun && !is_own", "if ((WITHOUT || begun) && !is_own"),),
        "one_shot",
        options=("--mishaps",),
        budget=20_000,
        failure=UNTOLD,
    ),
    Control(
        "dependency_wait_one_shot",
        "a grid waits for the grids before it",
        (Edit(ONE_SHOT, "grid_dependency_wait_after(", "if (!WITHOUT) grid_dependency_wait_after("),),
        "one_shot",
    ),
    Control(
        "dependency_wait_two_shot",
        "a grid waits for the grids before it",
        (Edit(TWO_SHOT, "grid_dependency_wait_after(", "if (!WITHOUT) grid_dependency_wait_after("),),
        "two_shot",
    ),
    Control(
        "contributions_complete",
        "one-shot sums after all threads of the block have their lines",
        (Edit(ONE_SHOT, "block_sync();", "if (!WITHOUT) block_sync();"),),
        "one_shot",
    ),
    Control(
        "contributions_twice",
        "one-shot's next tile does not overwrite what slow threads still sum",
        (Edit(ONE_SHOT, "parity ^= 1;", "parity ^= WITHOUT ? 0 : 1;"),),
        "one_shot",
        budget=20_000,
        failure=WRONG_RESULT,
    ),
    Control(
        "slice_complete",
        "two-shot sums after all threads of the block have their lines",
        (Edit(TWO_SHOT, "    block_sync();\n    if (op.in", "    if (!WITHOUT) block_sync();\n    if (op.in"),),
        "two_shot",
    ),
    Control(
        "sums_complete",
        "two-shot sends sums after all threads of the block have made theirs",
        (Edit(TWO_SHOT, "    block_sync();\n    if (i >=", "    if (!WITHOUT) block_sync();\n    if (i >="),),
        "two_shot",
        failure=WRONG_RESULT,
    ),
    Control(
        "no_sums_of_incomplete_slices",
        "a block whose wait ended in vain sends no sums",
        (Edit(TWO_SHOT, "|| *incomplete != 0", "|| (!WITHOUT && *incomplete != 0)"),),
        "two_shot",
        budget=20_000,
        failure=UNTOLD,
    ),
    Control(
        "two_shot_stays",
        "a thread that may not begin stays to tell its block, which may have begun, that a slice is incomplete",
        (Edit(TWO_SHOT, "bool begun = op.begin();", "bool begun = op.begin();\n  if (WITHOUT && !begun) return;"),),
        "two_shot",
        options=("--mishaps",),
        budget=20_000,
        failure=UNTOLD,
    ),
    Control(
        "abort_ends_the_communicator",
        "operations behind a wait that the host aborted do nothing",
        (Edit(WAIT, "    give_up(bounds);\n", "    if (!WITHOUT) give_up(bounds);\n"),),
        options=("--mishaps",),
        budget=20_000,
        failure=UNTOLD,
    ),
    Control(
        "exit_ends_waits",
        "a wait for a rank whose process has exited does not last for the time-out",
        (Edit(WAIT, "if (reasons != 0) store", "if (!WITHOUT && reasons != 0) store"),),
        options=("--mishaps",),
        budget=20_000,
        failure=TOO_LATE,
    ),
    Control(
        "stop_after_an_error",
        "operations behind an expired wait do nothing",
        (Edit(COMM, "in_vain_ = (state.word", "in_vain_ = !WITHOUT && (state.word"),),
        "one_shot",
        budget=20_000,
        failure=UNTOLD,
    ),
    Control(
        "notes",
        "a rank whose wait expires tells the others",
        (Edit(WAIT, "bounds.suspicions.tell(peer);", "if (!WITHOUT) bounds.suspicions.tell(peer);"),),
        budget=20_000,
        failure=f"{BLAME}|{TOO_LATE}",
    ),
    Control(
        "time_for_notes",
        "a rank whose wait expired hears the others before it blames one",
        (Edit(WAIT, "bounds.timeout_ns / 16", "WITHOUT ? 0 : bounds.timeout_ns / 16"),),
        budget=20_000,
        failure=BLAME,
    ),
    Control(
        "blame_follows_notes",
        "a rank that waits itself is not blamed",
        (Edit(WAIT, "bounds.suspicions.culprit(peer)", "WITHOUT ? peer : bounds.suspicions.culprit(peer)"),),
        budget=20_000,
        failure=BLAME,
    ),
    Control(
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
    Control(
        "check_dependency_wait",
        "a comparison waits for the grids before it",
        (
            Edit(
                CHECK_CALL,
                "  grid_dependency_wait();\n  const DeviceComm& comm",
                "  if (!WITHOUT) grid_dependency_wait();\n  const DeviceComm& comm",
            ),
        ),
        failure=f"{NOBODY_IS_MISSING}|{CONCURRENT}",
    ),
    Control(
        "fused_dependency_wait",
        "a fused grid waits for the grids before it",
        (Edit(FUSED_ONE_SHOT, "grid_dependency_wait_after(", "if (!WITHOUT) grid_dependency_wait_after("),),
        "fused_one_shot",
    ),
    Control(
        "fused_contributions_complete",
        "fused one-shot sums after all threads of the block have their lines",
        (Edit(FUSED_ONE_SHOT, "block_sync();", "if (!WITHOUT) block_sync();"),),
        "fused_one_shot",
    ),
    Control(
        "fused_contributions_twice",
        "fused one-shot's next tile does not overwrite what slow threads still sum",
        (Edit(FUSED_ONE_SHOT, "parity ^= 1;", "parity ^= WITHOUT ? 0 : 1;"),),
        "fused_one_shot",
        budget=20_000,
        failure=WRONG_RESULT,
    ),
    Control(
        "fused_cluster_meets",
        "blocks of a cluster deliver only once all of them have set up what counts deliveries",
        (Edit(FUSED_ONE_SHOT, "norm.meet();", "if (!WITHOUT) norm.meet();"),),
        "fused_one_shot",
        budget=20_000,
        failure=HANGS,
    ),
    Control(
        "fused_stays",
        "a thread that may not begin stays to deliver what its block, which may have begun, waits for",
        (
            Edit(
                FUSED_ONE_SHOT,
                "norm.set_begun(op.begin(state));",
                "norm.set_begun(op.begin(state));\n  if (WITHOUT && op.in_vain()) return;",
            ),
        ),
        "fused_one_shot",
        options=("--mishaps",),
        budget=20_000,
        failure=HANGS,
    ),
    Control(
        "fused_sums_complete",
        "fused two-shot sends sums after all threads of the block have made theirs",
        (Edit(FUSED_TWO_SHOT, "    block_sync();\n    if (has", "    if (!WITHOUT) block_sync();\n    if (has"),),
        "fused_two_shot",
        failure=WRONG_RESULT,
    ),
    Control(
        "fused_no_sums_of_incomplete_segments",
        "a fused block whose wait ended in vain sends no sums",
        (Edit(FUSED_TWO_SHOT, "if (has && *incomplete == 0) {", "if (has && (WITHOUT || *incomplete == 0)) {"),),
        "fused_two_shot",
        budget=20_000,
        failure=UNTOLD,
    ),
    Control(
        "arrive_last_two_shot",
        "a block arrives after all its threads have begun",
        (
            Edit(
                TWO_SHOT,
                "begun = op.begin();",
                "begun = op.begin();\n  if (WITHOUT && thread_index() == 0) op.arrive();",
            ),
            Edit(TWO_SHOT, "if (tile == first && thread", "if (!WITHOUT && tile == first && thread"),
        ),
        "two_shot",
    ),
    Control(
        "arrive_last_fused_one_shot",
        "a block arrives after all its threads have begun",
        (
            Edit(
                FUSED_ONE_SHOT,
                "norm.set_begun(op.begin(state));",
                "norm.set_begun(op.begin(state));\n  if (WITHOUT && thread_index() == 0) op.arrive();",
            ),
            Edit(
                FUSED_ONE_SHOT,
                "if (is_first && thread_index() == 0) op.arrive",
                "if (!WITHOUT && is_first && thread_index() == 0) op.arrive",
            ),
        ),
        "fused_one_shot",
    ),
    Control(
        "arrive_last_fused_two_shot",
        "a block arrives after all its threads have begun",
        (
            Edit(
                FUSED_TWO_SHOT,
                "norm.set_begun(op.begin(state));",
                "norm.set_begun(op.begin(state));\n  if (WITHOUT && thread_index() == 0) op.arrive();",
            ),
            Edit(
                FUSED_TWO_SHOT,
                "if (is_first && thread_index() == 0) op.arrive",
                "if (!WITHOUT && is_first && thread_index() == 0) op.arrive",
            ),
        ),
        "fused_two_shot",
    ),
    Control(
        "fused_re_arm",
        "R2 in fused one-shot",
        (Edit(FUSED_ONE_SHOT, "re_arm_line(received);", "if (!WITHOUT) re_arm_line(received);"),),
        "fused_one_shot",
    ),
    Control(
        "fused_re_arm_scattered",
        "R2 in fused two-shot's first phase",
        (
            Edit(
                FUSED_TWO_SHOT,
                "if (!is_own) re_arm_line(incoming + index);",
                "if (!WITHOUT && !is_own) re_arm_line(incoming + index);",
            ),
        ),
        "fused_two_shot",
    ),
    Control(
        "fused_re_arm_gathered",
        "R2 in fused two-shot's second phase",
        (
            Edit(
                FUSED_TWO_SHOT,
                "if (receives) re_arm_line(incoming + index);",
                "if (!WITHOUT && receives) re_arm_line(incoming + index);",
            ),
        ),
        "fused_two_shot",
    ),
    Control(
        "fused_dependency_wait_two_shot",
        "a fused grid waits for the grids before it",
        (Edit(FUSED_TWO_SHOT, "grid_dependency_wait_after(", "if (!WITHOUT) grid_dependency_wait_after("),),
        "fused_two_shot",
    ),
    Control(
        "fused_segment_complete",
        "fused two-shot sums after all threads of the block have their lines",
        (Edit(FUSED_TWO_SHOT, "block_sync();\n    if (op.in", "if (!WITHOUT) block_sync();\n    if (op.in"),),
        "fused_two_shot",
    ),
    Control(
        "fused_cluster_meets_two_shot",
        "the same in fused two-shot",
        (Edit(FUSED_TWO_SHOT, "norm.meet();", "if (!WITHOUT) norm.meet();"),),
        "fused_two_shot",
        budget=20_000,
        failure=HANGS,
    ),
    Control(
        "fused_two_sets",
        "rows take turns with two sets of partial sums",
        (
            Edit(RMS_NORM, "return rows_ % 2;", "return WITHOUT ? 0 : rows_ % 2;"),
            Edit(RMS_NORM, "rows_ / 2 % 2", "(WITHOUT ? rows_ : rows_ / 2) % 2"),
        ),
        "fused_one_shot",
        failure=WRONG_RESULT,
    ),
    Control(
        "fused_expects_again",
        "a set of partial sums counts deliveries of the row after next too",
        (
            Edit(
                RMS_NORM,
                "if (!Once && thread_index() == 0) expect(set);",
                "if (!WITHOUT && !Once && thread_index() == 0) expect(set);",
            ),
        ),
        "fused_one_shot",
        failure=HANGS,
    ),
    Control(
        "fused_nobody_leaves_alone",
        "a block stays as long as others of its cluster deliver to it",
        (Edit(FUSED_ONE_SHOT, "if (norms || warp == 0) {", "if (norms || (!WITHOUT && warp == 0)) {"),),
        "fused_one_shot",
        budget=20_000,
        failure=LEFT_ALONE,
    ),
    Control(
        "fused_nobody_leaves_alone_two_shot",
        "the same in fused two-shot",
        (
            Edit(
                FUSED_TWO_SHOT,
                "if (norms || thread_index() < kWarpThreads) {",
                "if (norms || (!WITHOUT && thread_index() < kWarpThreads)) {",
            ),
        ),
        "fused_two_shot",
        budget=20_000,
        failure=LEFT_ALONE,
    ),
    Control(
        "four_chunks_of_a_warp",
        "a warp delivers four chunks at once only where it holds four in a row",
        (Edit(RMS_NORM, "if (fills_warps_ &&", "if ((WITHOUT || fills_warps_) &&"),),
        "fused_two_shot",
        failure=f"{WRONG_RESULT}|{HANGS}|{LEFT_ALONE}",  # too much or too little is counted
    ),
    Control(
        "fused_sends_nothing_in_vain_one_shot",
        "a thread whose operation is in vain sends nothing",
        (
            Edit(
                FUSED_ONE_SHOT,
                "if (!is_own && has_line(sending) && !op.in_vain())",
                "if (!is_own && has_line(sending) && (WITHOUT || !op.in_vain()))",
            ),
        ),
        "fused_one_shot",
        options=("--mishaps",),
        budget=20_000,
        failure=UNTOLD,
    ),
    Control(
        "fused_sends_nothing_in_vain_two_shot",
        "a thread whose operation is in vain sends nothing",
        (
            Edit(
                FUSED_TWO_SHOT,
                "if (!is_own && has_line(scattering, self.peer) && !op.in_vain())",
                "if (!is_own && has_line(scattering, self.peer) && (WITHOUT || !op.in_vain()))",
            ),
        ),
        "fused_two_shot",
        options=("--mishaps",),
        budget=20_000,
        failure=UNTOLD,
    ),
    Control(
        "notes_end_waits",
        "a rank that finds a note in the middle of a wait gives up too",
        (Edit(WAIT, "bounds.suspicions.find(suspect) ||", "(!WITHOUT && bounds.suspicions.find(suspect)) ||"),),
        options=("--mishaps",),
        budget=20_000,
        failure=f"{TOO_LATE}|{BLAME}",
    ),
    Control(
        "silent_rank",
        "where notes lead nowhere, the rank without one is blamed",
        (Edit(SUSPICION, "return silent != world_size_ ?", "return !WITHOUT && silent != world_size_ ?"),),
        options=("--mishaps",),
        budget=20_000,
        failure=BLAME,
    ),
    Control(
        "notes_that_name_this_rank",
        "a rank is not led to blame itself by notes that name it",
        (Edit(SUSPICION, "if (named != rank_) suspect = named;", "if (WITHOUT || named != rank_) suspect = named;"),),
        options=("--mishaps",),
        budget=20_000,
        failure=BLAME,
    ),
    Control(
        "release_before_signal",
        "a signal is a release",
        (
            Edit(
                SEMAPHORE,
                "void signal() const { store_release(",
                "void signal() const { if (WITHOUT) return relaxed_signal(); store_release(",
            ),
        ),
        "put",
        failure=WRONG_RESULT,
    ),
    Control(
        "acquire_in_wait",
        "a wait is an acquire",
        (Edit(SEMAPHORE, "load_acquire(received)", "(WITHOUT ? load_relaxed(received) : load_acquire(received))"),),
        "put",
        failure=WRONG_RESULT,
    ),
    Control(
        "block_before_signal",
        "the block meets before one thread signals for it",
        (
            Edit(
                MESSAGES,
                "    block_sync();\n    if (thread_index() == 0) {\n      channel",
                "    if (!WITHOUT) block_sync();\n    if (thread_index() == 0) {\n      channel",
            ),
        ),
        "put",
        failure=WRONG_RESULT,
    ),
    Control(
        "buffer_free",
        "a buffer is written again after the peer has read it",
        (
            Edit(
                MESSAGES,
                "if (!party.meet(agreed)) return;  // the",
                "if (!WITHOUT && !party.meet(agreed)) return;  // the",
            ),
        ),
        "put",
        failure=WRONG_RESULT,
    ),
    Control(
        "block_before_packets_signal",
        "the block meets before one thread signals that packets are read",
        (
            Edit(
                MESSAGES,
                "block_sync();\n    if (thread_index() == 0) {\n      party",
                "if (!WITHOUT) block_sync();\n    if (thread_index() == 0) {\n      party",
            ),
        ),
        "packets",
        failure=f"{WRONG_RESULT}|{NOBODY_IS_MISSING}",
    ),
    Control(
        "packets_free",
        "packets are written again after the peer has read them",
        (Edit(MESSAGES, "*agreed = party.channel", "*agreed = WITHOUT || party.channel"),),
        "packets",
        failure=f"{WRONG_RESULT}|{NOBODY_IS_MISSING}",
    ),
)


def edited(text: str, edit: Edit, switch: str) -> str:
    """``text`` after the edit. However the lines of the old text are broken: the sources are formatted by a tool."""
    pattern = r"\s+".join(re.escape(word) for word in edit.old.split())
    if len(re.findall(pattern, text)) != 1:
        raise ValueError(f"{edit.file} does not hold {edit.old!r} once")
    return re.sub(pattern, lambda _: edit.new.replace("WITHOUT", switch), text)


def edited_sources() -> dict[str, bytes]:
    """The sources, by path, in which the environment variable of ``SWITCH`` takes out one protection."""
    found = [
        p for tree in ("csrc", "tests/deterministic") for p in (driver.REPOSITORY / tree).rglob("*") if p.is_file()
    ]
    texts = {str(p.relative_to(driver.REPOSITORY)): p.read_bytes() for p in found if "__pycache__" not in p.parts}
    for number, control in enumerate(CONTROLS, start=1):
        for edit in control.edits:
            try:
                new = edited(texts[edit.file].decode(), edit, f"(::control_that_is_on == {number})")
            except ValueError as error:
                raise ValueError(f"control {control.name}: {error}") from None
            texts[edit.file] = new.encode()
    variable = f'#include <cstdlib>\ninline const int control_that_is_on = std::atoi(std::getenv("{SWITCH}"));\n'
    texts[TYPES] += variable.encode()
    return texts


def edited_copy(directory: Path) -> Path:
    """Brings ``directory`` to hold ``edited_sources()``. What is there already is not built again."""
    texts = edited_sources()
    if directory.exists():
        for path in directory.rglob("*"):
            if path.is_file() and str(path.relative_to(directory)) not in texts:
                path.unlink()
    for name, text in texts.items():
        path = directory / name
        if path.exists() and path.read_bytes() == text:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return directory


def build(directory: Path = driver.REPOSITORY / "build" / "controls") -> Path:
    """The program with all controls."""
    return driver.build(directory / "build", root=edited_copy(directory / "sources")) / driver.PROGRAM


@dataclass(frozen=True)
class Outcome:
    schedules: int  # until the failure, or all there were
    failure: str  # "" if nothing was noticed


def run(control: Control, program: Path, first_seed: int = 1) -> Outcome:
    command = [str(program), "--seed", str(first_seed), "--cases", str(control.budget), *control.options]
    if control.algorithm:
        command += ["--algorithm", control.algorithm]
    number = next((i for i, known in enumerate(CONTROLS, start=1) if known.name == control.name), 0)
    environment = {**os.environ, SWITCH: str(number)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    found = re.search(r"^FAILED: seed \d+ \(schedule (\d+) of this run\): (.*)$", done.stdout, flags=re.MULTILINE)
    if done.returncode != (0 if found is None else 1):
        raise RuntimeError(f"{control.name}: the program ended with {done.returncode}: {done.stdout}{done.stderr}")
    if found is None:
        return Outcome(control.budget, "")
    if not re.search(control.failure, found[2]):
        raise RuntimeError(f"{control.name}: not what this leads to ({control.failure}): {found[0]}")
    return Outcome(int(found[1]), found[2])


def measure(control: Control, program: Path, runs: int) -> dict[str, object]:
    """Schedules until the failure, in runs with seeds that are far apart."""
    outcomes = [run(control, program, 1 + 1_000_000 * i) for i in range(runs)]
    counts = sorted(outcome.schedules for outcome in outcomes)
    return {
        "name": control.name,
        "protection": control.protection,
        "algorithm": control.algorithm or "all",
        "budget": control.budget,
        "schedules_median": counts[len(counts) // 2],
        "schedules_most": counts[-1],
        "noticed": sum(bool(outcome.failure) for outcome in outcomes),
        "runs": runs,
        "first_failure": outcomes[0].failure,
    }


def table(results: Sequence[dict[str, object]]) -> str:
    """The rows of docs/reliability.md."""
    head = "| control | what is taken out | schedules about | median | most | budget |\n|---|---|---|---|---|---|\n"
    columns = ("name", "protection", "algorithm", "schedules_median", "schedules_most", "budget")
    return head + "".join("| " + " | ".join(str(row[column]) for column in columns) + " |\n" for row in results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--runs", type=int, default=9, help="runs of each control, with different seeds")
    parser.add_argument("-k", default="", help="only controls whose names contain this")
    arguments = parser.parse_args()
    controls = [control for control in CONTROLS if arguments.k in control.name]
    program = build()
    results = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for result in pool.map(lambda control: measure(control, program, arguments.runs), controls):
            results.append(result)
            print(
                f"{result['name']:30} {result['noticed']}/{result['runs']} noticed, median"
                f" {result['schedules_median']}, most {result['schedules_most']} schedules: {result['first_failure']}",
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
