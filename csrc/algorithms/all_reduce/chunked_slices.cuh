// Launch shape of all-reduce algorithms that send the slices of a message in chunks.
#pragma once

#include "algorithms/chunked.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Teams of two-shot algorithms: one scatters, one reduces, one collects.
inline constexpr uint32_t kTwoShotTeams = 3;

template <class Algorithm>
struct ChunkedSlices : Chunked<Algorithm> {
  static constexpr uint64_t shard_lines(const Problem& problem, uint64_t units) {
    return divide_up(divide_up(units * element_bytes(problem.type), sizeof(Line)), uint64_t{problem.world});
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
