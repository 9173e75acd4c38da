// Two-shot all-reduce whose sums the NVLink switch makes: every rank has the switch sum a slice of what all have staged, and stores
// the sum to the memory of all.
//
// Each rank sends (N+1)/N of the message, all of it to the switch and the sums of its slice, and receives as much. Sums are not in
// rank order (`sums_in_switch`), but each is made once, so all ranks get the same bits.
//
// A block stages each slice in this rank's memory, has this rank's slice summed and stored to all, and collects the others'
// (step_pipeline.cuh, switch_chunks.cuh).
#pragma once

#include "algorithms/all_reduce/two_shot_hb.cuh"
#include "optional/switch_chunks.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceTwoShotLdReduce = kKindOf<struct AllReduceTwoShotLdReduce>;

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kTwoShotTeams))
all_reduce_two_shot_ld_reduce(LLM_COMM_KERNEL_PARAM AllReduceArgs args) {
  two_shot_in_steps<D, World, SwitchBuffers>(args, kAllReduceTwoShotLdReduce);
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceTwoShotLdReduce : ChunkedBySwitch<AllReduceTwoShotLdReduce> {
  using Operation = AllReduce;
  static constexpr AlgorithmInfo kInfo{.name = "two_shot_ld_reduce",
                                       .protocol = "Switch",
                                       .title = "two-shot all-reduce, summed by the switch",
                                       .by_switch = true,
                                       .sums_in_switch = true};
  static constexpr uint32_t kTeams = kTwoShotTeams;
  static constexpr uint64_t part_lines(const Problem& problem, uint64_t units) {
    return ChunkedSlices<AllReduceTwoShotLdReduce>::part_lines(problem, units);
  }

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_reduce_two_shot_ld_reduce<D, World>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
