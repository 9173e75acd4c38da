// All-gather by push through the NVLink switch: every rank stores its shard once, chunk by chunk, to the staging memory
// of all ranks, which copy it to its position (step_pipeline.cuh, switch_chunks.cuh). A rank copies its own shard from
// the input.
#pragma once

#include "algorithms/all_gather/push_hb.cuh"
#include "optional/switch_chunks.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllGatherPushSwitch = kKindOf<struct AllGatherPushSwitch>;

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kAllGatherPushTeams))
all_gather_push_switch(LLM_COMM_KERNEL_PARAM ShardsArgs args) {
  all_gather_in_steps<D, World, SwitchBuffers>(args, kAllGatherPushSwitch);
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllGatherPushSwitch : ChunkedBySwitch<AllGatherPushSwitch> {
  using Operation = AllGather;
  static constexpr AlgorithmInfo kInfo{.name = "push_switch",
                                       .protocol = "Switch",
                                       .title = "all-gather by push through the switch",
                                       .uses_multimem = true};
  static constexpr uint32_t kTeams = kAllGatherPushTeams;

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_gather_push_switch<D, World>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
