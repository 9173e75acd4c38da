// What operations over parts (parts.h) share in their descriptors, and the parameters of their kernels.
#pragma once

#include "algorithms/part_view.cuh"
#include "algorithms/parts.h"
#include "llm_comm/operation.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

struct PartsArgs {
  DeviceComm comm;
  const void* input;
  void* output;
  Parts parts;
  Range range;
  uint32_t tile_lines;  // that one peer's threads of a block handle at a time: a power of two
  uint32_t tile_lines_log2;
  uint32_t depth;  // of HB: steps that a block is ahead
};

struct PartsOperation {
  using Args = PartsArgs;
  static void check(const Problem& problem) { check_parts(problem); }

  static Args arguments(const Problem& problem, const Tiling& tiling, const Grid&) {
    Args args{};
    args.parts = parts_of(problem);
    args.tile_lines = tiling.tile_lines;
    args.depth = tiling.depth;
    while (args.tile_lines >> args.tile_lines_log2 > 1) ++args.tile_lines_log2;
    return args;
  }

  static void set_launch(Args& args, const Problem&, const uint64_t* buffers, uint64_t first, uint64_t units) {
    args.input = reinterpret_cast<const void*>(buffers[0]);
    args.output = reinterpret_cast<void*>(buffers[1]);
    args.range = {first, units};
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
