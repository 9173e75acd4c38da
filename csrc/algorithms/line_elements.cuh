// The elements of a line: as floats, and where a tensor is only element-aligned or a line partial, one at a time.
#pragma once

#include "llm_comm/reduce.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// The values of a line. Functions take and return them by value: LLM_COMM_DEVICE_CALL then passes registers.
template <uint32_t N>
struct Values {
  float of[N];
};

// The elements of a line, as floats, and back. Two values are rounded by one instruction.
template <DataType D>
struct LineElements {
  using E = Element<D>;
  using Storage = typename E::Storage;
  static constexpr uint32_t kCount = sizeof(Line) / sizeof(Storage);

  static LLM_COMM_DEVICE Values<kCount> values(Line line) {
    Values<kCount> x;
    LLM_COMM_UNROLL(4)
    for (uint32_t word = 0; word < 4; ++word) {
      if constexpr (kCount == 4) {
        x.of[word] = E::value(line.word[word]);
      } else {
        x.of[2 * word] = E::value(static_cast<Storage>(line.word[word]));
        x.of[2 * word + 1] = E::high_value(line.word[word]);
      }
    }
    return x;
  }
  static LLM_COMM_DEVICE Line round(const Values<kCount>& x) {
    Line line;
    LLM_COMM_UNROLL(4)
    for (uint32_t word = 0; word < 4; ++word) {
      if constexpr (kCount == 4) {
        line.word[word] = E::round(x.of[word]);
      } else {
        line.word[word] = E::round_two(x.of[2 * word], x.of[2 * word + 1]);
      }
    }
    return line;
  }
};

// Loads the first `count` elements of an unaligned or partial line; the rest is zeros.
template <DataType D>
LLM_COMM_DEVICE_CALL Line load_elements(const typename Element<D>::Storage* first, uint64_t count) {
  using Storage = typename Element<D>::Storage;
  constexpr uint32_t kPerLine = sizeof(Line) / sizeof(Storage);
  // Issues all loads before it uses any: a loop that stops at the end of the message would wait for each.
  Storage element[kPerLine];
  LLM_COMM_UNROLL(8)
  for (uint32_t i = 0; i < kPerLine; ++i) element[i] = i < count ? first[i] : 0;
  Line line{};
  LLM_COMM_UNROLL(8)
  for (uint32_t i = 0; i < kPerLine; ++i) {
    line.word[i * sizeof(Storage) / 4] |= static_cast<uint32_t>(element[i]) << (i * sizeof(Storage) % 4 * 8);
  }
  return line;
}

// Stores the first `count` elements of a line, at most all of them.
template <DataType D>
LLM_COMM_DEVICE_CALL void store_elements(typename Element<D>::Storage* first, uint64_t count, Line line) {
  using Storage = typename Element<D>::Storage;
  constexpr uint32_t kPerLine = sizeof(Line) / sizeof(Storage);
  LLM_COMM_UNROLL(8)
  for (uint32_t i = 0; i < kPerLine; ++i) {
    if (i < count) first[i] = static_cast<Storage>(line.word[i * sizeof(Storage) / 4] >> (i * sizeof(Storage) % 4 * 8));
  }
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
