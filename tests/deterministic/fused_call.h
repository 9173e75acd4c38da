// An all-reduce + residual add + RMSNorm of a schedule, with quantization or without.
#pragma once

#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "algorithms/all_reduce_add_rms_norm/block_formats.cuh"
#include "algorithms/registry.h"
#include "calls.h"
#include "operands.h"
#include "tilings.h"

namespace drill {

inline std::string suffix_of(Quantization quantization) {
  if (quantization == Quantization::kNone) return "";
  constexpr const ParameterInfo& names = AllReduceAddRmsNorm::kInfo.parameters[AllReduceAddRmsNorm::kQuantization];
  return std::string("+") + names.value_names[static_cast<uint32_t>(quantization)];
}

// How many representable values lie between two, whose highest bit is the sign.
template <class Bits>
uint32_t distance(Bits a, Bits b) {
  constexpr int kSign = 1 << (8 * sizeof(Bits) - 1);
  const auto place = [](int bits) { return bits < kSign ? kSign + bits : 2 * kSign - bits; };
  return static_cast<uint32_t>(std::abs(place(a) - place(b)));
}

template <DataType D>
class FusedCall final : public Call {
 public:
  // In tiles of rows, a block has more tiles than buffers, and tiles have several rows.
  // Else rows of several tiles, clusters of as many blocks as have a share of the row, and more rows than clusters: only then
  // does a block meet itself again in what it keeps for two rows, and blocks come to a row at different times.
  FusedCall(uint32_t algorithm, Quantization quantization, uint32_t ranks, Random& random)
      : algorithm_(algorithm),
        quantization_(quantization),
        ranks_(ranks),
        has_whole_warps_(shares_out() && ranks == 2 && random.chance(12)),
        lines_(has_whole_warps_           ? 4 * kWarpThreads
               : has_groups(quantization) ? kGroupLines * random.between(1, ranks > 4 ? 2 : 4)
               : has_blocks(quantization) ? block_size(quantization) / kElementsPerLine * random.between(1, 10)
                                          : random.between(1, random.pick({8u, 16u, ranks > 4 ? 16u : 40u}))),
        rows_(random.between(1, random.pick({1u, 2u, has_tiles() ? 12u : 5u}))),
        problem_{uint64_t{rows_} * lines_ * kElementsPerLine,
                 lines_ * kElementsPerLine,
                 D,
                 ranks,
                 {kEpsilon, static_cast<double>(quantization), weight_bias()}} {
    Registry::at(algorithm, [&]<class A>() {
      if constexpr (std::is_base_of_v<RowsInClusters<A>, A>) {
        tiling_ = draw_tiling_of_rows(A::span(problem_), random);
      } else if constexpr (std::is_base_of_v<RowsInTiles<A>, A>) {
        tiling_ = draw_tiling(algorithm, problem_, random, A::part_lines(problem_, random.between(1, 3)));
      } else {
        tiling_ = draw_tiling(algorithm, problem_, random);
      }
    });
    const uint32_t hidden = lines_ * kElementsPerLine;
    for (uint32_t rank = 0; rank < ranks; ++rank) input_.push_back(draw(rows_ * hidden, random));
    residual_ = draw(rows_ * hidden, random);
    weight_ = draw(hidden, random);
    const uint32_t scales = has_groups(quantization)   ? scale_count()
                            : has_blocks(quantization) ? scale_bytes() / sizeof(float)
                                                       : rows_;
    outputs_.assign(ranks, Outputs(rows_, hidden, quantization, scales));
    for (uint32_t row = 0; row < rows_; ++row) expect_row(row);
  }

  void enqueue(World& world, uint32_t rank) override {
    calls_.push_back(world.core(rank).prepare(algorithm_, problem_, tiling_));
    const auto address = [](const auto& tensor) { return reinterpret_cast<uint64_t>(tensor.data()); };
    const bool is_static = quantization_ == Quantization::kStatic;
    const Outputs& outputs = outputs_[rank];
    const uint64_t buffers[] = {address(input_[rank]),     address(residual_),
                                address(weight_),          address(outputs.normed),
                                address(outputs.residual), is_static ? address(static_scale_) : address(outputs.scale),
                                address(global_scale_)};
    calls_.back()->run(buffers, 0);
  }

  std::string wrong(uint32_t rank) const override {
    const Outputs& outputs = outputs_[rank];
    const std::string wrong = wrong_scales(outputs);
    if (!wrong.empty()) return wrong;
    for (size_t i = 0; i < residual_.size(); ++i) {
      if (outputs.residual[i] != expected_residual_[i]) {
        return "element " + std::to_string(i) + " of the residual is " + hex(outputs.residual[i]) + ", not " +
               hex(expected_residual_[i]);
      }
      const std::string wrong = wrong_norm(outputs, i);
      if (!wrong.empty()) return "normed element " + std::to_string(i) + wrong;
    }
    return "";
  }

