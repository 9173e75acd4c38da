// Two-shot all-reduce whose ranks exchange 8-bit integers, as two_shot_quantized.cuh explains.
#pragma once

#include "algorithms/all_reduce/two_shot_quantized.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceTwoShotInt8 = kKindOf<struct AllReduceTwoShotInt8>;

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(3))
all_reduce_two_shot_int8(LLM_COMM_KERNEL_PARAM AllReduceArgs args) {
  two_shot_quantized<D, World, Wire::kInt8>(args, kAllReduceTwoShotInt8);
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceTwoShotInt8 : TwoShotQuantized<AllReduceTwoShotInt8> {
  static constexpr AlgorithmInfo kInfo{.name = "two_shot_int8",
                                       .protocol = "HB",
                                       .title = "two-shot all-reduce of quantized values (int8)",
                                       .wire = "int8"};
  static constexpr Wire kWire = Wire::kInt8;

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_reduce_two_shot_int8<D, World>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
