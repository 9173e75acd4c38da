// Reduction in rank order 0..N-1, accumulated in fp32 and rounded once. Every algorithm whose ranks add uses these
// functions, so all of them return the same bits for an element.
#pragma once

#include "llm_comm/data_type.h"
#include "llm_comm/platform.cuh"
#include "llm_comm/ranks.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Storage type and conversions of an element type. Types of two bytes: high_value(word) is the value in the upper half
// of a word, round_two(low, high) a word of two values.
template <DataType D>
struct Element;

template <>
struct Element<DataType::kBFloat16> {
  using Storage = uint16_t;
  static LLM_COMM_DEVICE float value(uint16_t bits) { return bits_to_float(static_cast<uint32_t>(bits) << 16); }
  static LLM_COMM_DEVICE uint16_t round(float value) { return float_to_bf16(value); }
  static LLM_COMM_DEVICE float high_value(uint32_t word) { return bits_to_float(word & 0xFFFF0000u); }
  static LLM_COMM_DEVICE uint32_t round_two(float low, float high) { return floats_to_bf16(low, high); }
};

template <>
struct Element<DataType::kFloat16> {
  using Storage = uint16_t;
  static LLM_COMM_DEVICE float value(uint16_t bits) { return fp16_to_float(bits); }
  static LLM_COMM_DEVICE uint16_t round(float value) { return float_to_fp16(value); }
  static LLM_COMM_DEVICE float high_value(uint32_t word) { return value(static_cast<uint16_t>(word >> 16)); }
  static LLM_COMM_DEVICE uint32_t round_two(float low, float high) { return floats_to_fp16(low, high); }
};

template <>
struct Element<DataType::kFloat32> {
  using Storage = uint32_t;
  static LLM_COMM_DEVICE float value(uint32_t bits) { return bits_to_float(bits); }
  static LLM_COMM_DEVICE uint32_t round(float value) { return float_to_bits(value); }
};

// Bytes can be moved but not added.
template <>
struct Element<DataType::kByte> {
  using Storage = uint8_t;
};

// Adjacent elements that one thread loads, adds and stores together.
template <DataType D, uint32_t Width>
struct alignas(sizeof(typename Element<D>::Storage) * Width) Pack {
  typename Element<D>::Storage element[Width];
};

// Sum of packs in registers, added in rank order. The sum starts from rank 0's value, not from +0.0, so that -0.0
// survives where all ranks hold it.
template <DataType D, uint32_t Width>
class RunningSum {
  using E = Element<D>;

 public:
  LLM_COMM_DEVICE void add(bool is_first, const Pack<D, Width>& contribution) {
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < Width; ++i) {
      const float value = E::value(contribution.element[i]);
      sum_[i] = is_first ? value : sum_[i] + value;
    }
  }
  LLM_COMM_DEVICE Pack<D, Width> round() const {
    Pack<D, Width> sums;
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < Width; ++i) sums.element[i] = E::round(sum_[i]);
    return sums;
  }

 private:
  float sum_[Width] = {};
};

// Adds packs of all ranks that lie `stride` packs apart; pack r is rank r's contribution. The sum starts as in
// RunningSum.
template <DataType D, int World, uint32_t Width>
LLM_COMM_DEVICE Pack<D, Width> sum_in_rank_order(const Pack<D, Width>* packs, uint32_t stride,
                                                 Ranks<World> ranks = Ranks<World>()) {
  using E = Element<D>;
  if constexpr (!kIsExactWorld<World>) {
    RunningSum<D, Width> sum;
    add_in_batches<Pack<D, Width>>(
        ranks.count(), [&](uint32_t r) { return packs[r * stride]; },
        [&](bool is_first, const Pack<D, Width>& contribution) { sum.add(is_first, contribution); });
    return sum.round();
  } else {
    Pack<D, Width> contribution[World];
    LLM_COMM_UNROLL(8)
    for (int r = 0; r < World; ++r) contribution[r] = packs[r * stride];
    Pack<D, Width> sums;
    LLM_COMM_UNROLL(4)
    for (uint32_t i = 0; i < Width; ++i) {
      float sum = E::value(contribution[0].element[i]);
      LLM_COMM_UNROLL(8)
      for (int r = 1; r < World; ++r) sum += E::value(contribution[r].element[i]);
      sums.element[i] = E::round(sum);
    }
    return sums;
  }
}

// Adds lines in registers; contribution[r] is rank r's.
template <DataType D, int World>
LLM_COMM_DEVICE Line sum_lines(const Line (&contribution)[World]) {
  using E = Element<D>;
  constexpr uint32_t kBits = 8 * sizeof(typename E::Storage);
  const auto value = [&](int r, uint32_t word, uint32_t shift) {
    return E::value(static_cast<typename E::Storage>(contribution[r].word[word] >> shift));
  };
  Line sums{};
  LLM_COMM_UNROLL(4)
  for (uint32_t word = 0; word < 4; ++word) {
    LLM_COMM_UNROLL(2)
    for (uint32_t shift = 0; shift < 32; shift += kBits) {
      float sum = value(0, word, shift);
      LLM_COMM_UNROLL(8)
      for (int r = 1; r < World; ++r) sum += value(r, word, shift);
      sums.word[word] |= static_cast<uint32_t>(E::round(sum)) << shift;
    }
  }
  return sums;
}

// Adds rank `rank`'s own line and the lines of the other ranks, which are given in rank order.
template <DataType D, int World>
LLM_COMM_DEVICE Line sum_with_others(uint32_t rank, Line own, const Line (&others)[World - 1]) {
  if constexpr (World == 2) {
    // A sum of two values does not depend on their order.
    return sum_lines<D, 2>({own, others[0]});
  } else {
    Line contribution[World];
    LLM_COMM_UNROLL(8)
    for (uint32_t r = 0; r < World; ++r) {
      const Line& before = others[r == World - 1 ? World - 2 : r];
      const Line& behind = others[r == 0 ? 0 : r - 1];
      contribution[r] = r == rank ? own : r < rank ? before : behind;
    }
    return sum_lines<D, World>(contribution);
  }
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
