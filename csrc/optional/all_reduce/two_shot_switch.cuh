// Two-shot all-reduce (2PA, LL) whose second hop is one store through the NVLink switch. The owner of a slice reduces
// it in rank order and stores each sum once, to the memory of all ranks. It sends (N-1)/N + 1/N times the message
// instead of 2 (N-1)/N. The kernel is that of two_shot.cuh, and so are the bits of the result.
//
// Slot layout: [sender][line of slice] of phase 0 (scatter), then [owner][line of slice] of phase 1 (gather) for every
// owner. A store to all ranks reaches the owner's own slot too, at the same offset.
//
// Rules of operation.cuh: R1 as in two_shot.cuh. R2: every rank, the owner included, receives and resets the lines
// stored to all ranks. The owner takes its own sums from its slot, so none is in flight to it when the line is reset.
//
// Alias fences (switch_channel.cuh): lines of a slot are reset, and stored by peers in other operations, through the
// address of the rank's workspace. The threads that store to all ranks fence after they have begun, when they know that
// the lines are free, and before the first such store. Data that they wait for is in flight meanwhile.
#pragma once

#include "algorithms/all_reduce/two_shot.cuh"
#include "optional/multimem.h"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceTwoShotSwitch = kKindOf<struct AllReduceTwoShotSwitch>;

template <DataType D, int World, bool SingleTile>
LLM_COMM_KERNEL(kMaxBlockThreads)
all_reduce_two_shot_switch(LLM_COMM_KERNEL_PARAM AllReduceArgs args) {
  sum_in_two_shots<D, World, SingleTile, true>(args, kAllReduceTwoShotSwitch);
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceTwoShotSwitch : TwoShotInTiles<AllReduceTwoShotSwitch> {
  static constexpr AlgorithmInfo kInfo{.name = "two_shot_switch",
                                       .protocol = "LL",
                                       .title = "two-shot all-reduce, gathered by the switch",
                                       .uses_multimem = true};
  static constexpr uint64_t gathered_slices(uint64_t world) { return world; }

  static Grid grid(const Problem& problem, const Tiling& tiling, uint64_t units, const Limits& limits) {
    check_multimem(limits);
    return TwoShotInTiles::grid(problem, tiling, units, limits);
  }

  template <DataType D, int World, uint32_t Variant>
  static KernelPointer kernel() {
    return &all_reduce_two_shot_switch<D, World, Variant == 1>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
