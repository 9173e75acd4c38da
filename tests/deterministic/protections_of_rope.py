"""Protections of layers of q, k and v: of their place among the grids, of the blocks of a head, and of the epilogue.

Not here, as the driver cannot notice them: the clamp of tokens that are not there, whose sums are dropped; the barrier
behind the set-up of a delivery, as a block's set-up is done when others start; the barrier of a warp before a stage is
fetched again, as its lanes run in turn; the trigger behind the wait, of which 2,000 schedules noticed nothing.
"""

from __future__ import annotations

from edits import Edit
from protection import AHEAD, HANGS, LEFT_ALONE, WRONG_RESULT, Protection

KERNEL = "csrc/algorithms/linear/rope.cuh"
_SUBJECTS = ("linear_rope",)


def _protection(name: str, what: str, failure: str, *edits: tuple[str, str]) -> Protection:
    edited = tuple(Edit(KERNEL, old, new) for old, new in edits)
    return Protection(f"rope_{name}", what, edited, failure=failure, subjects=_SUBJECTS)


OF_ROPE = (
    # ---- Among the grids ----
    _protection(
        "x_behind_wait",
        "x, positions and slots are read, and outputs are written, when the grids before have ended",
        f"{WRONG_RESULT}|{AHEAD}",
        ("  grid_dependency_wait();\n", "  if (!WITHOUT) grid_dependency_wait();\n"),
    ),
    # ---- Among the blocks of a head ----
    _protection(
        "squares_are_there",
        "squares of a head are added, and a block ends, when all blocks have delivered theirs",
        f"{WRONG_RESULT}|{LEFT_ALONE}",
        ("    delivery_wait(delivery, 0);", "    if (!WITHOUT) delivery_wait(delivery, 0);"),
    ),
    # ---- Within a block ----
    _protection(
        "stages_are_read",
        "sums overwrite the stages when all warps have read them",
        WRONG_RESULT,
        (
            "  block_sync();  // all stages have been read",
            "  if (!WITHOUT) block_sync();  // all stages have been read",
        ),
    ),
    _protection(
        "sums_are_there",
        "sums of warps are added when all have left theirs",
        WRONG_RESULT,
        (
            "  block_sync();\n  if (pair.exists()) pair.add",
            "  if (!WITHOUT) block_sync();\n  if (pair.exists()) pair.add",
        ),
    ),
    _protection(
        "rounds_of_stages",
        "a warp waits for the round of a stage that it needs",
        f"{WRONG_RESULT}|{HANGS}",
        ("barrier_wait(barrier(slot), round % 2);", "barrier_wait(barrier(slot), WITHOUT ? 0 : round % 2);"),
    ),
    # ---- Epilogue ----
    _protection(
        "slots_of_the_cache",
        "a token without a slot is not written to the cache",
        WRONG_RESULT,
        ("      slot_ = number(", "      slot_ = (WITHOUT ? 7 : ~uint64_t{0}) & number("),
    ),
    _protection(
        "positions_of_the_table",
        "a position that is not in the table gives NaN",
        WRONG_RESULT,
        ("    if (position >= args_.angle_rows) return;", "    if (!WITHOUT && position >= args_.angle_rows) return;"),
        (
            "    const uint64_t position = number(",
            "    const uint64_t position = (WITHOUT ? 3 : ~uint64_t{0}) & number(",
        ),
    ),
)
