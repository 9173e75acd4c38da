// Parameters of the experts' kernels, and their place in shared memory.
#pragma once

#include "algorithms/linear/experts_problem.h"
#include "llm_comm/matrix_view.h"

namespace llm_comm::inline LLM_COMM_TARGET {

// Scales of the blocks of an FP8 weight: [experts][blocks of rows][blocks of columns], strides in elements.
struct ScaleView {
  const float* data;
  uint64_t expert_stride;
  uint64_t row_stride;
  uint64_t column_stride;
};

struct ExpertsArgs {
  MatrixView weight;  // a part for each matrix: gate and up of each expert, or its down-projection
  ScaleView scales;   // of the weight, if it is FP8
  const void* x;      // of gate and up: the tokens. Of the down-projection: the state between the layers
  void* out;
  const uint32_t* ids;      // [tokens, top_k], from first_expert on; other numbers than those of experts add nothing
  const uint32_t* factors;  // [tokens, top_k], bits of floats
  float scaling_factor;
  LinearEpilogue epilogue;
  experts::Layout layout;
  uint32_t tokens;
  uint32_t top_k;
  uint32_t experts;
  uint32_t first_expert;
  uint32_t block_outputs;
  uint32_t unit_rows;    // rows of a weight tile: of gate and up together, or of the down-projection
  uint32_t stages;       // of the block, or of a warp of the down-projection
  uint32_t stage_boxes;  // of the down-projection
};

using ExpertsKernel = void (*)(ExpertsArgs);

// W: type of the weights.
template <OperandType W, DataType D>
struct ExpertsKernels {
  // Returns nullptr if there is no such kernel. Defined in experts.cuh, which the generated translation units include.
  static ExpertsKernel find(bool is_gated, uint32_t rows);
};

extern template struct ExpertsKernels<OperandType::kBFloat16, DataType::kBFloat16>;
extern template struct ExpertsKernels<OperandType::kFloat16, DataType::kFloat16>;
extern template struct ExpertsKernels<OperandType::kFloat8, DataType::kBFloat16>;
extern template struct ExpertsKernels<OperandType::kFloat8, DataType::kFloat16>;

// Returns nullptr for targets without tiles.
inline ExpertsKernel find_experts_kernel(OperandType weights, DataType type, bool is_gated, uint32_t rows) {
  if constexpr (!kHasTiles) {
    return nullptr;
  } else if (weights == OperandType::kFloat8) {
    return type == DataType::kBFloat16 ? ExpertsKernels<OperandType::kFloat8, DataType::kBFloat16>::find(is_gated, rows)
                                       : ExpertsKernels<OperandType::kFloat8, DataType::kFloat16>::find(is_gated, rows);
  } else {
    return type == DataType::kBFloat16
               ? ExpertsKernels<OperandType::kBFloat16, DataType::kBFloat16>::find(is_gated, rows)
               : ExpertsKernels<OperandType::kFloat16, DataType::kFloat16>::find(is_gated, rows);
  }
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
