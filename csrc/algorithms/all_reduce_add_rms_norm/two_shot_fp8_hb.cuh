// Two-shot all-reduce + residual add + RMSNorm in tiles of rows (row_tiles.cuh), of quantized values: contributions and
// sums travel as FP8 (e4m3) with a scale for each block (quantized.cuh). For option `wire`.
//
// The owner of a part adds as in all_reduce/two_shot_quantized_hb.cuh, and keeps the quantized sums that it sends, so all
// ranks norm the same values. Parts are whole blocks, counted from the beginning of a tile. The last one of a part is
// filled up with zeros. A sum therefore depends on the tiling.
#pragma once

#include "algorithms/all_reduce_add_rms_norm/row_tiles.cuh"
#include "algorithms/quantized_reference.h"
#include "algorithms/quantized_steps.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceAddRmsNormTwoShotFP8HB = kKindOf<struct AllReduceAddRmsNormTwoShotFP8HB>;

template <DataType D, int World, class Steps>
class FP8Parts {
 public:
  LLM_COMM_DEVICE FP8Parts(const AddRmsNormArgs& args, const RowTiles& tiles, uint32_t block, uint32_t depth,
                           const Steps&)
      : steps_(args.comm, block, args.tile_lines, depth, tiles.all_part_lines()), part_lines_(args.tile_lines) {}

  template <class PartOf>
  LLM_COMM_DEVICE void stage(const Team& team, uint32_t t, PartOf part_of) const {
    steps_.stage(team, t, part_of);
  }
  template <class Part>
  LLM_COMM_DEVICE void sum_and_keep(const Team& team, uint32_t t, const Part& part) const {
    steps_.sum_and_keep(team, t, part);
  }

 private:
  using Quantized = QuantizedSteps<D, World, Wire::kFP8, ChunkBuffersWithOwn<World>>;

 public:
  class Tile {
   public:
    LLM_COMM_DEVICE Tile(const FP8Parts& parts, uint32_t t) : sums_(parts.steps_, t), part_lines_(parts.part_lines_) {}
    LLM_COMM_DEVICE auto load(uint32_t line) const {
      uint32_t owner = 0;
      // No line reaches a rank that a smaller world has not.
      LLM_COMM_UNROLL(16)
      for (uint32_t rank = 1; rank < World; ++rank) owner += line >= rank * part_lines_;
      return sums_.load(owner, line - owner * part_lines_);
    }
    static LLM_COMM_DEVICE Line line(const QuantizedLine<kElementsPerLine>& sum) { return Quantized::line(sum); }

   private:
    typename Quantized::Sums sums_;
    uint32_t part_lines_;
  };
  LLM_COMM_DEVICE Tile tile(uint32_t t) const { return {*this, t}; }

 private:
  Quantized steps_;
  uint32_t part_lines_;
};

template <DataType D, int World, Output Rows>
LLM_COMM_KERNEL(kMaxRowThreads)
all_reduce_add_rms_norm_two_shot_fp8_hb(LLM_COMM_KERNEL_PARAM AddRmsNormArgs args) {
  sum_and_norm_in_tiles<D, World, Rows, FP8Parts>(args, kAllReduceAddRmsNormTwoShotFP8HB);
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceAddRmsNormTwoShotFP8HB : RowsInTiles<AllReduceAddRmsNormTwoShotFP8HB> {
  static constexpr AlgorithmInfo kInfo{.name = "two_shot_fp8_hb",
                                       .protocol = "HB",
                                       .title = "two-shot all-reduce of quantized values (fp8) + RMSNorm",
                                       .wire = "fp8"};
  static constexpr uint32_t kPartUnit = kQuantizedBlock / kElementsPerLine;
  static constexpr uint64_t kLeastBytes = 0;
  static constexpr uint32_t kVariants = 2;

  // Lines of a buffer for a part of `tile_lines` lines.
  static constexpr uint64_t buffer_lines(uint64_t tile_lines) {
    return lines_of_quantized_chunk(static_cast<uint32_t>(divide_up(tile_lines, uint64_t{kQuantizedChunkLines})) *
                                    kQuantizedChunkLines);
  }

  // Element i of the sum, as bits, for tests; input(r, j) is element j of rank r's input.
  template <class Input>
  static uint32_t expect_sum(const Problem& problem, const Tiling& tiling, uint64_t i, Input input) {
    const uint64_t of_tile = rows_of_tile(problem, tiling.tile_lines) * problem.row;
    const uint64_t first = i / of_tile * of_tile;
    return quantized_sum_of_one<Wire::kFP8>(problem.type, problem.world, std::min(of_tile, problem.count - first),
                                            uint64_t{tiling.tile_lines} * kElementsPerLine, i - first,
                                            [&](uint32_t rank, uint64_t j) { return input(rank, first + j); });
  }

  template <DataType D, int World, uint32_t Variant>
  static KernelPointer kernel() {
    return &all_reduce_add_rms_norm_two_shot_fp8_hb<D, World, output_of(Variant, kVariants)>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
