// Fragment layout of tile products (tiles.cuh): which output and token value i of a thread of a warpgroup belongs to.
// It is the accumulator layout of wgmma and mma.sync.
#pragma once

#include "llm_comm/platform.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Output (row) and token (column) of value i of `thread`.
LLM_COMM_DEVICE uint32_t output_of(uint32_t thread, uint32_t i) {
  return thread / kWarpThreads * 16 + thread % kWarpThreads / 4 + i / 2 % 2 * 8;
}
LLM_COMM_DEVICE uint32_t token_of(uint32_t thread, uint32_t i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

}  // namespace llm_comm::inline LLM_COMM_TARGET
