// Two-shot all-reduce + residual add + RMSNorm in tiles of rows (row_tiles.cuh), of exact values. Sums and squares are
// added in the order of the other algorithms, so a row has the same bits.
#pragma once

#include "algorithms/all_reduce_add_rms_norm/row_tiles.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceAddRmsNormTwoShotHB = kKindOf<struct AllReduceAddRmsNormTwoShotHB>;

// The parts of a tile lie one behind the other in a rank's buffers.
template <DataType D, int World, class Steps>
class ExactParts {
 public:
  LLM_COMM_DEVICE ExactParts(const AddRmsNormArgs&, const RowTiles&, uint32_t, uint32_t, const Steps& steps)
      : steps_(steps) {}

  template <class PartOf>
  LLM_COMM_DEVICE void stage(const Team& team, uint32_t t, PartOf part_of) const {
    steps_.stage(team, t, part_of);
  }
  template <class Part>
  LLM_COMM_DEVICE void sum_and_keep(const Team& team, uint32_t t, const Part& part) const {
    steps_.sum_for_all(team, t, part, Kept{steps_.buffers().own(kSecondHop, t), steps_.first(t)});
  }

  struct Tile {
    const Line* first;
    LLM_COMM_DEVICE Line load(uint32_t line) const { return load_line(first + line); }
    static LLM_COMM_DEVICE Line line(Line loaded) { return loaded; }
  };
  LLM_COMM_DEVICE Tile tile(uint32_t t) const { return {steps_.buffers().from(kSecondHop, t, 0)}; }

 private:
  // This rank's own sums, as a view of lines.
  struct Kept {
    Line* buffer;
    uint32_t first;
    LLM_COMM_DEVICE void store(uint32_t line, Line sum) const { store_line(buffer + (line - first), sum); }
  };

  const Steps& steps_;
};

template <DataType D, int World, Output Rows>
LLM_COMM_KERNEL(kMaxRowThreads)
all_reduce_add_rms_norm_two_shot_hb(LLM_COMM_KERNEL_PARAM AddRmsNormArgs args) {
  sum_and_norm_in_tiles<D, World, Rows, ExactParts>(args, kAllReduceAddRmsNormTwoShotHB);
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceAddRmsNormTwoShotHB : RowsInTiles<AllReduceAddRmsNormTwoShotHB> {
  static constexpr AlgorithmInfo kInfo{"two_shot_hb", "HB", "two-shot all-reduce + RMSNorm (HB)"};
  static constexpr uint32_t kPartUnit = 1;
  static constexpr uint64_t kLeastBytes = kLeastMeasuredBytes;

  template <DataType D, int World, uint32_t Variant>
  static KernelPointer kernel() {
    return &all_reduce_add_rms_norm_two_shot_hb<D, World, output_of(Variant, kVariants)>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
