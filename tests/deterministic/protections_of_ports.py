"""Protections of port channels: of requests and their FIFO, of the proxy's order, and of chunks and their buffers."""

from __future__ import annotations

from edits import Edit
from protection import (
    MESSAGES,
    NOBODY_IS_MISSING,
    PORT_ACTOR,
    PORT_BATCH,
    PORT_CHANNEL,
    PORT_CHUNKS,
    PORT_SESSION,
    WRONG_RESULT,
    Protection,
)

ALL_REDUCE = "csrc/optional/all_reduce/port.cuh"

ALGORITHMS = ("all_reduce/port", "all_gather/port")
ALL = ("port", *ALGORITHMS)

#: What is lost or comes too early is not there, or something else is.
LOST = f"{WRONG_RESULT}|{NOBODY_IS_MISSING}"

OF_PORTS = (
    # ---- Requests ----
    Protection(
        "request_releases",
        "a request is a release: the proxy puts what the block has just written",
        (
            Edit(
                PORT_CHANNEL,
                "store_packets_release(entry, packets);",
                "if (!WITHOUT) return store_packets_release(entry, packets), true;\n"
                "for (uint32_t i = 0; i < kPackets; ++i) {\n"
                "  store_packet_relaxed(reinterpret_cast<Line*>(entry) + i, packets[i]);\n"
                "}",
            ),
        ),
        failure=WRONG_RESULT,
        subjects=("port",),
    ),
    Protection(
        "request_is_whole",
        "a request is taken when all of it is there",
        (
            Edit(
                PORT_ACTOR,
                "if (half >> 32 != flag) return false;",
                "if (half >> 32 != flag && !(WITHOUT && i + 2 >= kWordsOfPortRequest)) return false;",
            ),
        ),
        failure=LOST,
        subjects=ALL,
    ),
    Protection(
        "room_in_the_fifo",
        "a place of the FIFO is written again when the proxy has taken what was there",
        (
            Edit(
                PORT_CHANNEL,
                "if (position - load_relaxed(&state_->tail) >= entries) {",
                "if (!WITHOUT && position - load_relaxed(&state_->tail) >= entries) {",
            ),
        ),
        failure=LOST,
        subjects=ALL,
    ),
    Protection(
        "block_before_a_request",
        "the block meets before one thread asks for what all have written",
        (
            Edit(
                MESSAGES,
                "const auto lead = [&](auto steps) {  // by one thread of the block, for all\n block_sync();",
                "const auto lead = [&](auto steps) {\n if (!WITHOUT) block_sync();",
            ),
        ),
        failure=WRONG_RESULT,
        subjects=("port",),
    ),
    Protection(
        "flush",
        "a flush returns when the source has been read",
        (
            Edit(
                PORT_CHANNEL,
                "return wait( [&] { return poll_acquire(&state_->flushed[peer],",
                "return WITHOUT || wait( [&] { return poll_acquire(&state_->flushed[peer],",
            ),
        ),
        failure=WRONG_RESULT,
        subjects=("port",),
    ),
    # ---- The proxy ----
    Protection(
        "signal_behind_puts",
        "what the proxy does at once begins with all puts",
        (
            Edit(
                PORT_BATCH,
                "merge_puts();\n merge_words(kPortSignal);",
                "if (WITHOUT) merge_words(kPortSignal);\n merge_puts();\n if (!WITHOUT) merge_words(kPortSignal);",
            ),
        ),
        failure=WRONG_RESULT,
        subjects=ALL,
    ),
    Protection(
        "echo_behind_puts",
        "local completion is notified when earlier puts have left their source",
        (
            Edit(
                PORT_BATCH,
                "if (sort_puts()) {",
                "if (WITHOUT) merge_words(kPortLocalCompletion);\n if (sort_puts()) {",
            ),
        ),
        failure=WRONG_RESULT,
        subjects=("port", "all_reduce/port"),
    ),
    Protection(
        "proxy_order",
        "requests to a peer are carried out in their order",
        (
            Edit(
                PORT_ACTOR,
                "lane.batch.add(lane.requests.front());\n lane.requests.pop_front();",
                "lane.batch.add(WITHOUT ? lane.requests.back() : lane.requests.front());\n"
                " WITHOUT ? lane.requests.pop_back() : lane.requests.pop_front();",
            ),
        ),
        failure=LOST,
        subjects=ALL,
    ),
    # ---- Waits ----
    Protection(
        "acquire_of_a_port",
        "a wait for a signal of a port channel is an acquire",
        (
            Edit(
                PORT_CHANNEL,
                "return poll_acquire(received, [&]",
                "if (WITHOUT) return load_relaxed(received) - value <= ~uint64_t{0} / 2;\n"
                "return poll_acquire(received, [&]",
            ),
        ),
        failure=WRONG_RESULT,
        subjects=("port",),
    ),
    Protection(
        "acquire_of_a_step",
        "a wait for a step is an acquire",
        (
            Edit(
                PORT_SESSION,
                "return poll_acquire(word, HasReached{value_of(step)});",
                "const HasReached has{value_of(step)};\n"
                "return WITHOUT ? has(load_relaxed(word)) : poll_acquire(word, has);",
            ),
        ),
        failure=WRONG_RESULT,
        subjects=ALGORITHMS,
    ),
    Protection(
        "port_dependency_wait",
        "a grid waits for the grids before it",
        (Edit(PORT_SESSION, "grid_dependency_wait_after(", "if (!WITHOUT) grid_dependency_wait_after("),),
        subjects=ALGORITHMS,
        failure=r"^(?!it did not end)",
    ),
    # ---- Chunks ----
    Protection(
        "buffer_of_a_chunk",
        "a chunk is sent when the peer has taken the one that it overwrites",
        (
            Edit(
                PORT_CHUNKS,
                "return session.wait_for_step(peer, t + 1, 0) && send(peer, t + stages);",
                "return (WITHOUT || session.wait_for_step(peer, t + 1, 0)) && send(peer, t + stages);",
            ),
        ),
        subjects=ALGORITHMS,
    ),
    Protection(
        "chunk_taken",
        "a block says that it has taken a chunk when all its threads have",
        (Edit(PORT_CHUNKS, "take(t);\n block_sync();", "take(t);\n if (!WITHOUT) block_sync();"),),
        subjects=("all_gather/port",),
    ),
    Protection(
        "last_chunk_taken",
        "H1: a block ends when every peer has taken the last chunk",
        (
            Edit(
                PORT_CHUNKS,
                "return session.wait_for_step(peer, chunks, 0); });",
                "return WITHOUT || session.wait_for_step(peer, chunks, 0); });",
            ),
        ),
        subjects=ALGORITHMS,
    ),
    Protection(
        "second_half",
        "H2: what goes to the second half waits until the peer has begun",
        (
            Edit(
                PORT_CHUNKS,
                "if (t == stages_of_half && !session.wait_for_step(peer, 0, 0)) return false;",
                "if (!WITHOUT && t == stages_of_half && !session.wait_for_step(peer, 0, 0)) return false;",
            ),
        ),
        subjects=("all_gather/port",),
        with_others=True,
    ),
    Protection(
        "echo_before_sum",
        "in place, a chunk is summed when it has left its source",
        (
            Edit(
                ALL_REDUCE,
                "(!in_place || session.wait_for_local_completion(peer, t, 0))",
                "(WITHOUT || !in_place || session.wait_for_local_completion(peer, t, 0))",
            ),
        ),
    ),
    # ---- In two hops ----
    Protection(
        "sums_before_they_are_sent",
        "a sum is sent when all threads of the block have made theirs",
        (Edit(ALL_REDUCE, "reduce(s); block_sync();", "reduce(s); if (!WITHOUT) block_sync();"),),
        failure=WRONG_RESULT,
    ),
    Protection(
        "buffer_of_a_scattered_chunk",
        "a chunk is scattered when the peer has reduced the one that it overwrites",
        (
            Edit(
                ALL_REDUCE,
                "return session.wait_for_step(peer, s, kScatter) && send(",
                "return (WITHOUT || session.wait_for_step(peer, s, kScatter)) && send(",
            ),
        ),
    ),
    Protection(
        "buffer_of_a_gathered_chunk",
        "a sum is sent when the peer has collected the one that it overwrites",
        (
            Edit(
                ALL_REDUCE,
                "if (s >= stages && !session.wait_for_step(",
                "if (!WITHOUT && s >= stages && !session.wait_for_step(",
            ),
        ),
        budget=20_000,
    ),
    Protection(
        "last_step_of_two_hops",
        "a block ends when every peer has done its last step: its output has been gathered",
        (
            Edit(
                ALL_REDUCE,
                "return session.wait_for_step(peer, chunks.count(), kGather); });",
                "return WITHOUT || session.wait_for_step(peer, chunks.count(), kGather); });",
            ),
        ),
        budget=20_000,
    ),
)
