// What the warps of the experts' kernels go through and multiply: units, and the tokens of a group (experts.cuh).
#pragma once

#include "algorithms/linear/experts_groups.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Unit u is tile u % tiles of group u / tiles.
struct ExpertUnit {
  uint32_t unit;
  uint32_t group;
  uint32_t tile;
};

// Units of a block, or of a warp of the down-projection: those from `begin` to `end`, `step` apart.
struct ExpertUnits {
  uint32_t tiles;
  uint32_t begin, end, step;

  LLM_COMM_DEVICE bool have(const ExpertUnit& unit) const { return unit.unit < end; }
  LLM_COMM_DEVICE ExpertUnit first() const { return {begin, begin / tiles, begin % tiles}; }
  LLM_COMM_DEVICE ExpertUnit after(ExpertUnit unit) const {
    unit.unit += step;
    unit.tile += step;
    LLM_COMM_UNROLL(1)
    for (; unit.tile >= tiles; unit.tile -= tiles) ++unit.group;
    return unit;
  }
};

// Tokens of a group, as the lanes of a warp load and multiply them, and the scales of the weights. Rows of the matrix
// `x` of the kernel's parameters are tokens, or places. W: type of the weights.
template <OperandType W, DataType D, uint32_t Rows, bool OfPlaces>
class GroupTokens {
  static constexpr bool kHasScales = W == OperandType::kFloat8;

 public:
  LLM_COMM_DEVICE GroupTokens(const ExpertsArgs& args, const ExpertsMemory& memory) : args_(args), memory_(memory) {}

  LLM_COMM_DEVICE void choose(uint32_t group) {
    const uint32_t lane = thread_index() % kWarpThreads;
    const uint32_t rows = ExpertGroup(memory_.groups()[group]).rows();
    LLM_COMM_UNROLL(4)
    for (uint32_t n = 0; n < Rows / 8; ++n) {
      LLM_COMM_UNROLL(2)
      for (uint32_t c = 0; c < kTokenColumns; ++c) {
        // Sums of rows that the group lacks are dropped. They are those of its first row.
        const uint32_t row = 8 * n + token_column(lane, c);
        const ExpertPlace place(memory_.places()[group * Rows + (row < rows ? row : 0)]);
        row_[n][c] = OfPlaces ? place.place() : place.token();
      }
    }
  }

  // Rows of the weight that are multiplied next: the first 8 from `upper` on, the others from `lower` on, counted from
  // the first row of the group's expert. They must be those of the boxes that load() takes.
  LLM_COMM_DEVICE void choose_rows(uint32_t group, uint32_t upper, uint32_t lower) {
    if constexpr (kHasScales) {
      const ScaleView& scales = args_.scales;
      const float* const of_expert =
          scales.data + uint64_t{ExpertGroup(memory_.groups()[group]).expert()} * scales.expert_stride;
      scales_[0] = of_expert + uint64_t{upper / kScaleBlock} * scales.row_stride;
      scales_[1] = of_expert + uint64_t{lower / kScaleBlock} * scales.row_stride;
    }
  }

  struct Pieces {
    TokenPieces<W> tokens[Rows / 8][kTokenColumns];
    float scales[2];  // of the upper and the lower rows; FP8 only
  };
  LLM_COMM_DEVICE void load(Pieces& pieces, uint32_t box) const {
    constexpr uint32_t kBytes = 2 / operand_bytes(W);  // of a token, for each of the weight
    const uint32_t lane = thread_index() % kWarpThreads;
    LLM_COMM_UNROLL(4)
    for (uint32_t n = 0; n < Rows / 8; ++n) {
      LLM_COMM_UNROLL(2)
      for (uint32_t c = 0; c < kTokenColumns; ++c) {
        const uint64_t offset = uint64_t{row_[n][c]} * args_.weight.row_bytes + box * kBoxRowBytes;
        pieces.tokens[n][c] = load_pieces<W>(lane, static_cast<const char*>(args_.x) + kBytes * offset);
      }
    }
    if constexpr (kHasScales) {
      LLM_COMM_UNROLL(2)
      for (uint32_t i = 0; i < 2; ++i) {
        pieces.scales[i] = load_plain(scales_[i] + uint64_t{box} * args_.scales.column_stride);
      }
    }
  }

  // Sums of the left and of the right halves of tiles, of each 8 rows. With FP8 the left one is that of both.
  using Sums = float[Rows / 8][2][4];
  LLM_COMM_DEVICE static void multiply(Sums& sums, SharedAddress place, const Pieces& pieces) {
    constexpr OperandType kTokens = operands_of_type(D);
    if constexpr (kHasScales) {
      Sums products = {};
      multiply_rows<kTokens>(products, place, pieces.tokens);
      LLM_COMM_UNROLL(4)
      for (uint32_t n = 0; n < Rows / 8; ++n) {
        LLM_COMM_UNROLL(4)
        for (uint32_t i = 0; i < 4; ++i) {
          sums[n][0][i] = multiply_add(pieces.scales[i / 2], products[n][0][i] + products[n][1][i], sums[n][0][i]);
        }
      }
    } else {
      multiply_rows<kTokens>(sums, place, pieces.tokens);
    }
  }

 private:
  const ExpertsArgs& args_;
  const ExpertsMemory& memory_;
  uint32_t row_[Rows / 8][kTokenColumns];
  const float* scales_[2];
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
