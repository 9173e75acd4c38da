// Problem and tiling of a linear layer: y = x W^T + b, as torch.nn.functional.linear, with an optional bias b and
// activation. It is computed by one rank alone. x and W are bf16, fp16, or FP8 with scales.
#pragma once

#include <cstdint>

#include "llm_comm/data_type.h"

namespace llm_comm {

// Activation of the layer. g and u are the two halves of x W^T + b, gate and up of a gated MLP.
enum class LinearEpilogue : uint32_t {
  kNone,            // y = x W^T + b
  kSiluAndMul,      // y = silu(g) * u
  kGeluTanhAndMul,  // y = gelu(g) * u, with the approximation of gelu by tanh
};

// Number of matrices of `outputs` rows that the weight consists of, one after the other.
constexpr uint32_t weight_parts(LinearEpilogue epilogue) { return epilogue == LinearEpilogue::kNone ? 1 : 2; }

// Operand type of layers without scales whose results have this type. Types that no kernel serves give kBFloat16;
// linear::check() rejects them.
LLM_COMM_HOST_DEVICE constexpr OperandType operands_of_type(DataType type) {
  return type == DataType::kFloat16 ? OperandType::kFloat16 : OperandType::kBFloat16;
}

// Granularity of the scales of an FP8 operand. An element stands for its value times its scale.
enum class ScaleOf : uint32_t {
  kTensor,
  kRow,    // a token of x, or a row of the weight
  kBlock,  // kScaleBlock inputs of a token, or of kScaleBlock rows of the weight; both operands have it or neither has
};
inline constexpr uint32_t kScaleBlock = 128;

struct LinearProblem {
  uint32_t tokens;       // rows of x and y
  uint32_t inputs;       // columns of x and of the weight
  uint32_t outputs;      // columns of y, rows of each part of the weight
  OperandType operands;  // element type of x and of the weight
  DataType type;         // element type of y: the same, unless operands are FP8
  LinearEpilogue epilogue = LinearEpilogue::kNone;
  // FP8 only.
  ScaleOf x_scale = ScaleOf::kTensor;
  ScaleOf weight_scale = ScaleOf::kTensor;
  // kBlock only: strides of the scales of x, in elements, between tokens and between blocks of inputs.
  uint32_t x_scale_token_stride = 0;
  uint32_t x_scale_block_stride = 0;
};

constexpr bool has_block_scales(const LinearProblem& problem) { return problem.x_scale == ScaleOf::kBlock; }

// Tiling of a layer. linear::complete() fills in fields that are 0. Results do not depend on it.
struct LinearChoice {
  uint32_t block_outputs = 0;  // rows of the weight of a thread block, the same number of each part
  uint32_t stages = 0;         // stages of the ring in shared memory
  uint32_t stage_boxes = 0;    // TMA tiles of the weight in a stage, and of x

  bool operator==(const LinearChoice&) const = default;
};

}  // namespace llm_comm
