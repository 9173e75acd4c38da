// Which values of a product of boxes (tiles.cuh) a thread of a team has: those that the instructions of tensor cores give it.
#pragma once

#include "llm_comm/platform.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Value i of a thread of the team.
LLM_COMM_DEVICE uint32_t output_of(uint32_t thread, uint32_t i) {
  return thread / kWarpThreads * 16 + thread % kWarpThreads / 4 + i / 2 % 2 * 8;
}
LLM_COMM_DEVICE uint32_t token_of(uint32_t thread, uint32_t i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

}  // namespace llm_comm::inline LLM_COMM_TARGET
