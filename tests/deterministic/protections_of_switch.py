"""Protections of algorithms by SwitchChannel: of aliases, and of what all ranks have at one place."""

from __future__ import annotations

from edits import Edit
from protection import MISHAPS, NOBODY_IS_MISSING, UNTOLD, WRONG, WRONG_RESULT, Protection

SWITCH_CHUNKS = "csrc/optional/switch_chunks.cuh"
TWO_SHOT = "csrc/algorithms/all_reduce/two_shot.cuh"
STEP_PIPELINE = "csrc/algorithms/step_pipeline.cuh"
FUSED = "csrc/algorithms/all_reduce_add_rms_norm/two_shot.cuh"
FUSED_LD_REDUCE = "csrc/optional/all_reduce_add_rms_norm/two_shot_ld_reduce.cuh"
ALL_GATHER = "csrc/algorithms/all_gather/push_hb.cuh"

IN_TILES = ("all_reduce/two_shot_switch",)
IN_CLUSTERS = ("all_reduce_add_rms_norm/two_shot_switch",)
BY_STEPS = ("all_reduce/two_shot_ld_reduce", "all_reduce/one_shot_ld_reduce", "reduce_scatter/ld_reduce")
GATHERING = ("all_reduce/two_shot_ld_reduce",)
FUSED_SUMS = ("all_reduce_add_rms_norm/two_shot_ld_reduce",)
_WRONG = f"{WRONG_RESULT}|{NOBODY_IS_MISSING}"

