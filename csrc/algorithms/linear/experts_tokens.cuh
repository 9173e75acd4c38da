// Units of the experts' kernels, and the tokens that their warps multiply (experts.cuh).
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

// Tokens and scales of a warp's tiles, which its lanes load ahead of the multiplication. W: type of the weights. Rows of the
// matrix `x` of the kernel's parameters are tokens or, of the down-projection, places.
//
// Step s of a unit is tile `first_box` + s * kWarps of a row or, of the down-projection, kTogether neighbouring tiles.
template <OperandType W, DataType D, uint32_t Rows, bool IsDown>
class TokensAhead {
  static constexpr bool kHasScales = W == OperandType::kFloat8;
  static constexpr uint32_t kStep = IsDown ? experts::tiles_together(W) : experts::kWarps;

 public:
  static constexpr uint32_t kTogether = IsDown ? experts::tiles_together(W) : 1;
  // Steps whose tokens are loaded or being loaded. Step s has slot s % kAhead.
  static constexpr uint32_t kAhead = Rows == 8 && !IsDown ? 2 : 1;

  // Sums of the left and of the right halves of tiles, of each 8 rows. With FP8 the left one is that of both.
  using Sums = float[Rows / 8][2][4];

  LLM_COMM_DEVICE TokensAhead(const ExpertsArgs& args, const ExpertsMemory& memory, const ExpertUnits& units,
                              uint32_t first_box)
      : args_(args),
        memory_(memory),
        units_(units),
        boxes_(args.weight.row_bytes / kBoxRowBytes),
        first_box_(first_box),
        steps_(first_box < boxes_ ? divide_up(boxes_ - first_box, kStep) : 0),
        unit_(units.first()) {
    if (steps_ == 0 || !units_.have(unit_)) return;
    choose_group();
    choose_rows();
    LLM_COMM_UNROLL(2)
    for (uint32_t slot = 0; slot < kAhead; ++slot) {
      if (slot < steps_) load(slot, slot);
    }
  }

  // Steps of a unit.
  LLM_COMM_DEVICE uint32_t steps() const { return steps_; }

  // Multiplies tile `i` of the step in `slot`, which lies at `place`.
  LLM_COMM_DEVICE void multiply(Sums& sums, SharedAddress place, uint32_t slot, uint32_t i = 0) const {
    constexpr OperandType kTokens = operands_of_type(D);
    const Tile& tile = tiles_[slot][i];
    if constexpr (kHasScales) {
      Sums products = {};
      multiply_rows<kTokens>(products, place, tile.tokens);
      LLM_COMM_UNROLL(4)
      for (uint32_t n = 0; n < Rows / 8; ++n) {
        LLM_COMM_UNROLL(4)
        for (uint32_t k = 0; k < 4; ++k) {
          sums[n][0][k] = multiply_add(tile.scales[k / 2], products[n][0][k] + products[n][1][k], sums[n][0][k]);
        }
      }
    } else {
      multiply_rows<kTokens>(sums, place, tile.tokens);
    }
  }

  // Loads into `slot`, whose step of the present unit has been multiplied, what comes next: of this unit or the next.
  LLM_COMM_DEVICE void refill(uint32_t slot, uint32_t step) {
    if (step + kAhead < steps_) {
      load(slot, step + kAhead);
      return;
    }
    if (step == (steps_ > kAhead ? steps_ - kAhead : 0)) {  // all of this unit has been loaded
      const uint32_t group = unit_.group;
      unit_ = units_.after(unit_);
      if (units_.have(unit_)) {
        if (unit_.group != group) choose_group();
        choose_rows();
      }
    }
    if (units_.have(unit_)) load(slot, slot);
  }

 private:
  struct Tile {
    TokenPieces<W> tokens[Rows / 8][kTokenColumns];
    float scales[2];  // of the upper and the lower rows; FP8 only
  };

  LLM_COMM_DEVICE void choose_group() {
    const uint32_t lane = thread_index() % kWarpThreads;
    const uint32_t rows = ExpertGroup(memory_.groups()[unit_.group]).rows();
    LLM_COMM_UNROLL(4)
    for (uint32_t n = 0; n < Rows / 8; ++n) {
      LLM_COMM_UNROLL(2)
      for (uint32_t c = 0; c < kTokenColumns; ++c) {
        // Sums of rows that the group lacks are dropped. They are those of its first row.
        const uint32_t row = 8 * n + token_column(lane, c);
        const ExpertPlace place(memory_.places()[unit_.group * Rows + (row < rows ? row : 0)]);
        row_[n][c] = IsDown ? place.place() : place.token();
      }
    }
  }

  // The scales of the unit's rows.
  LLM_COMM_DEVICE void choose_rows() {
    if constexpr (kHasScales) {
      const ScaleView& scales = args_.scales;
      const float* const of_expert =
          scales.data + uint64_t{ExpertGroup(memory_.groups()[unit_.group]).expert()} * scales.expert_stride;
      uint32_t upper, lower;  // counted from the first row of the expert
      if constexpr (IsDown) {
        const uint32_t row = block_index() * args_.block_outputs + unit_.tile * args_.unit_rows;
        upper = lower = row < args_.weight.rows ? row : 0;  // a tile has rows of one block of scales
      } else {
        upper = unit_.tile * (experts::kUnitRows / 2);
        lower = args_.weight.rows + upper;
      }
      scales_[0] = of_expert + uint64_t{upper / kScaleBlock} * scales.row_stride;
      scales_[1] = of_expert + uint64_t{lower / kScaleBlock} * scales.row_stride;
    }
  }

  LLM_COMM_DEVICE void load(uint32_t slot, uint32_t step) {
    LLM_COMM_UNROLL(2)
    for (uint32_t i = 0; i < kTogether; ++i) {
      const uint32_t box = first_box_ + step * kStep + i;
      if (i == 0 || box < boxes_) load_tile(tiles_[slot][i], box);
    }
  }

  LLM_COMM_DEVICE void load_tile(Tile& tile, uint32_t box) const {
    constexpr uint32_t kBytes = 2 / operand_bytes(W);  // of a token, for each of the weight
    const uint32_t lane = thread_index() % kWarpThreads;
    LLM_COMM_UNROLL(4)
    for (uint32_t n = 0; n < Rows / 8; ++n) {
      LLM_COMM_UNROLL(2)
      for (uint32_t c = 0; c < kTokenColumns; ++c) {
        const uint64_t offset = uint64_t{row_[n][c]} * args_.weight.row_bytes + box * kBoxRowBytes;
        tile.tokens[n][c] = load_pieces<W>(lane, static_cast<const char*>(args_.x) + kBytes * offset);
      }
    }
    if constexpr (kHasScales) {
      LLM_COMM_UNROLL(2)
      for (uint32_t i = 0; i < 2; ++i) {
        tile.scales[i] = load_plain(scales_[i] + uint64_t{box} * args_.scales.column_stride);
      }
    }
  }

  const ExpertsArgs& args_;
  const ExpertsMemory& memory_;
  const ExpertUnits& units_;
  uint32_t boxes_;  // of a row
  uint32_t first_box_;
  uint32_t steps_;
  ExpertUnit unit_;  // that is loaded
  uint32_t row_[Rows / 8][kTokenColumns];
  const float* scales_[2];
  Tile tiles_[kAhead][kTogether];
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