  std::string touched(uint32_t rank) const override {
    const Outputs& outputs = outputs_[rank];
    const auto what = [](const char* name, const auto& tensor) {
      const auto* const first = reinterpret_cast<const char*>(tensor.data());
      const std::string touched = touched_in(first, tensor.size() * sizeof(tensor[0]));
      return touched.empty() ? "" : std::string(name) + ": " + touched;
    };
    const std::string scale = what("scale", outputs.scale);
    const std::string residual = what("new_residual", outputs.residual);
    return !scale.empty() ? scale : !residual.empty() ? residual : what("normed", outputs.normed);
  }

  uint64_t operations() const override { return launches(problem_, tiling_); }

  std::string name() const override {
    return name_of(algorithm_) + suffix_of(quantization_) + " of " + std::to_string(rows_) + " rows of " +
           std::to_string(lines_) + " lines (" + text(tiling_) + ")";
  }

 private:
  using E = Element<D>;
  static constexpr float kEpsilon = 1e-5f;

  static constexpr float kStaticScale = 0.0371f;
  static constexpr float kGlobalScale = 29.3f;

  // 0, 0.5 or 1.
  double weight_bias() const { return (lines_ + rows_) % 3 / 2.0; }

  // What a call writes on one rank, each of exactly the bytes that are its own.
  struct Outputs {
    std::vector<uint8_t> normed;
    std::vector<uint16_t> residual;
    std::vector<float> scale;  // empty unless the call makes it

    Outputs(uint32_t rows, uint32_t hidden, Quantization quantization, uint32_t scales)
        : normed(rows * hidden *
                 (quantization == Quantization::kNone ? 4
                  : is_nvfp4(quantization)            ? 1
                                                      : 2) /
                 2),
          residual(rows * hidden),
          scale(quantization == Quantization::kNone || quantization == Quantization::kStatic ? 0 : scales) {
      std::memset(normed.data(), kUntouched, normed.size());
      std::memset(residual.data(), kUntouched, residual.size() * sizeof(residual[0]));
      if (!scale.empty()) std::memset(scale.data(), kUntouched, scale.size() * sizeof(float));
    }
  };

  static std::vector<uint16_t> draw(uint32_t count, Random& random) {
    std::vector<uint16_t> values(count);
    for (uint16_t& value : values) value = static_cast<uint16_t>(draw_number(D, random));
    return values;
  }

  // Of `count` elements from `first` on.
  float expected_scale(uint32_t first, uint32_t count) const {
    float largest = 0;
    for (uint32_t i = first; i < first + count; ++i)
      largest = std::max(largest, std::abs(E::value(expected_normed_[i])));
    return has_groups(quantization_) ? std::max(largest, kLeastGroupMagnitude) / kLargestE4m3
                                     : std::max(largest / kLargestE4m3, kSmallestScale);
  }

  uint32_t groups() const { return lines_ / kGroupLines; }

  bool scales_lie_by_rows() const {
    return quantization_ == Quantization::kGroup || quantization_ == Quantization::kGroupUe8m0;
  }

  // From a group's scale to that of the next group, where they lie by columns.
  uint32_t scales_apart() const {
    const bool is_aligned =
        quantization_ == Quantization::kGroupColumnsAligned || quantization_ == Quantization::kGroupColumnsAlignedUe8m0;
    return is_aligned ? divide_up(rows_, kScaleAlignment) * kScaleAlignment : rows_;
  }

  uint32_t scale_count() const { return groups() * (scales_lie_by_rows() ? rows_ : scales_apart()); }

  uint32_t scale_index(uint32_t row, uint32_t group) const {
    return scales_lie_by_rows() ? row * groups() + group : group * scales_apart() + row;
  }

  uint32_t blocks() const { return lines_ * kElementsPerLine / block_size(quantization_); }
  // Tiles of scales side by side.
  uint32_t scale_tiles() const { return divide_up(blocks(), kTileBlocks); }
  uint32_t scale_bytes() const { return divide_up(rows_, kTileRows) * scale_tiles() * kTileRows * kTileBlocks; }
  uint8_t scale_byte(const Outputs& outputs, uint32_t row, uint32_t block) const {
    return reinterpret_cast<const uint8_t*>(outputs.scale.data())[swizzled_offset(row, block, scale_tiles())];
  }

