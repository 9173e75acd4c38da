// Emulator definitions of the tile contract (tiles.cuh). The first lane performs a fetch when it is requested. Each
// thread computes its sums in plain code. The rows of a tile lie one after the other, without a swizzle.
#pragma once

#include <utility>

#include "llm_comm/fragment.cuh"
#include "llm_comm/matrix_view.h"
#include "llm_comm/operand.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr uint32_t kFetchArrivals = 1;
inline constexpr uint32_t kNumberArrivals = 0;

using SharedAddress = char*;

LLM_COMM_DEVICE uint32_t same_in_warp(uint32_t value) { return value; }

LLM_COMM_DEVICE void warp_sync() { emulator::warp_exchange(0.0f, 0); }

LLM_COMM_DEVICE uint32_t largest_of_lanes(uint32_t value) {
  // Halves are exact as floats; the bits of some words would not survive as those of a float.
  const auto of_other = [](uint32_t half, uint32_t mask) {
    return static_cast<uint32_t>(shuffle_xor(static_cast<float>(half), mask));
  };
  for (uint32_t mask = 1; mask < kWarpThreads; mask *= 2) {
    const uint32_t high = of_other(value >> 16, mask);
    const uint32_t other = high << 16 | of_other(value & 0xFFFF, mask);
    if (other > value) value = other;
  }
  return value;
}

LLM_COMM_DEVICE SharedAddress tile_memory() { return shared_memory<char>(); }

template <class T>
LLM_COMM_DEVICE T* pointer_to(SharedAddress place) {
  return reinterpret_cast<T*>(place);
}

LLM_COMM_DEVICE bool is_first_lane() { return thread_index() % kWarpThreads == 0; }

// Barrier word: completed phases from bit 32, arrivals per phase from bit 16, arrivals missing in this phase from bit
// 0.
LLM_COMM_DEVICE void barrier_init(SharedAddress barrier, uint32_t arrivals) {
  if (is_first_lane()) *pointer_to<uint64_t>(barrier) = uint64_t{arrivals} << 16 | arrivals;
}

LLM_COMM_DEVICE void barrier_init_fence() {}

LLM_COMM_DEVICE void barrier_arrive(SharedAddress barrier) {
  auto& state = *pointer_to<uint64_t>(barrier);
  state -= 1;
  if ((state & 0xFFFF) == 0) state += (uint64_t{1} << 32) + (state >> 16 & 0xFFFF);
}

LLM_COMM_DEVICE void barrier_wait(SharedAddress barrier, uint32_t parity) {
  while ((*pointer_to<uint64_t>(barrier) >> 32 & 1) == parity) emulator::yield();
}

LLM_COMM_DEVICE void fetch_begin(SharedAddress, uint32_t) {}

template <uint32_t Parts, bool OfMany = (Parts > 1)>
LLM_COMM_DEVICE void fetch_boxes(SharedAddress to, const MatrixView& matrix, uint32_t row, uint32_t box, uint32_t rows,
                                 uint32_t boxes, SharedAddress, BoxUse, uint32_t first_part = 0) {
  if (!is_first_lane()) return;
  auto* line = pointer_to<Line>(to);
  for (uint32_t b = box; b < box + boxes; ++b) {
    for (uint32_t i = 0; i < rows; ++i) {
      const uint32_t part = first_part + i / (rows / Parts);
      const uint32_t r = row + i % (rows / Parts);
      for (uint32_t byte = b * kBoxRowBytes; byte < (b + 1) * kBoxRowBytes; byte += sizeof(Line)) {
        const bool is_there = r < matrix.rows && byte < matrix.row_bytes;
        const uint64_t row_of_all = uint64_t{part} * matrix.rows + r;
        const auto* const from = static_cast<const char*>(matrix.data) + row_of_all * matrix.row_bytes + byte;
        *line++ = is_there ? load_line(from) : Line{};
      }
    }
  }
}

LLM_COMM_DEVICE void fetch_number(SharedAddress to, const float* from) { *pointer_to<float>(to) = load_plain(from); }

template <bool Numbers = false>
LLM_COMM_DEVICE void fetch_end(SharedAddress full) {
  if constexpr (Numbers) warp_sync();  // the numbers of all lanes
  if (is_first_lane()) barrier_arrive(full);
}

struct Box {
  SharedAddress place;
};

LLM_COMM_DEVICE Box box_at(SharedAddress place) { return {place}; }
LLM_COMM_DEVICE Box moved(Box box, uint32_t bytes) { return {box.place + bytes}; }

