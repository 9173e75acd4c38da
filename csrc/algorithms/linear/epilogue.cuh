// What becomes of the products of a linear layer.
#pragma once

#include "algorithms/linear/problem.h"
#include "llm_comm/reduce.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

template <LinearEpilogue E>
inline constexpr uint32_t kWeightParts = weight_parts(E);

// Of products that are rounded as the outputs of a plain layer are. So the bits are those of silu-and-mul behind one.
template <DataType D>
LLM_COMM_DEVICE uint16_t silu_and_mul(uint16_t gate_bits, uint16_t up_bits) {
  const float gate = Element<D>::value(gate_bits);
  const float up = Element<D>::value(up_bits);
  return Element<D>::round(gate / (1.0f + exponential(-gate)) * up);
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
