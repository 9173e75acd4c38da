// NVFP4 and MXFP8: values of a row in blocks, each with a scale of one byte. Used by the fused kernels.
//
// NVFP4  e2m1 values, two to a byte, the first in the low half. A block of 16 has an e4m3 scale.
// MXFP8  e4m3 values. A block of 32 has an e8m0 scale: a power of two, stored as its exponent.
//
// e2m1 and e8m0 are defined in the OCP Microscaling Formats (MX) specification 1.0; NVFP4 is NVIDIA's.
// The formulas are those of FlashInfer: cvt_warp_fp16_to_fp4 in include/flashinfer/comm/trtllm_allreduce_fusion.cuh,
// and cvt_warp_fp16_to_mxfp8 in csrc/nv_internal/tensorrt_llm/kernels/quantization_utils.cuh. vLLM's scaled_fp4_quant
// (csrc/quantization/fp4/nvfp4_utils.cuh) computes the same. Both use approximate reciprocals. Here divisions are
// exact: the emulator and all GPUs return the same bits.
#pragma once

#include "algorithms/all_reduce_add_rms_norm/operation.cuh"
#include "llm_comm/fp8.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr float kReciprocalOfLargestE2m1 = 1.0f / 6.0f;

// Clears the sign, also of -0 and NaN.
LLM_COMM_DEVICE float without_sign(float value) { return bits_to_float(float_to_bits(value) & 0x7FFFFFFFu); }

// Nearest e2m1 value, ties to even: 2 exponent bits with bias 1, 1 mantissa bit. Values beyond +-6 saturate; NaN
// becomes 6. The instruction, cvt.rn.satfinite.e2m1x2.f32, needs a target with an architecture suffix (sm_100a), which
// the build does not compile.
LLM_COMM_DEVICE uint8_t float_to_e2m1(float value) {
  const float magnitude = without_sign(value);
  if (magnitude != magnitude) return 7;
  const uint32_t code = (magnitude > 0.25f) + (magnitude >= 0.75f) + (magnitude > 1.25f) + (magnitude >= 1.75f) +
                        (magnitude > 2.5f) + (magnitude >= 3.5f) + (magnitude > 5.0f);
  return static_cast<uint8_t>((float_to_bits(value) >> 28 & 8u) | code);
}

// Smallest power of two at or above a value, as e8m0: an exponent with bias 127. Below 2^-127 it is 2^-127, above 2^127
// it is 2^127, and NaN becomes 0xFF. The value is not negative.
LLM_COMM_DEVICE uint8_t float_to_e8m0(float value) {
  const uint32_t bits = float_to_bits(value);
  if (value != value) return 0xFF;
  if (bits <= 0x400000u) return 0;
  const uint32_t exponent = (bits + 0x7FFFFFu) >> 23;
  return static_cast<uint8_t>(exponent < 254 ? exponent : 254);
}

LLM_COMM_DEVICE float e8m0_to_float(uint8_t code) {
  if (code == 0xFF) return bits_to_float(0x7FFFFFFFu);
  return bits_to_float(code == 0 ? 0x400000u : uint32_t{code} << 23);
}

// Scale of a block as stored, and the number that its values are multiplied by before they are rounded.
struct BlockScale {
  uint8_t code;
  float factor;
};

// `magnitude`: the largest of the block. A scale of 0 makes all values 0.
LLM_COMM_DEVICE BlockScale nvfp4_scale(float magnitude, float global_scale) {
  const uint8_t code = float_to_e4m3(global_scale * (magnitude * kReciprocalOfLargestE2m1));
  const float scale = e4m3_to_float(code);
  return {code, scale != 0.0f ? global_scale / scale : 0.0f};
}

LLM_COMM_DEVICE BlockScale mxfp8_scale(float magnitude) {
  const uint8_t code = float_to_e8m0(magnitude / kLargestE4m3);
  return {code, 1.0f / e8m0_to_float(code)};
}

// A tile of scales has kTileGroups groups of 16 bytes: group i has the scales of rows i, i + 32, i + 64 and i + 96, 4
// bytes each.
inline constexpr uint32_t kTileGroups = 32;
inline constexpr uint32_t kRowsOfTileGroup = kTileRows / kTileGroups;

// Offset of a scale in the layout of NVIDIA's block-scaled matrix products (cuBLAS documentation, "1D Block Scaling
// Factors Layout"), with `tiles` tiles side by side. FlashInfer's get_sf_out_offset_128x4 and vLLM's swizzle_blockscale
// define the same layout.
LLM_COMM_DEVICE uint64_t swizzled_offset(uint32_t row, uint32_t block, uint32_t tiles) {
  const uint64_t tile = uint64_t{row / kTileRows} * tiles + block / kTileBlocks;
  return tile * (kTileRows * kTileBlocks) + row % kTileGroups * (kRowsOfTileGroup * kTileBlocks) +
         row % kTileRows / kTileGroups * kTileBlocks + block % kTileBlocks;
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
