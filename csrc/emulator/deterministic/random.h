// Random numbers that are the same on every machine: everything in a schedule derives from its seed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "llm_comm/platform_types.h"

namespace llm_comm::inline LLM_COMM_TARGET::emulator {

// Finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), used as a 64-bit hash.
inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// SplitMix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(mix(seed + kStep)) {}

  uint64_t next() { return mix(state_ += kStep); }
  // Returns 0 to n - 1; n is at least 1.
  uint32_t below(uint64_t n) { return static_cast<uint32_t>((next() >> 32) * n >> 32); }
  uint32_t between(uint32_t low, uint32_t high) { return low + below(high - low + 1); }
  // True with probability of_256 / 256.
  bool chance(uint32_t of_256) { return of_256 != 0 && (next() & 255) < of_256; }
  template <class T, size_t N>
  T pick(const T (&choices)[N]) {
    return choices[below(N)];
  }

 private:
  static constexpr uint64_t kStep = 0x9E3779B97F4A7C15u;
  uint64_t state_;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET::emulator
