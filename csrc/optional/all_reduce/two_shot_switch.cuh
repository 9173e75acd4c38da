// Two-shot all-reduce (2PA, LL) whose second hop is one store through the NVLink switch: the owner of a slice sums it, in rank order,
// and stores each sum once, to the memory of all ranks. So it sends (N-1)/N + 1/N x bytes instead of 2 (N-1)/N x bytes, and the
// result is bitwise that of two_shot.cuh, whose kernel it is.
//
// Slot: [sender][line of slice] of phase 0 (scatter), then [owner][line of slice] of phase 1 (gather), for every owner: a store to
// all ranks hits the owner's slot too, at the same place.
//
// The rules of operation.cuh: R1 as in two_shot.cuh. R2: what is stored to all ranks is received and re-armed on each, by the
// owner too: it takes its own sums from its slot, so none is still on its way to it when the line is armed.
//
// Aliases (switch_channel.cuh): lines of a slot are armed, and stored by peers in other operations, by the address of the rank's
// workspace. The threads that store to all ranks fence after they have begun, and so know that the lines are free, and before the
// first such store. What they wait for meanwhile is on its way.
#pragma once

#include "algorithms/all_reduce/two_shot.cuh"
#include "optional/by_switch.h"

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
                                       .by_switch = true};
  static constexpr uint64_t gathered_slices(uint64_t world) { return world; }

  static Grid grid(const Problem& problem, const Tiling& tiling, uint64_t units, const Limits& limits) {
    check_switch(limits);
    return TwoShotInTiles::grid(problem, tiling, units, limits);
  }

  template <DataType D, int World, uint32_t Variant>
  static KernelPointer kernel() {
    return &all_reduce_two_shot_switch<D, World, Variant == 1>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
