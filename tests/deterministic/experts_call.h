// Experts of few tokens behind a grid that brings x and the router's choice late, and reads what the outputs held
// before.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "algorithms/linear/experts.h"
#include "linear_call.h"

namespace drill {

// As a linear layer, it takes no operation, and a rank is enough.
template <DataType D>
class ExpertsCall final : public Call {
 public:
  explicit ExpertsCall(Random& random)
      : problem_(draw_problem(random)),
        gate_up_{experts::kUnitRows, random.between(2, 3), experts::kWarps},
        // Few blocks: other ranks wait for this one, and it must end long before kTimeoutNs.
        down_{problem_.hidden > 128 ? random.pick({40u, 64u}) : random.pick({8u, 40u, 64u}), random.between(2, 3),
              random.pick({2u, 4u})},
        threads_(random.between(1, 4)) {
    fill(source_, problem_.tokens * problem_.hidden, random);
    fill_weight(gate_up_weight_, gate_up_scales_, 2 * problem_.intermediate, problem_.hidden, random);
    fill_weight(down_weight_, down_scales_, problem_.hidden, problem_.intermediate, random);
    choose(random);
    x_.resize(source_.size(), touchless());
    choice_.resize(choice_source_.size(), touchless());
    results_.resize((count_of_out() + state_count()) / kElements, touchless());
    before_.resize(results_.size());
    expect();
  }

  void enqueue(World& world, uint32_t rank) override {
    if (rank != kRank) return;
    const BringArgs args{source_.data(), x_.data(),       x_.size(),      choice_source_.data(), choice_.data(),
                         choice_.size(), results_.data(), before_.data(), results_.size()};
    world.launch(rank, {1, threads_, 0}, [=] { bring(args); });
    call_ = world.core(rank).prepare_experts(problem_, gate_up_, down_);
    const uint64_t ids = address(choice_), out = address(results_);
    const uint64_t buffers[experts::kBuffers] = {
        address(x_), address(gate_up_weight_), address(down_weight_),
        ids,         ids + bytes(choice_) / 2, out + count_of_out() * sizeof(uint16_t),
        out,         address(gate_up_scales_), address(down_scales_)};
    call_->run(buffers, 0);
  }

  std::string wrong(uint32_t rank) const override {
    if (rank != kRank) return "";
    const std::string before = touched_in(reinterpret_cast<const char*>(before_.data()), bytes(before_));
    if (!before.empty()) return "written before its time: " + before;
    for (size_t i = 0; i < expected_.size(); ++i) {
      if (element(results_, i) == expected_[i]) continue;
      return "output " + std::to_string(i % problem_.hidden) + " of token " + std::to_string(i / problem_.hidden) +
             " is " + hex(element(results_, i)) + ", not " + hex(expected_[i]);
    }
    return "";
  }

  uint64_t operations() const override { return 0; }

  std::string name() const override {
    const auto tiling = [](const experts::Choice& choice) {
      return "block_outputs " + std::to_string(choice.block_outputs) + ", stages " + std::to_string(choice.stages) +
             ", stage_boxes " + std::to_string(choice.stage_boxes);
    };
    return std::to_string(problem_.top_k) + " of " + std::to_string(problem_.experts) + " experts of " +
           std::to_string(problem_.tokens) + " tokens, hidden " + std::to_string(problem_.hidden) + ", intermediate " +
           std::to_string(problem_.intermediate) + " " + data_type_name(D) + ", weights " +
           operand_type_name(problem_.weights) + " (" + tiling(gate_up_) + "; " + tiling(down_) + ")";
  }

 private:
  using E = Element<D>;
  static constexpr uint32_t kRank = 0;

  static experts::Problem draw_problem(Random& random) {
    const OperandType weights = random.chance(64) ? OperandType::kFloat8 : operands_of_type(D);
    const uint32_t multiple = kBoxRowBytes / operand_bytes(weights);
    const uint32_t tokens = random.pick({1u, 2u, 9u});
    const uint32_t most = (tokens == 9 ? 2 : 4) * 64 / multiple;
    experts::Problem problem{tokens,
                             random.between(1, 3),
                             random.between(3, 6),
                             multiple * random.between(1, most),
                             multiple * random.between(1, most),
                             D,
                             weights,
                             LinearEpilogue::kSiluAndMul};
    if (tokens < 9 && random.chance(24)) {  // several tiles of each warp of gate and up
      problem.experts = 3;
      problem.hidden = multiple * random.between(9, 26);
      problem.intermediate = multiple;
    }
    const uint64_t hidden = problem.hidden / kScaleBlock, intermediate = problem.intermediate / kScaleBlock;
    problem.scaling_factor = random.pick({1.0f, 2.5f});
    problem.gate_up_scale_strides = {2 * intermediate * hidden, hidden, 1};
    problem.down_scale_strides = {hidden * intermediate, intermediate, 1};
    problem.first_expert = random.pick({0u, 4u});
    problem.all_experts = random.pick({0u, 2 * problem.experts});
    return problem;
  }

  bool is_fp8() const { return problem_.weights == OperandType::kFloat8; }

