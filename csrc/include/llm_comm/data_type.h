// Element types of messages and matrices: one enumeration for device code, the host and Python.
#pragma once

#include "llm_comm/platform_types.h"

namespace llm_comm {

// kByte: elements of any type, for operations that move data and add nothing.
enum class DataType : uint32_t { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2, kByte = 3 };

inline constexpr uint32_t kDataTypes = 4;

LLM_COMM_HOST constexpr uint32_t element_bytes(DataType type) {
  return type == DataType::kFloat32 ? 4 : type == DataType::kByte ? 1 : 2;
}

LLM_COMM_HOST constexpr bool is_number(DataType type) { return type != DataType::kByte; }

LLM_COMM_HOST constexpr const char* data_type_name(DataType type) {
  switch (type) {
    case DataType::kBFloat16:
      return "bf16";
    case DataType::kFloat16:
      return "fp16";
    case DataType::kFloat32:
      return "fp32";
    case DataType::kByte:
      return "byte";
  }
  return "unknown data type";
}

// Element types of matrix operands. FP8 is e4m3 (fp8.cuh).
enum class OperandType : uint32_t { kBFloat16 = 0, kFloat16 = 1, kFloat8 = 2 };

LLM_COMM_HOST_DEVICE constexpr uint32_t operand_bytes(OperandType type) { return type == OperandType::kFloat8 ? 1 : 2; }

LLM_COMM_HOST constexpr const char* operand_type_name(OperandType type) {
  switch (type) {
    case OperandType::kBFloat16:
      return "bf16";
    case OperandType::kFloat16:
      return "fp16";
    case OperandType::kFloat8:
      return "fp8";
  }
  return "unknown data type";
}

}  // namespace llm_comm
