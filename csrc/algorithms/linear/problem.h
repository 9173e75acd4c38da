// A linear layer: y = x W^T + b, as torch.nn.functional.linear, with or without the bias b, or what an epilogue makes
// of it. No rank takes part but this one. x and W are of bf16 or fp16, or of FP8 with scales.
#pragma once

#include <cstdint>

#include "llm_comm/data_type.h"

namespace llm_comm {

// What becomes of the products. g and u are the two halves of x W^T + b, gate and up of a gated MLP.
enum class LinearEpilogue : uint32_t {
  kNone,            // y = x W^T + b
  kSiluAndMul,      // y = silu(g) * u
  kGeluTanhAndMul,  // y = gelu(g) * u, with the approximation of gelu by tanh
};

// Matrices of `outputs` rows that the weight consists of, one behind the other.
constexpr uint32_t weight_parts(LinearEpilogue epilogue) { return epilogue == LinearEpilogue::kNone ? 1 : 2; }

// That are not scaled, for results of a type; any where there are none.
constexpr FactorType factors_of_type(DataType type) {
  return type == DataType::kFloat16 ? FactorType::kFloat16 : FactorType::kBFloat16;
}

// Whose each scale of FP8 elements is. An element stands for its value times its scale.
enum class ScaleOf : uint32_t {
  kTensor,
  kRow,
  kBlock,  // kScaleBlock inputs of a token, or of kScaleBlock rows of the weight; of both operands or of neither
};
inline constexpr uint32_t kScaleBlock = 128;

struct LinearProblem {
  uint32_t tokens;     // rows of x and y
  uint32_t inputs;     // columns of x and of the weight
  uint32_t outputs;    // columns of y, rows of each part of the weight
  FactorType factors;  // of x and of the weight
  DataType type;       // of y: that of the factors, unless they are FP8
  LinearEpilogue epilogue = LinearEpilogue::kNone;
  // Of FP8, and no others.
  ScaleOf x_scale = ScaleOf::kTensor;
  ScaleOf weight_scale = ScaleOf::kTensor;
  // kBlock: scales of x from one token to the next, and from one block of inputs to the next.
  uint32_t x_scale_token_stride = 0;
  uint32_t x_scale_block_stride = 0;
};

constexpr bool has_block_scales(const LinearProblem& problem) { return problem.x_scale == ScaleOf::kBlock; }

// 0: as the layer finds best.
struct LinearChoice {
  uint32_t block_outputs = 0;  // rows of the weight that a block multiplies, as many of each part
  uint32_t stages = 0;         // of the ring of boxes in shared memory
  uint32_t stage_boxes = 0;    // boxes of the weight in a stage, and as many of x

  bool operator==(const LinearChoice&) const = default;
};

}  // namespace llm_comm
