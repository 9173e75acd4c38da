// Reference results of collectives that exchange quantized values, computed element by element on the host. For tests.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "algorithms/launch_shape.h"
#include "algorithms/quantized.cuh"
#include "algorithms/reference.h"

namespace llm_comm::inline LLM_COMM_TARGET {

// Replaces the values of a block by what their codes mean (quantized.cuh).
template <Wire W>
inline void quantize_and_back(std::vector<float>& block) {
  float amax = 0.0f;
  bool escapes = false;
  for (const float x : block) {
    if (std::isfinite(x)) {
      amax = std::max(amax, std::fabs(x));
    } else {
      escapes = true;
    }
  }
  const float reciprocal = escapes ? Code<W>::kReciprocalOfFinite : Code<W>::kReciprocal;
  const float scale = std::max(amax * reciprocal, kSmallestQuantizedScale);
  const float inverse = 1.0f / scale;
  for (float& x : block) {
    if (std::isnan(x)) x = std::bit_cast<float>(0x7FFFFFFFu);
    if (!std::isfinite(x)) continue;
    const float scaled[4] = {x * inverse};
    float values[4];
    Code<W>::values(Code<W>::four(scaled), values);
    x = values[0] * scale;
  }
}

// Element i of a sum of `count` elements that `owner` adds, as bits; input(r, j) returns element j of rank r.
// `quantizes_sum`: as all-reduces do, which send the sums.
template <Wire W, class Input>
inline uint32_t quantized_sum_of_owner(DataType type, uint32_t world, uint64_t count, uint64_t owner, uint64_t i,
                                       Input input, bool quantizes_sum) {
  return for_type(type, [&]<DataType D>() -> uint32_t {
    using E = Element<D>;
    const uint64_t first = i / kQuantizedBlock * kQuantizedBlock;
    const uint64_t elements = count - first < kQuantizedBlock ? count - first : kQuantizedBlock;
    std::vector<float> sum(elements);
    for (uint32_t rank = 0; rank < world; ++rank) {
      std::vector<float> block(elements);
      for (uint64_t j = 0; j < elements; ++j) {
        block[j] = E::value(static_cast<typename E::Storage>(input(rank, first + j)));
      }
      if (rank != owner) quantize_and_back<W>(block);
      for (uint64_t j = 0; j < elements; ++j) sum[j] = rank == 0 ? block[j] : sum[j] + block[j];
    }
    if (quantizes_sum) quantize_and_back<W>(sum);
    return E::round(sum[i - first]);
  });
}

// Element i of an all-reduce of `count` elements in which each rank adds `slice` of them, in whole blocks, as bits.
template <Wire W, class Input>
inline uint32_t quantized_sum_of_one(DataType type, uint32_t world, uint64_t count, uint64_t slice, uint64_t i,
                                     Input input) {
  return quantized_sum_of_owner<W>(type, world, count, i / slice, i, input, true);
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
