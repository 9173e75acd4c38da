// A linear layer behind a grid that brings its x late, and reads what its output held before.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "algorithms/linear/epilogue.cuh"
#include "calls.h"
#include "llm_comm/matrix_view.h"
#include "llm_comm/reduce.cuh"
#include "operands.h"

namespace drill {

struct BringArgs {
  const Line* source;
  Line* x;
  uint64_t lines;
  const Line* out;
  Line* before;
  uint64_t out_lines;
};

// Lets the layer begin before it has done anything.
LLM_COMM_KERNEL(32) bring(LLM_COMM_KERNEL_PARAM BringArgs args) {
  grid_dependency_wait();
  grid_dependency_trigger();
  for (uint64_t i = thread_index(); i < args.lines; i += block_threads()) {
    store_line(args.x + i, load_line(args.source + i));
  }
  for (uint64_t i = thread_index(); i < args.out_lines; i += block_threads()) {
    store_line(args.before + i, load_line(args.out + i));
  }
}

// A call takes no operation, and no rank waits for another one in it. So a rank is enough: each has hundreds of threads.
template <DataType D>
class LinearCall final : public Call {
 public:
  LinearCall(LinearEpilogue epilogue, Random& random)
      : problem_{random.pick({1u, 3u, 8u, 9u}), kBoxColumns * random.between(1, 5), 64 * random.between(1, 2), D,
                 epilogue},
        choice_{std::min(weight_parts(epilogue) * random.pick({8u, 24u, 64u}), 64u), random.between(2, 4),
                random.between(1, 3)},
        threads_(random.between(1, 4)) {
    fill(source_, problem_.tokens * problem_.inputs, random);
    fill(weight_, weight_parts(epilogue) * problem_.outputs * problem_.inputs, random);
    const Line untouched = touchless();
    x_.resize(source_.size(), untouched);
    out_.resize(problem_.tokens * problem_.outputs / kElements, untouched);
    before_.resize(out_.size());
    expect();
  }

  void enqueue(World& world, uint32_t rank) override {
    if (rank != kRank) return;
    const BringArgs args{source_.data(), x_.data(), x_.size(), out_.data(), before_.data(), out_.size()};
    world.launch(rank, {1, threads_, 0}, [=] { bring(args); });
    call_ = world.core(rank).prepare_linear(problem_, choice_);
    const uint64_t buffers[kMaxBuffers] = {address(x_), address(weight_), address(out_)};
    call_->run(buffers, 0);
  }

  std::string wrong(uint32_t rank) const override {
    if (rank != kRank) return "";
    const std::string before = touched_in(reinterpret_cast<const char*>(before_.data()), bytes(before_));
    if (!before.empty()) return "written before its time: " + before;
    for (size_t i = 0; i < expected_.size(); ++i) {
      if (element(out_, i) == expected_[i]) continue;
      return "output " + std::to_string(i % problem_.outputs) + " of token " + std::to_string(i / problem_.outputs) +
             " is " + hex(element(out_, i)) + ", not " + hex(expected_[i]);
    }
    return "";
  }

  uint64_t operations() const override { return 0; }

  std::string name() const override {
    const bool is_plain = problem_.epilogue == LinearEpilogue::kNone;
    return "linear layer" + std::string(is_plain ? "" : " with silu-and-mul") + " of " +
           std::to_string(problem_.tokens) + " tokens, " + std::to_string(problem_.inputs) + " inputs, " +
           std::to_string(problem_.outputs) + " outputs " + data_type_name(D) + " (block_outputs " +
           std::to_string(choice_.block_outputs) + ", stages " + std::to_string(choice_.stages) + ", stage_boxes " +
           std::to_string(choice_.stage_boxes) + ")";
  }

 private:
  using E = Element<D>;
  using Lines = std::vector<Line>;
  static constexpr uint32_t kElements = sizeof(Line) / sizeof(uint16_t);
  static constexpr uint32_t kRank = 0;

  static Line touchless() {
    Line line;
    std::memset(&line, kUntouched, sizeof(line));
    return line;
  }
  static size_t bytes(const Lines& lines) { return lines.size() * sizeof(Line); }
  static uint64_t address(const Lines& lines) { return reinterpret_cast<uint64_t>(lines.data()); }
  static uint16_t element(const Lines& lines, size_t i) {
    uint16_t bits;
    std::memcpy(&bits, reinterpret_cast<const char*>(lines.data()) + i * sizeof(bits), sizeof(bits));
    return bits;
  }
  static void fill(Lines& lines, size_t count, Random& random) {
    lines.resize(count / kElements);
    for (size_t i = 0; i < count; ++i) {
      const auto bits = static_cast<uint16_t>(draw_number(D, random));
      std::memcpy(reinterpret_cast<char*>(lines.data()) + i * sizeof(bits), &bits, sizeof(bits));
    }
  }

  void expect() {
    for (uint32_t token = 0; token < problem_.tokens; ++token) {
      for (uint32_t output = 0; output < problem_.outputs; ++output) {
        const uint16_t first = product(token, output);
        expected_.push_back(problem_.epilogue == LinearEpilogue::kNone
                                ? first
                                : silu_and_mul<D>(first, product(token, problem_.outputs + output)));
      }
    }
  }

  // The boxes of even number in their order, those of odd number in theirs, and then the sum of the two.
  uint16_t product(uint32_t token, uint32_t row) const {
    float sums[2] = {};
    for (uint32_t k = 0; k < problem_.inputs; ++k) {
      float& sum = sums[k / kBoxColumns % 2];
      sum = multiply_add(E::value(element(weight_, size_t{row} * problem_.inputs + k)),
                         E::value(element(source_, size_t{token} * problem_.inputs + k)), sum);
    }
    return E::round(sums[0] + sums[1]);
  }

  LinearProblem problem_;
  LinearChoice choice_;
  uint32_t threads_;
  Lines source_;
  Lines x_;
  Lines weight_;
  Lines out_;
  Lines before_;  // of the output, as the grid before finds it
  std::vector<uint16_t> expected_;
  std::unique_ptr<host::PreparedCall> call_;
};

}  // namespace drill
