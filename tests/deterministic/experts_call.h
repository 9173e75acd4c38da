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
      : problem_{random.pick({1u, 2u, 9u}),  random.between(1, 3),      random.between(3, 6),
                 64 * random.between(1, 5),  64 * random.between(1, 5), D,
                 LinearEpilogue::kSiluAndMul},
        gate_up_{experts::kUnitRows, random.between(2, 3), experts::kWarps},
        down_{random.pick({8u, 40u, 64u}), random.between(2, 3), random.pick({2u, 4u})},
        threads_(random.between(1, 4)) {
    fill(source_, problem_.tokens * problem_.hidden, random);
    fill(gate_up_weight_, problem_.experts * 2 * problem_.intermediate * problem_.hidden, random);
    fill(down_weight_, problem_.experts * problem_.intermediate * problem_.hidden, random);
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
        out};
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
           std::to_string(problem_.intermediate) + " " + data_type_name(D) + " (" + tiling(gate_up_) + "; " +
           tiling(down_) + ")";
  }

 private:
  using E = Element<D>;
  static constexpr uint32_t kRank = 0;
  static constexpr uint32_t kColumns = kBoxRowBytes / sizeof(uint16_t);

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
      put(choice_source_, i, random.chance(32) ? ~0u : expert);
      put(choice_source_, half * sizeof(Line) / sizeof(float) + i, 0.001f * static_cast<float>(random.between(1, 999)));
    }
  }

  void expect() {
    const uint32_t hidden = problem_.hidden, intermediate = problem_.intermediate;
    const size_t factors = bytes(choice_source_) / 2 / sizeof(float);
    for (uint32_t token = 0; token < problem_.tokens; ++token) {
      std::vector<std::vector<uint16_t>> states(problem_.top_k);
      for (uint32_t k = 0; k < problem_.top_k; ++k) {
        const auto expert = at<uint32_t>(choice_source_, token * problem_.top_k + k);
        for (uint32_t output = 0; expert < problem_.experts && output < intermediate; ++output) {
          const auto row = [&](uint32_t part) {
            return E::round(sum_of_products(gate_up_weight_, (2 * expert + part) * intermediate + output, hidden,
                                            experts::kWarps,
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
          const auto expert = at<uint32_t>(choice_source_, place);
          const float product = sum_of_products(down_weight_, expert * hidden + output, intermediate, 1,
                                                [&](uint32_t i) { return states[k][i]; });
          sum = multiply_add(at<float>(choice_source_, factors + place), product, sum);
        }
        expected_.push_back(E::round(sum));
      }
    }
  }

  // Box i is of warp i % warps. Each adds the left halves of its boxes and the right ones in two sums.
  template <class Input>
  static float sum_of_products(const Lines& weight, uint32_t row, uint32_t columns, uint32_t warps, Input input) {
    std::vector<std::array<float, 2>> sums(warps);
    for (uint32_t i = 0; i < columns; ++i) {
      float& sum = sums[i / kColumns % warps][i % kColumns / (kColumns / 2)];
      sum = multiply_add(E::value(element(weight, size_t{row} * columns + i)), E::value(input(i)), sum);
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
  Lines choice_source_;
  Lines choice_;
  Lines results_;  // out, then the state between the layers
  Lines before_;   // of the results, as the grid before finds them
  std::vector<uint16_t> expected_;
  std::unique_ptr<host::PreparedCall> call_;
};

}  // namespace drill
