// What linear layers are served, how they are cut, and the grids that do it.
#pragma once

#include <cstdint>
#include <vector>

#include "algorithms/algorithm.h"
#include "algorithms/linear/problem.h"
#include "llm_comm/matrix_view.h"

namespace llm_comm::linear {

inline constexpr OperationInfo kInfo{
    .name = "linear",
    .title = "linear layer",
    .buffers = {{"x"}, {"weight"}, {.name = "out", .is_output = true}, {.name = "bias", .is_optional = true}}};
// Of FP8.
inline constexpr OperationInfo kScaledInfo{.name = "linear",
                                           .title = "linear layer",
                                           .buffers = {{"x"},
                                                       {"weight"},
                                                       {.name = "out", .is_output = true},
                                                       {.name = "bias", .is_optional = true},
                                                       {"x_scale"},
                                                       {"weight_scale"}}};

// Of a few tokens: one block has them all.
inline constexpr uint32_t kMaxTokens = 64;
// Of many, cut into tiles.
inline constexpr uint32_t kMaxManyTokens = 1u << 20;
inline constexpr uint32_t kMultiple = 64;  // of outputs, and of inputs that are not FP8
inline constexpr uint32_t kMaxFeatures = 1u << 24;
inline constexpr uint32_t kLineElements = 8;
inline constexpr uint32_t kMaxBlockOutputs = 64;
inline constexpr uint32_t kTeams = 2;
inline constexpr uint32_t kThreads = kTeams * kTeamThreads + 32;
inline constexpr uint32_t kMaxStages = 16;
inline constexpr uint32_t kMaxStageBoxes = 8;
inline constexpr uint32_t kBarrierBytes = 256;
inline constexpr uint32_t kScalesBytes =
    (kMaxTokens + 2 * kMaxBlockOutputs) * static_cast<uint32_t>(sizeof(float));  // and bias
// In front of the stages, which begin where boxes may.
inline constexpr uint32_t kHeaderBytes = kBoxAlignment;
static_assert(kBarrierBytes + kScalesBytes <= kHeaderBytes);
// Between the sums of two tokens in shared memory, so that the threads of a warp meet in no bank.
inline constexpr uint32_t kSumsPadding = 4;

constexpr bool serves(FactorType factors, DataType type) {
  const bool is_bf16 = type == DataType::kBFloat16, is_fp16 = type == DataType::kFloat16;
  if (factors == FactorType::kFloat8) return is_bf16 || is_fp16;
  return factors == FactorType::kBFloat16 ? is_bf16 : is_fp16;
}

// Of inputs: whole boxes.
constexpr uint32_t inputs_multiple(FactorType factors) { return kBoxRowBytes / factor_bytes(factors); }

// Whether there are kernels for many tokens too: prefills of engines whose tokens must not depend on their batch.
constexpr bool serves_many(FactorType factors, uint32_t weight_parts) {
  return factors != FactorType::kFloat8 && weight_parts == 1;
}

// Rows of a box of x, for which there is a kernel each.
constexpr uint32_t token_rows(uint32_t tokens) {
  if (tokens > kMaxTokens) return tokens <= 128 ? 128 : 256;
  return tokens <= 8 ? 8 : tokens <= 16 ? 16 : tokens <= 32 ? 32 : 64;
}

// Into how many tiles the tokens are cut. Each has blocks of its own.
constexpr uint32_t token_tiles(uint32_t tokens) { return divide_up(tokens, token_rows(tokens)); }

// Whether other blocks fetch the same boxes of the weight.
constexpr BoxUse use_of_weight(uint32_t tokens) { return token_tiles(tokens) > 1 ? BoxUse::kShared : BoxUse::kOnce; }

// Throws std::invalid_argument for what no choice makes possible.
void check(const LinearProblem& problem);
// What is worth a try on such a device, the fastest first as the kernel expects it; of many tokens that alone.
std::vector<LinearChoice> choices(const LinearProblem& problem, uint32_t sm_count, uint32_t max_shared_bytes);
// The choice with all fields filled in, for a device of so many multiprocessors and so much shared memory for a block. Throws
// std::invalid_argument for a choice that the kernel does not take.
LinearChoice complete(const LinearProblem& problem, const LinearChoice& choice, uint32_t sm_count,
                      uint32_t max_shared_bytes);
// Of a choice that is complete.
uint32_t stage_bytes(const LinearProblem& problem, const LinearChoice& choice);
Grid grid(const LinearProblem& problem, const LinearChoice& choice);

}  // namespace llm_comm::linear
