// Two-shot all-reduce in the NVLink switch: every rank has the switch reduce one slice of what all ranks have staged,
// and stores the sums to the memory of all ranks.
//
// Each rank sends (N+1)/N of the message (its whole message to the switch, and the sums of its slice) and receives as
// much. Sums are not in rank order (`sums_in_switch`), but each is made once, so all ranks get the same bits.
//
// A block stages each slice in this rank's memory, reduces this rank's slice, stores it to all, and collects the other
// slices (step_pipeline.cuh, switch_chunks.cuh).
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
                                       .uses_multimem = true,
                                       .sums_in_switch = true};
  static constexpr uint32_t kTeams = kTwoShotTeams;
  static constexpr uint64_t shard_lines(const Problem& problem, uint64_t units) {
    return ChunkedSlices<AllReduceTwoShotLdReduce>::shard_lines(problem, units);
  }

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_reduce_two_shot_ld_reduce<D, World>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
