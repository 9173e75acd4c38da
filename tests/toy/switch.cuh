// Algorithms that say of themselves that they go by the NVLink switch, for tests of who may use such ones. What they do
// is broadcast_direct, of which the second makes a wrong result: what a switch that is not right would look like. For
// emulated GPUs only.
#pragma once

#include "broadcast.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kBroadcastSwitch = kKindOf<struct BroadcastSwitch>;
inline constexpr OperationKind kBroadcastWrong = kKindOf<struct BroadcastWrong>;

struct BroadcastSwitch : BroadcastDirect {
  static constexpr AlgorithmInfo kInfo{
      .name = "by_switch", .protocol = "LL", .title = "broadcast by the switch", .uses_multimem = true};
};

template <DataType D>
LLM_COMM_KERNEL(kMaxBlockThreads)
broadcast_wrong(LLM_COMM_KERNEL_PARAM BroadcastArgs args) {
  broadcast_direct<D>(args);
  if (block_index() != 0 || thread_index() != 0 || args.comm.rank != 0) return;
  auto* const first = static_cast<typename Element<D>::Storage*>(args.output);
  *first = static_cast<typename Element<D>::Storage>(*first ^ 1);
}

struct BroadcastWrong : BroadcastDirect {
  static constexpr AlgorithmInfo kInfo{.name = "wrong",
                                       .protocol = "Switch",
                                       .title = "wrong broadcast by the switch",
                                       .uses_multimem = true,
                                       .sums_in_switch = true};

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &broadcast_wrong<D>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
