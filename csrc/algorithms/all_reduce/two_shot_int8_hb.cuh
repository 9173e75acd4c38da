// Two-shot all-reduce whose ranks exchange 8-bit integers, as two_shot_quantized_hb.cuh explains.
#pragma once

#include "algorithms/all_reduce/two_shot_quantized_hb.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceTwoShotInt8HB = kKindOf<struct AllReduceTwoShotInt8HB>;

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kTwoShotTeams))
all_reduce_two_shot_int8_hb(LLM_COMM_KERNEL_PARAM AllReduceArgs args) {
  two_shot_quantized_hb<D, World, Wire::kInt8>(args, kAllReduceTwoShotInt8HB);
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceTwoShotInt8HB : TwoShotQuantizedHB<AllReduceTwoShotInt8HB> {
  static constexpr AlgorithmInfo kInfo{.name = "two_shot_int8_hb",
                                       .protocol = "HB",
                                       .title = "two-shot all-reduce of quantized values (int8)",
                                       .wire = "int8"};
  static constexpr Wire kWire = Wire::kInt8;

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_reduce_two_shot_int8_hb<D, World>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
