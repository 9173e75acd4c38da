// Problem and tiling of experts of few tokens, on one rank alone:
//
// y[t] = s * sum over the experts e of token t of factor(t, e) * W2_e (act(W_gate_e x[t]) * W_up_e x[t])
#pragma once

#include <array>
#include <cstdint>

#include "algorithms/linear/problem.h"

namespace llm_comm::experts {

// Buffers of a call: x, gate_up_weight, down_weight, topk_ids, topk_weights, intermediate, out, and the scales of the
// two weights, which are null unless these are FP8.
inline constexpr uint32_t kBuffers = 9;
inline constexpr uint32_t kOptionalBuffers = 1u << 7 | 1u << 8;

// Strides in elements of scales [experts, blocks of rows, blocks of columns].
using ScaleStrides = std::array<uint64_t, 3>;

struct Problem {
  uint32_t tokens;
  uint32_t top_k;
  uint32_t experts;
  uint32_t hidden;        // columns of x and of the result
  uint32_t intermediate;  // rows of gate, rows of up, columns of the down-projection
  DataType type;          // of x and of the result: bf16 or fp16
  OperandType weights;    // the same, or FP8 with a scale for each block of kScaleBlock rows and columns
  LinearEpilogue epilogue = LinearEpilogue::kSiluAndMul;
  float scaling_factor = 1.0f;  // s
  // FP8 only.
  ScaleStrides gate_up_scale_strides{};
  ScaleStrides down_scale_strides{};
  uint32_t first_expert = 0;  // what topk_ids call the first one
  uint32_t all_experts = 0;   // that the router chooses from, those of other ranks among them; 0: no others
};

// Tiling of one of the two layers.
using Choice = LinearChoice;

// Offsets in bytes of what a block keeps in shared memory. Its first bytes are the barriers.
struct Layout {
  uint32_t tokens;        // two words for each expert. Bit t % 32 of word t / 32: token t has the expert
  uint32_t warp_groups;   // for each warp: groups of the experts that its lanes count
  uint32_t groups;        // their experts and sizes
  uint32_t first_groups;  // of each expert
  uint32_t places;        // of the rows of each group
  uint32_t ids;           // the router's choice
  uint32_t stands;        // of the down-projection: whether a place stands for an expert
  uint32_t factors;       // of the down-projection: of each place
  uint32_t products;      // of the down-projection: [place][output of the block]
  uint32_t sums;          // of gate and up: of the warps
  uint32_t stages;
};

}  // namespace llm_comm::experts
