// Router of few tokens behind a grid that brings x and the bias late, and reads what the outputs held before.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "algorithms/linear/router.h"
#include "linear_call.h"

namespace drill {

// One rank is enough: the call takes no operation and waits for no other rank.
template <DataType D>
class RouterCall final : public Call {
 public:
  explicit RouterCall(Random& random) : problem_(draw_problem(random)), threads_(random.between(1, 4)) {
    const uint32_t experts = problem_.experts, hidden = problem_.hidden;
    // Numbers are up to 32. Scaled, most logits are between -40 and 40, so the softmax has more than one large share.
    const float scale = 1.0f / static_cast<float>(1 << random.between(8, 12));
    const auto draw = [&](float factor) { return E::round(E::value(draw_number_of_type(random)) * factor); };
    fill(source_, size_t{problem_.tokens} * hidden, [&](size_t) { return draw_number_of_type(random); });
    fill(weight_, size_t{experts} * hidden, [&](size_t) { return draw(scale); });
    if (random.chance(128)) fill(bias_source_, experts, [&](size_t) { return draw(0.25f); });
    copy_rows(random);
    x_.resize(source_.size(), touchless());
    bias_.resize(bias_source_.size(), touchless());
    size_t lines = 0;
    for (uint32_t i = 0; i < kOutputs; ++i) {
      first_[i] = lines;
      lines += (bytes_of(i) + sizeof(Line) - 1) / sizeof(Line) + kGuardLines;
    }
    results_.resize(lines, touchless());
    before_.resize(lines);
    expect();
  }

  void enqueue(World& world, uint32_t rank) override {
    if (rank != kRank) return;
    const BringArgs args{source_.data(), x_.data(),       x_.size(),      bias_source_.data(), bias_.data(),
                         bias_.size(),   results_.data(), before_.data(), results_.size()};
    world.launch(rank, {1, threads_, 0}, [=] { bring(args); });
    call_ = world.core(rank).prepare_router(problem_);
    const auto output = [&](uint32_t i) { return address(results_) + first_[i] * sizeof(Line); };
    const uint64_t buffers[router::kBuffers] = {address(x_),     address(weight_), address(bias_),
                                                output(kLogits), output(kWeights), output(kIds)};
    call_->run(buffers, 0);
  }

  std::string wrong(uint32_t rank) const override {
    if (rank != kRank) return "";
    const std::string before = touched_in(reinterpret_cast<const char*>(before_.data()), bytes(before_));
    if (!before.empty()) return "written before its time: " + before;
    constexpr const char* kNames[kOutputs] = {"logit", "weight", "expert"};
    for (uint32_t i = 0; i < kOutputs; ++i) {
      const auto* const output = reinterpret_cast<const char*>(results_.data() + first_[i]);
      const uint32_t columns = i == kLogits ? problem_.experts : problem_.top_k;
      for (size_t place = 0; place < expected_[i].size(); ++place) {
        uint32_t found = 0;
        std::memcpy(&found, output + place * element_bytes_of(i), element_bytes_of(i));
        if (found == expected_[i][place]) continue;
        return std::string(kNames[i]) + " " + std::to_string(place % columns) + " of token " +
               std::to_string(place / columns) + " is " + hex(found) + ", not " + hex(expected_[i][place]);
      }
      const size_t end = i + 1 < kOutputs ? first_[i + 1] : results_.size();
      const auto* const behind = reinterpret_cast<const char*>(results_.data() + end);
      const std::string touched = touched_in(output + bytes_of(i), behind - output - bytes_of(i));
      if (!touched.empty()) return "behind the last " + std::string(kNames[i]) + ", " + touched;
    }
    return "";
  }

  uint64_t operations() const override { return 0; }

  std::string name() const override {
    return "router of " + std::to_string(problem_.tokens) + " tokens to " + std::to_string(problem_.top_k) + " of " +
           std::to_string(problem_.experts) + " experts, hidden " + std::to_string(problem_.hidden) + " " +
           data_type_name(D) + (bias_.empty() ? "" : ", a bias") + (problem_.renormalize ? ", renormalized" : "");
  }

 private:
  using E = Element<D>;
  enum Output : uint32_t { kLogits, kWeights, kIds };
  static constexpr uint32_t kOutputs = 3;
  static constexpr uint32_t kRank = 0;
  static constexpr uint32_t kColumns = kBoxRowBytes / sizeof(uint16_t);
  // Lines behind each output that nobody writes. Lanes without an expert would write words there.
  static constexpr size_t kGuardLines = kWarpThreads * sizeof(uint32_t) / sizeof(Line);

