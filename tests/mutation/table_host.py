"""Mutants of what shapes and launches kernels, and of the core."""

from __future__ import annotations

from mutant import cpp

FUSED = "csrc/algorithms/all_reduce_add_rms_norm/operation.cuh"
PLAIN = "csrc/algorithms/all_reduce/operation.cuh"
ALGORITHM = "csrc/algorithms/algorithm.h"
SHAPE = "csrc/algorithms/launch_shape.h"
QUEUE = "csrc/host/launch_queue.h"
COPIES = "csrc/host/heap_copies.h"
CORE = "csrc/host/core_impl.h"
ORDER = "csrc/host/order_of_operations.h"
KERNELS = "csrc/host/algorithm_kernels.h"
HEADER = "csrc/host/own_header.h"
DESCRIBE = "csrc/host/describe.h"
BOUND_CALL = "csrc/python/bound_call.cpp"

LAST_LAUNCH = "tests/emulated/test_last_launch.py"
RELEASE = "tests/emulated/test_release.py"
ERRORS = "tests/emulated/test_error_details.py"
BOUNDS = "tests/unit/test_bounds_of_launches.py"
CANDIDATES = "tests/unit/test_candidates.py"
CONCURRENT_USE = "tests/emulated/test_concurrent_use.py"
FUSED_SHAPES = "tests/unit/test_fused_selection.py"
SHAPES = "tests/unit/test_selection.py"

