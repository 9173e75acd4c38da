// Problem and tiling of experts of few tokens, on one rank alone:
//
// y[t] = sum over the experts e of token t of factor(t, e) * W2_e (act(W_gate_e x[t]) * W_up_e x[t])
#pragma once

#include <cstdint>

#include "algorithms/linear/problem.h"

namespace llm_comm::experts {

// Buffers of a call: x, gate_up_weight, down_weight, topk_ids, topk_weights, intermediate and out.
inline constexpr uint32_t kBuffers = 7;

struct Problem {
  uint32_t tokens;
  uint32_t top_k;
  uint32_t experts;
  uint32_t hidden;        // columns of x and of the result
  uint32_t intermediate;  // rows of gate, rows of up, columns of the down-projection
  DataType type;          // bf16 or fp16
  LinearEpilogue epilogue = LinearEpilogue::kSiluAndMul;
};

// Tiling of one of the two layers.
using Choice = LinearChoice;

}  // namespace llm_comm::experts
