// A call of any other operation, by what its descriptor says.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "algorithms/registry.h"
#include "any_order.h"
#include "calls.h"
#include "operands.h"
#include "tilings.h"

namespace drill {

// An algorithm of an operation that has expect(), which is about its first output. All buffers are like the input,
// unless the operation has elements().
template <class Algorithm>
class AnyCall final : public Call {
 public:
  using Operation = typename Algorithm::Operation;

  AnyCall(uint32_t algorithm, DataType type, uint32_t ranks, Random& random)
      : algorithm_(algorithm),
        problem_(draw_problem(type, ranks, random)),
        tiling_(draw_tiling(algorithm, problem_, random)) {
    in_place_ = Algorithm::kInfo.symmetric == 0b11 && random.chance(96);
    if (kIsCopied && random.chance(128)) rounds_ = 2;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      if (kIsDirect) gaps_[rank] = rank != 0 && kIsCopied ? gaps_[0] : random.below(3);
      for (uint32_t buffer = 0; buffer < kMaxBuffers; ++buffer) {
        const BufferInfo& info = Operation::kInfo.buffers[buffer];
        if (info.name == nullptr) continue;
        const uint64_t count = elements(buffer, rank);
        tensors_[buffer].emplace_back(type, count, random);
        if (info.is_output) continue;
        tensors_[buffer].back().fill(random);
      }
      if (rounds_ == 1) continue;
      first_input_.emplace_back(type, elements(0, rank), random);
      first_input_.back().fill(random);
      first_result_[rank].resize(divide_up(tensors_[first_output()][rank].bytes_with_guard(), sizeof(Line)));
    }
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      for (uint64_t i = 0; i < elements(first_output(), rank); ++i) {
        std::vector<uint32_t> summands;
        expected_[rank].push_back(Operation::expect(problem_, rank, i, [&](uint32_t of, uint64_t j) {
          summands.push_back(tensors_[0][of].at(j));
          return summands.back();
        }));
        if (Algorithm::kInfo.sums_in_switch) sums_[rank].expect(type, summands);
        if (rounds_ == 1) continue;
        first_expected_[rank].push_back(
            Operation::expect(problem_, rank, i, [&](uint32_t of, uint64_t j) { return first_input_[of].at(j); }));
      }
    }
  }

  void enqueue(World& world, uint32_t rank) override {
    calls_.push_back(world.core(rank).prepare(algorithm_, problem_, tiling_));
    uint64_t buffers[kMaxBuffers] = {};
    for (uint32_t buffer = 0; buffer < kMaxBuffers; ++buffer) {
      if (tensors_[buffer].empty()) continue;
      if (in_place_ && buffer == first_output()) {
        buffers[buffer] = buffers[0];
        continue;
      }
      Tensor& tensor = tensors_[buffer][rank];
      if ((Algorithm::kInfo.symmetric >> buffer & 1) != 0) {
        world.take_symmetric(rank, gaps_[rank] * sizeof(Line));
        tensor.move_to(world.take_symmetric(rank, tensor.bytes_with_guard()));
      }
      buffers[buffer] = tensor.address();
    }
    if (rounds_ == 2) {
      uint64_t of_first_round[kMaxBuffers];
      std::copy(buffers, buffers + kMaxBuffers, of_first_round);
      of_first_round[0] = first_input_[rank].address();
      calls_.back()->run(of_first_round, 0);
      read(world, rank, tensors_[first_output()][rank]);
    }
    calls_.back()->run(buffers, 0);
  }

  std::string wrong(uint32_t rank) const override {
    const Tensor& result = tensors_[in_place_ ? 0 : first_output()][rank];
    if (rounds_ == 2) {
      const auto* const found = reinterpret_cast<const char*>(first_result_[rank].data());
      for (uint64_t i = 0; i < first_expected_[rank].size(); ++i) {
        const uint32_t bytes = element_bytes(problem_.type);
        if (std::memcmp(found + i * bytes, &first_expected_[rank][i], bytes) == 0) continue;
        return "element " + std::to_string(i) + " of the first of two results is not " + hex(first_expected_[rank][i]);
      }
    }
    if (Algorithm::kInfo.sums_in_switch) return sums_[rank].wrong(result, false);  // ranks have parts of their own
    return result.differs_from(expected_[rank]);
  }
  std::string touched(uint32_t rank) const override {
    if (in_place_ || kIsCopied) return "";  // what stands in the stream is copied whatever has ended
    return tensors_[first_output()][rank].touched();
  }

  uint64_t operations() const override {
    uint64_t grids = 1;  // of a launch
    if constexpr (kIsCopied) grids = Operation::grids(problem_, tiling_);
    return rounds_ * launches(problem_, tiling_) * grids;
  }

  std::string name() const override {
    std::string parameters;
    for (uint32_t i = 0; i < kMaxParameters; ++i) {
      if (Operation::kInfo.parameters[i].name == nullptr) continue;
      parameters += std::string(Operation::kInfo.parameters[i].name) + " " +
                    std::to_string(static_cast<int64_t>(problem_.parameter[i])) + ", ";
    }
    return name_of(algorithm_) + " of " + std::to_string(problem_.count) + " " + data_type_name(problem_.type) + " (" +
           parameters + text(tiling_) +
           (in_place_      ? ", in place)"
            : rounds_ == 2 ? ", twice)"
                           : ")");
  }

 private:
  // Its peers access whole lines only.
  static constexpr bool kIsDirect = Algorithm::kInfo.symmetric != 0;
  // Whose copies stand in the stream: their tensors lie at one place.
  static constexpr bool kIsCopied =
      requires(const Problem& problem, const Tiling& tiling) { Operation::grids(problem, tiling); };

  static constexpr uint32_t first_output() {
    uint32_t buffer = 0;
    while (!Operation::kInfo.buffers[buffer].is_output) ++buffer;
    return buffer;
  }

  // A grid that reads the result before the next round, as a user's kernel would. By a few threads, some of which come
  // late.
  void read(World& world, uint32_t rank, const Tensor& output) {
    Line* const to = first_result_[rank].data();
    const auto* const from = reinterpret_cast<const Line*>(output.address());
    const uint64_t lines = first_result_[rank].size();
    world.launch(rank, {1, kReaders, 0}, [=] {
      grid_dependency_wait();
      for (uint64_t i = thread_index(); i < lines; i += kReaders) to[i] = load_line(from + i);
    });
  }

  uint64_t elements(uint32_t buffer, uint32_t rank) const {
    if constexpr (requires { Operation::elements(problem_, buffer, rank); }) {
      return Operation::elements(problem_, buffer, rank);
    } else {
      return problem_.count;
    }
  }

  // Parts of all sizes, in one row or in several.
  static Problem draw_parts(DataType type, uint32_t ranks, Random& random) {
    Problem problem{0, 0, type, ranks, {}};
    const uint32_t per_line = static_cast<uint32_t>(sizeof(Line)) / element_bytes(type);
    const uint32_t rows = random.chance(96) ? random.between(2, 3) : 1;
    const uint32_t whole_lines = random.chance(128) || kIsDirect ? per_line : 1;
    // Those of quantized algorithms have several chunks too.
    const uint32_t unit = *Algorithm::kInfo.wire != 0 ? kQuantizedChunkLines : 1;
    const uint32_t most = (ranks > 4 ? 4 : 8) * unit * per_line / rows;
    problem.parameter[kRows] = rows;
    const uint32_t size_of_all = random.between(1, most / whole_lines) * whole_lines;
    const bool is_even = random.chance(96) || std::is_same_v<Operation, AllToAll>;
    uint32_t largest = 0;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      const uint32_t size = is_even ? size_of_all : random.below(most / whole_lines + 1) * whole_lines;
      problem.parameter[kFirstSize + rank] = size;
      largest = std::max(largest, size);
    }
    if (largest == 0) problem.parameter[kFirstSize + random.below(ranks)] = largest = whole_lines;
    problem.count = uint64_t{rows} * largest;
    return problem;
  }

  static Problem draw_served(DataType type, uint32_t ranks, Random& random) {
    for (;;) {
      const Problem problem = draw_parts(type, ranks, random);
      if constexpr (requires { Algorithm::is_served(problem); }) {
        if (!Algorithm::is_served(problem)) continue;
      }
      return problem;
    }
  }

  static Problem draw_problem(DataType type, uint32_t ranks, Random& random) {
    constexpr const OperationInfo& info = Operation::kInfo;
    if constexpr (std::is_base_of_v<ShardsOperation, Operation>) return draw_served(type, ranks, random);
    for (;;) {
      Problem problem{0, 0, type, ranks, {}};
      if (info.row_multiple != 0) {
        problem.row = info.row_multiple * random.between(1, std::min(8u, info.max_row / info.row_multiple));
        problem.count = uint64_t{problem.row} * random.between(1, 4);
      } else {
        const uint32_t per_line = static_cast<uint32_t>(sizeof(Line)) / element_bytes(type);
        // Of those that are copied the slices of all ranks but one are whole.
        const uint32_t lines = random.between(1, kIsCopied ? 2 * ranks + 2 : ranks > 4 ? 6 : 10);
        problem.count =
            random.chance(96) ? lines * per_line : random.between(lines * per_line - per_line + 1, lines * per_line);
        if (kIsDirect) problem.count = lines * per_line;
      }
      for (uint32_t i = 0; i < kMaxParameters; ++i) {
        const ParameterInfo& parameter = info.parameters[i];
        if (parameter.name == nullptr) continue;
        problem.parameter[i] = parameter.is_rank ? random.below(ranks) : random.below(3);
      }
      if constexpr (requires { Algorithm::is_served(problem); }) {
        if (!Algorithm::is_served(problem)) continue;
      }
      try {
        check_problem<Operation>(problem);
        return problem;
      } catch (const std::invalid_argument&) {  // of parameters that do not go together
      }
    }
  }

  static constexpr uint32_t kReaders = 3;

  uint32_t algorithm_;
  Problem problem_;
  Tiling tiling_;
  bool in_place_;
  // 2: the call is made twice, with the same output and another input at first, and what comes first is read in
  // between.
  uint32_t rounds_ = 1;
  std::vector<Tensor> first_input_;  // by rank, as what follows
  std::vector<uint32_t> first_expected_[kMaxWorldSize];
  std::vector<Line> first_result_[kMaxWorldSize];
  uint32_t gaps_[kMaxWorldSize] = {};         // lines before each symmetric tensor: it may lie elsewhere on each rank
  std::vector<Tensor> tensors_[kMaxBuffers];  // by rank
  std::vector<uint32_t> expected_[kMaxWorldSize];
  SwitchSums sums_[kMaxWorldSize];  // what counts in place of them where a switch sums
  std::vector<std::unique_ptr<host::PreparedCall>> calls_;
};

}  // namespace drill
