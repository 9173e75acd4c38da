// A linear layer behind a grid that brings its x, and the scales of it, late, and reads what its output held before.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "algorithms/linear/epilogue.cuh"
#include "calls.h"
#include "llm_comm/matrix_view.h"
#include "llm_comm/operand.cuh"
#include "llm_comm/reduce.cuh"
#include "operands.h"

namespace drill {

struct BringArgs {
  const Line* source;
  Line* x;
  uint64_t lines;
  const Line* scale_source;
  Line* x_scale;
  uint64_t scale_lines;
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
  for (uint64_t i = thread_index(); i < args.scale_lines; i += block_threads()) {
    store_line(args.x_scale + i, load_line(args.scale_source + i));
  }
  for (uint64_t i = thread_index(); i < args.out_lines; i += block_threads()) {
    store_line(args.before + i, load_line(args.out + i));
  }
}

// Tensors of elements of 16 bits, aligned to lines.
using Lines = std::vector<Line>;
constexpr uint32_t kElements = sizeof(Line) / sizeof(uint16_t);
inline Line touchless() {
  Line line;
  std::memset(&line, kUntouched, sizeof(line));
  return line;
}
inline size_t bytes(const Lines& lines) { return lines.size() * sizeof(Line); }
inline uint64_t address(const Lines& lines) { return lines.empty() ? 0 : reinterpret_cast<uint64_t>(lines.data()); }
template <class T>
T at(const Lines& lines, size_t i) {
  T value;
  std::memcpy(&value, reinterpret_cast<const char*>(lines.data()) + i * sizeof(value), sizeof(value));
  return value;
}
template <class T>
void put(Lines& lines, size_t i, T value) {
  std::memcpy(reinterpret_cast<char*>(lines.data()) + i * sizeof(value), &value, sizeof(value));
}
inline uint16_t element(const Lines& lines, size_t i) { return at<uint16_t>(lines, i); }

// A call takes no operation, and no rank waits for another one in it. So a rank is enough: each has hundreds of
// threads.
template <OperandType F, DataType D>
class LinearCall final : public Call {
 public:
  LinearCall(LinearEpilogue epilogue, Random& random)
      : problem_{draw_tokens(epilogue, random),
                 kColumns * random.between(1, 5),
                 64 * random.between(1, 2),
                 F,
                 D,
                 epilogue,
                 draw_scales(random),
                 draw_scales(random)},
        choice_{std::min(weight_parts(epilogue) * random.pick({8u, 24u, 64u}), 64u), random.between(2, 4),
                problem_.tokens > linear::kMaxTokens ? 1 : random.between(1, 3)},
        threads_(random.between(1, 4)) {
    const uint32_t rows = weight_parts(epilogue) * problem_.outputs;
    if (kIsScaled && random.chance(96)) draw_block_scales(random);
    fill(source_, problem_.tokens * problem_.inputs, random);
    fill(weight_, rows * problem_.inputs, random);
    if (kIsScaled) {
      fill_scales(scale_source_, scales_of_x(), random);
      fill_scales(weight_scale_, scales_of_weight(rows), random);
    }
    if (random.chance(128)) {
      bias_.resize(rows / kElements);
      for (uint32_t row = 0; row < rows; ++row) put(bias_, row, static_cast<uint16_t>(draw_number(D, random)));
    }
    const Line untouched = touchless();
    x_.resize(source_.size(), untouched);
    x_scale_.resize(scale_source_.size(), untouched);
    out_.resize(problem_.tokens * problem_.outputs / kElements, untouched);
    before_.resize(out_.size());
    expect();
  }

  void enqueue(World& world, uint32_t rank) override {
    if (rank != kRank) return;
    const BringArgs args{source_.data(),  x_.data(),   x_.size(),      scale_source_.data(), x_scale_.data(),
                         x_scale_.size(), out_.data(), before_.data(), out_.size()};
    world.launch(rank, {1, threads_, 0}, [=] { bring(args); });
    call_ = world.core(rank).prepare_linear(problem_, choice_);
    const uint64_t buffers[kMaxBuffers] = {address(x_),    address(weight_),  address(out_),
                                           address(bias_), address(x_scale_), address(weight_scale_)};
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
    constexpr const char* kBehind[] = {"", " with silu-and-mul", " with gelu-tanh-and-mul"};
    return "linear layer" + std::string(kBehind[static_cast<uint32_t>(problem_.epilogue)]) + " of " +
           std::to_string(problem_.tokens) + " tokens, " + std::to_string(problem_.inputs) + " inputs, " +
           std::to_string(problem_.outputs) + " outputs " + data_type_name(D) + about_scales() +
           (bias_.empty() ? "" : ", a bias") + " (block_outputs " + std::to_string(choice_.block_outputs) +
           ", stages " + std::to_string(choice_.stages) + ", stage_boxes " + std::to_string(choice_.stage_boxes) + ")";
  }

 private:
  using E = Element<D>;
  static constexpr bool kIsScaled = F == OperandType::kFloat8;
  static constexpr uint32_t kColumns = kBoxRowBytes / sizeof(Operand<F>);
  static constexpr uint32_t kRank = 0;

