// Common descriptor and kernel arguments of operations on shards (shards.h).
#pragma once

#include "algorithms/shard_view.cuh"
#include "algorithms/shards.h"
#include "llm_comm/operation.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

struct ShardsArgs {
  DeviceComm comm;
  const void* input;
  void* output;
  Shards shards;
  Range range;
  uint32_t tile_lines;  // lines that one peer's threads of a block handle at a time: a power of two
  uint32_t tile_lines_log2;
  uint32_t depth;  // HB: steps that a block is ahead
  // All shards have the same size in this launch, in whole aligned lines, contiguous in both tensors.
  uint32_t is_plain;
};

struct ShardsOperation {
  using Args = ShardsArgs;
  static void check(const Problem& problem) { check_shards(problem); }

  static Args arguments(const Problem& problem, const Tiling& tiling, const Grid&) {
    Args args{};
    args.shards = shards_of(problem);
    args.tile_lines = tiling.tile_lines;
    args.depth = tiling.depth;
    while (args.tile_lines >> args.tile_lines_log2 > 1) ++args.tile_lines_log2;
    return args;
  }

  static void set_launch(Args& args, const Problem& problem, const uint64_t* buffers, uint64_t first, uint64_t units) {
    args.input = reinterpret_cast<const void*>(buffers[0]);
    args.output = reinterpret_cast<void*>(buffers[1]);
    args.range = {first, units};
    args.is_plain = is_plain(problem, args);
  }

 private:
  static bool is_plain(const Problem& problem, const Args& args) {
    const uint64_t bytes = element_bytes(problem.type);
    // With a single row, shards are adjacent in the tensor.
    const uint64_t row = args.shards.row_elements;
    uint64_t places = reinterpret_cast<uint64_t>(args.input) | reinterpret_cast<uint64_t>(args.output) |
                      args.range.first * bytes | args.range.count * bytes;
    for (uint32_t rank = 0; rank < problem.world; ++rank) {
      const Shard& shard = args.shards.shard[rank];
      if (shard.length < args.range.first + args.range.count) return false;
      if (row != shard.size && shard.length != shard.size) return false;
      places |= shard.first * bytes;
    }
    return places % sizeof(Line) == 0;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
