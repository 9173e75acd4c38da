"""Protections of what is ordered by signals (HB), and of lines that carry any bytes."""

from __future__ import annotations

from edits import Edit
from protection import (
    AHEAD,
    BLAME,
    HANGS,
    HB_SESSION,
    MISHAPS,
    NOBODY_IS_MISSING,
    OTHER_OFFSET,
    OTHER_SIZES,
    PLAIN_BY_SWITCH,
    UNTOLD,
    WRONG,
    WRONG_RESULT,
    Protection,
)

BYTES = "csrc/include/llm_comm/ll_bytes.cuh"
STEP_PIPELINE = "csrc/algorithms/step_pipeline.cuh"

#: Of what HBSession::run() does, and of its buffers.
AT_ONCE = {
    r".*/direct_(push_hb|port)|.*_ce|.*/two_shot_pull_hb": "its steps are signalled at once, and it stages nothing",
    r".*/port": "it has a session of its own",
}
#: Of what HBSession does in either way.
NO_HB = {r".*/port": "it has a session of its own"}
#: The offset of a peer's output that has not arrived names no memory, or other memory: the program crashes.
NO_OFFSET = {r".*/two_shot_port": "without it an offset may be read that has not arrived"}
#: Whose peers read what a rank has staged, or stored to all.
ONE_HOP_BY_SWITCH = ("all_reduce/one_shot_ld_reduce", "all_gather/push_switch", "reduce_scatter/ld_reduce")
#: Algorithms whose third team collects quantized sums, or norms sums.
WITH_THIRD_TEAM = (
    "all_reduce/two_shot_fp8_hb",
    "all_reduce_add_rms_norm/two_shot_hb",
    "all_reduce_add_rms_norm/two_shot_fp8_hb",
)
_WRONG = f"{WRONG_RESULT}|{NOBODY_IS_MISSING}"

