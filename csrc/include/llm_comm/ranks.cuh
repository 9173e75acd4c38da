// Number of ranks of a kernel. A world of up to kMaxExactWorld ranks has kernels of its own, in which the number is a
// constant. All larger worlds share one kernel, compiled for kMaxWorldSize, which takes the number at run time.
#pragma once

#include "llm_comm/platform.cuh"
#include "llm_comm/workspace_layout.h"

namespace llm_comm::inline LLM_COMM_TARGET {

// `World`: template argument of the kernel.
template <int World>
inline constexpr bool kIsExactWorld = World <= kMaxExactWorld;

// In loops over World that are unrolled, has(i) guards the body. In other loops count() is the bound.
template <int World, bool = kIsExactWorld<World>>
class Ranks {
 public:
  LLM_COMM_DEVICE explicit Ranks(uint32_t = World) {}

  LLM_COMM_DEVICE constexpr uint32_t count() const { return World; }
  LLM_COMM_DEVICE constexpr bool has(uint32_t) const { return true; }
  // The i-th rank after `rank`, modulo the number of ranks; `i` is at most that number.
  LLM_COMM_DEVICE uint32_t after(uint32_t rank, uint32_t i) const { return (rank + i) % World; }
};

template <int World>
class Ranks<World, false> {
 public:
  LLM_COMM_DEVICE explicit Ranks(uint32_t world_size = World) : count_(world_size) {}

  LLM_COMM_DEVICE uint32_t count() const { return count_; }
  LLM_COMM_DEVICE bool has(uint32_t rank) const { return rank < count_; }
  LLM_COMM_DEVICE uint32_t after(uint32_t rank, uint32_t i) const {
    return rank + i < count_ ? rank + i : rank + i - count_;
  }

 private:
  uint32_t count_;
};

// Ranks whose contributions a thread of a shared kernel loads at a time. The next batch waits for this one, so that
// registers suffice for any number of ranks.
inline constexpr uint32_t kRanksOfBatch = kMaxExactWorld;

// Calls add(is_first, load(rank)) for each rank, in rank order. The loads of a batch are in flight together.
template <class Loaded, class Load, class Add>
LLM_COMM_DEVICE void add_in_batches(uint32_t ranks, Load load, Add add) {
  LLM_COMM_UNROLL(1)
  for (uint32_t first = 0; first < ranks; first += kRanksOfBatch) {
    Loaded batch[kRanksOfBatch] = {};
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < kRanksOfBatch; ++i) {
      if (first + i < ranks) batch[i] = load(first + i);
    }
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < kRanksOfBatch; ++i) {
      if (first + i < ranks) add(i == 0 && first == 0, batch[i]);
    }
  }
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
