// Activations of gated MLPs in the epilogue of a linear layer.
#pragma once

#include "algorithms/linear/problem.h"
#include "llm_comm/reduce.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Returns 2u for gelu(g) = g (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (g + 0.044715 g^3) (Hendrycks and Gimpel, arXiv
// 1606.08415).
LLM_COMM_DEVICE float twice_gelu_tanh_argument(float gate) {
  constexpr float kOfGate = 1.5957691216057308f;   // 2 sqrt(2 / pi)
  constexpr float kOfCube = 0.07135481627159634f;  // 0.044715 * kOfGate
  return gate * multiply_add(kOfCube, gate * gate, kOfGate);
}

// Returns activation(gate) * up, computed in fp32 and rounded once. Gate and up are already rounded to D, as the
// outputs of a plain layer are. So the result is bitwise that of the same activation in a kernel after a plain layer.
// silu(g) = g / (1 + exp(-g)). gelu(g) = g / (1 + exp(-2u)), because (1 + tanh(u)) / 2 is the logistic function of 2u.
template <DataType D>
LLM_COMM_DEVICE uint16_t activate_and_mul(LinearEpilogue epilogue, uint16_t gate_bits, uint16_t up_bits) {
  const float gate = Element<D>::value(gate_bits);
  const float up = Element<D>::value(up_bits);
  const float exponent = epilogue == LinearEpilogue::kSiluAndMul ? gate : twice_gelu_tanh_argument(gate);
  return Element<D>::round(gate / (1.0f + exponential(-exponent)) * up);
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
