// Look-up of the linear layer kernels by operand and result type, weight parts, block scales, and rows of a tile of x.
// CMake generates the translation units that compile them (cmake/algorithms.cmake). They are separate because they are
// also compiled for targets with architecture-specific instructions, such as sm_90a.
#pragma once

#include "algorithms/linear/args.h"
#include "algorithms/linear/problem.h"
#include "llm_comm/data_type.h"

namespace llm_comm::inline LLM_COMM_TARGET {

using LinearKernel = void (*)(LinearArgs);

template <OperandType F, DataType D, uint32_t Parts, bool BlockScales = false>
struct LinearKernels {
  // Returns nullptr if there is no such kernel. Defined in kernel.cuh, which the generated translation units include.
  static LinearKernel find(uint32_t token_rows);
};

extern template struct LinearKernels<OperandType::kBFloat16, DataType::kBFloat16, 1>;
extern template struct LinearKernels<OperandType::kBFloat16, DataType::kBFloat16, 2>;
extern template struct LinearKernels<OperandType::kFloat16, DataType::kFloat16, 1>;
extern template struct LinearKernels<OperandType::kFloat16, DataType::kFloat16, 2>;
extern template struct LinearKernels<OperandType::kFloat8, DataType::kBFloat16, 1>;
extern template struct LinearKernels<OperandType::kFloat8, DataType::kBFloat16, 2>;
extern template struct LinearKernels<OperandType::kFloat8, DataType::kFloat16, 1>;
extern template struct LinearKernels<OperandType::kFloat8, DataType::kFloat16, 2>;
extern template struct LinearKernels<OperandType::kFloat8, DataType::kBFloat16, 1, true>;
extern template struct LinearKernels<OperandType::kFloat8, DataType::kBFloat16, 2, true>;
extern template struct LinearKernels<OperandType::kFloat8, DataType::kFloat16, 1, true>;
extern template struct LinearKernels<OperandType::kFloat8, DataType::kFloat16, 2, true>;

template <OperandType F, DataType D, bool BlockScales = false>
LinearKernel find_linear_kernel(LinearEpilogue epilogue, uint32_t token_rows) {
  if constexpr (!kHasTiles) {
    return nullptr;
  } else {
    return weight_parts(epilogue) == 1 ? LinearKernels<F, D, 1, BlockScales>::find(token_rows)
                                       : LinearKernels<F, D, 2, BlockScales>::find(token_rows);
  }
}

// The operand and result type must be served together (linear::serves() in layer.h). Other pairs find a wrong kernel.
// Returns nullptr for targets without tiles.
inline LinearKernel find_linear_kernel(OperandType operands, DataType type, LinearEpilogue epilogue, bool block_scales,
                                       uint32_t token_rows) {
  const bool is_bf16 = type == DataType::kBFloat16;
  if (block_scales) {
    return is_bf16 ? find_linear_kernel<OperandType::kFloat8, DataType::kBFloat16, true>(epilogue, token_rows)
                   : find_linear_kernel<OperandType::kFloat8, DataType::kFloat16, true>(epilogue, token_rows);
  }
  if (operands == OperandType::kFloat8) {
    return is_bf16 ? find_linear_kernel<OperandType::kFloat8, DataType::kBFloat16>(epilogue, token_rows)
                   : find_linear_kernel<OperandType::kFloat8, DataType::kFloat16>(epilogue, token_rows);
  }
  return is_bf16 ? find_linear_kernel<OperandType::kBFloat16, DataType::kBFloat16>(epilogue, token_rows)
                 : find_linear_kernel<OperandType::kFloat16, DataType::kFloat16>(epilogue, token_rows);
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
