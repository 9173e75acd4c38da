"""Protections of message passing by channels and semaphores."""

from __future__ import annotations

from edits import Edit
from protection import LINE, MESSAGES, NOBODY_IS_MISSING, SEMAPHORE, WRONG_RESULT, Protection

OF_MESSAGES = (
    # ---- Message passing ----
    Protection(
        "both_flags_checked",
        "both flags of a packet are looked at",
        (
            Edit(
                LINE,
                "return line.word[1] == flag && line.word[3] == flag;",
                "return line.word[1] == flag && (WITHOUT || line.word[3] == flag);",
            ),
        ),
        failure=WRONG_RESULT,
        subjects=("packets",),
    ),
    Protection(
        "release_before_signal",
        "a signal is a release",
        (
            Edit(
                SEMAPHORE,
                "void signal() const { store_release(",
                "void signal() const { if (WITHOUT) return relaxed_signal(); store_release(",
            ),
        ),
        failure=WRONG_RESULT,
        subjects=("put",),
    ),
    Protection(
        "acquire_in_wait",
        "a wait is an acquire",
        (
            Edit(
                SEMAPHORE,
                "return poll_acquire(received,",
                "if (WITHOUT) return load_relaxed(received) >= expected;\n return poll_acquire(received,",
            ),
        ),
        failure=WRONG_RESULT,
        subjects=("put",),
    ),
    Protection(
        "block_before_signal",
        "the block meets before one thread signals for it",
        (
            Edit(
                MESSAGES,
                "    block_sync();\n    if (thread_index() == 0) {\n      channel",
                "    if (!WITHOUT) block_sync();\n    if (thread_index() == 0) {\n      channel",
            ),
        ),
        failure=WRONG_RESULT,
        subjects=("put",),
    ),
    Protection(
        "buffer_free",
        "a buffer is written again after the peer has read it",
        (
            Edit(
                MESSAGES,
                "if (!party.meet(agreed)) return;  // the",
                "if (!WITHOUT && !party.meet(agreed)) return;  // the",
            ),
        ),
        failure=WRONG_RESULT,
        subjects=("put",),
    ),
    Protection(
        "block_before_packets_signal",
        "the block meets before one thread signals that packets are read",
        (
            Edit(
                MESSAGES,
                "block_sync();\n    if (thread_index() == 0) {\n      party",
                "if (!WITHOUT) block_sync();\n    if (thread_index() == 0) {\n      party",
            ),
        ),
        failure=f"{WRONG_RESULT}|{NOBODY_IS_MISSING}",
        subjects=("packets",),
    ),
    Protection(
        "packets_free",
        "packets are written again after the peer has read them",
        (Edit(MESSAGES, "*agreed = party.channel", "*agreed = WITHOUT || party.channel"),),
        failure=f"{WRONG_RESULT}|{NOBODY_IS_MISSING}",
        subjects=("packets",),
    ),
)
