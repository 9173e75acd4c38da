"""Protections of the router: of its place among the grids, of the deliveries to the block of a token, and of the sums.

Not here: the barrier of a block that is a cluster by itself. The driver's devices have clusters.
Nor the clamp of tokens that are not there: their sums are dropped, so only a sanitizer would see what is read.
"""

from __future__ import annotations

from edits import Edit
from protection import AHEAD, HANGS, LEFT_ALONE, WRONG_RESULT, Protection

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
        ("cluster_arrive_relaxed();", "cluster_arrive_relaxed();\n  if (WITHOUT) grid_dependency_trigger();"),
    ),
    # ---- Deliveries ----
    _protection(
        "cluster_meets",
        "blocks deliver only once all of the cluster have set up what counts deliveries",
        f"{WRONG_RESULT}|{HANGS}|{LEFT_ALONE}",
        ("cluster_wait();", "if (!WITHOUT) cluster_wait();"),
    ),
    _protection(
        "deliveries_are_there",
        "experts are chosen when the sums of all parts have arrived",
        f"{WRONG_RESULT}|{LEFT_ALONE}",
        ("delivery_wait(delivery, 0);", "if (!WITHOUT) delivery_wait(delivery, 0);"),
    ),
    _protection(
        "every_delivery_counts",
        "a block expects the sums of all its tokens",
        f"{WRONG_RESULT}|{LEFT_ALONE}",
        (
            "delivery_expect(delivery, values, division.blocks);",
            "delivery_expect(delivery, WITHOUT ? values / 2 : values, division.blocks);",
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
            "for (uint32_t part = 0; part < parts; ++part) logit",
            "for (uint32_t part = WITHOUT ? 1 : 0; part < parts; ++part) logit",
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
