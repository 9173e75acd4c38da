// Parameters of the linear layer kernels.
#pragma once

#include "algorithms/linear/problem.h"
#include "llm_comm/matrix_view.h"

namespace llm_comm::inline LLM_COMM_TARGET {

struct LinearArgs {
  MatrixView weight;
  MatrixView x;
  void* out;
  LinearEpilogue epilogue;
  const void* bias;  // one element for each row of the weight, of the result's type; nullptr: no bias
  uint32_t block_outputs;
  uint32_t stages;
  uint32_t stage_boxes;
  uint32_t stage_bytes;
  // FP8 only.
  const float* x_scale;
  const float* weight_scale;
  ScaleOf x_scale_of;
  ScaleOf weight_scale_of;
  // Number of token tiles; 1 for up to linear::kMaxTokens tokens.
  uint32_t token_tiles;
  // Block scales only: strides in elements, as in LinearProblem.
  uint32_t x_scale_token_stride;
  uint32_t x_scale_block_stride;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
