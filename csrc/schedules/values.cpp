#include "schedules/values.h"

#include <cstdio>

#include "llm_comm/reduce.cuh"

namespace llm_comm::inline LLM_COMM_TARGET::schedules {

std::string hex(uint64_t value) {
  char text[20];
  std::snprintf(text, sizeof(text), "%#llx", static_cast<unsigned long long>(value));
  return text;
}

uint32_t draw_number(DataType type, Random& random) {
  const float value = static_cast<float>(static_cast<int32_t>(random.below(4096)) - 2048) / 64.0f;
  switch (type) {
    case DataType::kBFloat16:
      return Element<DataType::kBFloat16>::round(value);
    case DataType::kFloat16:
      return Element<DataType::kFloat16>::round(value);
    case DataType::kByte:
      return random.below(256);
    default:
      return Element<DataType::kFloat32>::round(value);
  }
}

uint32_t draw_value(DataType type, Random& random) {
  const uint32_t all_ones = type == DataType::kFloat32 ? 0xFFFFFFFFu : (1u << 8 * element_bytes(type)) - 1;
  const uint32_t sign = all_ones / 2 + 1;
  switch (random.below(16)) {
    case 0:
      return static_cast<uint32_t>(random.next()) & all_ones;  // includes NaN, infinities and subnormals
    case 1:
      return all_ones;  // the sentinel
    case 2:
      return sign;  // -0.0
    case 3:
      return all_ones - 1;  // encoding of the sentinel
    default:
      return draw_number(type, random);
  }
}

}  // namespace llm_comm::inline LLM_COMM_TARGET::schedules
