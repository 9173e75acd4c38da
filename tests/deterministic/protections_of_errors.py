"""Protections of operations that go wrong: what they do after an error, whom they blame, how calls are compared."""

from __future__ import annotations

from edits import Edit
from protection import (
    AHEAD,
    BLAME,
    CHECK_CALL,
    CONCURRENT,
    FAULT_REPORTS,
    HANGS,
    MISHAPS,
    MISMATCH,
    NOBODY_IS_MISSING,
    OPERATION,
    OTHER_OFFSET,
    RMS_NORM,
    TOO_LATE,
    UNTOLD,
    WAIT,
    Everywhere,
    Protection,
)

#: What all waits and comparisons of calls do, which are the same code. All-reduces by LL, fused ones and the toy show
#: it in minutes; schedules of the others would take as long again for each.
ALIKE = {
    r"(all_gather|reduce_scatter|all_to_all|all_to_all_v)/.*|.*_hb|.*port|.*_ce|.*_switch|.*ld_reduce": (
        "waits and comparisons are those of all-reduces by LL"
    )
}

OF_ERRORS = (
    # ---- After an error ----
    Protection(
        "stop_after_an_error",
        "operations behind an expired wait do nothing",
        (Edit(OPERATION, "aborted_ = (state.word", "aborted_ = !WITHOUT && (state.word"),),
        options=MISHAPS,
        budget=20_000,
        failure=f"{UNTOLD}|{OTHER_OFFSET}",
    ),
    Protection(
        "sends_nothing_in_vain",
        "a thread that may not begin sends nothing",
        Everywhere(
            (r"(\bbegun|!session\.aborted\(\))(?=[^;{}]*\)\s*\{?\s*(session\.)?send\()", r"(WITHOUT || \1)"),
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
        exempt={r".*_hb": "all threads of its blocks begin, or none does"},
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
        exempt={
            "reduce_scatter/one_shot": "not seen in 20,000 schedules: a thread that leaves mostly takes its block too",
            "moe_combine/one_shot": "not seen in ten minutes of schedules, as with reduce_scatter/one_shot",
        },
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
        exempt=ALIKE,
    ),
    Protection(
        "exit_ends_waits",
        "a wait for a rank whose process has exited does not last for the time-out",
        (Edit(WAIT, "if (reasons != 0) store", "if (!WITHOUT && reasons != 0) store"),),
        options=MISHAPS,
        budget=20_000,
        failure=TOO_LATE,
        exempt=ALIKE,
    ),
    Protection(
        "greetings_before_failure",
        "a rank whose sizes are wrong fails only after it has greeted all ranks, which wait for that",
        (
            Edit(
                "csrc/algorithms/all_to_all_v/one_shot.cuh",
                "block_sync();  // a thread that fails",
                "if (!WITHOUT) block_sync();  // a thread that fails",
            ),
        ),
        budget=20_000,
        failure=NOBODY_IS_MISSING,
    ),
    # ---- Who is to blame ----
    Protection(
        "notes",
        "a rank whose wait expires tells the others",
        (Edit(WAIT, "bounds.fault_reports.send(peer);", "if (!WITHOUT) bounds.fault_reports.send(peer);"),),
        options=MISHAPS,
        budget=20_000,
        failure=f"{BLAME}|{TOO_LATE}",
        exempt=ALIKE,
    ),
    Protection(
        "time_for_notes",
        "a rank whose wait expired hears the others before it blames one",
        (Edit(WAIT, "bounds.timeout_ns / 16", "WITHOUT ? 0 : bounds.timeout_ns / 16"),),
        options=MISHAPS,
        budget=20_000,
        failure=BLAME,
        exempt=ALIKE,
    ),
    Protection(
        "blame_follows_notes",
        "a rank that waits itself is not blamed",
        (
            Edit(
                WAIT,
                "bounds.fault_reports.failed_peer(peer)",
                "WITHOUT ? peer : bounds.fault_reports.failed_peer(peer)",
            ),
        ),
        options=MISHAPS,
        budget=20_000,
        failure=BLAME,
        exempt=ALIKE,
    ),
    Protection(
        "notes_end_waits",
        "a rank that finds a note in the middle of a wait gives up too",
        (Edit(WAIT, "bounds.fault_reports.find(suspect) ||", "(!WITHOUT && bounds.fault_reports.find(suspect)) ||"),),
        options=MISHAPS,
        budget=20_000,
        failure=f"{TOO_LATE}|{BLAME}",
        exempt=ALIKE,
    ),
    Protection(
        "silent_rank",
        "where notes lead nowhere, the rank without one is blamed",
        (Edit(FAULT_REPORTS, "return silent != world_size_ ?", "return !WITHOUT && silent != world_size_ ?"),),
        options=MISHAPS,
        budget=20_000,
        failure=BLAME,
        exempt={
            **ALIKE,
            "all_reduce_add_rms_norm/.*": "slow with mishaps: two-shot noticed after 164 s, one-shot not in 600 s",
        },
    ),
    Protection(
        "notes_that_name_this_rank",
        "a rank is not led to blame itself by notes that name it",
        (
            Edit(
                FAULT_REPORTS, "if (named != rank_) suspect = named;", "if (WITHOUT || named != rank_) suspect = named;"
            ),
        ),
        options=MISHAPS,
        budget=20_000,
        failure=BLAME,
        exempt=ALIKE,
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
        exempt=ALIKE,
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
        exempt=ALIKE,
    ),
)
