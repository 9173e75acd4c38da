// Reference results of operations, computed element by element on the host. For tests.
#pragma once

#include "llm_comm/reduce.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Calls call.operator()<D>() for a type whose elements are added.
template <class Call>
inline uint32_t for_type(DataType type, Call call) {
  switch (type) {
    case DataType::kBFloat16:
      return call.template operator()<DataType::kBFloat16>();
    case DataType::kFloat16:
      return call.template operator()<DataType::kFloat16>();
    case DataType::kByte:  // bytes are not added
    case DataType::kFloat32:
      break;
  }
  return call.template operator()<DataType::kFloat32>();
}

// Sum of one element as reduce.cuh defines it, as bits; value(r) returns rank r's element.
template <class Value>
inline uint32_t sum_of_one(DataType type, uint32_t world, Value value) {
  return for_type(type, [&]<DataType D>() -> uint32_t {
    using E = Element<D>;
    float total = E::value(static_cast<typename E::Storage>(value(0)));
    for (uint32_t rank = 1; rank < world; ++rank) total += E::value(static_cast<typename E::Storage>(value(rank)));
    return E::round(total);
  });
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
