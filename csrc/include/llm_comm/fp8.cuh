// FP8 e4m3 conversions for linear layers and norms: 4 exponent bits, 3 mantissa bits, no infinity.
//
// Two formats have this name. OCP's (OCP 8-bit Floating Point Specification, 2023) has bias 7, largest value 448, and NaN
// 0x7F and 0xFF. gfx942 has FNUZ (Noune et al., arXiv 2206.02915; AMD's ISA documents): bias 8, largest value 240, one
// zero, and NaN 0x80.
#pragma once

#include "llm_comm/platform.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

enum class E4m3 { kOcp, kFnuz };

// The format of the target's matrix instructions.
inline constexpr E4m3 kE4m3 = kHasFnuz ? E4m3::kFnuz : E4m3::kOcp;

inline constexpr float kLargestE4m3 = kE4m3 == E4m3::kFnuz ? 240.0f : 448.0f;

// float_to_e4m3 in integer arithmetic, from the bits of a float. For targets without the instruction: the emulator, GPUs
// before sm_89, and those of AMD.
template <E4m3 Format = E4m3::kOcp>
LLM_COMM_DEVICE uint8_t e4m3_from_bits(uint32_t bits) {
  constexpr bool kFnuz = Format == E4m3::kFnuz;
  constexpr uint32_t kBias = kFnuz ? 8 : 7;
  constexpr uint32_t kLargest = kFnuz ? 0x43700000u : 0x43E00000u;  // 240.0f, 448.0f
  constexpr uint32_t kSmallestNormal = (127u + 1 - kBias) << 23;    // 2^-7, 2^-6
  constexpr uint32_t kBiasDifference = (127u - kBias) << 23;
  const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return kFnuz ? 0x80 : 0x7F;
  if (magnitude >= kLargest) return sign | (kFnuz ? 0x7F : 0x7E);
  const auto drop = [](uint32_t value, uint32_t dropped_bits) {
    return (value + (1u << (dropped_bits - 1)) - 1 + (value >> dropped_bits & 1u)) >> dropped_bits;
  };
  // A carry of the rounding correctly increments the exponent.
  if (magnitude >= kSmallestNormal) return static_cast<uint8_t>(sign | drop(magnitude - kBiasDifference, 20));
  // Subnormals are multiples of 2^-9 (FNUZ: 2^-10): shift the mantissa, with its leading one, to that position.
  const uint32_t exponent = magnitude >> 23;
  if (exponent < 127 - 3 - kBias) return kFnuz ? 0 : sign;  // less than half of the smallest subnormal
  const uint32_t rounded = drop((magnitude & 0x7FFFFFu) | 0x800000u, 20 + 127 + 1 - kBias - exponent);
  return kFnuz && rounded == 0 ? 0 : static_cast<uint8_t>(sign | rounded);
}

// Exact: every e4m3 value is an fp32 value.
template <E4m3 Format = E4m3::kOcp>
LLM_COMM_DEVICE float e4m3_to_float(uint8_t bits) {
  constexpr bool kFnuz = Format == E4m3::kFnuz;
  const uint32_t sign = (bits & 0x80u) << 24;
  const uint32_t magnitude = bits & 0x7Fu;
  if (kFnuz ? bits == 0x80 : magnitude == 0x7F) return bits_to_float(0x7FFFFFFFu);
  if (magnitude >= 8) return bits_to_float(sign | ((magnitude << 20) + ((127u - (kFnuz ? 8u : 7u)) << 23)));
  const float value = static_cast<float>(magnitude) * (kFnuz ? 0x1p-10f : 0x1p-9f);  // subnormal
  return sign != 0 ? -value : value;
}

// Nearest value in the target's format, ties to even. Values beyond the largest saturate.
LLM_COMM_DEVICE uint8_t float_to_e4m3(float value) {
  uint16_t bits;
  return convert_to_e4m3(value, 0.0f, bits) ? static_cast<uint8_t>(bits) : e4m3_from_bits<kE4m3>(float_to_bits(value));
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
