// Linear layers on the host: supported problems, tilings, and launch configurations.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "algorithms/algorithm.h"
#include "algorithms/linear/problem.h"
#include "llm_comm/matrix_view.h"

namespace llm_comm::linear {

inline constexpr OperationInfo kInfo{
    .name = "linear",
    .title = "linear layer",
    .buffers = {{"x"}, {"weight"}, {.name = "out", .is_output = true}, {.name = "bias", .is_optional = true}}};
// Layers with FP8 operands, which have two more buffers.
inline constexpr OperationInfo kScaledInfo{.name = "linear",
                                           .title = "linear layer",
                                           .buffers = {{"x"},
                                                       {"weight"},
                                                       {.name = "out", .is_output = true},
                                                       {.name = "bias", .is_optional = true},
                                                       {"x_scale"},
                                                       {"weight_scale"}}};

// Maximum tokens of a layer whose thread blocks each have all tokens.
inline constexpr uint32_t kMaxTokens = 64;
// Maximum tokens of a layer whose tokens are cut into tiles.
inline constexpr uint32_t kMaxManyTokens = 1u << 20;
inline constexpr uint32_t kMultiple = 64;  // outputs are multiples of it, and so are inputs unless they are FP8
inline constexpr uint32_t kMaxFeatures = 1u << 24;
inline constexpr uint32_t kLineElements = 8;  // elements of the result in a 16-byte line
inline constexpr uint32_t kMaxBlockOutputs = 64;
inline constexpr uint32_t kTeams = 2;
inline constexpr uint32_t kThreads = kTeams * kTeamThreads + 32;
inline constexpr uint32_t kMaxStages = 16;
inline constexpr uint32_t kMaxStageBoxes = 8;
inline constexpr uint32_t kBarrierBytes = 256;
// Scales of tokens, scales of rows, and bias of rows.
inline constexpr uint32_t kScalesBytes = (kMaxTokens + 2 * kMaxBlockOutputs) * static_cast<uint32_t>(sizeof(float));
// Bytes before the stages: barriers and scales. The stages begin at a multiple of kBoxAlignment, as tiles must.
inline constexpr uint32_t kHeaderBytes = kBoxAlignment;
static_assert(kBarrierBytes + kScalesBytes <= kHeaderBytes);
// Padding in floats between the sums of two tokens in shared memory. It avoids bank conflicts within a warp.
inline constexpr uint32_t kSumsPadding = 4;

// Returns whether there are kernels for this pair of operand type and result type.
constexpr bool serves(OperandType operands, DataType type) {
  const bool is_bf16 = type == DataType::kBFloat16, is_fp16 = type == DataType::kFloat16;
  if (operands == OperandType::kFloat8) return is_bf16 || is_fp16;
  return operands == OperandType::kBFloat16 ? is_bf16 : is_fp16;
}

// Multiple that the number of inputs must be: the columns of one tile.
constexpr uint32_t inputs_multiple(OperandType operands) { return kBoxRowBytes / operand_bytes(operands); }

// Returns whether there are kernels for more than kMaxTokens tokens. They are for prefills of batch-invariant engines.
constexpr bool serves_many(OperandType operands, uint32_t weight_parts) {
  return operands != OperandType::kFloat8 && weight_parts == 1;
}

// Rows of a tile of x for this number of tokens. Each value has a kernel of its own.
constexpr uint32_t token_rows(uint32_t tokens) {
  if (tokens > kMaxTokens) return tokens <= 128 ? 128 : 256;
  return tokens <= 8 ? 8 : tokens <= 16 ? 16 : tokens <= 32 ? 32 : 64;
}

// Number of tiles that the tokens are cut into. Each tile has thread blocks of its own.
constexpr uint32_t token_tiles(uint32_t tokens) { return divide_up(tokens, token_rows(tokens)); }

// L2 eviction hint for the weight. With several token tiles other blocks fetch the same tiles of the weight.
constexpr BoxUse use_of_weight(uint32_t tokens) { return token_tiles(tokens) > 1 ? BoxUse::kShared : BoxUse::kOnce; }

// Returns why no kernel of this directory takes so many columns or rows of a matrix, or "". `name` tells of which.
std::string why_not_features(uint32_t features, const std::string& name, uint32_t multiple = kMultiple);
// Throws std::invalid_argument for a problem that the kernels serve with no tiling.
void check(const LinearProblem& problem);
// Tilings worth timing on a device: the kernel's own choice, then others in ascending order of the time model's
// estimate (cost.h). For more than kMaxTokens tokens only the own choice. `max_shared_bytes`: shared memory available
// to one thread block.
std::vector<LinearChoice> choices(const LinearProblem& problem, uint32_t sm_count, uint32_t max_shared_bytes);
// Returns `choice` with its zero fields filled in for a device with `sm_count` multiprocessors. Throws
// std::invalid_argument for a tiling that the kernel does not support or that exceeds `max_shared_bytes`.
LinearChoice complete(const LinearProblem& problem, const LinearChoice& choice, uint32_t sm_count,
                      uint32_t max_shared_bytes);
// Bytes of one stage, and launch configuration. The tiling must be complete.
uint32_t stage_bytes(const LinearProblem& problem, const LinearChoice& choice);
Grid grid(const LinearProblem& problem, const LinearChoice& choice);

}  // namespace llm_comm::linear