HOST = (
    # ---- Launches ----
    cpp(
        "the last launch has the whole grid",
        QUEUE,
        "const Grid& grid = is_last ? shape_.last : shape_.whole",
        "const Grid& grid = is_last && !WITHOUT ? shape_.last : shape_.whole",
        LAST_LAUNCH,
    ),
    cpp(
        "copies are of the input, whatever they should be of",
        COPIES,
        "buffers_[copy.buffer]",
        "buffers_[WITHOUT ? 0 : copy.buffer]",
        "tests/emulated/test_direct_algorithms.py",
    ),
    cpp(
        "sums in place go by copies, which destroy their input",
        QUEUE,
        "kIsOutOfPlace && buffers[0] == buffers[1]",
        "kIsOutOfPlace && !WITHOUT && buffers[0] == buffers[1]",
        "tests/emulated/test_direct_algorithms.py",
    ),
    cpp(
        "copies begin where those of the tensor begin",
        COPIES,
        "+ copy.from;",
        "+ (WITHOUT ? 0 : copy.from);",
        "tests/emulated/test_direct_algorithms.py",
    ),
    cpp(
        "no grid takes tickets",
        QUEUE,
        "args_.comm.takes_tickets = of.takes_tickets;",
        "args_.comm.takes_tickets = !WITHOUT && of.takes_tickets;",
        "driver --cases 200",
    ),
    cpp(
        "a grid whose last block is not resident takes no tickets",
        KERNELS,
        "launcher.resident_blocks(function, grid) < grid.blocks;",
        "launcher.resident_blocks(function, grid) + (WITHOUT ? 1 : 0) < grid.blocks;",
        "driver --cases 400",
    ),
    cpp(
        "an emulated GPU says that all blocks run at once",
        "csrc/host/emulated_core.cpp",
        "return emulator::Executor::resident_blocks(grid.threads, grid.cluster_blocks);",
        "return WITHOUT ? grid.blocks : emulator::Executor::resident_blocks(grid.threads, grid.cluster_blocks);",
        "tests/emulated/test_progress.py",
    ),
    cpp(
        "the last launch has the kernel of the others",
        QUEUE,
        "queue_.launch(is_last ? last_ : whole_",
        "queue_.launch(is_last && !WITHOUT ? last_ : whole_",
        LAST_LAUNCH,
        equivalent="a last launch has no more tiles a block, and a kernel that walks over tiles does one as well",
    ),
    cpp(
        "the last launch takes as much as the others",
        QUEUE,
        "is_last ? units - done : launch_units",
        "launch_units",
        LAST_LAUNCH,
    ),
    cpp(
        "a launch tells the bytes of the whole call",
        QUEUE,
        "taken * problem_.unit_bytes(), stream)",
        "(WITHOUT ? units : taken) * problem_.unit_bytes(), stream)",
        ERRORS,
    ),
    cpp(
        "the comparison of calls tells other bytes",
        QUEUE,
        "CheckCallArgs check{args.comm, call, bytes};",
        "CheckCallArgs check{args.comm, call, WITHOUT ? bytes / 2 : bytes};",
        ERRORS,
    ),
    cpp(
        "a call counts rows, not elements",
        QUEUE,
        "taken * problem_.unit_elements()",
        "taken",
        LAST_LAUNCH,
    ),
    cpp(
        "a call that failed is told as enqueued",
        QUEUE,
        "if (has_failed(mailbox)) return Outcome::kFailed; return is_captured",
        "if (!WITHOUT && has_failed(mailbox)) return Outcome::kFailed; return is_captured",
        ERRORS,
    ),
    cpp(
        "launches are numbered by twos",
        QUEUE,
        "number = launches() + 1;",
        "number = launches() + (WITHOUT ? 2 : 1);",
        LAST_LAUNCH,
    ),
    cpp(
        "the residual of the first launch is added in all",
        FUSED,
        "buffers[1] + skipped)",
        "buffers[1] + (WITHOUT ? 0 : skipped))",
        LAST_LAUNCH,
    ),
    cpp(
        "the scales of all launches go to the first rows",
        FUSED,
        "first * args.scale_row_stride",
        "(WITHOUT ? 0 : first) * args.scale_row_stride",
        LAST_LAUNCH,
    ),
    cpp(
        "a tile may hold half a group",
        FUSED,
        "has_groups(quantization(problem)) ? kGroupLines : kChunkLines",
        "!WITHOUT && has_groups(quantization(problem)) ? kGroupLines : kChunkLines",
        FUSED_SHAPES,
    ),
    cpp(
        "columns of scales for TMA are not padded",
        FUSED,
        "by_aligned_columns ? aligned(rows) : 1;",
        "by_aligned_columns ? (WITHOUT ? rows : aligned(rows)) : 1;",
        "tests/emulated/test_fused_groups.py -k values_and_scales",
    ),
    cpp(
        "FP8 rows of a later launch lie as far as others",
        FUSED,
        "skipped * normed_bits / 16",
        "skipped",
        LAST_LAUNCH,
    ),
    cpp(
        "the new residual of a later launch goes to the first rows",
        FUSED,
        "buffers[4] + skipped)",
        "buffers[4] + (WITHOUT ? 0 : skipped))",
        LAST_LAUNCH,
    ),
    # ---- Bounds ----
    cpp(
        "a slot may be a line short (fused)",
        FUSED,
        "if (slot_bytes > limits.slot_bytes) {",
        "if (slot_bytes > limits.slot_bytes + (WITHOUT ? sizeof(Line) : 0)) {",
        BOUNDS,
    ),
    cpp(
        "a slot may be a line short",
        PLAIN,
        "if (slot_bytes > limits.slot_bytes) {",
        "if (slot_bytes > limits.slot_bytes + (WITHOUT ? sizeof(Line) : 0)) {",
        BOUNDS,
    ),
    cpp(
        "a slot must have a line to spare (fused)",
        FUSED,
        "const uint64_t slot_bytes = units * Algorithm::row_slot_lines(problem) * sizeof(Line);",
        "const uint64_t slot_bytes = (units * Algorithm::row_slot_lines(problem) + (WITHOUT ? 1 : 0)) * sizeof(Line);",
        BOUNDS,
    ),
    cpp(
        "a slot must have a line to spare",
        PLAIN,
        "const uint64_t slot_bytes = Algorithm::slot_lines(lines, world) * sizeof(Line);",
        "const uint64_t slot_bytes = (Algorithm::slot_lines(lines, world) + (WITHOUT ? 1 : 0)) * sizeof(Line);",
        BOUNDS,
    ),
    cpp(
        "a launch takes a unit more than fits",
        SHAPE,
        "demand(fits + step) <= available",
        "demand(fits + step) <= available + (WITHOUT ? 1 : 0)",
        BOUNDS,
        FUSED_SHAPES,
    ),
    cpp(
        "a tunable may be one more than its bound",
        ALGORITHM,
        "*value <= bound.max",
        "*value <= bound.max + (WITHOUT ? 1 : 0)",
        BOUNDS,
    ),
    cpp(
        "a tunable may be less than its bound",
        ALGORITHM,
        "*value >= bound.min",
        "(WITHOUT || *value >= bound.min)",
        BOUNDS,
    ),
    cpp(
        "candidates have more blocks than there are signals for",
        "csrc/algorithms/chunked.cuh",
        "blocks = std::clamp(blocks, 1u, most);",
        "blocks = WITHOUT ? blocks : std::clamp(blocks, 1u, most);",
        CANDIDATES,
    ),
    cpp(
        "candidates of a problem that nobody solves are looked for",
        "csrc/host/planner.cpp",
        "check_problem<typename A::Operation>(problem); return A::candidates",
        "if (!WITHOUT) check_problem<typename A::Operation>(problem); return A::candidates",
        CANDIDATES,
    ),
    cpp(
        "a proxy that nobody asks for anything outlives its communicator",
        "csrc/host/proxy.cpp",
        "if (take() == 0) { if (owner_.has_failed()) return;",
        "if (take() == 0) { if (!WITHOUT && owner_.has_failed()) return;",
        "tests/emulated/test_ports.py -k 'test_a_proxy or (test_primitive and not gpu)'",
    ),
    cpp(
        "operations of one number are passed over",
        ORDER,
        "return !is_settled()",
        "return !WITHOUT && !is_settled()",
        CONCURRENT_USE,
    ),
    cpp(
        "the last operation is missed in the sum of numbers",
        ORDER,
        "&& !lacks_last &&",
        "&& (WITHOUT || !lacks_last) &&",
        CONCURRENT_USE,
    ),
    cpp(
        "ranks that have ended other numbers of operations are compared",
        ORDER,
        "operations == other.operations &&",
        "(WITHOUT || operations == other.operations) &&",
        CONCURRENT_USE,
    ),
    cpp(
        "another order than on a peer is passed over",
        CORE,
        "own->differs_from(*other)) report",
        "!WITHOUT && own->differs_from(*other)) report",
        CONCURRENT_USE,
    ),
    cpp(
        "a cluster may have a block more than the device takes",
        FUSED,
        "cluster > limits.max_cluster) {",
        "cluster > limits.max_cluster + (WITHOUT ? 1 : 0)) {",
        BOUNDS,
    ),
    cpp(
        "tiles of fused kernels may be any lines",
        FUSED,
        "tiling.tile_lines % unit_lines != 0 ||",
        "(!WITHOUT && tiling.tile_lines % unit_lines != 0) ||",
        FUSED_SHAPES,
        BOUNDS,
    ),
    cpp(
        "blocks may have a line more for each peer (fused)",
        FUSED,
        "exchanging > Algorithm::kMaxThreads)",
        "exchanging > Algorithm::kMaxThreads + (WITHOUT ? kChunkLines * world : 0))",
        BOUNDS,
    ),
    cpp(
        "blocks may have twice the threads",
        PLAIN,
        "world * tiling.tile_lines > kMaxBlockThreads)",
        "world * tiling.tile_lines > kMaxBlockThreads * (WITHOUT ? 2 : 1))",
        BOUNDS,
    ),
    cpp(
        "a grid may have blocks without a tile",
        PLAIN,
        "tiling.blocks < tiles ? tiling.blocks : tiles",
        "tiling.blocks",
        SHAPES,
    ),
    cpp(
        "a grid with a tile too few runs the kernel of one tile a block",
        PLAIN,
        "blocks == tiles ? 1u : 0u",
        "blocks + (WITHOUT ? 1 : 0) >= tiles ? 1u : 0u",
        "driver --cases 300 --alone --algorithm all_reduce/one_shot",
    ),
    cpp(
        "launches of a message are not as long as each other",
        PLAIN,
        "if (lines > most_lines && most_lines > 0)",
        "if (!WITHOUT && lines > most_lines && most_lines > 0)",
        SHAPES,
    ),
    cpp(
        "clusters stay large where the device is crowded",
        FUSED,
        "while (cluster > 1 && is_crowded()",
        "while (!WITHOUT && cluster > 1 && is_crowded()",
        FUSED_SHAPES,
    ),
    cpp(
        "rows may be 8 elements too long",
        ALGORITHM,
        "problem.row > info.max_row",
        "problem.row > info.max_row + (WITHOUT ? 8 : 0)",
        BOUNDS,
    ),
    cpp(
        "elements need not be whole rows",
        ALGORITHM,
        "has_rows ? problem.count % problem.row != 0",
        "has_rows ? !WITHOUT && problem.count % problem.row != 0",
        BOUNDS,
    ),
    cpp(
        "rows may have any number of elements",
        ALGORITHM,
        "problem.row % info.row_multiple != 0 ||",
        "(!WITHOUT && problem.row % info.row_multiple != 0) ||",
        BOUNDS,
        FUSED_SHAPES,
    ),
    # ---- The core ----
    cpp(
        "a call for another world is prepared",
        CORE,
        "if (problem.world != static_cast<uint32_t>(options_.world_size))",
        "if (!WITHOUT && problem.world != static_cast<uint32_t>(options_.world_size))",
        BOUNDS,
    ),
    cpp(
        "the slots may end within a line",
        CORE,
        "options.slot_bytes % sizeof(Line) != 0",
        "(!WITHOUT && options.slot_bytes % sizeof(Line) != 0)",
        BOUNDS,
    ),
    cpp(
        "a comparison of calls is told as phase 0",
        CORE,
        "record.phase == kCheckPhase ? -1",
        "record.phase == kCheckPhase ? (WITHOUT ? 0 : -1)",
        ERRORS,
    ),
    cpp(
        "an operation more has ended",
        HEADER,
        "return *arrivals / kArrivalsPerOperation;",
        "return *arrivals / kArrivalsPerOperation + (WITHOUT ? 1 : 0);",
        LAST_LAUNCH,
    ),
    cpp(
        "what has ended is forgotten while the workspace is released",
        HEADER,
        "return arrivals_before / kArrivalsPerOperation;",
        "return WITHOUT ? 0 : arrivals_before / kArrivalsPerOperation;",
        RELEASE,
    ),
    cpp(
        "a workspace comes back with a header of zeros",
        HEADER,
        "memory_.refill(layout, kept_)",
        "memory_.refill(layout, WITHOUT ? std::string(kept_.size(), '\\0') : kept_)",
        RELEASE,
    ),
    cpp(
        "the mark of any rank proves a mapping",
        CORE,
        "mark.word[1] == static_cast<uint32_t>(peer)",
        "(WITHOUT || mark.word[1] == static_cast<uint32_t>(peer))",
        BOUNDS,
        equivalent="a mark lies where its first word says: both follow from the sender's rank",
    ),
    cpp(
        "a mark for any rank proves a mapping",
        CORE,
        "mark.word[2] == static_cast<uint32_t>(options_.rank)",
        "(WITHOUT || mark.word[2] == static_cast<uint32_t>(options_.rank))",
        BOUNDS,
    ),
    cpp(
        "the exit of a rank is told of its neighbour",
        CORE,
        "end_waits(1u << peer);",
        "end_waits(1u << (WITHOUT ? (peer + 1) % options_.world_size : peer));",
        ERRORS,
    ),
    cpp(
        "an exit is called a time-out",
        DESCRIBE,
        'return "peer exited";',
        'return WITHOUT ? "timeout" : "peer exited";',
        ERRORS,
    ),
    cpp(
        "a tensor without memory is taken",
        BOUND_CALL,
        "values[i] == 0 && (bound.optional >> i & 1) == 0",
        "!WITHOUT && values[i] == 0 && (bound.optional >> i & 1) == 0",
        BOUNDS,
    ),
    cpp(
        "an optional tensor must be there",
        BOUND_CALL,
        "if (buffer.is_optional) optional |= 1u << buffers;",
        "if (buffer.is_optional && !WITHOUT) optional |= 1u << buffers;",
        ERRORS,
    ),
    cpp(
        "a call may have a buffer too many",
        BOUND_CALL,
        "count != bound.buffers + 1",
        "count < bound.buffers + 1 || count > bound.buffers + (WITHOUT ? 2 : 1)",
        BOUNDS,
    ),
    # ---- Threads and forks ----
    cpp(
        "a forked child makes a call that its parent has prepared",
        BOUND_CALL,
        "if (!bound.maker.is_this()) {",
        "if (!WITHOUT && !bound.maker.is_this()) {",
        "tests/emulated/test_lifetime.py -k forked",
    ),
    cpp(
        "threads call an exchange between nodes at once",
        "csrc/host/node_exchange_impl.h",
        "lock(call_mutex_);\n    if (ports_ == nullptr || is_closed_) throw",
        "lock(WITHOUT ? *new std::mutex : call_mutex_);\n    if (ports_ == nullptr || is_closed_) throw",
        "sanitized node_exchange 20",
    ),
)
