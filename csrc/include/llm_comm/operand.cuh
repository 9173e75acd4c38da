// Elements of matrix operands as floats, for targets without tensor-core instructions (the emulator).
#pragma once

#include "llm_comm/fp8.cuh"
#include "llm_comm/reduce.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

template <OperandType F>
struct Operand {
  uint16_t bits;
  LLM_COMM_DEVICE float value() const {
    return Element < F == OperandType::kBFloat16 ? DataType::kBFloat16 : DataType::kFloat16 > ::value(bits);
  }
};

template <>
struct Operand<OperandType::kFloat8> {
  uint8_t bits;
  LLM_COMM_DEVICE float value() const { return e4m3_to_float(bits); }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
