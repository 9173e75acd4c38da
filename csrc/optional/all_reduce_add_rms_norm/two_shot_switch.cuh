// Two-shot all-reduce + residual add + RMSNorm whose second hop is one store through the NVLink switch, as in
// all_reduce/two_shot_switch.cuh. Each rank reduces its segments in rank order and stores each sum once, to the memory
// of all ranks. The kernel is that of two_shot.cuh, and so are the bits of the result.
//
// Slot layout: [sender][row][line of segment] of phase 0 (scatter), then [owner][row][line of segment] of phase 1
// (gather) for every owner.
//
// Rules of operation.cuh: R1 as in two_shot.cuh. R2: the owner receives and resets its own sums too. Alias fences: the
// threads that store to all ranks fence after they have begun and before the first such store.
#pragma once

#include "algorithms/all_reduce_add_rms_norm/two_shot.cuh"
#include "optional/multimem.h"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceAddRmsNormTwoShotSwitch = kKindOf<struct AllReduceAddRmsNormTwoShotSwitch>;

template <DataType D, int World, bool SingleTile, Output Rows>
LLM_COMM_KERNEL(kMaxTwoShotThreads)
all_reduce_add_rms_norm_two_shot_switch(LLM_COMM_KERNEL_PARAM AddRmsNormArgs args) {
  sum_and_norm_in_two_shots<D, World, SingleTile, Rows, StoredToAll>(args, kAllReduceAddRmsNormTwoShotSwitch);
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceAddRmsNormTwoShotSwitch : TwoShotInClusters<AllReduceAddRmsNormTwoShotSwitch> {
  static constexpr AlgorithmInfo kInfo{.name = "two_shot_switch",
                                       .protocol = "LL",
                                       .title = "two-shot all-reduce + RMSNorm, gathered by the switch",
                                       .uses_multimem = true};
  static constexpr uint32_t kVariants = 4;
  // One for each of the other ranks, and in the second phase one for every owner.
  static constexpr uint64_t slot_segments(uint64_t world) { return 2 * world - 1; }

  // The launch bounds of the kernels leave 128 registers for each thread.
  static constexpr uint32_t resident_threads(const Limits&) { return kMaxTwoShotThreads; }

  static Grid grid(const Problem& problem, const Tiling& tiling, uint64_t units, const Limits& limits) {
    check_multimem(limits);
    return TwoShotInClusters::grid(problem, tiling, units, limits);
  }

  template <DataType D, int World, uint32_t Variant>
  static KernelPointer kernel() {
    return &all_reduce_add_rms_norm_two_shot_switch<D, World, (Variant & 1) != 0,
                                                    output_of(Variant >> 1, kVariants / 2)>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