  // Codes may be neighbours, as norms.
  std::string wrong_block_scales(const Outputs& outputs) const {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(outputs.scale.data());
    std::vector<bool> is_scale(scale_bytes(), false);
    const uint32_t size = block_size(quantization_);
    for (uint32_t first = 0; first < rows_ * lines_ * kElementsPerLine; first += size) {
      const uint32_t row = first / (lines_ * kElementsPerLine);
      const uint32_t block = first / size % blocks();
      float largest = 0;
      for (uint32_t i = first; i < first + size; ++i)
        largest = std::max(largest, std::abs(E::value(expected_normed_[i])));
      const uint8_t expected =
          is_nvfp4(quantization_) ? nvfp4_scale(largest, kGlobalScale).code : mxfp8_scale(largest).code;
      const uint8_t found = scale_byte(outputs, row, block);
      is_scale[swizzled_offset(row, block, scale_tiles())] = true;
      if (found + 1 >= expected && found <= expected + 1) continue;
      return "the scale of block " + std::to_string(block) + " of row " + std::to_string(row) + " is " + hex(found) +
             ", not " + hex(expected);
    }
    for (uint32_t i = 0; i < scale_bytes(); ++i) {
      if (!is_scale[i] && bytes[i] != 0) return "padding of the scales is not zero";
    }
    return "";
  }

  std::string wrong_in_block(const Outputs& outputs, size_t i) const {
    const uint32_t hidden = lines_ * kElementsPerLine;
    const uint32_t block = static_cast<uint32_t>(i % hidden / block_size(quantization_));
    const uint8_t code = scale_byte(outputs, static_cast<uint32_t>(i / hidden), block);
    const float value = E::value(expected_normed_[i]);
    if (!is_nvfp4(quantization_)) {
      const uint8_t expected = float_to_e4m3(value / e8m0_to_float(code));
      if (distance(outputs.normed[i], expected) <= 1) return "";
      return " is " + hex(outputs.normed[i]) + ", not " + hex(expected) + " (MXFP8)";
    }
    const float scale = e4m3_to_float(code);
    const uint8_t expected = float_to_e2m1(scale == 0.0f ? 0.0f : value * (kGlobalScale / scale));
    const uint8_t found = outputs.normed[i / 2] >> i % 2 * 4 & 15;
    const auto number = [](uint8_t bits) { return bits < 8 ? bits : 8 - bits; };
    if (std::abs(number(found) - number(expected)) <= 1) return "";
    return " is " + hex(found) + ", not " + hex(expected) + " (FP4)";
  }

  // A norm may differ by a rounding, and with the largest of a row or group its scale.
  std::string wrong_scales(const Outputs& outputs) const {
    if (outputs.scale.empty()) return "";
    if (has_blocks(quantization_)) return wrong_block_scales(outputs);
    const bool by_groups = has_groups(quantization_);
    const uint32_t hidden = lines_ * kElementsPerLine;
    const uint32_t count = by_groups ? kGroupSize : hidden;
    uint32_t written = 0;
    for (uint32_t first = 0; first < rows_ * hidden; first += count) {
      const uint32_t row = first / hidden;
      const uint32_t group = first % hidden / count;
      const float found = outputs.scale[by_groups ? scale_index(row, group) : row];
      const float expected = expected_scale(first, count);
      const bool is_right = quantization_ < Quantization::kGroupUe8m0 ? std::abs(found - expected) <= expected / 64
                                                                      : is_next_power(found, expected);
      ++written;
      if (is_right) continue;
      return "the scale of group " + std::to_string(group) + " of row " + std::to_string(row) + " is " +
             std::to_string(found) + ", not " + std::to_string(expected);
    }
    for (const float scale : outputs.scale) {
      uint32_t untouched;
      std::memset(&untouched, kUntouched, sizeof(untouched));
      if (float_to_bits(scale) == untouched) ++written;
    }
    return written == outputs.scale.size() ? "" : "something else has been written among the scales";
  }

  // Whether `found` is the power of two at or above about `scale`.
  static bool is_next_power(float found, float scale) {
    scale = std::max(scale, kLeastUe8m0Scale);
    int exponent;
    return std::frexp(found, &exponent) == 0.5f && found >= scale * (1 - 1.0f / 64) &&
           found < 2 * scale * (1 + 1.0f / 64);
  }

  std::string wrong_norm(const Outputs& outputs, size_t i) const {
    if (quantization_ == Quantization::kNone) {
      uint16_t normed;
      std::memcpy(&normed, outputs.normed.data() + i * sizeof(normed), sizeof(normed));
      if (distance(normed, expected_normed_[i]) <= 1) return "";
      return " is " + hex(normed) + ", not " + hex(expected_normed_[i]);
    }
    if (has_blocks(quantization_)) return wrong_in_block(outputs, i);
    const uint8_t expected = float_to_e4m3(E::value(expected_normed_[i]) / scale_of(outputs, static_cast<uint32_t>(i)));
    if (distance(outputs.normed[i], expected) <= 1) return "";
    return " is " + hex(outputs.normed[i]) + ", not " + hex(expected) + " (FP8)";
  }

