// Launch shape of LL algorithms over shards (shards.h): one-shot all-gather, reduce-scatter and all-to-all.
#pragma once

#include "algorithms/shards_operation.h"

namespace llm_comm::inline LLM_COMM_TARGET {

// Largest world size at which a block has one thread per line of a tile, which exchanges the line with all peers.
// Larger worlds use one thread per line and rank (docs/experiments/pair.md).
inline constexpr int kMaxWorldByLines = 4;

// Maximum threads of a block. With 1024 a thread has 64 registers and the all-gather spills.
inline constexpr uint32_t kMaxShardThreads = kMaxBlockThreads / 2;

// Algorithm defines, for a launch whose largest shard has `lines` lines among `world` ranks:
//   slot_bytes(lines, world)           bytes of a slot
//   shared_lines(tile_lines, world)    shared memory of a block, in lines
template <class Algorithm>
struct TiledShards {
  static constexpr Tunables kTunables{{{"blocks", 1, kArrivalsPerOperation - 1}, {"tile_lines", 1, 1u << 16, true}}};
  static constexpr uint32_t kVariants = 1;

  // Threads of a block for each line of a tile.
  static constexpr uint64_t threads_of_line(uint64_t world) { return world <= kMaxWorldByLines ? 1 : world; }

  static Tiling tile(const Problem& problem, const TuningParameters& tuning, const Limits& limits) {
    const uint32_t most_tile_lines =
        floor_power_of_two(static_cast<uint32_t>(kMaxShardThreads / Algorithm::threads_of_line(problem.world)));
    const uint32_t tile_lines = tuning.tile_lines < most_tile_lines ? tuning.tile_lines : most_tile_lines;
    const uint64_t most_lines =
        most_units(limits.slot_bytes, [&](uint64_t lines) { return Algorithm::slot_bytes(lines, problem.world); });
    const uint64_t lines = divide_up(problem.bytes(), sizeof(Line));
    uint64_t launch_lines = most_lines;
    // Launches of one message have equal lengths, up to rounding to whole tiles.
    if (lines > most_lines && most_lines > 0) {
      launch_lines = divide_up(lines, divide_up(lines, most_lines) * tile_lines) * tile_lines;
      if (launch_lines > most_lines) launch_lines = most_lines;
    }
    return {tuning.blocks, tile_lines, 1, 0, launch_lines * sizeof(Line) / element_bytes(problem.type)};
  }

  static Grid grid(const Problem& problem, const Tiling& tiling, uint64_t units, const Limits& limits) {
    const uint64_t bytes = units * element_bytes(problem.type);
    const uint64_t lines = divide_up(bytes, sizeof(Line));
    if (bytes >> 32 != 0) throw std::invalid_argument("a launch must have fewer than 2^32 bytes of a shard");
    if (tiling.launch_units < problem.count && tiling.launch_units * element_bytes(problem.type) % sizeof(Line) != 0) {
      throw std::invalid_argument("launches must be whole lines");
    }
    if (Algorithm::slot_bytes(lines, problem.world) > limits.slot_bytes) {
      throw std::invalid_argument("shards of " + std::to_string(bytes) + " bytes need a slot of " +
                                  std::to_string(Algorithm::slot_bytes(lines, problem.world)) +
                                  " bytes, the workspace has slots of " + std::to_string(limits.slot_bytes) +
                                  ": lower launch_units or raise workspace_bytes");
    }
    const uint64_t threads = Algorithm::threads_of_line(problem.world) * tiling.tile_lines;
    if (threads > kMaxShardThreads) {
      throw std::invalid_argument("tile_lines is " + std::to_string(tiling.tile_lines) + "; it must be at most " +
                                  std::to_string(kMaxShardThreads / Algorithm::threads_of_line(problem.world)) +
                                  " among " + std::to_string(problem.world) + " ranks");
    }
    const uint64_t tiles = divide_up(lines, uint64_t{tiling.tile_lines});
    return {static_cast<uint32_t>(tiling.blocks < tiles ? tiling.blocks : tiles), static_cast<uint32_t>(threads),
            static_cast<uint32_t>(Algorithm::shared_lines(tiling.tile_lines, problem.world) * sizeof(Line))};
  }

  static std::vector<TuningParameters> candidates(const Problem& problem, const Limits& limits) {
    constexpr uint64_t kMaxRounds = 32;  // tiles that a block walks over
    std::vector<TuningParameters> found;
    const uint64_t lines = divide_up(problem.bytes(), sizeof(Line));
    for (uint32_t tile_lines = 8;
         tile_lines <= 256 && tile_lines * Algorithm::threads_of_line(problem.world) <= kMaxShardThreads;
         tile_lines *= 2) {
      const uint64_t tiles = divide_up(lines, uint64_t{tile_lines});
      for (uint32_t waves = 1; waves <= 8; waves *= 2) {
        const uint32_t blocks = waves * limits.multiprocessors();
        if (waves > 1 && tiles <= blocks / 2) break;  // would be the same grid
        if (divide_up(tiles, uint64_t{blocks}) <= kMaxRounds)
          found.push_back({.blocks = blocks, .tile_lines = tile_lines});
      }
    }
    return found;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
