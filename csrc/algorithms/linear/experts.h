// Experts of few tokens on the host: supported problems, tilings, and launch configurations.
#pragma once

#include <cstdint>

#include "algorithms/algorithm.h"
#include "algorithms/linear/experts_problem.h"
#include "algorithms/linear/layer.h"

namespace llm_comm::experts {

inline constexpr uint32_t kMaxExperts = 512;
inline constexpr uint32_t kMaxTopK = 16;
inline constexpr uint32_t kMaxTokens = linear::kMaxTokens;

// Bytes before the stages: barriers, marks of the experts and their counts, active experts, factors and flags of the
// tokens, and the numbers that the router chose. The stages begin at a multiple of kBoxAlignment, as tiles must.
inline constexpr uint32_t kMarksOffset = linear::kBarrierBytes;
inline constexpr uint32_t kCountsOffset = kMarksOffset + kMaxExperts;
inline constexpr uint32_t kActiveOffset = kCountsOffset + kMaxExperts / 4;
inline constexpr uint32_t kFactorsOffset = kActiveOffset + kMaxExperts * 2;
inline constexpr uint32_t kHasExpertOffset = kFactorsOffset + kMaxTokens * 4;
inline constexpr uint32_t kIdsOffset = kHasExpertOffset + kMaxTokens * 4;
inline constexpr uint32_t kHeaderBytes =
    divide_up(kIdsOffset + kMaxTokens * kMaxTopK * 4, kBoxAlignment) * kBoxAlignment;

// Throws std::invalid_argument for a problem that the kernels do not serve.
void check(const Problem& problem);
// Number of experts that the tokens can have at most.
constexpr uint32_t most_active(const Problem& problem) {
  const uint32_t chosen = problem.tokens * problem.top_k;
  return chosen < problem.experts ? chosen : problem.experts;
}
// Tiling of gate and up (`is_gated`) or of the down-projection for a device: `choice` with its zero fields filled in.
// Throws std::invalid_argument for a tiling that the kernel does not support or that exceeds `max_shared_bytes`.
Choice choose(const Problem& problem, bool is_gated, Choice choice, uint32_t sm_count, uint32_t max_shared_bytes);
uint32_t stage_bytes(const Problem& problem, const Choice& choice);
Grid grid(const Problem& problem, bool is_gated, const Choice& choice);

}  // namespace llm_comm::experts
