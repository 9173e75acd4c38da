// A linear layer of a few tokens: y = x W^T, as torch.nn.functional.linear without a bias. No rank takes part but this one.
//
// What is asked for, how it is cut, and the grid that does it.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "algorithms/algorithm.h"
#include "llm_comm/data_type.h"

namespace llm_comm {

struct LinearProblem {
  uint32_t tokens;   // rows of x and y
  uint32_t inputs;   // columns of x and of the weight
  uint32_t outputs;  // rows of the weight, columns of y
  DataType type;     // of all three
};

// 0: as the layer finds best.
struct LinearChoice {
  uint32_t block_outputs = 0;  // that a block computes
  uint32_t stages = 0;         // of the ring of boxes in shared memory
  uint32_t stage_boxes = 0;    // boxes of the weight in a stage, and as many of x
};

namespace linear {

inline constexpr OperationInfo kInfo{
    .name = "linear", .title = "linear layer", .buffers = {{"x"}, {"weight"}, {.name = "out", .is_output = true}}};

inline constexpr uint32_t kMaxTokens = 64;
inline constexpr uint32_t kMultiple = 64;  // of inputs and of outputs
inline constexpr uint32_t kMaxFeatures = 1u << 24;
inline constexpr uint32_t kLineElements = 8;
inline constexpr uint32_t kMaxBlockOutputs = 64;
inline constexpr uint32_t kTeams = 2;
inline constexpr uint32_t kTeamThreads = 128;  // as of tiles.cuh, which kernels include
inline constexpr uint32_t kThreads = kTeams * kTeamThreads + 32;
inline constexpr uint32_t kMaxStages = 16;
inline constexpr uint32_t kMaxStageBoxes = 8;
inline constexpr uint32_t kBarrierBytes = 1024;
// Between the sums of two tokens in shared memory, so that the threads of a warp meet in no bank.
inline constexpr uint32_t kSumsPadding = 4;

constexpr bool serves(DataType type) { return type == DataType::kBFloat16 || type == DataType::kFloat16; }

// Rows of a box of x, for which there is a kernel each.
constexpr uint32_t token_rows(uint32_t tokens) { return tokens <= 8 ? 8 : tokens <= 16 ? 16 : tokens <= 32 ? 32 : 64; }

// Throws std::invalid_argument for what no choice makes possible.
void check(const LinearProblem& problem);
// The choice with all fields filled in, for a device of so many multiprocessors and so much shared memory for a block. Throws
// std::invalid_argument for a choice that the kernel does not take.
LinearChoice complete(const LinearProblem& problem, const LinearChoice& choice, uint32_t sm_count,
                      uint32_t max_shared_bytes);
// Of a choice that is complete.
uint32_t stage_bytes(const LinearProblem& problem, const LinearChoice& choice);
Grid grid(const LinearProblem& problem, const LinearChoice& choice);

}  // namespace linear

}  // namespace llm_comm
