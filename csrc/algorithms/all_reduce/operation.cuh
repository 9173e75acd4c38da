// All-reduce: every rank gets the sum of all inputs, added in rank order in fp32 and rounded once.
//
// This file has the kernel arguments, the mapping of threads to peers, and the launch shape of its LL algorithms. A
// grid has at most as many blocks as tiles, because a block arrives (Operation::arrive) in its first tile.
#pragma once

#include "algorithms/algorithm.h"
#include "algorithms/reference.h"
#include "llm_comm/operation.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

struct AllReduceArgs {
  DeviceComm comm;
  const void* input;         // element-aligned
  void* output;              // element-aligned; equal to `input` or not overlapping it
  uint64_t count;            // elements, at least 1 and below 2^32, the same on all ranks
  uint32_t tile_lines;       // lines that one peer's threads of a block handle at a time: a power of two
  uint32_t tile_lines_log2;  // an argument because kernels would compute it at a point where it costs time
  uint32_t depth;            // tiles that a block sends ahead of the one it reduces
};

// A block has world << tile_lines_log2 threads. Thread (k, c) exchanges line c of the block's tile with peer k. With
// one peer and one line per thread, all links and all polls of a block are in flight at once. A thread that serves all
// peers in turn was slower.
struct PeerParallel {
  uint32_t tile_lines;
  uint32_t peer;
  uint32_t column;
  uint32_t rank;
  bool is_own;  // exchanges nothing; contributes this rank's own lines

  LLM_COMM_DEVICE explicit PeerParallel(const AllReduceArgs& args)
      : tile_lines(args.tile_lines),
        peer(thread_index() >> args.tile_lines_log2),
        column(thread_index() & (args.tile_lines - 1)),
        rank(args.comm.rank),
        is_own(peer == rank) {}
};

// ---- Descriptor of the operation -----------------------------------------------------------------------------------

struct AllReduce {
  using Args = AllReduceArgs;
  static constexpr OperationInfo kInfo{
      .name = "all_reduce", .title = "all-reduce", .buffers = {{"input"}, {.name = "output", .is_output = true}}};

  static constexpr bool serves(DataType type) { return is_number(type); }
  static void check(const Problem&) {}

  static Args arguments(const Problem& problem, const Tiling& tiling, const Grid& grid) {
    Args args{};
    args.tile_lines = tiling.tile_lines;
    while (args.tile_lines >> args.tile_lines_log2 > 1) ++args.tile_lines_log2;
    // Limited to the tiles of a block: no block sends further ahead, and kernels count tiles in 32 bits.
    const uint64_t launch_units = problem.count < tiling.launch_units ? problem.count : tiling.launch_units;
    const uint64_t stride = uint64_t{grid.blocks} * tiling.tile_lines;
    const uint64_t tiles_of_block = (launch_units * element_bytes(problem.type) / sizeof(Line) + stride) / stride;
    args.depth = static_cast<uint32_t>(tiling.depth < tiles_of_block ? tiling.depth : tiles_of_block);
    return args;
  }

  static void set_launch(Args& args, const Problem& problem, const uint64_t* buffers, uint64_t first, uint64_t units) {
    const uint64_t skipped = first * element_bytes(problem.type);
    args.input = reinterpret_cast<const void*>(buffers[0] + skipped);
    args.output = reinterpret_cast<void*>(buffers[1] + skipped);
    args.count = units;
  }

  template <class Input>
  static uint32_t expect(const Problem& problem, uint32_t, uint64_t i, Input input) {
    return sum_of_one(problem.type, problem.world, [&](uint32_t rank) { return input(rank, i); });
  }
};

// Launch shape of tiled algorithms. Algorithm defines, for a message of `lines` lines among `world` ranks:
//   slot_lines(lines, world)           lines of a slot
//   tiled_lines(lines, world)          lines that its blocks walk over
//   threads_of_line(world)             threads of a block for each line of a tile
//   shared_lines(tile_lines, world)    shared memory of a block, in lines
//   is_worth_measuring(bytes, world)   true if the tuner should try it
template <class Algorithm>
struct TiledAllReduce {
  using Operation = AllReduce;
  using KernelPointer = void (*)(AllReduceArgs);
  static constexpr Tunables kTunables{
      {{"blocks", 1, kArrivalsPerOperation - 1}, {"tile_lines", 1, 1u << 16, true}, {"depth", 0, 65535}}};
  // Variant 0: blocks walk over several tiles. Variant 1: the grid has one block per tile.
  static constexpr uint32_t kVariants = 2;