OF_SWITCH = (
    # ---- Aliases ----
    Protection(
        "switch_fence_of_step",
        "a fence of aliases lies between what a block stages, or stores to all ranks, and the signal of the step",
        (
            Edit(
                STEP_PIPELINE,
                "[](uint32_t) { Buffers::fence(); }",
                "[](uint32_t) { if (!WITHOUT) Buffers::fence(); }",
            ),
        ),
        failure=_WRONG,
        subjects=(*BY_STEPS, "all_gather/push_switch"),
    ),
    Protection(
        "switch_fence_of_lines",
        "a fence of aliases lies between the arming of lines and a store to them on all ranks",
        (
            Edit(
                TWO_SHOT,
                "if (BySwitch && self.is_own && tile == first) fence_aliases();",
                "if (!WITHOUT && BySwitch && self.is_own && tile == first) fence_aliases();",
            ),
        ),
        failure=_WRONG,
        subjects=IN_TILES,
    ),
    Protection(
        "switch_fence_of_fused_lines",
        "the same, of fused two-shot",
        (
            Edit(
                FUSED,
                "if (kToAll && is_first && self.is_own) fence_aliases();",
                "if (!WITHOUT && kToAll && is_first && self.is_own) fence_aliases();",
            ),
        ),
        failure=_WRONG,
        subjects=IN_CLUSTERS,
    ),
    Protection(
        "switch_fence_of_tile",
        "a fence of aliases lies between what a block stages of a tile and its signal",
        (Edit(FUSED_LD_REDUCE, "fence_aliases();\n", "if (!WITHOUT) fence_aliases();\n"),),
        failure=_WRONG,
        subjects=FUSED_SUMS,
    ),
    Protection(
        "switch_fence_of_parts",
        "a fence of aliases lies between what plain stores left in staging memory and a store there on all ranks",
        (Edit(ALL_GATHER, "Buffers<World>::fence();", "if (!WITHOUT) Buffers<World>::fence();"),),
        failure=WRONG_RESULT,
        subjects=("all_gather/push_switch",),
        with_others=True,
        budget=20_000,
    ),
    # ---- Sums ----
    Protection(
        "switch_sums_after_all_staged",
        "the switch sums a tile only when all ranks have staged it",
        (Edit(FUSED_LD_REDUCE, "if (talks_) {", "if (!WITHOUT && talks_) {"),),
        failure=WRONG,
        subjects=FUSED_SUMS,
    ),
    Protection(
        "switch_release_of_tile",
        "the signal of a tile is a release",
        (
            Edit(
                FUSED_LD_REDUCE,
                "store_release(row_.word(",
                "const auto signal = [](uint64_t* to, uint64_t n) {"
                " WITHOUT ? store_relaxed(to, n) : store_release(to, n); };\n signal(row_.word(",
            ),
        ),
        failure=_WRONG,
        subjects=FUSED_SUMS,
    ),
    Protection(
        "switch_acquire_of_tile",
        "who finds the signal of a tile sums what was staged before it",
        (
            Edit(
                FUSED_LD_REDUCE,
                "return poll_acquire(said, HasReached{step});",
                "return WITHOUT ? HasReached{step}(load_relaxed(said)) : poll_acquire(said, HasReached{step});",
            ),
        ),
        failure=_WRONG,
        subjects=FUSED_SUMS,
    ),
    Protection(
        "switch_tiles_of_operation",
        "signals of tiles of operations before count for nothing",
        (
            Edit(
                FUSED_LD_REDUCE,
                "step = word_of_step(session_.sequence(), waited_);",
                "step = word_of_step(session_.sequence() - (WITHOUT ? 1 : 0), waited_);",
            ),
        ),
        failure=_WRONG,
        subjects=FUSED_SUMS,
    ),
    Protection(
        "switch_place_of_slice",
        "each rank has the switch sum its own slice",
        (
            Edit(
                SWITCH_CHUNKS,
                "staged = of(kFirstHop, t, own_part());",
                "staged = of(kFirstHop, t, WITHOUT ? 0 : own_part());",
            ),
        ),
        failure=WRONG_RESULT,
        subjects=GATHERING,
    ),
    # ---- Stores to all ranks ----
    Protection(
        "switch_own_sums_received",
        "R2: the owner receives, and arms again, the sums that it stores to all ranks",
        (
            Edit(
                TWO_SHOT,
                "(self.is_own && !BySwitch) || i >= peer_lines) return;",
                "(self.is_own && (!BySwitch || WITHOUT)) || i >= peer_lines) return;",
            ),
        ),
        failure=WRONG,
        subjects=IN_TILES,
    ),
    Protection(
        "switch_own_fused_sums_received",
        "the same, of fused two-shot",
        (
            Edit(
                FUSED,
                "at.exists && (kToAll || !self.is_own || !SingleTile);",
                "at.exists && ((kToAll && !WITHOUT) || !self.is_own || !SingleTile);",
            ),
        ),
        failure=WRONG,
        subjects=(*IN_CLUSTERS, *FUSED_SUMS),
    ),
    Protection(
        "switch_slot_of_operation",
        "what is stored to all ranks goes to the slot of the operation",
        (
            Edit(
                TWO_SHOT,
                "reinterpret_cast<Line*>(session.own_slot()) + gather + owner * slice + i;",
                "reinterpret_cast<Line*>(WITHOUT ? args.comm.workspace[self.rank] + kHeaderBytes : session.own_slot())"
                " + gather + owner * slice + i;",
            ),
        ),
        failure=WRONG,
        subjects=IN_TILES,
    ),
    Protection(
        "switch_places_of_owners",
        "every owner's sums have a place of their own on all ranks",
        (
            Edit(
                SWITCH_CHUNKS,
                "* parts_.count() + part;",
                "* parts_.count() + (WITHOUT && hop == kSecondHop ? 0 : part);",
            ),
        ),
        failure=WRONG_RESULT,
        subjects=GATHERING,
    ),
    # ---- Staging memory ----
    Protection(
        "switch_turns",
        "there are twice as many buffers as steps that a block is ahead",
        (Edit(SWITCH_CHUNKS, "stages_(2 * depth)", "stages_(WITHOUT ? depth : 2 * depth)"),),
        failure=WRONG_RESULT,
        subjects=(*BY_STEPS, "all_gather/push_switch"),
    ),
    # ---- Errors ----
    Protection(
        "switch_signals_whole_tiles",
        "a block that may not begin, or whose wait was aborted, tells nobody that it has staged a tile",
        (
            Edit(
                FUSED_LD_REDUCE, "if (talks_ && *incomplete_ == 0) {", "if (talks_ && (WITHOUT || *incomplete_ == 0)) {"
            ),
        ),
        options=MISHAPS,
        budget=20_000,
        failure=UNTOLD,
        subjects=FUSED_SUMS,
    ),
    Protection(
        "switch_no_sums_of_incomplete_tiles",
        "what not all ranks have staged is not summed",
        (
            Edit(
                FUSED_LD_REDUCE,
                "if (!has || *incomplete_ != 0) return;",
                "if (!has || (!WITHOUT && *incomplete_ != 0)) return;",
            ),
        ),
        options=MISHAPS,
        budget=20_000,
        failure=UNTOLD,
        subjects=FUSED_SUMS,
    ),
)