  static router::Problem draw_problem(Random& random) {
    const uint32_t tokens = random.pick({1u, 2u, 9u, 17u});
    const uint32_t experts = random.pick({3u, 16u, 24u, 40u, 130u});
    const uint32_t top_k = random.between(1, std::min(experts, router::kMaxTopK));
    return {tokens, experts, top_k, kColumns * random.between(1, 12), D, random.chance(128)};
  }
  static uint16_t draw_number_of_type(Random& random) { return static_cast<uint16_t>(draw_number(D, random)); }

  template <class Draw>
  static void fill(Lines& lines, size_t count, Draw draw) {
    lines.resize((count + kElements - 1) / kElements);
    for (size_t i = 0; i < count; ++i) put(lines, i, draw(i));
  }

  // Some experts are copies of earlier ones and have equal logits.
  void copy_rows(Random& random) {
    const size_t row_lines = problem_.hidden / kElements;
    for (uint32_t expert = 1; expert < problem_.experts; ++expert) {
      if (!random.chance(64)) continue;
      const uint32_t from = random.below(expert);
      std::copy_n(weight_.begin() + from * row_lines, row_lines, weight_.begin() + expert * row_lines);
      if (!bias_source_.empty()) put(bias_source_, expert, element(bias_source_, from));
    }
  }

  static size_t element_bytes_of(uint32_t output) { return output == kLogits ? sizeof(uint16_t) : sizeof(uint32_t); }
  size_t bytes_of(uint32_t output) const {
    return size_t{problem_.tokens} * (output == kLogits ? problem_.experts : problem_.top_k) * element_bytes_of(output);
  }

  void expect() {
    const uint32_t boxes_of_part = router::divide(problem_, kMaxClusterBlocks).part_boxes;
    for (uint32_t token = 0; token < problem_.tokens; ++token) {
      std::vector<float> logits;
      for (uint32_t expert = 0; expert < problem_.experts; ++expert) {
        const float sum = sum_of_products(token, expert, boxes_of_part);
        const uint16_t logit = E::round(bias_.empty() ? sum : sum + E::value(element(bias_source_, expert)));
        expected_[kLogits].push_back(logit);
        logits.push_back(E::value(logit));
      }
      expect_choice(logits);
    }
  }

  // A part has `boxes_of_part` neighbouring boxes, whose left and right halves are two sums.
  float sum_of_products(uint32_t token, uint32_t expert, uint32_t boxes_of_part) const {
    std::vector<std::array<float, 2>> sums(divide_up(problem_.hidden / kColumns, boxes_of_part));
    for (uint32_t i = 0; i < problem_.hidden; ++i) {
      float& sum = sums[i / kColumns / boxes_of_part][i % kColumns / (kColumns / 2)];
      sum = multiply_add(E::value(element(weight_, size_t{expert} * problem_.hidden + i)),
                         E::value(element(source_, size_t{token} * problem_.hidden + i)), sum);
    }
    float all = 0.0f;
    for (const auto& [left, right] : sums) all += left + right;
    return all;
  }

  // A stable sort leaves equal logits in the order of experts.
  void expect_choice(const std::vector<float>& logits) {
    std::vector<uint32_t> experts(logits.size());
    std::iota(experts.begin(), experts.end(), 0u);
    std::stable_sort(experts.begin(), experts.end(), [&](uint32_t a, uint32_t b) { return logits[a] > logits[b]; });
    const auto share = [&](uint32_t expert) { return exponential(logits[expert] - logits[experts[0]]); };
    // Sums of lanes: lane k adds the share of the k-th chosen expert, or those of experts k, k + 32 and so on.
    std::array<float, kWarpThreads> sums{};
    for (uint32_t i = 0; i < (problem_.renormalize ? problem_.top_k : problem_.experts); ++i) {
      sums[i % kWarpThreads] += share(problem_.renormalize ? experts[i] : i);
    }
    for (uint32_t mask = 1; mask < kWarpThreads; mask *= 2) {
      const auto old = sums;
      for (uint32_t lane = 0; lane < kWarpThreads; ++lane) sums[lane] = old[lane] + old[lane ^ mask];
    }
    for (uint32_t k = 0; k < problem_.top_k; ++k) {
      expected_[kWeights].push_back(float_to_bits(share(experts[k]) / sums[0]));
      expected_[kIds].push_back(experts[k]);
    }
  }

  router::Problem problem_;
  uint32_t threads_;
  Lines source_;
  Lines x_;
  Lines weight_;
  Lines bias_source_;  // of the bias, as `source_`; empty: none
  Lines bias_;
  Lines results_;                         // the outputs, each with lines behind it that nobody writes
  Lines before_;                          // of the results, as the grid before finds them
  std::array<size_t, kOutputs> first_{};  // lines of the results, where outputs begin
  std::array<std::vector<uint32_t>, kOutputs> expected_;
  std::unique_ptr<host::PreparedCall> call_;
};

}  // namespace drill