LLM_COMM_DEVICE void multiply_end() {}
template <uint32_t Groups, uint32_t N>
LLM_COMM_DEVICE void multiply_wait(float (&)[N]) {}

// Products are exact in fp32, also those of FP8. Sums are rounded to fp32 only; GPUs accumulate FP8 with fewer bits.
template <OperandType F, uint32_t N>
LLM_COMM_DEVICE void multiply_boxes(float (&sums)[N], Box outputs, uint32_t output_rows, Box tokens) {
  const uint32_t thread = thread_index() % kTeamThreads;
  for (uint32_t i = 0; i < N; ++i) {
    const uint32_t output = output_of(thread, i);
    if (output >= output_rows) continue;
    const auto* const weights = pointer_to<const Operand<F>>(outputs.place + output * kBoxRowBytes);
    const auto* const x = pointer_to<const Operand<F>>(tokens.place + token_of(thread, i) * kBoxRowBytes);
    constexpr uint32_t kColumns = kBoxRowBytes / sizeof(Operand<F>);
    for (uint32_t k = 0; k < kColumns; ++k) sums[i] = multiply_add(weights[k].value(), x[k].value(), sums[i]);
  }
}

// ---- Few tokens --------------------------------------------------------------------------------------------------

// A lane has the whole tokens of its sums.
inline constexpr uint32_t kTokenColumns = 2;
LLM_COMM_DEVICE uint32_t token_column(uint32_t lane, uint32_t c) { return token_of(lane, c); }
LLM_COMM_DEVICE uint32_t row_of_sum(uint32_t lane, uint32_t i) { return output_of(lane, i); }
inline constexpr uint32_t kLanesToNextRow = 4;

template <OperandType W>
struct TokenPieces {
  Line line[kBoxRowBytes / operand_bytes(W) * 2 / sizeof(Line)];
};

template <OperandType W>
LLM_COMM_DEVICE TokenPieces<W> load_pieces(uint32_t, const char* from) {
  TokenPieces<W> pieces;
  for (Line& line : pieces.line) line = load_line(std::exchange(from, from + sizeof(Line)));
  return pieces;
}

struct RowPieces {
  // Rows row_of_sum(lane, 0) and row_of_sum(lane, 2). Their pieces are like those of tokens.
  TokenPieces<OperandType::kBFloat16> row[2];
};

LLM_COMM_DEVICE RowPieces load_row_pieces(uint32_t lane, const char* from, uint32_t row_bytes, uint32_t rows) {
  RowPieces pieces;
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t row = row_of_sum(lane, 2 * i);
    pieces.row[i] = load_pieces<OperandType::kBFloat16>(lane, from + uint64_t{row < rows ? row : rows - 1} * row_bytes);
  }
  return pieces;
}

namespace tiles {

// Products of two rows of a tile and two tokens. `rows`: where the two rows begin.
template <OperandType F, OperandType W, uint32_t N>
LLM_COMM_DEVICE void multiply_pairs(float (&sums)[N][2][4], const void* const (&rows)[2],
                                    const TokenPieces<W> (&tokens)[N][kTokenColumns]) {
  constexpr uint32_t kColumns = kBoxRowBytes / sizeof(Operand<W>);
  for (uint32_t i = 0; i < 4 * N; ++i) {
    const auto* const weights = static_cast<const Operand<W>*>(rows[i % 4 / 2]);
    const auto* const x = reinterpret_cast<const Operand<F>*>(tokens[i / 4][i % 2].line);
    for (uint32_t k = 0; k < kColumns; ++k) {
      float& sum = sums[i / 4][k / (kColumns / 2)][i % 4];
      sum = multiply_add(weights[k].value(), x[k].value(), sum);
    }
  }
}

}  // namespace tiles

template <OperandType F>
LLM_COMM_DEVICE void multiply_rows(float (&sums)[1][2][4], const RowPieces& rows,
                                   const TokenPieces<F> (&tokens)[1][kTokenColumns]) {
  tiles::multiply_pairs<F, F>(sums, {rows.row[0].line, rows.row[1].line}, tokens);
}

template <OperandType F, OperandType W, uint32_t N>
LLM_COMM_DEVICE void multiply_rows(float (&sums)[N][2][4], SharedAddress place,
                                   const TokenPieces<W> (&tokens)[N][kTokenColumns]) {
  const uint32_t lane = thread_index() % kWarpThreads;
  const auto row = [&](uint32_t i) { return place + row_of_sum(lane, i) * kBoxRowBytes; };
  tiles::multiply_pairs<F, W>(sums, {row(0), row(2)}, tokens);
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
