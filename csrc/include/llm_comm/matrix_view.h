// Matrices in memory and their tiles, as host and kernels of linear layers share them (tiles.cuh).
#pragma once

#include "llm_comm/platform_types.h"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr uint32_t kBoxRowBytes = 128;
inline constexpr uint32_t kBoxAlignment = 1024;
inline constexpr uint32_t kMaxBoxRows = 64;
inline constexpr uint32_t kTeamThreads = 128;  // a warpgroup, which multiplies one tile together

// Kernel parameter: a matrix with contiguous rows, or several such matrices ("parts") of `rows` rows each, one after
// the other. Fetches move 16-byte pieces whatever the element type is. `map` is the TMA tensor map, on GPUs that have
// TMA. It repeats the other members and also fixes the number of tiles and rows that one fetch takes.
struct alignas(64) MatrixView {
  unsigned char map[128];
  const void* data;    // 16-byte aligned
  uint32_t rows;       // of one part
  uint32_t row_bytes;  // a multiple of 16
};

// L2 eviction hint of a fetch: other blocks fetch the tile too, or nobody needs it again.
enum class BoxUse : uint32_t { kShared, kOnce };

}  // namespace llm_comm::inline LLM_COMM_TARGET