  static void fill(Lines& lines, size_t count, Random& random) {
    lines.resize(count * sizeof(Operand<F>) / sizeof(Line));
    for (size_t i = 0; i < count; ++i) {
      if constexpr (kIsScaled) {
        const float number = E::value(static_cast<uint16_t>(draw_number(D, random)));
        put(lines, i, e4m3_from_bits(float_to_bits(number)));
      } else {
        put(lines, i, static_cast<uint16_t>(draw_number(D, random)));
      }
    }
  }
  // Seldom many: a tile that is cut off, or one and a token of the next.
  static uint32_t draw_tokens(LinearEpilogue epilogue, Random& random) {
    if (linear::serves_many(F, weight_parts(epilogue)) && random.between(1, 8) == 1) return random.pick({65u, 257u});
    return random.pick({1u, 3u, 8u, 9u});
  }

  static ScaleOf draw_scales(Random& random) {
    return kIsScaled && random.chance(128) ? ScaleOf::kRow : ScaleOf::kTensor;
  }
  void draw_block_scales(Random& random) {
    problem_.x_scale = problem_.weight_scale = ScaleOf::kBlock;
    const bool is_by_rows = random.chance(128);
    problem_.x_scale_token_stride = is_by_rows ? blocks() : 1;
    problem_.x_scale_block_stride = is_by_rows ? 1 : problem_.tokens + random.between(0, 3);
  }
  uint32_t blocks() const { return problem_.inputs / kScaleBlock; }
  size_t scales_of_x() const {
    if (problem_.x_scale == ScaleOf::kTensor) return 1;
    if (problem_.x_scale == ScaleOf::kRow) return problem_.tokens;
    return size_t{problem_.tokens - 1} * problem_.x_scale_token_stride +
           size_t{blocks() - 1} * problem_.x_scale_block_stride + 1;
  }
  size_t scales_of_weight(uint32_t rows) const {
    if (problem_.weight_scale == ScaleOf::kTensor) return 1;
    return problem_.weight_scale == ScaleOf::kRow ? rows : divide_up(rows, kScaleBlock) * blocks();
  }
  // As long as whole lines are.
  static void fill_scales(Lines& lines, size_t count, Random& random) {
    lines.resize((count * sizeof(float) + sizeof(Line) - 1) / sizeof(Line));
    for (size_t i = 0; i < count; ++i) put(lines, i, 0.001f * static_cast<float>(random.between(1, 1000)));
  }
  std::string about_scales() const {
    if (!kIsScaled) return "";
    const auto of = [](ScaleOf scale) {
      return scale == ScaleOf::kRow ? "row" : scale == ScaleOf::kBlock ? "block" : "tensor";
    };
    return std::string(" of fp8, a scale for each ") + of(problem_.x_scale) + " of x and " + of(problem_.weight_scale) +
           " of the weight";
  }

  void expect() {
    for (uint32_t token = 0; token < problem_.tokens; ++token) {
      for (uint32_t output = 0; output < problem_.outputs; ++output) {
        const uint16_t first = product(token, output);
        expected_.push_back(
            weight_parts(problem_.epilogue) == 1
                ? first
                : activate_and_mul<D>(problem_.epilogue, first, product(token, problem_.outputs + output)));
      }
    }
  }

  // The boxes of even number in their order, those of odd number in theirs, and then the sum of the two. With scales of
  // blocks the products of each box are summed by themselves.
  uint16_t product(uint32_t token, uint32_t row) const {
    float sums[2] = {};
    float products = 0.0f;
    for (uint32_t k = 0; k < problem_.inputs; ++k) {
      float& sum = has_block_scales(problem_) ? products : sums[k / kColumns % 2];
      sum = multiply_add(at<Operand<F>>(weight_, size_t{row} * problem_.inputs + k).value(),
                         at<Operand<F>>(source_, size_t{token} * problem_.inputs + k).value(), sum);
      if (!has_block_scales(problem_) || k % kColumns != kColumns - 1) continue;
      const uint32_t block = k / kScaleBlock;
      const auto of_x = at<float>(
          scale_source_, size_t{token} * problem_.x_scale_token_stride + size_t{block} * problem_.x_scale_block_stride);
      const auto of_weight = at<float>(weight_scale_, size_t{row / kScaleBlock} * blocks() + block);
      sums[block % 2] = multiply_add(of_x * of_weight, products, sums[block % 2]);
      products = 0.0f;
    }
    const float sum = sums[0] + sums[1];
    const float bias = bias_.empty() ? 0.0f : E::value(element(bias_, row));
    if (!kIsScaled || has_block_scales(problem_)) return E::round(bias_.empty() ? sum : sum + bias);
    const auto of_x = at<float>(scale_source_, problem_.x_scale == ScaleOf::kRow ? token : 0);
    const auto of_weight = at<float>(weight_scale_, problem_.weight_scale == ScaleOf::kRow ? row : 0);
    const float product = of_weight * sum;
    return E::round(bias_.empty() ? of_x * product : multiply_add(of_x, product, bias));
  }

  LinearProblem problem_;
  LinearChoice choice_;
  uint32_t threads_;
  Lines source_;
  Lines x_;
  Lines weight_;
  Lines scale_source_;  // of x, as `source_`
  Lines x_scale_;
  Lines weight_scale_;
  Lines bias_;  // none where it is empty
  Lines out_;
  Lines before_;  // of the output, as the grid before finds it
  std::vector<uint16_t> expected_;
  std::unique_ptr<host::PreparedCall> call_;
};

}  // namespace drill
