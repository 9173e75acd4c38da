// The slices of a message, of which each rank sums one.
#pragma once

#include "algorithms/chunked.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// The last slices may be short or empty.
LLM_COMM_DEVICE uint32_t lines_of_slice(uint32_t owner, uint32_t slice, uint32_t lines) {
  const uint32_t first = owner * slice;
  return first >= lines ? 0 : (lines - first < slice ? lines - first : slice);
}

// Descriptors of algorithms by chunks of slices.
template <class Algorithm>
struct ChunkedSlices : Chunked<Algorithm> {
  static constexpr uint64_t part_lines(const Problem& problem, uint64_t units) {
    return divide_up(divide_up(units * element_bytes(problem.type), sizeof(Line)), uint64_t{problem.world});
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
