// Reduce-scatter whose sums the NVLink switch makes: every rank stages what it has for all parts, and has the switch sum its own.
//
// Each rank sends its input once and receives its part: no more than that crosses its links. Sums are not in rank order
// (`sums_in_switch`).
//
// A block stages each part in this rank's memory, and has this rank's part summed (step_pipeline.cuh, switch_chunks.cuh).
#pragma once

#include "algorithms/reduce_scatter/push_hb.cuh"
#include "optional/switch_chunks.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kReduceScatterLdReduce = kKindOf<struct ReduceScatterLdReduce>;

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kReduceScatterTeams))
reduce_scatter_ld_reduce(LLM_COMM_KERNEL_PARAM PartsArgs args) {
  reduce_scatter_in_steps<D, World, SwitchBuffers>(args, kReduceScatterLdReduce);
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct ReduceScatterLdReduce : ChunkedBySwitch<ReduceScatterLdReduce> {
  using Operation = ReduceScatter;
  static constexpr AlgorithmInfo kInfo{.name = "ld_reduce",
                                       .protocol = "Switch",
                                       .title = "reduce-scatter, summed by the switch",
                                       .by_switch = true,
                                       .sums_in_switch = true};
  static constexpr uint32_t kTeams = kReduceScatterTeams;

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &reduce_scatter_ld_reduce<D, World>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