  // By which element i has been divided. Of groups, the one that is there, which has been found to be right: a power of two
  // may be the next one.
  float scale_of(const Outputs& outputs, uint32_t i) const {
    const uint32_t hidden = lines_ * kElementsPerLine;
    if (quantization_ == Quantization::kStatic) return kStaticScale;
    if (quantization_ == Quantization::kDynamic) return expected_scale(i / hidden * hidden, hidden);
    return outputs.scale[scale_index(i / hidden, i % hidden / kGroupSize)];
  }

  // Whether a rank sums a part of each row only.
  bool shares_out() const {
    bool shares = false;
    Registry::at(algorithm_, [&]<class A>() {
      if constexpr (std::is_base_of_v<RowsInClusters<A>, A>) {
        const Problem of_chunks{0, ranks_ * kChunkLines * kElementsPerLine, D, ranks_, {}};
        shares = A::span(of_chunks) < ranks_ * kChunkLines;
      }
    });
    return shares;
  }

  bool has_tiles() const {
    bool found = false;
    Registry::at(algorithm_, [&]<class A>() { found = std::is_base_of_v<RowsInTiles<A>, A>; });
    return found;
  }

  // `span`: lines of a row that a cluster walks over.
  Tiling draw_tiling_of_rows(uint32_t span, Random& random) const {
    Tiling tiling{};
    const uint32_t unit = AllReduceAddRmsNorm::unit_lines(problem_);
    tiling.tile_lines = has_whole_warps_ ? kWarpThreads : unit * (ranks_ <= 4 && random.chance(64) ? 2 : 1);
    tiling.cluster = has_whole_warps_ ? 2 : random.between(1, divide_up(span, tiling.tile_lines));
    tiling.blocks = tiling.cluster * random.between(1, 2);
    tiling.depth = random.below(3);
    tiling.launch_units = random.between(1, rows_);
    // Blocks without a share of the row, which only grids with a cluster for each row may have.
    if (random.chance(48)) {
      tiling.cluster = divide_up(span, tiling.tile_lines) + 1;
      tiling.blocks = tiling.cluster * static_cast<uint32_t>(tiling.launch_units);
    }
    return tiling;
  }

  // Squares are summed in double precision: `normed` may differ by a rounding, the residual may not.
  uint16_t expect_sum(uint64_t i) const {
    const auto input = [&](uint32_t rank, uint64_t j) { return input_[rank][j]; };
    uint32_t sum = sum_of_one(D, ranks_, [&](uint32_t rank) { return input(rank, i); });
    Registry::at(algorithm_, [&]<class A>() {
      if constexpr (requires { &A::template expect_sum<decltype(input)>; }) {
        sum = A::expect_sum(problem_, tiling_, i, input);
      }
    });
    return static_cast<uint16_t>(sum);
  }

  void expect_row(uint32_t row) {
    const uint32_t hidden = lines_ * kElementsPerLine;
    double squares = 0;
    for (uint32_t i = row * hidden; i < (row + 1) * hidden; ++i) {
      const uint16_t reduced = expect_sum(i);
      expected_residual_.push_back(E::round(E::value(reduced) + E::value(residual_[i])));
      squares += std::pow(static_cast<double>(E::value(expected_residual_.back())), 2);
    }
    const double scale = 1 / std::sqrt(squares / hidden + kEpsilon);
    for (uint32_t i = 0; i < hidden; ++i) {
      const double value = static_cast<double>(E::value(expected_residual_[row * hidden + i]));
      const double weight = static_cast<double>(E::value(weight_[i])) + weight_bias();
      expected_normed_.push_back(E::round(static_cast<float>(value * scale * weight)));
    }
  }

  uint32_t algorithm_;
  Quantization quantization_;
  uint32_t ranks_;
  bool has_whole_warps_;  // each holds four chunks in a row, which it delivers at once
  uint32_t lines_;        // of a row
  uint32_t rows_;
  Problem problem_;
  Tiling tiling_{};
  std::vector<std::vector<uint16_t>> input_;  // [rank][row and element]
  std::vector<uint16_t> residual_;
  std::vector<uint16_t> weight_;
  const std::vector<float> static_scale_{kStaticScale};
  const std::vector<float> global_scale_{kGlobalScale};
  std::vector<Outputs> outputs_;  // by rank
  std::vector<uint16_t> expected_residual_;
  std::vector<uint16_t> expected_normed_;
  std::vector<std::unique_ptr<host::PreparedCall>> calls_;
};

}  // namespace drill
