// The kernels of linear layers by data type and rows of a box of x. They are compiled in translation units of their own, which CMake
// makes (cmake/algorithms.cmake): for GPUs with the instructions that only one architecture has.
#pragma once

#include "algorithms/linear/args.h"
#include "llm_comm/data_type.h"

namespace llm_comm::inline LLM_COMM_TARGET {

using LinearKernel = void (*)(LinearArgs);

template <DataType D>
struct LinearKernels {
  // nullptr where there is no such kernel. Defined in kernel.cuh, for the translation unit that compiles them.
  static LinearKernel find(uint32_t token_rows);
};

extern template struct LinearKernels<DataType::kBFloat16>;
extern template struct LinearKernels<DataType::kFloat16>;

inline LinearKernel find_linear_kernel(DataType type, uint32_t token_rows) {
  if (type == DataType::kBFloat16) return LinearKernels<DataType::kBFloat16>::find(token_rows);
  if (type == DataType::kFloat16) return LinearKernels<DataType::kFloat16>::find(token_rows);
  return nullptr;
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
