// Two-shot all-reduce whose ranks exchange FP8 (e4m3), as two_shot_quantized_hb.cuh explains.
#pragma once

#include "algorithms/all_reduce/two_shot_quantized_hb.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceTwoShotFP8HB = kKindOf<struct AllReduceTwoShotFP8HB>;

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kTwoShotTeams))
all_reduce_two_shot_fp8_hb(LLM_COMM_KERNEL_PARAM AllReduceArgs args) {
  two_shot_quantized_hb<D, World, Wire::kFP8>(args, kAllReduceTwoShotFP8HB);
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceTwoShotFP8HB : TwoShotQuantizedHB<AllReduceTwoShotFP8HB> {
  static constexpr AlgorithmInfo kInfo{.name = "two_shot_fp8_hb",
                                       .protocol = "HB",
                                       .title = "two-shot all-reduce of quantized values (fp8)",
                                       .wire = "fp8"};
  static constexpr Wire kWire = Wire::kFP8;

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_reduce_two_shot_fp8_hb<D, World>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
