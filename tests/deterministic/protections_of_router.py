"""Protections of the router: of its place among the grids, of its blocks, and of the sums.

Not here, as the driver cannot notice them: the barrier of a block that is a cluster by itself, as its devices have
clusters; the barrier at the end, as its blocks keep their memory until the cluster has ended; the clamp of tokens that
are not there, whose sums are dropped.
"""

from __future__ import annotations

from edits import Edit
from protection import AHEAD, WRONG_RESULT, Protection

KERNEL = "csrc/algorithms/linear/router.cuh"
_SUBJECTS = ("moe_route",)


def _protection(name: str, what: str, failure: str, *edits: tuple[str, str]) -> Protection:
    edited = tuple(Edit(KERNEL, old, new) for old, new in edits)
    return Protection(f"router_{name}", what, edited, failure=failure, subjects=_SUBJECTS)


OF_ROUTER = (
    # ---- Among the grids ----
    _protection(
        "x_behind_wait",
        "x is read, and outputs are written, when the grids before have ended",
        f"{WRONG_RESULT}|{AHEAD}",
        ("grid_dependency_wait();  // for x", "if (!WITHOUT) grid_dependency_wait();  // for x"),
    ),
    _protection(
        "trigger_behind_wait",
        "one grid of a stream at most comes ahead of the one that runs",
        AHEAD,
        ("RowPieces weights[kBoxes];", "RowPieces weights[kBoxes];\n  if (WITHOUT) grid_dependency_trigger();"),
    ),
    # ---- Among the blocks of the cluster ----
    _protection(
        "sums_are_there",
        "sums are added when all blocks have left theirs",
        WRONG_RESULT,
        (
            "cluster_arrive();\n  cluster_wait();\n  if (division.blocks == 1)",
            "if (!WITHOUT) {\n    cluster_arrive();\n    cluster_wait();\n  }\n  if (division.blocks == 1)",
        ),
    ),
    # ---- Sums and choice ----
    _protection(
        "every_tile",
        "weights are loaded for each tile of experts",
        WRONG_RESULT,
        (
            "if (tile != first_tile || box != first_box) load",
            "if (!WITHOUT && (tile != first_tile || box != first_box)) load",
        ),
    ),
    _protection(
        "every_part",
        "sums of all parts are added",
        WRONG_RESULT,
        (
            "for (uint32_t first = 0; begin * kWarpThreads",
            "for (uint32_t first = WITHOUT ? 1 : 0; begin * kWarpThreads",
        ),
    ),
    _protection(
        "lower_number_first",
        "of experts with equal logits the one with the lower number comes first",
        WRONG_RESULT,
        ("key = ascending << 16 | (0xFFFF - expert);", "key = ascending << 16 | (WITHOUT ? expert : 0xFFFF - expert);"),
        ("return 0xFFFF - (key & 0xFFFF);", "return WITHOUT ? key & 0xFFFF : 0xFFFF - (key & 0xFFFF);"),
    ),
    _protection(
        "lanes_without_expert",
        "lanes without an expert of the token write nothing",
        WRONG_RESULT,
        ("if (lane >= args.top_k) return;", "if (!WITHOUT && lane >= args.top_k) return;"),
    ),
)
