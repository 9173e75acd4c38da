// Parameters of the kernel of layers of q, k and v.
#pragma once

#include "algorithms/linear/rope.h"
#include "llm_comm/data_type.h"
#include "llm_comm/matrix_view.h"

namespace llm_comm::inline LLM_COMM_TARGET {

// Where heads of k or of v go.
struct CacheView {
  uint16_t* data;
  rope::CacheStrides strides;
};

struct RopeArgs {
  MatrixView weight;     // parts of half of rotary_size rows each
  const char* x;         // [tokens, inputs]
  const uint16_t* bias;  // [outputs] or nullptr
  uint16_t* out;         // [tokens, outputs]
  uint32_t tokens;
  uint32_t row_bytes;  // of x and of the weight
  uint32_t outputs;
  uint32_t block_rows;
  uint32_t stages;
  rope::Layout layout;
  uint32_t head_parts;  // parts of a head
  uint32_t part_blocks;
  uint32_t head_blocks;
  uint32_t q_heads;
  uint32_t kv_heads;
  bool is_interleaved;
  bool has_fp32_angles;
  bool has_64_bit_positions;
  bool has_64_bit_slots;
  const void* positions;  // [tokens]
  const void* angles;     // [angle_rows, rotary_size]
  uint32_t angle_rows;
  const uint16_t* norm_weights[2];  // of q and of k; nullptr: no norms
  float epsilon;
  float reciprocal_head_size;
  const void* slots;  // [slot_count]; nullptr: no cache
  uint32_t slot_count;
  uint32_t block_slots;
  uint32_t cache_slots;  // of all blocks
  CacheView key, value;
};

using RopeKernel = void (*)(RopeArgs);

template <OperandType F, DataType D>
struct RopeKernels {
  // Defined in rope.cuh, which the generated translation units include.
  static RopeKernel find(uint32_t token_rows);
};

extern template struct RopeKernels<OperandType::kBFloat16, DataType::kBFloat16>;
extern template struct RopeKernels<OperandType::kFloat16, DataType::kFloat16>;

// Returns nullptr for targets without tiles.
inline RopeKernel find_rope_kernel(DataType type, uint32_t token_rows) {
  if constexpr (!kHasTiles) {
    return nullptr;
  } else {
    return type == DataType::kBFloat16 ? RopeKernels<OperandType::kBFloat16, DataType::kBFloat16>::find(token_rows)
                                       : RopeKernels<OperandType::kFloat16, DataType::kFloat16>::find(token_rows);
  }
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