  // Draws a weight of all experts, and its scales if it is FP8.
  void fill_weight(Lines& weight, Lines& scales, uint32_t rows, uint32_t columns, Random& random) {
    const size_t count = size_t{problem_.experts} * rows * columns;
    if (!is_fp8()) return fill(weight, count, random);
    weight.resize(count / sizeof(Line));
    for (size_t i = 0; i < count; ++i) put(weight, i, static_cast<uint8_t>(random.below(0x48) | random.below(2) << 7));
    const size_t blocks = count / (kScaleBlock * kScaleBlock);
    scales.resize((blocks * sizeof(float) + sizeof(Line) - 1) / sizeof(Line));
    for (size_t i = 0; i < blocks; ++i) put(scales, i, 0.001f * static_cast<float>(random.between(1, 999)));
  }

  static void fill(Lines& lines, size_t count, Random& random) {
    lines.resize(count / kElements);
    for (size_t i = 0; i < count; ++i) put(lines, i, static_cast<uint16_t>(draw_number(D, random)));
  }
  size_t count_of_out() const { return size_t{problem_.tokens} * problem_.hidden; }
  size_t state_count() const { return size_t{problem_.tokens} * problem_.top_k * problem_.intermediate; }

  // Numbers of experts, then their factors, which begin at the middle. Some tokens lack experts.
  void choose(Random& random) {
    const uint32_t count = problem_.tokens * problem_.top_k;
    const size_t half = (count * sizeof(uint32_t) + sizeof(Line) - 1) / sizeof(Line);
    choice_source_.resize(2 * half);
    for (uint32_t i = 0; i < count; ++i) {
      // Different ones of a token.
      const uint32_t expert = (random.below(problem_.experts / problem_.top_k) * problem_.top_k + i % problem_.top_k);
      put(choice_source_, i, random.chance(32) ? ~0u : problem_.first_expert + expert);
      put(choice_source_, half * sizeof(Line) / sizeof(float) + i, 0.001f * static_cast<float>(random.between(1, 999)));
    }
  }

  uint32_t expert_of(uint32_t place) const { return at<uint32_t>(choice_source_, place) - problem_.first_expert; }

  void expect() {
    const uint32_t hidden = problem_.hidden, intermediate = problem_.intermediate;
    const size_t factors = bytes(choice_source_) / 2 / sizeof(float);
    for (uint32_t token = 0; token < problem_.tokens; ++token) {
      std::vector<std::vector<uint16_t>> states(problem_.top_k);
      for (uint32_t k = 0; k < problem_.top_k; ++k) {
        const uint32_t expert = expert_of(token * problem_.top_k + k);
        for (uint32_t output = 0; expert < problem_.experts && output < intermediate; ++output) {
          const auto row = [&](uint32_t part) {
            return E::round(sum_of_products(gate_up_weight_, gate_up_scales_,
                                            (2 * expert + part) * intermediate + output, hidden, experts::kWarps,
                                            [&](uint32_t i) { return element(source_, size_t{token} * hidden + i); }));
          };
          states[k].push_back(activate_and_mul<D>(problem_.epilogue, row(0), row(1)));
        }
      }
      for (uint32_t output = 0; output < hidden; ++output) {
        float sum = 0.0f;
        for (uint32_t k = 0; k < problem_.top_k; ++k) {
          if (states[k].empty()) continue;
          const uint32_t place = token * problem_.top_k + k;
          const uint32_t expert = expert_of(place);
          const float product = sum_of_products(down_weight_, down_scales_, expert * hidden + output, intermediate, 1,
                                                [&](uint32_t i) { return states[k][i]; });
          sum = multiply_add(problem_.scaling_factor * at<float>(choice_source_, factors + place), product, sum);
        }
        expected_.push_back(E::round(sum));
      }
    }
  }

  // Box i is of warp i % warps. Each adds the left halves of its boxes and the right ones in two sums. With FP8 it adds
  // both halves of a box, and scales them.
  template <class Input>
  float sum_of_products(const Lines& weight, const Lines& scales, uint32_t row, uint32_t columns, uint32_t warps,
                        Input input) const {
    const uint32_t of_box = kBoxRowBytes / operand_bytes(problem_.weights);
    std::vector<std::array<float, 2>> sums(warps);
    for (uint32_t box = 0; box < columns / of_box; ++box) {
      auto& of_warp = sums[box % warps];
      std::array<float, 2> halves = is_fp8() ? std::array<float, 2>{} : of_warp;
      for (uint32_t i = 0; i < of_box; ++i) {
        const size_t place = size_t{row} * columns + box * of_box + i;
        const float value = is_fp8() ? e4m3_to_float(at<uint8_t>(weight, place)) : E::value(element(weight, place));
        halves[2 * i / of_box] = multiply_add(value, E::value(input(box * of_box + i)), halves[2 * i / of_box]);
      }
      if (is_fp8()) {
        const auto scale = at<float>(scales, row / kScaleBlock * (columns / kScaleBlock) + box);
        halves = {multiply_add(scale, halves[0] + halves[1], of_warp[0]), 0.0f};
      }
      of_warp = halves;
    }
    float all = 0.0f;
    for (const auto& [left, right] : sums) all += left + right;
    return all;
  }

  experts::Problem problem_;
  experts::Choice gate_up_;
  experts::Choice down_;
  uint32_t threads_;
  Lines source_;
  Lines x_;
  Lines gate_up_weight_;
  Lines down_weight_;
  Lines gate_up_scales_;
  Lines down_scales_;
  Lines choice_source_;
  Lines choice_;
  Lines results_;  // out, then the state between the layers
  Lines before_;   // of the results, as the grid before finds them
  std::vector<uint16_t> expected_;
  std::unique_ptr<host::PreparedCall> call_;
};

}  // namespace drill
