"""Protections of experts: of the ring of stages, of the sums, of the groups, and of the place among the grids.

Not here: the barriers of a warp's lanes. A lane of the emulator does not fall behind the others by a round of the ring.
Nor three of the barriers by which groups are found: without them the program ends by an address outside of its memory.
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
        "a stage is multiplied when its boxes have come",
        "barrier_wait(memory.full(at.stage)",
        "if (!WITHOUT) barrier_wait(memory.full(at.stage)",
        f"{WRONG_RESULT}|{HANGS}",
    ),
    _protection(
        "empty",
        "a stage is fetched again when all have multiplied it",
        "barrier_wait(memory_.empty(at.stage)",
        "if (!WITHOUT) barrier_wait(memory_.empty(at.stage)",
        f"{WRONG_RESULT}|{HANGS}",
    ),
    _protection(
        "every_warp",
        "a stage is given back by every warp, for itself",
        "barrier_init(memory_.empty(at.stage), kWarps);",
        "barrier_init(memory_.empty(at.stage), WITHOUT ? 1 : kWarps);",
        f"{WRONG_RESULT}|{HANGS}",
    ),
    _protection(
        "lines_of_all_lanes",
        "a stage of gate and up is full when the lines of all lanes have come",
        "fetch_end<Gated>(full);",
        "WITHOUT ? fetch_end<false>(full) : fetch_end<Gated>(full);",
        f"{WRONG_RESULT}|{HANGS}",
    ),
    _protection(
        "state_behind_wait",
        "the state between the layers is fetched when gate and up have ended",
        "    grid_dependency_wait();\n    grid_dependency_trigger();",
        "    if (!WITHOUT) grid_dependency_wait();\n    grid_dependency_trigger();",
        f"{WRONG_RESULT}|{AHEAD}",
    ),
    _protection(
        "choice_behind_wait",
        "the router's choice is read when the grids before have ended",
        "if constexpr (Gated) grid_dependency_wait();",
        "if (Gated && !WITHOUT) grid_dependency_wait();",
        f"{WRONG_RESULT}|{HANGS}|{AHEAD}",
    ),
    _protection(
        "trigger_behind_wait",
        "one grid of a stream at most comes ahead of the one that runs",
        "  LLM_COMM_DEVICE void begin() const {",
        "  LLM_COMM_DEVICE void begin() const {\n    if (WITHOUT) grid_dependency_trigger();",
        AHEAD,
    ),
    _protection(
        "tokens_are_there",
        "tokens of experts are counted when all are marked",
        "  block_sync();\n  // Rows of experts in",
        "  if (!WITHOUT) block_sync();\n  // Rows of experts in",
        f"{WRONG_RESULT}|{HANGS}",
    ),
    _protection(
        "rows_are_there",
        "tokens of rows are read when all are there",
        "  block_sync();\n  if (fetches) {\n    fetch.run();",
        "  if (!WITHOUT) block_sync();\n  if (fetches) {\n    fetch.run();",
        f"{WRONG_RESULT}|{HANGS}",
    ),
    _protection(
        "sums_are_full",
        "sums of the teams are added when all of a unit are there",
        "barrier_wait(memory.sums_full()",
        "if (!WITHOUT) barrier_wait(memory.sums_full()",
        WRONG_RESULT,
    ),
    _protection(
        "sums_are_empty",
        "sums of a unit take the place of those that have been read",
        "if (done > 0) barrier_wait",
        "if (!WITHOUT && done > 0) barrier_wait",
        WRONG_RESULT,
    ),
    _protection(
        "sums_are_there",
        "sums of all groups are there before they are rounded",
        "  block_sync();  // also keeps",
        "  if (!WITHOUT) block_sync();  // also keeps",
        WRONG_RESULT,
    ),
)
