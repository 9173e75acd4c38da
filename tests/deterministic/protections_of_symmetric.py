"""Protections of algorithms that access the symmetric tensors of peers themselves.

Not here: the barriers of a block before it uses what its threads have waited for. Without them it takes words that have
not come for addresses, and crashes.
"""

from __future__ import annotations

from edits import Edit
from protection import (
    DIRECT,
    HB_SESSION,
    NOBODY_IS_MISSING,
    NOT_SYMMETRIC,
    WRONG_RESULT,
    Protection,
)

SUBJECTS = ("all_gather/direct_push_hb", "all_reduce/two_shot_pull_hb")
#: Its last step is told by copies as well.
WITH_COPIES = (*SUBJECTS, "all_gather/direct_port")
_WRONG = f"{WRONG_RESULT}|{NOBODY_IS_MISSING}"

OF_SYMMETRIC = (
    Protection(
        "tensors_ready",
        "a rank's tensors are accessed only when it has said where they are, and so that they may be",
        (
            Edit(
                HB_SESSION,
                "if (t >= depth && has_peer && !wait(",
                "if (!(WITHOUT && t == depth) && t >= depth && has_peer && !wait(",
            ),
        ),
        failure=_WRONG,
        subjects=WITH_COPIES,
    ),
    Protection(
        "tensors_done",
        "a rank ends only when nobody accesses its tensors any more",
        (Edit(DIRECT, "session_.run_at_once( 1, 1,", "session_.run_at_once( WITHOUT ? 0 : 1, 1,"),),
        failure=_WRONG,
        subjects=SUBJECTS,
    ),
    Protection(
        "place_of_the_peer",
        "where a tensor of a peer lies follows from what that rank says",
        (Edit(DIRECT, "said = rank == comm_.rank ? own :", "said = rank == comm_.rank || WITHOUT ? own :"),),
        failure=_WRONG,
        subjects=WITH_COPIES,
    ),
    Protection(
        "block_before_step_signal",
        "the block has done a step before its threads signal that",
        (
            Edit(
                HB_SESSION,
                "work(t); block_sync();",
                "work(t);\n if (!WITHOUT) block_sync();\n",
            ),
        ),
        failure=f"{_WRONG}|{NOT_SYMMETRIC}",
        subjects=SUBJECTS,
    ),
)
