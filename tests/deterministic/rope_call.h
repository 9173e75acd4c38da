// Layer of q, k and v behind a grid that brings x, positions and slots late, and reads what the outputs held before.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "algorithms/linear/rope.h"
#include "linear_call.h"

namespace drill {

// One rank is enough: the call takes no operation and waits for no other rank.
template <DataType D>
class RopeCall final : public Call {
 public:
  explicit RopeCall(Random& random) : problem_(draw_problem(random)), threads_(random.between(1, 4)) {
    const auto number = [&](size_t) { return static_cast<uint16_t>(draw_number(D, random)); };
    fill(source_, size_t{problem_.tokens} * problem_.inputs, number);
    // Numbers are up to 32. Scaled, they leave bits to round.
    fill(weight_, size_t{problem_.outputs} * problem_.inputs, [&](size_t i) { return scaled(number(i), 1.0f / 64); });
    if (random.chance(128)) fill(bias_, problem_.outputs, number);
    fill(angles_, size_t{problem_.positions} * problem_.rotary_size,
         [&](size_t i) { return scaled(number(i), 1.0f / 32); });
    if (problem_.has_norms) fill(norms_, 2 * problem_.head_size, number);
    // Positions, then slots. Some are of no row of the table, and of no slot.
    number_source_.resize(divide_up(2 * problem_.tokens * sizeof(int64_t), sizeof(Line)));
    std::vector<uint32_t> slots(problem_.blocks * problem_.block_slots);
    for (uint32_t slot = 0; slot < slots.size(); ++slot) slots[slot] = slot;
    for (uint32_t token = 0; token < problem_.tokens; ++token) {
      const uint32_t place = random.below(static_cast<uint32_t>(slots.size()));
      put(number_source_, token, random.chance(16) ? int64_t{-1} : int64_t{random.below(problem_.positions)});
      put(number_source_, problem_.tokens + token, random.chance(32) ? int64_t{-1} : int64_t{slots[place]});
      slots.erase(slots.begin() + place);
    }
    x_.resize(source_.size(), touchless());
    numbers_.resize(number_source_.size(), touchless());
    results_.resize((size_t{problem_.tokens} * problem_.outputs + 2 * cache_elements()) / kElements, touchless());
    before_.resize(results_.size());
    expect();
  }

  void enqueue(World& world, uint32_t rank) override {
    if (rank != kRank) return;
    const BringArgs args{source_.data(),  x_.data(),       x_.size(),      number_source_.data(), numbers_.data(),
                         numbers_.size(), results_.data(), before_.data(), results_.size()};
    world.launch(rank, {1, threads_, 0}, [=] { bring(args); });
    call_ = world.core(rank).prepare_rope(problem_, {});
    const uint64_t out = address(results_), keys = out + uint64_t{problem_.tokens} * problem_.outputs * 2;
    const uint64_t norms = address(norms_);
    const uint64_t buffers[rope::kBuffers] = {address(x_),
                                              address(weight_),
                                              address(bias_),
                                              out,
                                              address(numbers_),
                                              address(angles_),
                                              norms,
                                              norms == 0 ? 0 : norms + problem_.head_size * 2,
                                              keys,
                                              keys + cache_elements() * 2,
                                              address(numbers_) + problem_.tokens * sizeof(int64_t)};
    call_->run(buffers, 0);
  }

  std::string wrong(uint32_t rank) const override {
    if (rank != kRank) return "";
    const std::string before = touched_in(reinterpret_cast<const char*>(before_.data()), bytes(before_));
    if (!before.empty()) return "written before its time: " + before;
    for (size_t i = 0; i < expected_.size(); ++i) {
      if (element(results_, i) == expected_[i]) continue;
      const size_t outputs = size_t{problem_.tokens} * problem_.outputs;
      const std::string where = i < outputs ? "output " + std::to_string(i % problem_.outputs) + " of token " +
                                                  std::to_string(i / problem_.outputs)
                                            : "element " + std::to_string(i - outputs) + " of the cache";
      return where + " is " + hex(element(results_, i)) + ", not " + hex(expected_[i]);
    }
    return "";
  }

  uint64_t operations() const override { return 0; }

  std::string name() const override {
    return "layer of q, k and v of " + std::to_string(problem_.tokens) + " tokens, " + std::to_string(problem_.inputs) +
           " inputs, " + std::to_string(problem_.outputs) + " outputs " + data_type_name(D) + ", heads of " +
           std::to_string(problem_.head_size) + " of which " + std::to_string(problem_.rotary_size) + " rotate" +
           (problem_.is_interleaved ? ", interleaved" : "") + (problem_.has_norms ? ", norms" : "") +
           (bias_.empty() ? "" : ", a bias");
  }

 private:
  using E = Element<D>;
  static constexpr uint32_t kRank = 0;
  static constexpr uint32_t kColumns = kBoxRowBytes / sizeof(uint16_t);

  static rope::Problem draw_problem(Random& random) {
    rope::Problem problem{};
    problem.tokens = random.pick({1u, 2u, 9u, 17u});
    problem.inputs = kColumns * random.pick({1u, 3u, 34u, 70u});
    problem.type = D;
    problem.head_size = random.pick({32u, 64u});
    problem.kv_heads = 1;
    problem.outputs = problem.head_size * (problem.head_size == 32 ? random.pick({4u, 6u}) : 3u);
    problem.rotary_size = problem.head_size / random.between(1, 2);
    problem.is_interleaved = random.chance(96);
    problem.has_norms = random.chance(160);
    problem.epsilon = 0.25f;
    problem.positions = 5;
    problem.has_64_bit_positions = problem.has_64_bit_slots = true;
    problem.blocks = 6;
    problem.block_slots = 4;
    problem.slots = problem.tokens;
    problem.key = {uint64_t{problem.block_slots} * problem.head_size, problem.head_size, problem.head_size};
    problem.value = problem.key;
    return problem;
  }

