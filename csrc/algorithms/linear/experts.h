// Experts of few tokens on the host: supported problems, tilings, and launch configurations.
//
// y[t] = sum over the experts e of token t of factor(t, e) * W2_e (act(W_gate_e x[t]) * W_up_e x[t])
#pragma once

#include <cstdint>

#include "algorithms/algorithm.h"
#include "algorithms/linear/layer.h"

namespace llm_comm::experts {

// Buffers of a call: x, gate_up_weight, down_weight, topk_ids, topk_weights, intermediate and out.
inline constexpr uint32_t kBuffers = 7;
inline constexpr uint32_t kMaxExperts = 512;
inline constexpr uint32_t kMaxTopK = 16;
inline constexpr uint32_t kMaxTokens = linear::kMaxTokens;

// Bytes before the stages: barriers, flags of the experts, active experts, factors and flags of the tokens, and the
// numbers that the router chose. The stages begin at a multiple of kBoxAlignment, as tiles must.
inline constexpr uint32_t kPresentOffset = linear::kBarrierBytes;
inline constexpr uint32_t kActiveOffset = kPresentOffset + kMaxExperts;
inline constexpr uint32_t kFactorsOffset = kActiveOffset + kMaxExperts * 2;
inline constexpr uint32_t kRoutedOffset = kFactorsOffset + kMaxTokens * 4;
inline constexpr uint32_t kIdsOffset = kRoutedOffset + kMaxTokens * 4;
inline constexpr uint32_t kHeaderBytes =
    divide_up(kIdsOffset + kMaxTokens * kMaxTopK * 4, kBoxAlignment) * kBoxAlignment;

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

// Throws std::invalid_argument for a problem that the kernels do not serve.
void check(const Problem& problem);
// Number of experts that the tokens can have at most.
constexpr uint32_t most_active(const Problem& problem) {
  const uint32_t chosen = problem.tokens * problem.top_k;
  return chosen < problem.experts ? chosen : problem.experts;
}
// Tiling of gate and up (`is_gated`) or of the down-projection for a device: `choice` with its zero fields filled in.
// Throws std::invalid_argument for a tiling that the kernel does not support or that exceeds `max_shared_bytes`.
Choice choose(const Problem& problem, bool is_gated, Choice choice, uint32_t sm_count, uint32_t max_shared_bytes);
uint32_t stage_bytes(const Problem& problem, const Choice& choice);
Grid grid(const Problem& problem, bool is_gated, const Choice& choice);

}  // namespace llm_comm::experts
