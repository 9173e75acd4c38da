// One-shot all-reduce in the NVLink switch: every rank stages its message and loads the whole sum from the switch.
//
// One hop, in which each rank sends N * bytes and receives bytes: for messages that are short compared with the
// latency. Every rank has its own sums made, in any order, so ranks may get different bits (`ranks_may_differ`).
//
// A block stages the message in this rank's memory and has the switch reduce it (step_pipeline.cuh, switch_chunks.cuh).
#pragma once

#include "optional/all_reduce/one_shot_hb.cuh"
#include "optional/switch_chunks.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceOneShotLdReduce = kKindOf<struct AllReduceOneShotLdReduce>;

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kOneShotTeams))
all_reduce_one_shot_ld_reduce(LLM_COMM_KERNEL_PARAM AllReduceArgs args) {
  one_shot_in_steps<D, World, SwitchBuffers<1>>(
      args, kAllReduceOneShotLdReduce, [](const auto& steps, const Team& team, uint32_t t, const Message<D>& message) {
        steps.stage(team, t, [&](uint32_t) -> const Message<D>& { return message; });
      });
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceOneShotLdReduce : ChunkedBySwitch<AllReduceOneShotLdReduce> {
  using Operation = AllReduce;
  static constexpr AlgorithmInfo kInfo{.name = "one_shot_ld_reduce",
                                       .protocol = "Switch",
                                       .title = "one-shot all-reduce, summed by the switch",
                                       .uses_multimem = true,
                                       .sums_in_switch = true,
                                       .ranks_may_differ = true};
  static constexpr uint32_t kTeams = kOneShotTeams;
  static constexpr uint64_t senders(uint64_t) { return 1; }

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_reduce_one_shot_ld_reduce<D, World>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
