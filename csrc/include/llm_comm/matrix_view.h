// Matrices in memory and boxes of them, in the terms that the host and kernels share (tiles.cuh).
#pragma once

#include "llm_comm/platform_types.h"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr uint32_t kBoxRowBytes = 128;
inline constexpr uint32_t kBoxAlignment = 1024;
inline constexpr uint32_t kMaxBoxRows = 64;
inline constexpr uint32_t kTeamThreads = 128;  // that multiply together

// A matrix with contiguous rows, part of a kernel's parameters; or several of as many rows each, one behind the other: its parts. What
// its elements are is nobody's business until boxes of it are multiplied: 16-byte pieces are moved. `map` is what the copy engine of a multiprocessor (TMA) reads, where there is one: it says all the rest as well, and
// how many boxes of how many rows one fetch takes.
struct alignas(64) MatrixView {
  unsigned char map[128];
  const void* data;    // 16-byte aligned
  uint32_t rows;       // of a part
  uint32_t row_bytes;  // a multiple of 16
};

// Whether a box will be fetched by others, or is not needed again: what it may push out of the L2 cache.
enum class BoxUse : uint32_t { kShared, kOnce };

}  // namespace llm_comm::inline LLM_COMM_TARGET
