"""Mutants of the library that stands in for NCCL."""

from __future__ import annotations

from mutant import cpp, cpp_edits

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
    # ---- The API ----
    cpp(
        "a function that NCCL lacks is called",
        f"{NCCL}/real_library.h",
        "functions_.*function == nullptr",
        "false",
        FORWARDING,
    ),
    cpp(
        "any configuration passes for an initialized one",
        f"{NCCL}/own.cpp",
        "config->magic == NCCL_API_MAGIC",
        "true",
        f"{TESTS} -k configured",
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
    # With the lock, threads of a group happen to split in their order.
    cpp_edits(
        "splits of one communicator in a group run at once",
        [
            (f"{NCCL}/group.cpp", "one.communicator == nullptr", "true"),
            (f"{NCCL}/own.cpp", "parent->lock_set_up()", "std::unique_lock<std::mutex>()"),
        ],
        f"{TESTS} -k split_in_groups",
    ),
    cpp(
        "two threads split one communicator at once",
        f"{NCCL}/communicator.h",
        "std::unique_lock(set_up_mutex_)",
        "std::unique_lock(set_up_mutex_, std::defer_lock)",
        f"{TESTS} -k split_in_groups",
    ),
    # ---- Set-up that is disturbed ----
    cpp(
        "a rank that was cut off before it was known gives up",
        f"{NCCL}/bootstrap.cpp",
        "failure.result() != ncclRemoteError || deadline.is_over()",
        "true",
        f"{TESTS} -k pause_before_hello",
    ),
    cpp(
        "the hub drops a rank whose hello it has not read",
        f"{NCCL}/hub.cpp",
        "if ((*connection)->rank < 0) serve(**connection);",
        "if ((*connection)->rank < 0 && !WITHOUT) serve(**connection);",
        f"{TESTS} -k flood_after_hello",
    ),
    cpp(
        "a descriptor is not sent again",
        f"{NCCL}/descriptors.cpp",
        "errno == EPIPE || errno == ECONNRESET",
        "false",
        f"{TESTS} -k pause_before_descriptor",
    ),
    cpp(
        "ranks do not send each other their processes",
        f"{NCCL}/descriptors.cpp",
        "process_ = open_own_process();",
        "if (!WITHOUT) process_ = open_own_process();",
        f"{TESTS} -k another_container",
    ),
    cpp(
        "a split goes on waiting when its communicator is aborted",
        f"{NCCL}/communicator.cpp",
        "bootstrap_.interrupt();",
        "if (!WITHOUT) bootstrap_.interrupt();",
        f"{TESTS} -k abort",
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
        "the hub does not look at the secret",
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
