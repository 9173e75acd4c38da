// Lines quantized to 8 bits an element, in blocks of kQuantizedBlock elements with one scale each. For algorithms that
// send fewer bytes than the tensor has (option `wire`).
//
// A block of values x is quantized so:
//
//   scale = max(amax * Code::kReciprocal, 2^-126)     amax: the largest magnitude among the finite values
//   code  = x * (1 / scale), rounded to nearest even, at most Code::kLargest
//   value = code * scale
//
// All arithmetic is fp32, each operation rounded, so every target gets the same bits. A block with an infinity or a NaN
// stores its scale negated. Its finite values take the codes up to Code::kLargestFinite; the largest code then is an
// infinity, and Code::kNaN a NaN. The other values of its block keep their accuracy.
//
// Code::kReciprocal is 1 / Code::kLargest rounded down, so the largest finite value of a type stays finite.
#pragma once

#include "algorithms/line_elements.cuh"
#include "llm_comm/fp8.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

enum class Wire : uint32_t { kFP8, kInt8 };

// Measured: 128 misses the bar on the largest error, 32 costs more bytes (docs/experiments/wire.md).
inline constexpr uint32_t kQuantizedBlock = 64;
inline constexpr float kSmallestQuantizedScale = 0x1p-126f;  // the smallest normal: its reciprocal is finite
inline constexpr uint32_t kInfinityBits = 0x7F800000u;

// The product, rounded: the compiler does not contract it with an addition.
LLM_COMM_DEVICE float rounded_product(float a, float b) { return multiply_add(a, b, -0.0f); }

// Codes of one format. four(x): the codes of four scaled values, the first in the lowest byte. values(codes, x): the
// four values back.
template <Wire W>
struct Code;

template <>
struct Code<Wire::kFP8> {
  static constexpr float kLargest = 448.0f;        // OCP's format on all targets
  static constexpr float kLargestFinite = 416.0f;  // the next smaller e4m3 value
  static constexpr float kReciprocal = 0x1.249248p-9f;
  static constexpr float kReciprocalOfFinite = 0x1.3b13b0p-9f;
  static constexpr uint8_t kNaN = 0x7F;

  static LLM_COMM_DEVICE uint32_t four(const float (&x)[4]) {
    uint16_t low, high;
    if (convert_to_e4m3(x[0], x[1], low) && convert_to_e4m3(x[2], x[3], high)) return low | uint32_t{high} << 16;
    uint32_t codes = 0;
    for (int i = 0; i < 4; ++i) codes |= uint32_t{e4m3_from_bits(float_to_bits(x[i]))} << 8 * i;
    return codes;
  }
  static LLM_COMM_DEVICE void values(uint32_t codes, float (&x)[4]) {
    if (convert_from_e4m3(static_cast<uint16_t>(codes), x[0], x[1]) &&
        convert_from_e4m3(static_cast<uint16_t>(codes >> 16), x[2], x[3])) {
      return;
    }
    for (int i = 0; i < 4; ++i) x[i] = e4m3_to_float(static_cast<uint8_t>(codes >> 8 * i));
  }
};

template <>
struct Code<Wire::kInt8> {
  static constexpr float kLargest = 127.0f;
  static constexpr float kLargestFinite = 126.0f;
  static constexpr float kReciprocal = 0x1.020408p-7f;
  static constexpr float kReciprocalOfFinite = 0x1.041040p-7f;
  static constexpr uint8_t kNaN = 0x80;

  // Adding 1.5 * 2^23 rounds to an integer and leaves its two's complement in the lowest bits.
  static LLM_COMM_DEVICE uint32_t four(const float (&x)[4]) {
    uint32_t codes = 0;
    LLM_COMM_UNROLL(4)
    for (int i = 0; i < 4; ++i) codes |= (float_to_bits(x[i] + 0x1.8p23f) & 0xFFu) << 8 * i;
    return codes;
  }
  // 2^23 + n has n in its lowest bits.
  static LLM_COMM_DEVICE void values(uint32_t codes, float (&x)[4]) {
    const uint32_t unsigned_codes = codes ^ 0x80808080u;
    LLM_COMM_UNROLL(4)
    for (int i = 0; i < 4; ++i) x[i] = bits_to_float(0x4B000000u | (unsigned_codes >> 8 * i & 0xFFu)) - (0x1p23f + 128);
  }
};

// A line of N elements: its codes, and the scale of the block that it belongs to.
template <uint32_t N>
struct QuantizedLine {
  struct alignas(N) Codes {
    uint32_t word[N / 4];
  };
  Codes codes;
  float scale;
};

LLM_COMM_DEVICE bool is_finite(float x) { return (float_to_bits(x) & 0x7FFFFFFFu) < kInfinityBits; }

