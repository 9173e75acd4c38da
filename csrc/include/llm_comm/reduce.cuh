// Sums in rank order 0..N-1, accumulated in fp32 and rounded once: the one sum of every algorithm of this
// library.
#pragma once

#include "llm_comm/platform.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

enum class DataType : uint32_t { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

// Storage of an element, and its arithmetic.
template <DataType D>
struct Element;

template <>
struct Element<DataType::kBFloat16> {
  using Storage = uint16_t;
  static LLM_COMM_DEVICE float value(uint16_t bits) { return bits_to_float(static_cast<uint32_t>(bits) << 16); }
  static LLM_COMM_DEVICE uint16_t round(float value) { return float_to_bf16(value); }
};

template <>
struct Element<DataType::kFloat16> {
  using Storage = uint16_t;
  static LLM_COMM_DEVICE float value(uint16_t bits) { return fp16_to_float(bits); }
  static LLM_COMM_DEVICE uint16_t round(float value) { return float_to_fp16(value); }
};

template <>
struct Element<DataType::kFloat32> {
  using Storage = uint32_t;
  static LLM_COMM_DEVICE float value(uint32_t bits) { return bits_to_float(bits); }
  static LLM_COMM_DEVICE uint32_t round(float value) { return float_to_bits(value); }
};

// Sums one element over World contributions that lie `stride` elements apart, contribution r being rank r's.
// The sum starts from rank 0's value, not from +0.0, so that -0.0 survives where all ranks hold it.
template <DataType D, int World>
LLM_COMM_DEVICE typename Element<D>::Storage sum_in_rank_order(const typename Element<D>::Storage* elements,
                                                               uint32_t stride) {
  using E = Element<D>;
  typename E::Storage contribution[World];
  LLM_COMM_UNROLL(8)
  for (int r = 0; r < World; ++r) contribution[r] = elements[r * stride];
  float sum = E::value(contribution[0]);
  LLM_COMM_UNROLL(8)
  for (int r = 1; r < World; ++r) sum += E::value(contribution[r]);
  return E::round(sum);
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