OF_CHANNELS = (
    Protection(
        "hb_dependency_wait",
        "a grid waits for the grids before it",
        (Edit(HB_SESSION, "grid_dependency_wait_after(", "if (!WITHOUT) grid_dependency_wait_after("),),
        failure=f"{WRONG}|{AHEAD}",
        exempt=NO_HB,
    ),
    # ---- Signals ----
    Protection(
        "hb_release",
        "the signal of a step orders what was stored in it before",
        (
            Edit(
                HB_SESSION,
                "store_release(row_.word(comm_, peer, comm_.rank), value_of(step));",
                "if (WITHOUT) { store_relaxed(row_.word(comm_, peer, comm_.rank), value_of(step)); } else "
                "{ store_release(row_.word(comm_, peer, comm_.rank), value_of(step)); }",
            ),
        ),
        failure=f"{_WRONG}|{OTHER_OFFSET}",
        exempt={**NO_HB, **NO_OFFSET},
    ),
    Protection(
        "hb_acquire",
        "who finds a signal reads what was stored before it",
        (
            Edit(
                HB_SESSION,
                "return poll_acquire(word, HasReached{value_of(step)});",
                "const HasReached has{value_of(step)};\n"
                "return WITHOUT ? has(load_relaxed(word)) : poll_acquire(word, has);",
            ),
        ),
        failure=f"{_WRONG}|{OTHER_OFFSET}",
        exempt={**NO_HB, **NO_OFFSET},
    ),
    Protection(
        "hb_wait",
        "a step begins when the peers have ended the one that it builds on",
        (Edit(HB_SESSION, "if (has_peer && t >= depth && !wait(", "if (has_peer && !WITHOUT && t >= depth && !wait("),),
        failure=f"{_WRONG}|{OTHER_OFFSET}",
        exempt={**AT_ONCE, **NO_OFFSET},
    ),
    Protection(
        "hb_signal_of_ended_step",
        "a step is signalled behind a barrier of the block, when all of its threads have ended it",
        (Edit(HB_SESSION, "signal(peer, t - 2);", "signal(peer, WITHOUT ? t - 1 : t - 2);"),),
        failure=f"{_WRONG}|{OTHER_OFFSET}",
        exempt=AT_ONCE,
    ),
    Protection(
        "hb_operation_number",
        "signals of operations before count for nothing",
        (Edit(HB_SESSION, "word_of_step(op_.sequence(), step)", "word_of_step(WITHOUT ? 0 : op_.sequence(), step)"),),
        failure=f"{_WRONG}|{OTHER_OFFSET}",
        exempt=NO_HB,
    ),
    Protection(
        "hb_next_operation_counts",
        "a signal of the next operation says that all steps of this one have ended",
        (
            Edit(
                HB_SESSION,
                "const uint64_t* const",
                "if (WITHOUT) return op_.wait_until([&] { return load_acquire(row_.word(comm_, comm_.rank, peer)) -"
                " value_of(step) < kFurthestAhead / 2 - value_of(step) % (kFurthestAhead / 2); }, peer, phase);\n"
                "const uint64_t* const",
            ),
        ),
        failure=NOBODY_IS_MISSING,
        exempt=NO_HB,
    ),
    # ---- Staging memory ----
    Protection(
        "hb_turns",
        "there are twice as many buffers as steps that a block is ahead",
        (Edit(STEP_PIPELINE, "stages_(2 * depth)", "stages_(WITHOUT ? depth : 2 * depth)"),),
        failure=WRONG_RESULT,
        exempt={PLAIN_BY_SWITCH: "it has buffers of its own"},
    ),
    Protection(
        "hb_last_steps",
        "H1: a rank ends only when its peers have read what it sent",
        (Edit(HB_SESSION, "steps = chunks + 2 * depth;", "steps = chunks + (WITHOUT ? depth + 1 : 2 * depth);"),),
        failure=_WRONG,
        subjects=(
            *("all_reduce/one_shot_hb", "all_gather/push_hb", "reduce_scatter/push_hb"),
            *("all_to_all/push_hb", "all_to_all_v/push_hb"),
            *ONE_HOP_BY_SWITCH,
        ),
    ),
    Protection(
        "hb_second_half",
        "H2: what a second hop stores has memory of its own",
        (Edit(STEP_PIPELINE, "staging_of(comm_, receiver, hop)", "staging_of(comm_, receiver, WITHOUT ? 0 : hop)"),),
        failure=WRONG_RESULT,
        subjects=("all_reduce/two_shot_hb", "all_reduce/two_shot_int8_hb", *WITH_THIRD_TEAM),
    ),
    Protection(
        "greetings_apart",
        "greetings with sizes have memory of their own",
        (
            Edit(
                "csrc/algorithms/all_to_all_v/push_hb.cuh",
                "session.staging(receiver, kSecondHop)",
                "session.staging(receiver, WITHOUT ? kFirstHop : kSecondHop)",
            ),
        ),
        failure=_WRONG,
    ),
    Protection(
        "hb_sums_have_arrived",
        "what the ranks have added is read `depth` steps after it was stored",
        (
            Edit(
                STEP_PIPELINE,
                "const uint32_t behind = number * depth_;",
                "const uint32_t behind = WITHOUT && number == 2 ? depth_ : number * depth_;",
            ),
        ),
        failure=WRONG_RESULT,
        subjects=("all_reduce/two_shot_hb", *WITH_THIRD_TEAM),
    ),
    # ---- Errors ----
    Protection(
        "hb_block_ends_as_one",
        "a block whose wait was aborted sends and sums nothing more",
        (Edit(HB_SESSION, "if (incomplete_[t % 2] != 0) return;", "if (!WITHOUT && incomplete_[t % 2] != 0) return;"),),
        options=MISHAPS,
        # A rank that goes on may read greetings that have not come, and fail for their sizes: others wait for it.
        failure=f"{UNTOLD}|{OTHER_OFFSET}|{OTHER_SIZES}|{BLAME}",
        exempt=AT_ONCE,
    ),
    # ---- Lines of any bytes ----
    Protection(
        "bytes_mask",
        "a line that holds a word which may stand for two is followed by a mask, which is read",
        (Edit(BYTES, "if (has_ambiguous_words(lines[i]))", "if (!WITHOUT && has_ambiguous_words(lines[i]))"),),
        failure=f"{WRONG_RESULT}|is not reset to the sentinel",  # the mask, where it comes later
    ),
    Protection(
        "bytes_wait_for_mask",
        "a mask is taken only when it has arrived",
        (Edit(BYTES, "return found != kSentinel;", "return WITHOUT || found != kSentinel;"),),
        failure=f"{WRONG_RESULT}|is not reset to the sentinel",  # the mask, where it comes later
    ),
    Protection(
        "bytes_re_arm_mask",
        "R2: a mask is reset to the sentinel",
        (Edit(BYTES, "store_relaxed(incoming, kSentinel);", "if (!WITHOUT) store_relaxed(incoming, kSentinel);"),),
        failure="|".join((WRONG_RESULT, "is not reset to the sentinel", HANGS)),
    ),
)