  static uint16_t scaled(uint16_t number, float factor) { return E::round(E::value(number) * factor); }

  template <class Draw>
  static void fill(Lines& lines, size_t count, Draw draw) {
    lines.resize((count + kElements - 1) / kElements);
    for (size_t i = 0; i < count; ++i) put(lines, i, draw(i));
  }

  size_t cache_elements() const { return size_t{problem_.blocks} * problem_.block_slots * problem_.head_size; }

  void expect() {
    expected_.resize(results_.size() * kElements);
    for (size_t i = 0; i < expected_.size(); ++i) expected_[i] = element(results_, i);
    for (uint32_t token = 0; token < problem_.tokens; ++token) {
      for (uint32_t head = 0; head < problem_.outputs / problem_.head_size; ++head) expect_head(token, head);
    }
  }

  void expect_head(uint32_t token, uint32_t head) {
    const uint32_t size = problem_.head_size, heads = problem_.outputs / size, half = problem_.rotary_size / 2;
    std::vector<float> values;
    for (uint32_t i = 0; i < size; ++i) values.push_back(layer(token, head * size + i));
    const bool is_value = head + 1 == heads, is_query = head + 2 < heads;
    if (problem_.has_norms && !is_value) normalize(values, is_query ? 0 : 1);
    const auto position = at<int64_t>(number_source_, token);
    for (uint32_t i = 0; i < half && !is_value; ++i) {
      float& x = values[problem_.is_interleaved ? 2 * i : i];
      float& y = values[problem_.is_interleaved ? 2 * i + 1 : half + i];
      const auto angle = [&](uint32_t column) {
        if (position < 0) return bits_to_float(0x7FC00000);
        return E::value(element(angles_, static_cast<size_t>(position) * problem_.rotary_size + column));
      };
      const float cosine = angle(i), sine = angle(half + i), old = x;
      x = multiply_add(old, cosine, -(y * sine));
      y = multiply_add(y, cosine, old * sine);
    }
    const auto slot = at<int64_t>(number_source_, problem_.tokens + token);
    const size_t outputs = size_t{problem_.tokens} * problem_.outputs;
    for (uint32_t i = 0; i < size; ++i) {
      const uint16_t bits = E::round(values[i]);
      expected_[size_t{token} * problem_.outputs + head * size + i] = bits;
      if (is_query || slot < 0) continue;
      expected_[outputs + (is_value ? cache_elements() : 0) + static_cast<size_t>(slot) * size + i] = bits;
    }
  }

  // Each warp has two neighbouring boxes of every 16 pairs of these, whose left and right halves are two sums.
  float layer(uint32_t token, uint32_t output) const {
    std::array<std::array<float, 2>, rope::kWarps> sums{};
    for (uint32_t i = 0; i < problem_.inputs; ++i) {
      float& sum = sums[i / kColumns / rope::kStageBoxes % rope::kWarps][i % kColumns / (kColumns / 2)];
      sum = multiply_add(E::value(element(weight_, size_t{output} * problem_.inputs + i)),
                         E::value(element(source_, size_t{token} * problem_.inputs + i)), sum);
    }
    float all = sums[0][0] + sums[0][1];
    for (uint32_t warp = 1; warp < rope::kWarps; ++warp) all += sums[warp][0] + sums[warp][1];
    if (!bias_.empty()) all += E::value(element(bias_, output));
    return E::value(E::round(all));
  }

  void normalize(std::vector<float>& values, uint32_t norm) const {
    float sum = 0.0f;
    const uint32_t size = problem_.head_size, part = problem_.rotary_size / 2;
    for (uint32_t line = 0; line < size / (2 * rope::kLinePairs); ++line) {
      std::array<float, rope::kLinePairs> squares{};
      for (uint32_t i = 0; i < rope::kLinePairs; ++i) {
        const auto [a, b] = outputs_of_pair(line * rope::kLinePairs + i, part);
        squares[i] = multiply_add(values[a], values[a], values[b] * values[b]);
      }
      for (uint32_t mask = 1; mask < rope::kLinePairs; mask *= 2) {
        const auto old = squares;
        for (uint32_t i = 0; i < rope::kLinePairs; ++i) squares[i] = old[i] + old[i ^ mask];
      }
      sum += squares[0];
    }
    const float factor = reciprocal_sqrt(multiply_add(sum, 1.0f / static_cast<float>(size), problem_.epsilon));
    for (uint32_t i = 0; i < size; ++i) {
      values[i] = E::value(E::round(values[i] * factor * E::value(element(norms_, norm * size + i))));
    }
  }

  // Eight pairs are of eight outputs of a part and of as many of the part behind it.
  std::array<uint32_t, 2> outputs_of_pair(uint32_t pair, uint32_t part) const {
    const uint32_t line = pair / 8, of_line = pair % 8, lines = part / 8;
    const uint32_t first = line / lines * 2 * part + line % lines * 8;
    if (!problem_.is_interleaved) return {first + of_line, first + of_line + part};
    const uint32_t output = first + of_line / 4 * part + of_line % 4 * 2;
    return {output, output + 1};
  }

  rope::Problem problem_;
  uint32_t threads_;
  Lines source_;
  Lines x_;
  Lines number_source_;
  Lines numbers_;
  Lines weight_;
  Lines bias_;  // empty: none
  Lines angles_;
  Lines norms_;    // of q, then of k; empty: none
  Lines results_;  // y, then the caches of keys and of values
  Lines before_;   // of the results, as the grid before finds them
  std::vector<uint16_t> expected_;
  std::unique_ptr<host::PreparedCall> call_;
};

}  // namespace drill