  static Tiling tile(const Problem& problem, const TuningParameters& tuning, const Limits& limits) {
    const uint64_t world = problem.world;
    const uint32_t most_tile_lines = floor_power_of_two(kMaxBlockThreads / problem.world);
    const uint32_t tile_lines = tuning.tile_lines < most_tile_lines ? tuning.tile_lines : most_tile_lines;
    const uint64_t most_lines = most_units(limits.slot_bytes / sizeof(Line),
                                           [&](uint64_t lines) { return Algorithm::slot_lines(lines, world); });
    const uint64_t lines = divide_up(problem.bytes(), sizeof(Line));
    uint64_t launch_lines = most_lines;
    if (lines > most_lines && most_lines > 0) {
      // Launches of a message that needs several have equal lengths, up to rounding to whole tiles: a short launch has
      // the same latency as a long one.
      const uint64_t unit = world * tile_lines;
      launch_lines = divide_up(lines, divide_up(lines, most_lines) * unit) * unit;
      if (launch_lines > most_lines) launch_lines = most_lines;
    }
    return {tuning.blocks, tile_lines, 1, tuning.depth, launch_lines * sizeof(Line) / element_bytes(problem.type)};
  }

  static Grid grid(const Problem& problem, const Tiling& tiling, uint64_t units, const Limits& limits) {
    const uint64_t world = problem.world;
    const uint64_t bytes = units * element_bytes(problem.type);
    const uint64_t lines = divide_up(bytes, sizeof(Line));
    const uint64_t slot_bytes = Algorithm::slot_lines(lines, world) * sizeof(Line);
    if (units >> 32 != 0) throw std::invalid_argument("a launch must have fewer than 2^32 elements");
    if (slot_bytes > limits.slot_bytes) {
      throw std::invalid_argument("a message of " + std::to_string(bytes) + " bytes needs a slot of " +
                                  std::to_string(slot_bytes) + " bytes, the workspace has slots of " +
                                  std::to_string(limits.slot_bytes) + ": lower launch_units or raise workspace_bytes");
    }
    const uint64_t threads = Algorithm::threads_of_line(world) * tiling.tile_lines;
    if (world * tiling.tile_lines > kMaxBlockThreads) {
      throw std::invalid_argument("tile_lines is " + std::to_string(tiling.tile_lines) + "; it must be at most " +
                                  std::to_string(kMaxBlockThreads / world) + " among " + std::to_string(world) +
                                  " ranks");
    }
    const uint64_t tiles = divide_up(Algorithm::tiled_lines(lines, world), uint64_t{tiling.tile_lines});
    const uint64_t blocks = tiling.blocks < tiles ? tiling.blocks : tiles;
    return {static_cast<uint32_t>(blocks), static_cast<uint32_t>(threads),
            static_cast<uint32_t>(Algorithm::shared_lines(tiling.tile_lines, world) * sizeof(Line)), 1,
            blocks == tiles ? 1u : 0u};
  }

  static std::vector<TuningParameters> candidates(const Problem& problem, const Limits& limits) {
    // Blocks of 1024 threads were slower at every size: their barrier waits for 32 warps.
    constexpr uint32_t kMaxThreads = 512;
    constexpr uint64_t kMaxRounds = 8;        // tiles that a block walks over, without sending ahead
    constexpr uint64_t kMaxRoundsAhead = 32;  // with sending ahead
    std::vector<TuningParameters> found;
    if (!Algorithm::is_worth_measuring(problem.bytes(), problem.world)) return found;
    const uint64_t lines = divide_up(problem.bytes(), sizeof(Line));
    for (uint32_t tile_lines = 8;
         tile_lines <= 256 && tile_lines * Algorithm::threads_of_line(problem.world) <= kMaxThreads; tile_lines *= 2) {
      const uint64_t tiles = divide_up(Algorithm::tiled_lines(lines, problem.world), uint64_t{tile_lines});
      for (uint32_t waves = 1; waves <= 8; waves *= 2) {
        const uint32_t blocks = waves * limits.multiprocessors();
        if (waves > 1 && tiles <= blocks / 2) break;  // would be the same grid
        const uint64_t rounds = divide_up(tiles, uint64_t{blocks});
        if (rounds <= kMaxRounds) found.push_back({.blocks = blocks, .tile_lines = tile_lines});
        if (rounds > 1 && rounds <= kMaxRoundsAhead) {
          found.push_back({.blocks = blocks, .tile_lines = tile_lines, .depth = 1});
        }
      }
    }
    return found;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
