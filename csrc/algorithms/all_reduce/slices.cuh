// The slices of a message, of which each rank sums one.
#pragma once

#include "llm_comm/platform.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// The last slices may be short or empty.
LLM_COMM_DEVICE uint32_t lines_of_slice(uint32_t owner, uint32_t slice, uint32_t lines) {
  const uint32_t first = owner * slice;
  return first >= lines ? 0 : (lines - first < slice ? lines - first : slice);
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
