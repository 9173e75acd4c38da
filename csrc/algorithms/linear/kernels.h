// The kernels of linear layers by data type, epilogue and rows of a box of x. They are compiled in translation units of their own, which
// CMake makes (cmake/algorithms.cmake): for GPUs with the instructions that only one architecture has.
#pragma once

#include "algorithms/linear/args.h"
#include "algorithms/linear/problem.h"
#include "llm_comm/data_type.h"

namespace llm_comm::inline LLM_COMM_TARGET {

using LinearKernel = void (*)(LinearArgs);

template <DataType D, LinearEpilogue E>
struct LinearKernels {
  // nullptr where there is no such kernel. Defined in kernel.cuh, for the translation unit that compiles them.
  static LinearKernel find(uint32_t token_rows);
};

extern template struct LinearKernels<DataType::kBFloat16, LinearEpilogue::kNone>;
extern template struct LinearKernels<DataType::kBFloat16, LinearEpilogue::kSiluAndMul>;
extern template struct LinearKernels<DataType::kFloat16, LinearEpilogue::kNone>;
extern template struct LinearKernels<DataType::kFloat16, LinearEpilogue::kSiluAndMul>;

template <LinearEpilogue E>
LinearKernel find_linear_kernel(DataType type, uint32_t token_rows) {
  if (type == DataType::kBFloat16) return LinearKernels<DataType::kBFloat16, E>::find(token_rows);
  if (type == DataType::kFloat16) return LinearKernels<DataType::kFloat16, E>::find(token_rows);
  return nullptr;
}

inline LinearKernel find_linear_kernel(DataType type, LinearEpilogue epilogue, uint32_t token_rows) {
  if (epilogue == LinearEpilogue::kSiluAndMul) {
    return find_linear_kernel<LinearEpilogue::kSiluAndMul>(type, token_rows);
  }
  return find_linear_kernel<LinearEpilogue::kNone>(type, token_rows);
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
