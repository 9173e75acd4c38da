// Layers of q, k and v of attention on the host: supported problems, tilings and launch configurations.
//
// y = x W^T + b for few tokens, then RMSNorm of each head of q and k if there are norms, then rotary position embedding
// of q and k (RoPE, arXiv 2104.09864). k and v are also written to the cache. Rows of the weight: heads of q, then as
// many of k as of v. All have `head_size` outputs.
//
// The first `rotary_size` outputs of a head of q or k are rotated in pairs. With i < rotary_size / 2 pair i is outputs
// i and i + rotary_size / 2; `is_interleaved`: 2i and 2i + 1. Row p of the table of angles has the cosines of position p,
// then the sines, rotary_size / 2 each.
#pragma once

#include <cstdint>

#include "algorithms/launch_shape.h"
#include "llm_comm/data_type.h"

namespace llm_comm::rope {

// Buffers of a call: x, weight, bias, out, positions, table of angles, norms' weights of q and of k, caches of keys and
// of values, and slots. Those of kOptionalBuffers may be 0.
inline constexpr uint32_t kBuffers = 11;
inline constexpr uint32_t kOptionalBuffers = 1u << 2 | 0x1Fu << 6;
inline constexpr uint32_t kWarps = 16;
inline constexpr uint32_t kThreads = kWarps * 32;
// Tiles of the weight that a warp fetches at once: neighbours along the columns.
inline constexpr uint32_t kStageBoxes = 2;
inline constexpr uint32_t kMaxStages = 8;
inline constexpr uint32_t kFewStages = 2;
inline constexpr uint32_t kTileRows = 16;  // rows of the weight that a warp multiplies at once
inline constexpr uint32_t kMaxBlockRows = 2 * kTileRows;
// Rows of a block times tokens, so that a warp's sums fit in registers. A thread has a pair of outputs of a token.
inline constexpr uint32_t kMaxBlockTokenRows = 512;
static_assert(kMaxBlockTokenRows <= 2 * kThreads);
inline constexpr uint32_t kMaxTokens = 32;
inline constexpr uint32_t kLinePairs = 8;  // whose squares are added up by neighbouring lanes
inline constexpr uint32_t kMaxHeadSize = 512;
// Thread blocks of a head, which are a cluster if heads have norms. Clusters of more blocks are not portable (CUDA C++
// Programming Guide, "Thread Block Clusters").
inline constexpr uint32_t kMaxHeadBlocks = 8;
inline constexpr uint32_t kSumsPadding = 4;  // floats between the sums of two tokens: avoids bank conflicts
// Bytes of barriers, of which a stage of a warp has one, and the delivery of squares.
inline constexpr uint32_t kDeliveryOffset = kWarps * kMaxStages * 8;
inline constexpr uint32_t kHeaderBytes = 2048;
static_assert(kDeliveryOffset + 8 <= kHeaderBytes);

// Strides of a cache of keys or values, in elements: between blocks, between slots of a block, and between heads.
struct CacheStrides {
  uint64_t block = 0, slot = 0, head = 0;
};

struct Problem {
  uint32_t tokens;
  uint32_t inputs;
  uint32_t outputs;
  DataType type;  // bf16 or fp16
  uint32_t head_size;
  uint32_t kv_heads;
  uint32_t rotary_size;
  bool is_interleaved;
  bool has_norms;
  float epsilon;
  // Rows of the table of angles, which are fp32 or of the type of y; positions have 64 bits or 32.
  uint32_t positions;
  bool has_fp32_angles;
  bool has_64_bit_positions;
  // Cache: `blocks` of `block_slots` slots; without blocks nothing is written. The first `slots` tokens have a slot. A
  // slot that is negative or beyond the cache is not written.
  uint32_t blocks = 0;
  uint32_t block_slots = 0;
  uint32_t slots = 0;
  bool has_64_bit_slots = true;
  CacheStrides key{}, value{};
};

// Tiling. Results do not depend on it. choose() fills in fields that are 0.
struct Choice {
  uint32_t block_rows = 0;  // rows of the weight of a thread block
  uint32_t stages = 0;      // fetches of a warp in shared memory
};

// Places in shared memory, in bytes behind the header.
struct Layout {
  uint32_t stage_bytes;
  uint32_t squares;  // of the lines of a head, behind the stages and the sums
  uint32_t bytes;
};

constexpr uint32_t token_rows(uint32_t tokens) { return tokens <= 8 ? 8 : tokens <= 16 ? 16 : 32; }

// Throws std::invalid_argument for a problem that the kernel does not serve.
void check(const Problem& problem);
// Throws std::invalid_argument for a tiling that the kernel or the device does not support.
Choice choose(const Problem& problem, const Choice& wanted, uint32_t sm_count, uint32_t max_shared_bytes);
Layout layout(const Problem& problem, const Choice& choice);
Grid grid(const Problem& problem, const Choice& choice);
// Thread blocks of a head, and of two parts of one: the halves of what is rotated, or of as many outputs that are not.
uint32_t head_blocks(const Problem& problem, const Choice& choice);
uint32_t part_blocks(const Problem& problem, const Choice& choice);

}  // namespace llm_comm::rope
