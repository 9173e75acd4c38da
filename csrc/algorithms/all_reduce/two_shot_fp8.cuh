// Two-shot all-reduce whose ranks exchange FP8 (e4m3), as two_shot_quantized.cuh explains.
#pragma once

#include "algorithms/all_reduce/two_shot_quantized.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceTwoShotFP8 = kKindOf<struct AllReduceTwoShotFP8>;

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(3))
all_reduce_two_shot_fp8(LLM_COMM_KERNEL_PARAM AllReduceArgs args) {
  two_shot_quantized<D, World, Wire::kFP8>(args, kAllReduceTwoShotFP8);
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceTwoShotFP8 : TwoShotQuantized<AllReduceTwoShotFP8> {
  static constexpr AlgorithmInfo kInfo{.name = "two_shot_fp8",
                                       .protocol = "HB",
                                       .title = "two-shot all-reduce of quantized values (fp8)",
                                       .wire = "fp8"};
  static constexpr Wire kWire = Wire::kFP8;

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_reduce_two_shot_fp8<D, World>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
