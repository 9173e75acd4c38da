// Tensors whose sums are exact in every type: small integers.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "nccl/nccl_types.h"

namespace nccl_test {

inline uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

// Of whole numbers below 2048, which fp16 has exactly.
inline uint16_t to_fp16(float value) {
  if (value == 0) return 0;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t exponent = (bits >> 23 & 0xff) - 127 + 15;
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | exponent << 10 | (bits >> 13 & 0x3ff));
}

inline uint64_t element_bytes(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
      return 1;
    case ncclFloat32:
    case ncclInt32:
      return 4;
    case ncclFloat64:
      return 8;
    default:
      return 2;
  }
}

// `from` elements of garbage before and after it are kept, so that a store beyond it is seen.
class Tensor {
 public:
  static constexpr uint64_t kMargin = 64;
  static constexpr unsigned char kGarbage = 0xA5;

  // `shift` elements away from an aligned address.
  Tensor(ncclDataType_t type, uint64_t count, uint64_t shift = 0)
      : type_(type),
        count_(count),
        first_(kMargin + shift * element_bytes(type)),
        bytes_(2 * kMargin + (count + shift) * element_bytes(type), kGarbage) {}

  void* at(uint64_t element = 0) { return bytes_.data() + first_ + element * element_bytes(type_); }
  void set(uint64_t element, float value) {
    if (type_ == ncclFloat32) {
      std::memcpy(at(element), &value, sizeof(value));
    } else if (type_ == ncclInt8) {
      const auto small = static_cast<signed char>(value);
      std::memcpy(at(element), &small, sizeof(small));
    } else {
      const uint16_t half = type_ == ncclBfloat16 ? to_bf16(value) : to_fp16(value);
      std::memcpy(at(element), &half, sizeof(half));
    }
  }
  bool operator==(const Tensor& other) const = default;

 private:
  ncclDataType_t type_;
  uint64_t count_;
  uint64_t first_;
  std::vector<unsigned char> bytes_;
};

}  // namespace nccl_test
