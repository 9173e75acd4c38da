"""Protections of linear layers: of the ring of stages, of scales and bias, and of the place among grids of a stream.

Not here: the barriers of a warp's lanes. A lane of the emulator does not fall behind the others by a round of the ring.
"""

from __future__ import annotations

from edits import Edit
from protection import AHEAD, HANGS, WRONG_RESULT, Protection

KERNEL = "csrc/algorithms/linear/kernel.cuh"
SCALES = "csrc/algorithms/linear/scales.cuh"
_SUBJECTS = ("linear",)

OF_LINEAR = (
    Protection(
        "linear_full",
        "a stage is multiplied when its boxes have come",
        (Edit(KERNEL, "barrier_wait(memory.full(at.stage)", "if (!WITHOUT) barrier_wait(memory.full(at.stage)"),),
        failure=f"{WRONG_RESULT}|{HANGS}",
        subjects=_SUBJECTS,
    ),
    Protection(
        "linear_empty",
        "a stage is fetched again when all have multiplied it",
        (Edit(KERNEL, "barrier_wait(memory_.empty(at.stage)", "if (!WITHOUT) barrier_wait(memory_.empty(at.stage)"),),
        failure=f"{WRONG_RESULT}|{HANGS}",
        subjects=_SUBJECTS,
    ),
    Protection(
        "linear_every_warp",
        "a stage is given back by every warp, for itself",
        (
            Edit(
                KERNEL,
                "linear::kTeams * kTeamThreads / kWarpThreads);",
                "(WITHOUT ? 1 : linear::kTeams * kTeamThreads / kWarpThreads));",
            ),
        ),
        failure=f"{WRONG_RESULT}|{HANGS}",
        subjects=_SUBJECTS,
    ),
    Protection(
        "linear_x_behind_wait",
        "x is fetched when the grids before have ended",
        (Edit(KERNEL, "    grid_dependency_wait();", "    if (!WITHOUT) grid_dependency_wait();"),),
        failure=f"{WRONG_RESULT}|{AHEAD}",
        subjects=_SUBJECTS,
    ),
    Protection(
        "linear_scales_behind_wait",
        "scales of x are loaded when the grids before have ended",
        (Edit(SCALES, "grid_dependency_wait();  // the grid", "if (!WITHOUT) grid_dependency_wait();  // the grid"),),
        failure=WRONG_RESULT,
        subjects=("linear+fp8",),
    ),
    Protection(
        "linear_scales_are_there",
        "scales and bias are used when they have come to where all threads read them",
        (Edit(KERNEL, "    scales.share(team", "    if (!WITHOUT) scales.share(team"),),
        failure=WRONG_RESULT,
        subjects=("linear", "linear+fp8"),
    ),
    Protection(
        "linear_trigger_behind_wait",
        "one grid of a stream at most comes ahead of the one that runs",
        (
            Edit(
                KERNEL,
                "LLM_COMM_DEVICE void run() const {",
                "LLM_COMM_DEVICE void run() const {\n    if (WITHOUT) grid_dependency_trigger();",
            ),
        ),
        failure=AHEAD,
        subjects=_SUBJECTS,
    ),
    Protection(
        "linear_stages_are_read",
        "sums take the place of stages that have been read",
        (Edit(KERNEL, "block_sync();  // all stages have", "if (!WITHOUT) block_sync();  // all stages have"),),
        failure=WRONG_RESULT,
        subjects=_SUBJECTS,
    ),
    Protection(
        "linear_sums_are_there",
        "sums of the teams are added when all are there",
        (Edit(KERNEL, "block_sync();\n  // `out` may be", "if (!WITHOUT) block_sync();\n  // `out` may be"),),
        failure=WRONG_RESULT,
        subjects=_SUBJECTS,
    ),
)
