// Reduce-scatter in the NVLink switch: every rank stages its contributions to all shards. Then it reads its own
// shard, which the switch reduces.
//
// Each rank sends its input once and receives its shard; nothing else crosses its links. Sums are not in rank order
// (`sums_in_switch`).
//
// Blocks stage and read in steps: step_pipeline.cuh, switch_chunks.cuh.
#pragma once

#include "algorithms/reduce_scatter/push_hb.cuh"
#include "optional/switch_chunks.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kReduceScatterLdReduce = kKindOf<struct ReduceScatterLdReduce>;

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kReduceScatterTeams))
reduce_scatter_ld_reduce(LLM_COMM_KERNEL_PARAM ShardsArgs args) {
  reduce_scatter_in_steps<D, World, SwitchBuffers>(args, kReduceScatterLdReduce);
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct ReduceScatterLdReduce : ChunkedBySwitch<ReduceScatterLdReduce> {
  using Operation = ReduceScatter;
  static constexpr AlgorithmInfo kInfo{.name = "ld_reduce",
                                       .protocol = "Switch",
                                       .title = "reduce-scatter, summed by the switch",
                                       .uses_multimem = true,
                                       .sums_in_switch = true};
  static constexpr uint32_t kTeams = kReduceScatterTeams;

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &reduce_scatter_ld_reduce<D, World>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
