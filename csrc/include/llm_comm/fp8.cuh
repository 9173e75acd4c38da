// FP8 e4m3 conversions for linear layers: 4 exponent bits with bias 7, 3 mantissa bits, no infinity, largest value 448.
#pragma once

#include "llm_comm/platform.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr float kLargestE4m3 = 448.0f;

// float_to_e4m3 in integer arithmetic, from the bits of a float. For targets without the instruction: the emulator and
// GPUs before sm_89.
LLM_COMM_DEVICE uint8_t e4m3_from_bits(uint32_t bits) {
  constexpr uint32_t kLargest = 0x43E00000u;         // 448.0f
  constexpr uint32_t kSmallestNormal = 0x3C800000u;  // 2^-6
  constexpr uint32_t kBiasDifference = (127u - 7u) << 23;
  const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7F;
  if (magnitude >= kLargest) return sign | 0x7E;
  const auto drop = [](uint32_t value, uint32_t dropped_bits) {
    return (value + (1u << (dropped_bits - 1)) - 1 + (value >> dropped_bits & 1u)) >> dropped_bits;
  };
  // A carry of the rounding correctly increments the exponent.
  if (magnitude >= kSmallestNormal) return static_cast<uint8_t>(sign | drop(magnitude - kBiasDifference, 20));
  // Subnormals are multiples of 2^-9: shift the mantissa, with its leading one, to that position.
  const uint32_t exponent = magnitude >> 23;
  if (exponent < 127 - 10) return sign;  // less than half of the smallest subnormal
  return static_cast<uint8_t>(sign | drop((magnitude & 0x7FFFFFu) | 0x800000u, 20 + 127 - 6 - exponent));
}

// Exact: every e4m3 value is an fp32 value.
LLM_COMM_DEVICE float e4m3_to_float(uint8_t bits) {
  const uint32_t sign = (bits & 0x80u) << 24;
  const uint32_t magnitude = bits & 0x7Fu;
  if (magnitude == 0x7F) return bits_to_float(0x7FFFFFFFu);
  if (magnitude >= 8) return bits_to_float(sign | ((magnitude << 20) + ((127u - 7u) << 23)));
  const float value = static_cast<float>(magnitude) * 0x1p-9f;  // subnormal: a multiple of 2^-9
  return sign != 0 ? -value : value;
}

// Nearest e4m3 value, ties to even. Values beyond +-448 saturate; NaN becomes 0x7F.
LLM_COMM_DEVICE uint8_t float_to_e4m3(float value) {
  uint16_t bits;
  return convert_to_e4m3(value, 0.0f, bits) ? static_cast<uint8_t>(bits) : e4m3_from_bits(float_to_bits(value));
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