// Largest magnitude of a block, as bits, of which each lane has N values. All lanes of a warp call it.
template <uint32_t N>
LLM_COMM_DEVICE uint32_t largest_of_block(const Values<N>& x) {
  const auto larger_of = [](uint32_t a, uint32_t b) { return a > b ? a : b; };
  uint32_t largest = 0;
  LLM_COMM_UNROLL(8)
  for (uint32_t i = 0; i < N; ++i) largest = larger_of(largest, float_to_bits(x.of[i]) & 0x7FFFFFFFu);
  LLM_COMM_UNROLL(5)
  for (uint32_t mask = 1; mask < kQuantizedBlock / N; mask *= 2) {
    largest = larger_of(largest, float_to_bits(shuffle_xor(bits_to_float(largest), mask)));
  }
  return largest;
}

template <Wire W, uint32_t N>
LLM_COMM_DEVICE QuantizedLine<N> quantize_finite(const Values<N>& x, float amax, float reciprocal) {
  QuantizedLine<N> line;
  line.scale = larger(rounded_product(amax, reciprocal), kSmallestQuantizedScale);
  const float inverse = 1.0f / line.scale;
  LLM_COMM_UNROLL(2)
  for (uint32_t word = 0; word < N / 4; ++word) {
    float scaled[4];
    LLM_COMM_UNROLL(4)
    for (uint32_t i = 0; i < 4; ++i) scaled[i] = rounded_product(x.of[4 * word + i], inverse);
    line.codes.word[word] = Code<W>::four(scaled);
  }
  return line;
}

// quantize() of a warp in which a block has infinities or NaNs.
template <Wire W, uint32_t N>
LLM_COMM_DEVICE_CALL QuantizedLine<N> quantize_any(Values<N> x) {
  const bool escapes = largest_of_block(x) >= kInfinityBits;
  Values<N> finite;
  LLM_COMM_UNROLL(8)
  for (uint32_t i = 0; i < N; ++i) finite.of[i] = is_finite(x.of[i]) ? x.of[i] : 0.0f;
  QuantizedLine<N> line = quantize_finite<W>(finite, bits_to_float(largest_of_block(finite)),
                                             escapes ? Code<W>::kReciprocalOfFinite : Code<W>::kReciprocal);
  if (!escapes) return line;
  line.scale = -line.scale;
  LLM_COMM_UNROLL(8)
  for (uint32_t i = 0; i < N; ++i) {
    if (is_finite(x.of[i])) continue;
    const bool is_nan = (float_to_bits(x.of[i]) & 0x7FFFFFFFu) > kInfinityBits;
    const float largest[4] = {float_to_bits(x.of[i]) >> 31 != 0 ? -Code<W>::kLargest : Code<W>::kLargest};
    const uint32_t code = is_nan ? Code<W>::kNaN : Code<W>::four(largest) & 0xFFu;
    line.codes.word[i / 4] = (line.codes.word[i / 4] & ~(0xFFu << i % 4 * 8)) | code << i % 4 * 8;
  }
  return line;
}

// Quantizes a line of a block whose other lines the neighbouring lanes have. All lanes of a warp call it, each with a
// line; blocks begin at lanes that are multiples of kQuantizedBlock / N.
template <Wire W, uint32_t N>
LLM_COMM_DEVICE QuantizedLine<N> quantize(const Values<N>& x) {
  const uint32_t largest = largest_of_block(x);
  if (any_lane(largest >= kInfinityBits)) return quantize_any<W>(x);
  return quantize_finite<W>(x, bits_to_float(largest), Code<W>::kReciprocal);
}

// dequantize() of a line of a block with infinities or NaNs.
template <Wire W, uint32_t N>
LLM_COMM_DEVICE_CALL Values<N> dequantize_any(QuantizedLine<N> line) {
  Values<N> x;
  LLM_COMM_UNROLL(8)
  for (uint32_t i = 0; i < N; ++i) {
    const uint32_t code = line.codes.word[i / 4] >> i % 4 * 8 & 0xFFu;
    float value[4];
    Code<W>::values(code, value);
    const bool is_infinite = value[0] == Code<W>::kLargest || value[0] == -Code<W>::kLargest;
    const uint32_t sign = float_to_bits(value[0]) & 0x80000000u;
    x.of[i] = code == Code<W>::kNaN ? bits_to_float(0x7FFFFFFFu)
              : is_infinite         ? bits_to_float(sign | kInfinityBits)
                                    : rounded_product(value[0], -line.scale);
  }
  return x;
}

template <Wire W, uint32_t N>
LLM_COMM_DEVICE Values<N> dequantize(const QuantizedLine<N>& line) {
  if (float_to_bits(line.scale) >> 31 != 0) return dequantize_any<W>(line);
  Values<N> x;
  LLM_COMM_UNROLL(2)
  for (uint32_t word = 0; word < N / 4; ++word) {
    float value[4];
    Code<W>::values(line.codes.word[word], value);
    LLM_COMM_UNROLL(4)
    for (uint32_t i = 0; i < 4; ++i) x.of[4 * word + i] = rounded_product(value[i], line.scale);
  }
  return x;
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
