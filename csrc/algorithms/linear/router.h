// Router of experts on the host: supported problems and launch configuration.
//
// logits[t, e] = weight[e] . x[t] + bias[e], rounded to their type. A token's experts are the `top_k` largest logits, in
// descending order; of equal ones the lower number comes first, and NaN counts as largest. Weights are those of the
// softmax over all experts, or over the chosen ones.
#pragma once

#include <cstdint>

#include "algorithms/launch_shape.h"
#include "llm_comm/data_type.h"

namespace llm_comm::router {

// Buffers of a call: x, weight, bias (0: none), logits, topk_weights and topk_ids.
inline constexpr uint32_t kBuffers = 6;
inline constexpr uint32_t kMaxExperts = 512;
inline constexpr uint32_t kMaxTopK = 16;
inline constexpr uint32_t kWarps = 8;
inline constexpr uint32_t kThreads = kWarps * 32;
inline constexpr uint32_t kTileRows = 16;  // experts whose logits a warp computes together
// Blocks of the cluster on devices that have clusters: as many as all of them permit, so that ranks get the same bits.
inline constexpr uint32_t kClusterBlocks = 8;

struct Problem {
  uint32_t tokens;
  uint32_t experts;
  uint32_t top_k;
  uint32_t hidden;   // columns of x and of the weight
  DataType type;     // bf16 or fp16
  bool renormalize;  // softmax over the chosen experts
};

// How the columns are divided. A part is what one warp adds up of a logit.
struct Division {
  uint32_t blocks;       // of the cluster
  uint32_t block_parts;  // of each block, a power of two
  uint32_t part_boxes;   // tiles of a row (tiles.cuh); the last parts may have fewer or none
};

// Throws std::invalid_argument for a problem that the kernel does not serve.
void check(const Problem& problem);
Division divide(const Problem& problem, uint32_t max_cluster_blocks);
// Tokens whose experts a block chooses.
uint32_t block_tokens(const Problem& problem, const Division& division);
// Throws std::invalid_argument if the grid exceeds `max_shared_bytes`.
Grid grid(const Problem& problem, const Division& division, uint32_t max_shared_bytes);

}  // namespace llm_comm::router
