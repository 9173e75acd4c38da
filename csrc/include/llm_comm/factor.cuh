// Elements of matrix operands as floats, for targets without tensor-core instructions (the emulator).
#pragma once

#include "llm_comm/fp8.cuh"
#include "llm_comm/reduce.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

template <FactorType F>
struct Factor {
  uint16_t bits;
  LLM_COMM_DEVICE float value() const {
    return Element < F == FactorType::kBFloat16 ? DataType::kBFloat16 : DataType::kFloat16 > ::value(bits);
  }
};

template <>
struct Factor<FactorType::kFloat8> {
  uint8_t bits;
  LLM_COMM_DEVICE float value() const { return e4m3_to_float(bits); }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
