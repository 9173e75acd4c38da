"""Protections of experts: of the rings of stages, of the sums, of the groups, and of the place among the grids.

Not here: the barriers of a warp's lanes. A lane of the emulator does not fall behind the others by a round of the ring.
Nor the wait for tiles that a warp has fetched itself: the emulator copies them at once.
Nor the barriers by which groups are found: without them the program ends by an address outside of its memory.
"""

from __future__ import annotations

from edits import Edit
from protection import AHEAD, HANGS, WRONG_RESULT, Protection

KERNEL = "csrc/algorithms/linear/experts.cuh"
_SUBJECTS = ("fused_experts",)


def _protection(name: str, what: str, old: str, new: str, failure: str) -> Protection:
    return Protection(f"experts_{name}", what, (Edit(KERNEL, old, new),), failure=failure, subjects=_SUBJECTS)


OF_EXPERTS = (
    _protection(
        "full",
        "a stage of gate and up is multiplied when its boxes have come",
        "barrier_wait(memory.full(stage), parity)",
        "if (!WITHOUT) barrier_wait(memory.full(stage), parity)",
        f"{WRONG_RESULT}|{HANGS}",
    ),
    _protection(
        "empty",
        "a stage of gate and up is fetched again when all have multiplied it",
        "barrier_wait(memory_.empty(stage_)",
        "if (!WITHOUT) barrier_wait(memory_.empty(stage_)",
        f"{WRONG_RESULT}|{HANGS}",
    ),
    _protection(
        "every_warp",
        "a stage of gate and up is given back by every warp, for itself",
        "barrier_init(memory.empty(stage), experts::kWarps);",
        "barrier_init(memory.empty(stage), WITHOUT ? 1 : experts::kWarps);",
        f"{WRONG_RESULT}|{HANGS}",
    ),
    _protection(
        "sums_are_full",
        "sums of the warps are added when all of a unit are there",
        "barrier_wait(memory_.sums_full(buffer_)",
        "if (!WITHOUT) barrier_wait(memory_.sums_full(buffer_)",
        f"{WRONG_RESULT}|{HANGS}",
    ),
    _protection(
        "sums_are_empty",
        "sums of a unit take the place of those that have been read",
        "if (round_ > 0) barrier_wait(memory_.sums_empty",
        "if (!WITHOUT && round_ > 0) barrier_wait(memory_.sums_empty",
        f"{WRONG_RESULT}|{HANGS}",
    ),
    _protection(
        "state_behind_wait",
        "the state between the layers is loaded when gate and up have ended",
        "  grid_dependency_wait();  // for the state",
        "  if (!WITHOUT) grid_dependency_wait();  // for the state",
        f"{WRONG_RESULT}|{AHEAD}",
    ),
    _protection(
        "choice_behind_wait",
        "the router's choice is read when the grids before have ended",
        "  grid_dependency_wait();  // for x",
        "  if (!WITHOUT) grid_dependency_wait();  // for x",
        f"{WRONG_RESULT}|{HANGS}|{AHEAD}",
    ),
    _protection(
        "trigger_behind_wait",
        "one grid of a stream at most comes ahead of the one that runs",
        "  DownFetch fetch(args, memory, units, warp);",
        "  DownFetch fetch(args, memory, units, warp);\n  if (WITHOUT) grid_dependency_trigger();",
        AHEAD,
    ),
    _protection(
        "places_are_there",
        "places of rows are read when all are there",
        "    block_sync();\n    multiply_gate_up",
        "    if (!WITHOUT) block_sync();\n    multiply_gate_up",
        f"{WRONG_RESULT}|{HANGS}",
    ),
    _protection(
        "products_are_there",
        "products of all places are there before they are added",
        "  block_sync();\n  // A thread has two",
        "  if (!WITHOUT) block_sync();\n  // A thread has two",
        WRONG_RESULT,
    ),
)
