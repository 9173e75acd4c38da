// Reference results of operations, computed element by element on the host. For tests.
#pragma once

#include "llm_comm/reduce.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Sum of one element as reduce.cuh defines it, as bits; value(r) returns rank r's element.
template <class Value>
inline uint32_t sum_of_one(DataType type, uint32_t world, Value value) {
  const auto sum = [&]<DataType D>() -> uint32_t {
    using E = Element<D>;
    float total = E::value(static_cast<typename E::Storage>(value(0)));
    for (uint32_t rank = 1; rank < world; ++rank) total += E::value(static_cast<typename E::Storage>(value(rank)));
    return E::round(total);
  };
  switch (type) {
    case DataType::kBFloat16:
      return sum.template operator()<DataType::kBFloat16>();
    case DataType::kFloat16:
      return sum.template operator()<DataType::kFloat16>();
    case DataType::kByte:  // bytes are not added
    case DataType::kFloat32:
      break;
  }
  return sum.template operator()<DataType::kFloat32>();
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
