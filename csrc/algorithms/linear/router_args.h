// Parameters of the router's kernel.
#pragma once

#include "algorithms/linear/router.h"
#include "llm_comm/data_type.h"

namespace llm_comm::inline LLM_COMM_TARGET {

struct RouterArgs {
  const char* x;         // [tokens, hidden]
  const char* weight;    // [experts, hidden]
  const uint16_t* bias;  // [experts] or nullptr
  uint16_t* logits;      // [tokens, experts]
  uint32_t* weights;     // [tokens, top_k], bits of floats
  uint32_t* ids;         // [tokens, top_k]
  uint32_t tokens;
  uint32_t experts;
  uint32_t top_k;
  uint32_t row_bytes;  // of x and of the weight
  router::Division division;
  uint32_t block_tokens;
  bool renormalize;
};

using RouterKernel = void (*)(RouterArgs);

template <OperandType F, DataType D>
struct RouterKernels {
  // Defined in router.cuh, which the generated translation units include.
  static RouterKernel find(uint32_t tokens);
};

extern template struct RouterKernels<OperandType::kBFloat16, DataType::kBFloat16>;
extern template struct RouterKernels<OperandType::kFloat16, DataType::kFloat16>;

// Returns nullptr for targets without tiles.
inline RouterKernel find_router_kernel(DataType type, uint32_t tokens) {
  if constexpr (!kHasTiles) {
    return nullptr;
  } else {
    return type == DataType::kBFloat16 ? RouterKernels<OperandType::kBFloat16, DataType::kBFloat16>::find(tokens)
                                       : RouterKernels<OperandType::kFloat16, DataType::kFloat16>::find(tokens);
  }
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
