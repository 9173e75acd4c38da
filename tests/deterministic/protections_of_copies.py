"""Protections of what copy engines write to symmetric outputs: when a copy may be asked for, and when a rank ends.

Not here: that a rank of two_shot_port ends only when its copies have left its output. Its calls in a schedule have
outputs of their own, so nobody writes to one again.
"""

from __future__ import annotations

from edits import Edit
from protection import DIRECT, HB_SESSION, NOBODY_IS_MISSING, OTHER_OFFSET, STEPS, WRONG_RESULT, Protection

STREAM_COPIES = "csrc/algorithms/stream_copies.cuh"
DIRECT_PORT = "csrc/optional/all_gather/direct_port.cuh"
TWO_SHOT_PORT = "csrc/optional/all_reduce/two_shot_port.cuh"
TWO_SHOT_CE = "csrc/algorithms/all_reduce/two_shot_ce.cuh"

IN_PIECES = ("all_reduce/two_shot_ce",)
IN_STREAM = ("all_gather/direct_ce", *IN_PIECES)

_WRONG = f"{WRONG_RESULT}|{NOBODY_IS_MISSING}"

OF_COPIES = (
    Protection(
        "parts_have_come",
        "a rank says that it is done when the copies of all peers have come",
        (
            Edit(
                DIRECT_PORT,
                "args.shards.shard[peer].length != 0) words.",
                "args.shards.shard[peer].length != 0 && !WITHOUT) words.",
            ),
        ),
        failure=_WRONG,
        subjects=("all_gather/direct_port",),
    ),
    Protection(
        "piece_of_all_blocks",
        "a piece is copied when all blocks have summed what they have of it",
        (
            Edit(
                TWO_SHOT_PORT,
                "block_count() - 1) != block_count() - 1) return;",
                "block_count() - 1) != (WITHOUT ? 0 : block_count() - 1)) return;",
            ),
        ),
        failure=_WRONG,
        subjects=("all_reduce/two_shot_port",),
    ),
    Protection(
        "sums_before_the_count",
        "what a block has summed is there for whoever sees it counted",
        (Edit(TWO_SHOT_PORT, "fence_system(); // what the block", "if (!WITHOUT) fence_system(); // what the block"),),
        failure=_WRONG,
        subjects=("all_reduce/two_shot_port",),
    ),
    Protection(
        "count_before_the_copy",
        "the block that asks for a copy has seen what the others had summed",
        (Edit(TWO_SHOT_PORT, "fence_system(); // and the sums", "if (!WITHOUT) fence_system(); // and the sums"),),
        failure=_WRONG,
        subjects=("all_reduce/two_shot_port",),
    ),
    Protection(
        "slices_have_come",
        "a rank ends when the slices of all peers have come",
        (Edit(TWO_SHOT_PORT, "!words.wait_for_data(peer,", "!WITHOUT && !words.wait_for_data(peer,"),),
        failure=_WRONG,
        subjects=("all_reduce/two_shot_port",),
    ),
    Protection(
        "places_apart_from_signals",
        "a word that is no step, here the symmetric offset of an output, lies where nobody waits for a step",
        (
            Edit(
                STEPS,
                "+ kOutputOffsetsOffset) + sender;",
                "+ (WITHOUT ? kSignalsOffset : kOutputOffsetsOffset)) + sender;",
            ),
        ),
        failure=_WRONG,
        subjects=("all_reduce/two_shot_port",),
        with_others=True,
    ),
    # ---- In the stream ----
    Protection(
        "meeting_before_copies",
        "copies begin when all ranks have said that their tensors may be written",
        (
            # As below: the grid counts itself all the same.
            Edit(
                DIRECT,
                "run_one_step(kReady, [&](uint32_t step) {",
                "run_one_step(WITHOUT ? 98 : kReady, [&](uint32_t step) { if (WITHOUT) return;",
            ),
            Edit(
                HB_SESSION,
                "bool wait(uint32_t peer, uint32_t step, uint32_t phase) {",
                "bool wait(uint32_t peer, uint32_t step, uint32_t phase) {\nif (WITHOUT && phase == 98) return true;",
            ),
        ),
        failure=_WRONG,
        subjects=IN_STREAM,
    ),
    Protection(
        "copies_of_peers",
        "a rank ends when the copies of all peers have ended",
        (
            # The grid counts itself all the same: the number of a phase that nothing else has tells the wait apart.
            Edit(
                DIRECT, "run_one_step(kDone, [](uint32_t) {});", "run_one_step(WITHOUT ? 99 : kDone, [](uint32_t) {});"
            ),
            Edit(
                HB_SESSION,
                "word = row_.word(comm_, comm_.rank, peer);",
                "word = row_.word(comm_, comm_.rank, peer);\nif (WITHOUT && phase == 99) return true;",
            ),
        ),
        failure=f"{_WRONG}|{OTHER_OFFSET}",
        subjects=IN_STREAM,
    ),
    Protection(
        "copies_between_the_grids",
        "a rank says that its copies have ended behind them in the stream",
        (
            Edit(STREAM_COPIES, "between(); grid.", "if (!WITHOUT) between();\ngrid."),
            Edit(
                STREAM_COPIES,
                "args.stage = kExitBarrier; launch(grid);",
                "args.stage = kExitBarrier;\nlaunch(grid);\nif (WITHOUT) between();",
            ),
        ),
        failure=_WRONG,
        subjects=("all_gather/direct_ce",),
    ),
    # ---- In pieces ----
    Protection(
        "sums_of_what_has_come",
        "a piece is summed when the copies of all peers have brought it",
        (Edit(DIRECT, "if (step == 1) work();", "if (step == (WITHOUT ? 0 : 1)) work();"),),
        failure=_WRONG,
        subjects=IN_PIECES,
    ),
    Protection(
        "piece_has_left",
        "a rank says that its copies of a piece have come when they have",
        (Edit(TWO_SHOT_CE, "side_stream.wait_event(i);", "if (!WITHOUT) side_stream.wait_event(i);"),),
        failure=_WRONG,
        subjects=IN_PIECES,
    ),
    Protection(
        "sums_before_they_go",
        "a piece of sums goes to the peers when it has been summed",
        (
            Edit(
                TWO_SHOT_CE,
                "args.stage = kFirstPiece + i; launch(grid); side_stream.follow();",
                "if (WITHOUT) side_stream.copy(copies.placed(going(problem, tiling, rank, i)));\n"
                "args.stage = kFirstPiece + i;\nlaunch(grid);\nside_stream.follow();\nif (WITHOUT) continue;",
            ),
        ),
        failure=_WRONG,
        subjects=IN_PIECES,
    ),
    Protection(
        "zones_have_been_read",
        "a piece of sums goes to the peers when they have read what had come where it goes",
        (Edit(DIRECT, "WaitsForWork ? 1 : 0, 1,", "WaitsForWork && !WITHOUT ? 1 : 0, 1,"),),
        failure=_WRONG,
        subjects=IN_PIECES,
    ),
    Protection(
        "pieces_have_gone",
        "a rank says that its copies have ended behind those of all pieces",
        (Edit(TWO_SHOT_CE, "side_stream.join();", "if (!WITHOUT) side_stream.join();"),),
        failure=_WRONG,
        subjects=IN_PIECES,
    ),
)
