// Parameters of the kernels of linear layers.
#pragma once

#include "algorithms/linear/problem.h"
#include "llm_comm/matrix_view.h"

namespace llm_comm::inline LLM_COMM_TARGET {

struct LinearArgs {
  MatrixView weight;
  MatrixView x;
  void* out;
  LinearEpilogue epilogue;
  const void* bias;  // of each row of the weight, of the type of the result; nullptr: none
  uint32_t block_outputs;
  uint32_t stages;
  uint32_t stage_boxes;
  uint32_t stage_bytes;
  // Of FP8.
  const float* x_scale;
  const float* weight_scale;
  ScaleOf x_scale_of;
  ScaleOf weight_scale_of;
  // Into which many tokens are cut; 1 of a few.
  uint32_t token_tiles;
  // As in LinearProblem.
  uint32_t x_scale_token_stride;
  uint32_t x_scale_block_stride;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
