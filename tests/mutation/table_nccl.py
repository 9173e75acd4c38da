"""Mutants of the library that stands in for NCCL."""

from __future__ import annotations

from mutant import cpp

NCCL = "csrc/nccl"
TESTS = "tests/emulated/test_nccl_library.py"
FORWARDING = f"{TESTS} -k goes_to_the_library_behind"

IN_PLACE_OF_NCCL = (
    # ---- Who does a call ----
    cpp("a maximum is served", f"{NCCL}/selection.cpp", "message.reduction != ncclSum", "false", FORWARDING),
    cpp(
        "messages larger than the table goes are served though there is NCCL",
        f"{NCCL}/selection.cpp",
        "bytes > table_.max_message_bytes && !serves_all_",
        "false",
        FORWARDING,
    ),
    cpp(
        "a rank that receives a broadcast must have something to send",
        f"{NCCL}/own.cpp",
        "(sends && send == nullptr)",
        "(send == nullptr)",
        f"{TESTS} -k test_collectives",
    ),
    cpp(
        "the root of a broadcast has its part at rank 0",
        f"{NCCL}/selection.cpp",
        "static_cast<int>(rank) == message.root",
        "rank == 0",
        f"{TESTS} -k test_collectives",
    ),
    # ---- Groups ----
    cpp(
        "served calls of a group do not wait for its end",
        f"{NCCL}/group.cpp",
        "if (is_in_group()) {",
        "if (is_in_group() && !WITHOUT) {",
        FORWARDING,
    ),
    cpp(
        "forwarded calls of a group are in none of NCCL",
        f"{NCCL}/group.cpp",
        "group.depth == 0 || group.is_in_real_group",
        "true",
        FORWARDING,
    ),
    cpp(
        "calls that NCCL makes of its own API are ours",
        f"{NCCL}/api.cpp",
        "if (InRealLibrary::is_so()) return",
        "if (InRealLibrary::is_so() && !WITHOUT) return",
        FORWARDING,
    ),
    cpp(
        "a communicator of NCCL that is not blocking is not waited for",
        f"{NCCL}/own.cpp",
        "while (result == ncclInProgress)",
        "while (result == ncclInProgress && !WITHOUT)",
        FORWARDING,
    ),
    # ---- Communicators ----
    cpp(
        "keys of a split do not count",
        f"{NCCL}/communicator.cpp",
        "members.emplace_back(key_of, rank)",
        "members.emplace_back(0, rank)",
        f"{TESTS} -k split",
    ),
    cpp(
        "the meeting place does not look at the secret",
        f"{NCCL}/hub.cpp",
        "are_equal(hello.secret.data(), secret_.data(), secret_.size())",
        "true",
        f"{TESTS} -k strangers",
    ),
    cpp(
        "nobody hears of a process that exits",
        f"{NCCL}/peer_watch.cpp",
        "has_exited_(peers_[i - 1].rank);",
        "if (!WITHOUT) has_exited_(peers_[i - 1].rank);",
        f"{TESTS} -k killed",
    ),
    cpp(
        "a fork has the communicators of its parent",
        f"{NCCL}/communicators.cpp",
        "map_of_process = own;",
        "if (!WITHOUT) map_of_process = own;",
        f"{TESTS} -k forked",
    ),
    cpp(
        "a forked child runs what its parent has put into a group",
        f"{NCCL}/group.cpp",
        "group_of_thread = {};\n});",
        "if (!WITHOUT) group_of_thread = {};\n});",
        f"{TESTS} -k forked",
    ),
    cpp(
        "a forked child learns nothing of a handle that it has inherited",
        f"{NCCL}/communicators.cpp",
        "if (map->communicators.count(handle) == 0) continue;",
        "if (WITHOUT || map->communicators.count(handle) == 0) continue;",
        f"{TESTS} -k forked",
    ),
    cpp(
        "a variable that cannot be read is passed over",
        f"{NCCL}/options.cpp",
        "options.objection = failure.what();",
        "if (!WITHOUT) options.objection = failure.what();",
        f"{TESTS} -k test_wrong_options",
    ),
)
