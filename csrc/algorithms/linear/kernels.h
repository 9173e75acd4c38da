// The kernels of linear layers by types of factors and results, parts of the weight, scales of blocks and rows of a box
// of x. They are compiled in translation units of their own, which CMake makes (cmake/algorithms.cmake): for GPUs with
// the instructions that only one architecture has.
#pragma once

#include "algorithms/linear/args.h"
#include "algorithms/linear/problem.h"
#include "llm_comm/data_type.h"

namespace llm_comm::inline LLM_COMM_TARGET {

using LinearKernel = void (*)(LinearArgs);

template <FactorType F, DataType D, uint32_t Parts, bool BlockScales = false>
struct LinearKernels {
  // nullptr where there is no such kernel. Defined in kernel.cuh, for the translation unit that compiles them.
  static LinearKernel find(uint32_t token_rows);
};

extern template struct LinearKernels<FactorType::kBFloat16, DataType::kBFloat16, 1>;
extern template struct LinearKernels<FactorType::kBFloat16, DataType::kBFloat16, 2>;
extern template struct LinearKernels<FactorType::kFloat16, DataType::kFloat16, 1>;
extern template struct LinearKernels<FactorType::kFloat16, DataType::kFloat16, 2>;
extern template struct LinearKernels<FactorType::kFloat8, DataType::kBFloat16, 1>;
extern template struct LinearKernels<FactorType::kFloat8, DataType::kBFloat16, 2>;
extern template struct LinearKernels<FactorType::kFloat8, DataType::kFloat16, 1>;
extern template struct LinearKernels<FactorType::kFloat8, DataType::kFloat16, 2>;
extern template struct LinearKernels<FactorType::kFloat8, DataType::kBFloat16, 1, true>;
extern template struct LinearKernels<FactorType::kFloat8, DataType::kBFloat16, 2, true>;
extern template struct LinearKernels<FactorType::kFloat8, DataType::kFloat16, 1, true>;
extern template struct LinearKernels<FactorType::kFloat8, DataType::kFloat16, 2, true>;

template <FactorType F, DataType D, bool BlockScales = false>
LinearKernel find_linear_kernel(LinearEpilogue epilogue, uint32_t token_rows) {
  return weight_parts(epilogue) == 1 ? LinearKernels<F, D, 1, BlockScales>::find(token_rows)
                                     : LinearKernels<F, D, 2, BlockScales>::find(token_rows);
}

// Of types that are served (layer.h).
inline LinearKernel find_linear_kernel(FactorType factors, DataType type, LinearEpilogue epilogue, bool block_scales,
                                       uint32_t token_rows) {
  const bool is_bf16 = type == DataType::kBFloat16;
  if (block_scales) {
    return is_bf16 ? find_linear_kernel<FactorType::kFloat8, DataType::kBFloat16, true>(epilogue, token_rows)
                   : find_linear_kernel<FactorType::kFloat8, DataType::kFloat16, true>(epilogue, token_rows);
  }
  if (factors == FactorType::kFloat8) {
    return is_bf16 ? find_linear_kernel<FactorType::kFloat8, DataType::kBFloat16>(epilogue, token_rows)
                   : find_linear_kernel<FactorType::kFloat8, DataType::kFloat16>(epilogue, token_rows);
  }
  return is_bf16 ? find_linear_kernel<FactorType::kBFloat16, DataType::kBFloat16>(epilogue, token_rows)
                 : find_linear_kernel<FactorType::kFloat16, DataType::kFloat16>(epilogue, token_rows);
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
