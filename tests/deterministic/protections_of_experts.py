"""Protections of experts: of the ring of stages, of the list of active experts, and of the place among the grids.

Not here: the barriers of a warp's lanes. A lane of the emulator does not fall behind the others by a round of the ring.
"""

from __future__ import annotations

from edits import Edit
from protection import AHEAD, HANGS, WRONG_RESULT, Protection

KERNEL = "csrc/algorithms/linear/experts.cuh"
_SUBJECTS = ("fused_experts",)
#: Loop that counts the marks of four experts.
_COUNT = "  for (uint32_t i = thread_index(); i < experts::kMaxExperts / 4; i += block_threads()) {\n    counts"


#: A number that is no expert's would be an address outside of the weights, and end the program.
_WITHIN = (
    Edit(KERNEL, "memory_.active()[at.slot];", "memory_.active()[at.slot] % (WITHOUT ? args_.experts : ~0u);"),
    Edit(KERNEL, "kParts * expert);", "kParts * (expert % (WITHOUT ? args_.experts : ~0u)));"),
)


def _protection(name: str, what: str, old: str, new: str, failure: str, *others: Edit) -> Protection:
    return Protection(f"experts_{name}", what, (Edit(KERNEL, old, new), *others), failure=failure, subjects=_SUBJECTS)


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
        "linear::kTeams * kTeamThreads / kWarpThreads);",
        "(WITHOUT ? 1 : linear::kTeams * kTeamThreads / kWarpThreads));",
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
        "choice_is_there",
        "experts are marked when the choice is in shared memory, and no mark is cleared after that",
        "  block_sync();\n  for (uint32_t i = thread_index(); i < chosen; i += block_threads()) {\n",
        "  if (!WITHOUT) block_sync();\n  for (uint32_t i = thread_index(); i < chosen; i += block_threads()) {\n",
        f"{WRONG_RESULT}|{HANGS}",
    ),
    _protection(
        "marks_are_there",
        "marks are counted when all are there",
        f"  block_sync();\n{_COUNT}",
        f"  if (!WITHOUT) block_sync();\n{_COUNT}",
        f"{WRONG_RESULT}|{HANGS}",
        _WITHIN[0],
    ),
    _protection(
        "counts_are_there",
        "counts are added when all are there",
        "  block_sync();\n  uint32_t all = 0;",
        "  if (!WITHOUT) block_sync();\n  uint32_t all = 0;",
        f"{WRONG_RESULT}|{HANGS}",
    ),
    _protection(
        "list_is_there",
        "the list of active experts is read when all of it is there",
        "  block_sync();\n  return all;",
        "  if (!WITHOUT) block_sync();\n  return all;",
        f"{WRONG_RESULT}|{HANGS}",
        _WITHIN[1],
    ),
    _protection(
        "stages_are_read",
        "sums take the place of stages that have been read",
        "block_sync();  // all stages have",
        "if (!WITHOUT) block_sync();  // all stages have",
        WRONG_RESULT,
    ),
    _protection(
        "sums_are_there",
        "sums of the teams are added when all are there",
        "  block_sync();\n  // `out` may be",
        "  if (!WITHOUT) block_sync();\n  // `out` may be",
        WRONG_RESULT,
    ),
)
