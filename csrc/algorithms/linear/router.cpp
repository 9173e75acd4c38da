#include "algorithms/linear/router.h"

#include <stdexcept>
#include <string>

#include "algorithms/linear/experts.h"
#include "algorithms/linear/layer.h"

namespace llm_comm::router {

// Python checks both kernels with one set of limits.
static_assert(kMaxExperts == experts::kMaxExperts && kMaxTopK == experts::kMaxTopK);
// In a cluster of several blocks a warp chooses the experts of one token at most.
static_assert(linear::kMaxTokens <= kClusterBlocks * kWarps);

namespace {

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument("router: " + why); }

uint32_t expert_tiles(const Problem& problem) { return divide_up(problem.experts, kTileRows); }

}  // namespace

void check(const Problem& problem) {
  const auto within = [&](uint32_t value, const char* name, uint32_t most) {
    if (value == 0 || value > most) {
      refuse(std::to_string(value) + " " + name + "; it takes 1 to " + std::to_string(most));
    }
  };
  if (!linear::serves(operands_of_type(problem.type), problem.type)) {
    refuse(std::string("it has no kernels for ") + data_type_name(problem.type));
  }
  within(problem.tokens, "tokens", linear::kMaxTokens);
  within(problem.experts, "experts", kMaxExperts);
  within(problem.top_k, "experts of a token", problem.experts < kMaxTopK ? problem.experts : kMaxTopK);
  const std::string why = linear::why_not_features(problem.hidden, "columns");
  if (!why.empty()) refuse(why);
}

Division divide(const Problem& problem, uint32_t max_cluster_blocks) {
  const uint32_t blocks = max_cluster_blocks < kClusterBlocks ? 1 : kClusterBlocks;
  const uint32_t tiles = expert_tiles(problem);
  const uint32_t parts = tiles < kWarps ? floor_power_of_two(kWarps / tiles) : 1;
  const uint32_t boxes = problem.hidden / linear::inputs_multiple(operands_of_type(problem.type));
  return {blocks, parts, divide_up(boxes, blocks * parts)};
}

uint32_t block_tokens(const Problem& problem, const Division& division) {
  return divide_up(problem.tokens, division.blocks);
}

Grid grid(const Problem& problem, const Division& division, uint32_t max_shared_bytes) {
  const uint32_t sums = division.block_parts * problem.tokens * problem.experts;
  const uint32_t shared = sums * static_cast<uint32_t>(sizeof(float));
  if (shared > max_shared_bytes) {
    refuse("it takes " + std::to_string(shared) + " bytes of shared memory, this device has " +
           std::to_string(max_shared_bytes) + " for a block");
  }
  return {division.blocks, kThreads, shared, division.blocks};
}

}  // namespace llm_comm::router
