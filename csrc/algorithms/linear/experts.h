// Experts of few tokens on the host: supported problems, tilings, and launch configurations.
#pragma once

#include <cstdint>

#include "algorithms/algorithm.h"
#include "algorithms/linear/experts_problem.h"
#include "algorithms/linear/layer.h"

namespace llm_comm::experts {

inline constexpr uint32_t kMaxExperts = 512;
inline constexpr uint32_t kMaxTopK = 16;
inline constexpr uint32_t kMaxTokens = linear::kMaxTokens;
inline constexpr uint32_t kWarps = 8;                                    // of gate and up, that multiply
inline constexpr uint32_t kGateUpThreads = (kWarps + 2) * kWarpThreads;  // one more fetches, and one adds
inline constexpr uint32_t kMinDownWarps = 8, kMaxDownWarps = 16;
inline constexpr uint32_t kMaxDownThreads = kMaxDownWarps * kWarpThreads;
inline constexpr uint32_t kMaxStages = 16;
// Rows of a weight tile that a warp multiplies at once; of gate and up half of them each.
inline constexpr uint32_t kUnitRows = 16;
// Tiles of a row whose tokens the lanes of the down-projection load together: 256 bytes of a token.
LLM_COMM_HOST_DEVICE constexpr uint32_t tiles_together(OperandType weights) { return operand_bytes(weights); }
// Units of gate and up for whose sums there is room.
inline constexpr uint32_t kSumsBuffers = 2;
inline constexpr uint32_t kBarrierBytes = kMaxDownWarps * kMaxStages * 8;

// Throws std::invalid_argument for a problem that the kernels do not serve.
void check(const Problem& problem);
// Most tokens that are multiplied together, for which there is a kernel.
uint32_t group_rows(const Problem& problem);
// Tiling of gate and up (`is_gated`) or of the down-projection for a device: `choice` with its zero fields filled in.
// `stages` and `stage_boxes` of the down-projection are those of a warp. Throws std::invalid_argument for a tiling that
// the kernel does not support or that exceeds `max_shared_bytes`.
Choice choose(const Problem& problem, bool is_gated, Choice choice, uint32_t sm_count, uint32_t max_shared_bytes);
// Warps of a block of the down-projection.
uint32_t down_warps(const Problem& problem, const Choice& choice, uint32_t max_shared_bytes);
// Rows of a weight tile.
uint32_t unit_rows(bool is_gated, const Choice& choice);
Layout layout(const Problem& problem, bool is_gated, const Choice& choice);
Grid grid(const Problem& problem, bool is_gated, const Choice& choice, uint32_t sm_count, uint32_t max_shared_bytes);

}  // namespace llm_comm::experts
