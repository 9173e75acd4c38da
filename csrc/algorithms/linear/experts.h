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
// Rows of the state between the layers: one for each token of each expert.
inline constexpr uint32_t kMaxRows = kMaxTokens * kMaxTopK;
// Groups of at least 8 rows, of which those of an expert have fewer once.
inline constexpr uint32_t kMaxGroups = kMaxExperts + kMaxRows / 8;
// Experts whose rows and groups a thread adds up before those of all are.
inline constexpr uint32_t kExpertsOfSubtotal = 16;

// Bytes before the sums of the teams: barriers of the stages and of the sums, and what each block finds out about the
// router's choice. The sums precede the stages, which begin at a multiple of kBoxAlignment, as tiles must.
inline constexpr uint32_t kSumsBarriersOffset = linear::kBarrierBytes;
inline constexpr uint32_t kTokensOffset = kSumsBarriersOffset + 16;
inline constexpr uint32_t kSubtotalsOffset = kTokensOffset + kMaxExperts * 8;
inline constexpr uint32_t kGroupsOffset = kSubtotalsOffset + kMaxExperts / kExpertsOfSubtotal * 4;
inline constexpr uint32_t kFirstRowsOffset = kGroupsOffset + kMaxGroups * 4;
inline constexpr uint32_t kIdsOffset = kFirstRowsOffset + kMaxExperts * 2;
inline constexpr uint32_t kTokenOfRowOffset = kIdsOffset + kMaxRows * 2;
inline constexpr uint32_t kFactorOfRowOffset = kTokenOfRowOffset + kMaxRows;
inline constexpr uint32_t kHeaderBytes = kFactorOfRowOffset + kMaxRows * 4;

// Throws std::invalid_argument for a problem that the kernels do not serve.
void check(const Problem& problem);
// Number of experts that the tokens can have at most.
constexpr uint32_t most_active(const Problem& problem) {
  const uint32_t chosen = problem.tokens * problem.top_k;
  return chosen < problem.experts ? chosen : problem.experts;
}
// Most tokens that are multiplied together, for which there is a kernel.
uint32_t group_rows(const Problem& problem);
// Tiling of gate and up (`is_gated`) or of the down-projection for a device: `choice` with its zero fields filled in.
// Throws std::invalid_argument for a tiling that the kernel does not support or that exceeds `max_shared_bytes`.
Choice choose(const Problem& problem, bool is_gated, Choice choice, uint32_t sm_count, uint32_t max_shared_bytes);
uint32_t stage_bytes(const Problem& problem, const Choice& choice);
// Bytes before the stages.
uint32_t stages_offset(const Problem& problem, bool is_gated, const Choice& choice);
Grid grid(const Problem& problem, bool is_gated, const Choice& choice, uint32_t sm_count);

}  // namespace llm_comm::experts
