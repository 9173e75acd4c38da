#include "calls.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "algorithms/registry.h"
#include "host/planner.h"
#include "message_passing.cuh"

namespace drill {

namespace {

std::string hex(uint64_t value) {
  char text[20];
  std::snprintf(text, sizeof(text), "%#llx", static_cast<unsigned long long>(value));
  return text;
}

// ---- Values --------------------------------------------------------------------------------------------------------

uint32_t draw_number(DataType type, Random& random) {
  const float value = static_cast<float>(static_cast<int32_t>(random.below(4096)) - 2048) / 64.0f;
  switch (type) {
    case DataType::kBFloat16:
      return Element<DataType::kBFloat16>::round(value);
    case DataType::kFloat16:
      return Element<DataType::kFloat16>::round(value);
    default:
      return Element<DataType::kFloat32>::round(value);
  }
}

uint32_t draw_value(DataType type, Random& random) {
  const uint32_t all_ones = type == DataType::kFloat32 ? 0xFFFFFFFFu : 0xFFFFu;
  const uint32_t sign = all_ones / 2 + 1;
  switch (random.below(16)) {
    case 0:
      return static_cast<uint32_t>(random.next()) & all_ones;  // NaN, infinities and subnormals among them
    case 1:
      return all_ones;  // what a line that has not arrived is filled with
    case 2:
      return sign;  // -0.0
    case 3:
      return all_ones - 1;  // what a sentinel is sent as
    default:
      return draw_number(type, random);
  }
}

// What outputs hold at first.
constexpr char kUntouched = '\x5A';

// "" or where bytes are not as they were at first.
std::string touched_in(const char* first, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    if (first[i] != kUntouched) return "byte " + std::to_string(i) + " has been written";
  }
  return "";
}

// A rank's tensor, whose first element need not be aligned to a line.
class Tensor {
 public:
  Tensor(DataType type, uint64_t count, Random& random) : type_(type), count_(count) {
    const uint32_t per_line = static_cast<uint32_t>(sizeof(Line)) / bytes();
    offset_ = random.chance(64) ? random.below(per_line) * bytes() : 0;
    // To the byte: a sanitizer sees the first one behind it. The heap aligns to lines.
    bytes_ = std::vector<char>(offset_ + count * bytes(), kUntouched);
  }

  uint64_t address() const { return reinterpret_cast<uint64_t>(bytes_.data()) + offset_; }
  uint32_t at(uint64_t i) const {
    uint32_t value = 0;
    std::memcpy(&value, bytes_.data() + offset_ + i * bytes(), bytes());
    return value;
  }
  void set(uint64_t i, uint32_t value) { std::memcpy(bytes_.data() + offset_ + i * bytes(), &value, bytes()); }

  // "" or what is wrong.
  std::string differs_from(const std::vector<uint32_t>& expected) const {
    for (uint64_t i = 0; i < count_; ++i) {
      if (at(i) == expected[i]) continue;
      return "element " + std::to_string(i) + " of " + std::to_string(count_) + " is " + hex(at(i)) + ", not " +
             hex(expected[i]);
    }
    return "";
  }

  std::string touched() const { return touched_in(bytes_.data(), bytes_.size()); }

 private:
  uint32_t bytes() const { return element_bytes(type_); }

  DataType type_;
  uint64_t count_;
  std::vector<char> bytes_;
  size_t offset_;
};

// ---- Tilings -------------------------------------------------------------------------------------------------------

const host::Algorithm& info_of(uint32_t algorithm) { return host::algorithms()[algorithm]; }

std::string name_of(uint32_t algorithm) {
  return std::string(info_of(algorithm).operation->name) + "/" + info_of(algorithm).info->name;
}

std::string text(const Tiling& tiling) {
  return "blocks " + std::to_string(tiling.blocks) +
         (tiling.cluster > 1 ? ", clusters of " + std::to_string(tiling.cluster) : "") + ", tile lines " +
         std::to_string(tiling.tile_lines) + ", depth " + std::to_string(tiling.depth) + ", launches of " +
         std::to_string(tiling.launch_units);
}

const char* suffix_of(Quantization quantization) {
  const char* const suffixes[] = {"", "+static", "+dynamic"};
  return suffixes[static_cast<uint32_t>(quantization)];
}

uint64_t launches(const Problem& problem, const Tiling& tiling) {
  return divide_up(problem.units(), tiling.launch_units);
}

// A small value of a tunable: schedules are to have few threads, which do more than one thing each.
uint32_t draw_tunable(const Tunable& tunable, Random& random) {
  uint32_t value = std::min(tunable.max, tunable.min + random.below(4));
  if (tunable.is_power_of_two) value = floor_power_of_two(value);
  return value;
}

// Of any algorithm, from what its descriptor says of itself. The slots are often small ones, so that a message takes several
// launches.
Tiling draw_tiling(uint32_t number, const Problem& problem, Random& random) {
  const host::Algorithm& algorithm = info_of(number);
  for (int attempt = 0;; ++attempt) {
    Choice choice;
    for (const Tunable& tunable : algorithm.tunables->tunable) {
      if (tunable.name == nullptr) continue;
      const std::string name = tunable.name;
      const uint32_t value = draw_tunable(tunable, random);
      if (name == "blocks") choice.blocks = value;
      if (name == "threads") choice.threads = value;
      if (name == "tile_lines") choice.tile_lines = value;
      if (name == "cluster") choice.cluster = value;
      if (name == "depth") choice.depth = value;
    }
    Limits limits{kSlotBytes, 132, kMaxClusterBlocks, 0};
    const bool is_cut = random.chance(96);
    if (is_cut) limits.slot_bytes = problem.world * sizeof(Line) * random.between(1, 8);
    if (attempt == 20) {
      choice = algorithm.candidates(problem, limits).at(0);
      limits.slot_bytes = kSlotBytes;
    }
    try {
      const Shape shape = algorithm.shape(problem, choice, limits);
      if (shape.launches <= 4) return shape.tiling;
    } catch (const std::invalid_argument&) {
      if (attempt == 20) throw;
    }
  }
}

// ---- All-reduce ----------------------------------------------------------------------------------------------------

// What the schedules know of an algorithm in tiles (TiledAllReduce): draws that let blocks walk over several tiles, and cut
// messages anywhere.
Tiling draw_tiling_in_tiles(const Problem& problem, Random& random) {
  Tiling tiling{};
  tiling.blocks = random.between(1, 3);
  tiling.tile_lines = 1u << random.below(problem.world > 4 ? 2 : 3);
  tiling.cluster = 1;
  tiling.depth = random.below(3);
  const auto count = static_cast<uint32_t>(problem.count);
  tiling.launch_units = random.chance(32) ? random.between(1 + count / 3, 1 + count) : count;
  return tiling;
}

class AllReduceCall final : public Call {
 public:
  AllReduceCall(uint32_t algorithm, DataType type, uint32_t ranks, Random& random, const AllReduceCall* before)
      : algorithm_(algorithm), problem_{0, 0, type, ranks, {}} {
    if (random.chance(64) && before != nullptr) {
      problem_ = before->problem_;
      continued_ = before;
    } else {
      const uint32_t per_line = static_cast<uint32_t>(sizeof(Line)) / element_bytes(type);
      const uint32_t most_lines = shares_out() ? 2 * ranks + 2 : (ranks > 4 ? 5 : 9);
      const uint32_t lines = random.chance(96) ? 1 : random.between(1, most_lines);
      problem_.count =
          random.chance(96) ? lines * per_line : random.between(lines * per_line - per_line + 1, lines * per_line);
    }
    Registry::at(algorithm, [&]<class A>() {
      constexpr bool kInTiles = std::is_base_of_v<TiledAllReduce<A>, A>;
      tiling_ = kInTiles ? draw_tiling_in_tiles(problem_, random) : draw_tiling(algorithm, problem_, random);
    });
    in_place_ = continued_ == nullptr && random.chance(80);
    draw_contents(random);
  }

  void enqueue(World& world, uint32_t rank) override {
    calls_.push_back(world.core(rank).prepare(algorithm_, problem_, tiling_));
    const uint64_t buffers[] = {input(rank).address(), output(rank).address()};
    calls_.back()->run(buffers, 0);
  }

  std::string wrong(uint32_t rank) const override { return output(rank).differs_from(expected_); }
  std::string touched(uint32_t rank) const override { return in_place_ ? "" : output(rank).touched(); }

  uint64_t operations() const override { return launches(problem_, tiling_); }

  std::string name() const override {
    return name_of(algorithm_) + " of " + std::to_string(problem_.count) + " " + data_type_name(problem_.type) + " (" +
           text(tiling_) + (in_place_ ? ", in place" : "") + (continued_ != nullptr ? ", of the call before)" : ")");
  }

 private:
  // Whether a rank sums a part of the message only. Such an algorithm is given a message of a few lines for every rank.
  bool shares_out() const {
    bool shares = false;
    Registry::at(algorithm_, [&]<class A>() {
      if constexpr (std::is_base_of_v<TiledAllReduce<A>, A>) {
        shares = A::tiled_lines(problem_.world, problem_.world) < problem_.world;
      }
    });
    return shares;
  }

  const Tensor& input(uint32_t rank) const { return continued_ != nullptr ? continued_->output(rank) : inputs_[rank]; }
  const Tensor& output(uint32_t rank) const { return in_place_ ? input(rank) : outputs_[rank]; }

  void draw_contents(Random& random) {
    for (uint32_t rank = 0; rank < problem_.world; ++rank) {
      if (continued_ == nullptr) inputs_.emplace_back(problem_.type, problem_.count, random);
      if (!in_place_) outputs_.emplace_back(problem_.type, problem_.count, random);
    }
    for (uint64_t i = 0; i < problem_.count; ++i) {
      const bool all_alike = random.chance(16);  // -0.0 of all ranks stays -0.0
      std::vector<uint32_t> values(problem_.world, draw_value(problem_.type, random));
      for (uint32_t rank = 0; rank < problem_.world; ++rank) {
        if (continued_ != nullptr) {
          values[rank] = continued_->expected_[i];
          continue;
        }
        if (!all_alike) values[rank] = draw_value(problem_.type, random);
        inputs_[rank].set(i, values[rank]);
      }
      expected_.push_back(AllReduce::expect(problem_, 0, i, [&](uint32_t rank, uint64_t) { return values[rank]; }));
    }
  }

  uint32_t algorithm_;
  Problem problem_;
  Tiling tiling_{};
  bool in_place_;
  const AllReduceCall* continued_ = nullptr;  // whose results are summed
  std::vector<Tensor> inputs_;
  std::vector<Tensor> outputs_;
  std::vector<uint32_t> expected_;
  std::vector<std::unique_ptr<host::PreparedCall>> calls_;
};

// ---- All-reduce + residual add + RMSNorm ---------------------------------------------------------------------------

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
  // Rows of several tiles, clusters of as many blocks as have a share of the row, and more rows than clusters: only then
  // does a block meet itself again in what it keeps for two rows, and blocks come to a row at different times.
  FusedCall(uint32_t algorithm, Quantization quantization, uint32_t ranks, Random& random)
      : algorithm_(algorithm),
        quantization_(quantization),
        ranks_(ranks),
        has_whole_warps_(shares_out() && ranks == 2 && random.chance(12)),
        lines_(has_whole_warps_ ? 4 * kWarpThreads : random.between(1, random.pick({8u, 16u, ranks > 4 ? 16u : 40u}))),
        rows_(random.between(1, random.pick({1u, 2u, 5u}))),
        problem_{uint64_t{rows_} * lines_ * kElementsPerLine,
                 lines_ * kElementsPerLine,
                 D,
                 ranks,
                 {kEpsilon, static_cast<double>(quantization)}} {
    Registry::at(algorithm, [&]<class A>() {
      if constexpr (std::is_base_of_v<RowsInClusters<A>, A>) {
        tiling_ = draw_tiling_of_rows(A::span(problem_), random);
      } else {
        tiling_ = draw_tiling(algorithm, problem_, random);
      }
    });
    const uint32_t hidden = lines_ * kElementsPerLine;
    for (uint32_t rank = 0; rank < ranks; ++rank) input_.push_back(draw(rows_ * hidden, random));
    residual_ = draw(rows_ * hidden, random);
    weight_ = draw(hidden, random);
    outputs_.assign(ranks, Outputs(rows_, hidden, quantization));
    for (uint32_t row = 0; row < rows_; ++row) expect_row(row);
  }

  void enqueue(World& world, uint32_t rank) override {
    calls_.push_back(world.core(rank).prepare(algorithm_, problem_, tiling_));
    const auto address = [](const auto& tensor) { return reinterpret_cast<uint64_t>(tensor.data()); };
    const bool is_static = quantization_ == Quantization::kStatic;
    const Outputs& outputs = outputs_[rank];
    const uint64_t buffers[] = {address(input_[rank]),     address(residual_),
                                address(weight_),          address(outputs.normed),
                                address(outputs.residual), is_static ? address(static_scale_) : address(outputs.scale)};
    calls_.back()->run(buffers, 0);
  }

  std::string wrong(uint32_t rank) const override {
    const Outputs& outputs = outputs_[rank];
    for (uint32_t row = 0; row < rows_; ++row) {
      const std::string wrong = quantization_ == Quantization::kDynamic ? wrong_scale(outputs, row) : "";
      if (!wrong.empty()) return wrong;
    }
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

  // What a call writes on one rank, each of exactly the bytes that are its own.
  struct Outputs {
    std::vector<uint8_t> normed;
    std::vector<uint16_t> residual;
    std::vector<float> scale;  // empty unless the call makes it

    Outputs(uint32_t rows, uint32_t hidden, Quantization quantization)
        : normed(rows * hidden * (quantization == Quantization::kNone ? 2 : 1)),
          residual(rows * hidden),
          scale(quantization == Quantization::kDynamic ? rows : 0) {
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

  float expected_scale(uint32_t row) const {
    if (quantization_ == Quantization::kStatic) return kStaticScale;
    const uint32_t hidden = lines_ * kElementsPerLine;
    float largest = 0;
    for (uint32_t i = row * hidden; i < (row + 1) * hidden; ++i) {
      largest = std::max(largest, std::abs(E::value(expected_normed_[i])));
    }
    return std::max(largest / kLargestE4m3, kSmallestScale);
  }

  // A norm may differ by a rounding, and with the largest of a row its scale.
  std::string wrong_scale(const Outputs& outputs, uint32_t row) const {
    const float expected = expected_scale(row);
    if (std::abs(outputs.scale[row] - expected) <= expected / 64) return "";
    return "the scale of row " + std::to_string(row) + " is " + std::to_string(outputs.scale[row]) + ", not " +
           std::to_string(expected);
  }

  std::string wrong_norm(const Outputs& outputs, size_t i) const {
    if (quantization_ == Quantization::kNone) {
      uint16_t normed;
      std::memcpy(&normed, outputs.normed.data() + i * sizeof(normed), sizeof(normed));
      if (distance(normed, expected_normed_[i]) <= 1) return "";
      return " is " + hex(normed) + ", not " + hex(expected_normed_[i]);
    }
    const auto row = static_cast<uint32_t>(i / (lines_ * kElementsPerLine));
    const uint8_t expected = float_to_e4m3(E::value(expected_normed_[i]) / expected_scale(row));
    if (distance(outputs.normed[i], expected) <= 1) return "";
    return " is " + hex(outputs.normed[i]) + ", not " + hex(expected) + " (FP8)";
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

  // `span`: lines of a row that a cluster walks over.
  Tiling draw_tiling_of_rows(uint32_t span, Random& random) const {
    Tiling tiling{};
    tiling.tile_lines = has_whole_warps_ ? kWarpThreads : kChunkLines * (ranks_ <= 4 && random.chance(64) ? 2 : 1);
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
  void expect_row(uint32_t row) {
    const uint32_t hidden = lines_ * kElementsPerLine;
    double squares = 0;
    for (uint32_t i = row * hidden; i < (row + 1) * hidden; ++i) {
      const auto reduced = static_cast<uint16_t>(sum_of_one(D, ranks_, [&](uint32_t rank) { return input_[rank][i]; }));
      expected_residual_.push_back(E::round(E::value(reduced) + E::value(residual_[i])));
      squares += std::pow(static_cast<double>(E::value(expected_residual_.back())), 2);
    }
    const double scale = 1 / std::sqrt(squares / hidden + kEpsilon);
    for (uint32_t i = 0; i < hidden; ++i) {
      const double value = static_cast<double>(E::value(expected_residual_[row * hidden + i]));
      expected_normed_.push_back(
          E::round(static_cast<float>(value * scale * static_cast<double>(E::value(weight_[i])))));
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
  std::vector<Outputs> outputs_;  // by rank
  std::vector<uint16_t> expected_residual_;
  std::vector<uint16_t> expected_normed_;
  std::vector<std::unique_ptr<host::PreparedCall>> calls_;
};

// ---- Message passing -----------------------------------------------------------------------------------------------

Line draw_line(Random& random) {
  Line line;
  for (uint32_t& word : line.word) word = static_cast<uint32_t>(random.next());
  return line;
}

bool differ(const Line& a, const Line& b) { return std::memcmp(&a, &b, sizeof(Line)) != 0; }

class MessageCall final : public Call {
 public:
  MessageCall(Form form, uint32_t index, uint32_t ranks, Random& random)
      : form_(form),
        ranks_(ranks),
        lines_(random.between(1, ranks > 4 ? 3 : kChannelLines)),
        rounds_(random.between(1, 3)),
        threads_(random.between(1, 4)),
        first_flag_(0x7FFFFFF0u + 4 * index),
        words_(ranks * ranks * rounds_) {
    for (uint32_t i = 0; i < ranks * ranks * rounds_ * lines_; ++i) source_.push_back(draw_line(random));
    received_.resize(source_.size());
  }

  void enqueue(World& world, uint32_t rank) override {
    MessageArgs args{};
    args.comm = world.device_comm(rank);
    args.channel_offset = kChannelOffset;
    args.counters = world.channel_counters(rank);
    args.source = source_.data() + at(rank, 0, 0, 0);
    args.received = received_.data() + at(rank, 0, 0, 0);
    args.words = words_.data() + rank * ranks_ * rounds_;
    args.lines = lines_;
    args.rounds = rounds_;
    args.first_flag = first_flag_;
    void (*const kernels[])(MessageArgs) = {&pass_by_put, &pass_by_get, &pass_by_packets};
    const auto kernel = kernels[static_cast<uint32_t>(form_)];
    const emulator::LaunchConfig config{ranks_ - 1, threads_, sizeof(Line)};
    args.comm.takes_tickets = world.machine().resident_blocks(config) < config.blocks;
    world.launch(rank, config, [=] { kernel(args); });
  }

  std::string wrong(uint32_t rank) const override {
    for (uint32_t peer = 0; peer < ranks_; ++peer) {
      for (uint32_t round = 0; peer != rank && round < rounds_; ++round) {
        const std::string where =
            " of round " + std::to_string(round) + " from rank " + std::to_string(peer) + " is not what was sent";
        for (uint32_t i = 0; i < lines_; ++i) {
          if (differ(received_[at(rank, peer, round, i)], source_[at(peer, rank, round, i)])) {
            return "line " + std::to_string(i) + where;
          }
        }
        const auto* const first_word = reinterpret_cast<const uint64_t*>(&source_[at(peer, rank, round, 0)]);
        if (form_ == Form::kPut && words_[(rank * ranks_ + peer) * rounds_ + round] != *first_word) {
          return "the word" + where;
        }
      }
    }
    return "";
  }

  uint64_t operations() const override { return 0; }

  std::string name() const override {
    const char* const names[] = {"put", "get", "packets"};
    return std::string(names[static_cast<uint32_t>(form_)]) + " of " + std::to_string(lines_) + " lines, " +
           std::to_string(rounds_) + " rounds (threads " + std::to_string(threads_) + ")";
  }

 private:
  size_t at(uint32_t rank, uint32_t peer, uint32_t round, uint32_t line) const {
    return ((static_cast<size_t>(rank) * ranks_ + peer) * rounds_ + round) * lines_ + line;
  }

  Form form_;
  uint32_t ranks_;
  uint32_t lines_;
  uint32_t rounds_;
  uint32_t threads_;
  uint32_t first_flag_;
  std::vector<Line> source_;
  std::vector<Line> received_;
  std::vector<uint64_t> words_;
};

// ---- Any other operation -------------------------------------------------------------------------------------------

// An algorithm of an operation that has expect(), which is about its first output. All buffers are like the input.
template <class Algorithm>
class AnyCall final : public Call {
 public:
  using Operation = typename Algorithm::Operation;

  AnyCall(uint32_t algorithm, DataType type, uint32_t ranks, Random& random)
      : algorithm_(algorithm),
        problem_(draw_problem(type, ranks, random)),
        tiling_(draw_tiling(algorithm, problem_, random)) {
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      for (uint32_t buffer = 0; buffer < kMaxBuffers; ++buffer) {
        const BufferInfo& info = Operation::kInfo.buffers[buffer];
        if (info.name == nullptr) continue;
        tensors_[buffer].emplace_back(type, problem_.count, random);
        if (info.is_output) continue;
        for (uint64_t i = 0; i < problem_.count; ++i) tensors_[buffer].back().set(i, draw_value(type, random));
      }
    }
    const auto input = [&](uint32_t rank, uint64_t i) { return tensors_[0][rank].at(i); };
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      for (uint64_t i = 0; i < problem_.count; ++i) {
        expected_[rank].push_back(Operation::expect(problem_, rank, i, input));
      }
    }
  }

  void enqueue(World& world, uint32_t rank) override {
    calls_.push_back(world.core(rank).prepare(algorithm_, problem_, tiling_));
    uint64_t buffers[kMaxBuffers] = {};
    for (uint32_t buffer = 0; buffer < kMaxBuffers; ++buffer) {
      if (!tensors_[buffer].empty()) buffers[buffer] = tensors_[buffer][rank].address();
    }
    calls_.back()->run(buffers, 0);
  }

  std::string wrong(uint32_t rank) const override {
    return tensors_[first_output()][rank].differs_from(expected_[rank]);
  }
  std::string touched(uint32_t rank) const override { return tensors_[first_output()][rank].touched(); }

  uint64_t operations() const override { return launches(problem_, tiling_); }

  std::string name() const override {
    std::string parameters;
    for (uint32_t i = 0; i < kMaxParameters; ++i) {
      if (Operation::kInfo.parameters[i].name == nullptr) continue;
      parameters += std::string(Operation::kInfo.parameters[i].name) + " " +
                    std::to_string(static_cast<int64_t>(problem_.parameter[i])) + ", ";
    }
    return name_of(algorithm_) + " of " + std::to_string(problem_.count) + " " + data_type_name(problem_.type) + " (" +
           parameters + text(tiling_) + ")";
  }

 private:
  static constexpr uint32_t first_output() {
    uint32_t buffer = 0;
    while (!Operation::kInfo.buffers[buffer].is_output) ++buffer;
    return buffer;
  }

  static Problem draw_problem(DataType type, uint32_t ranks, Random& random) {
    constexpr const OperationInfo& info = Operation::kInfo;
    for (;;) {
      Problem problem{0, 0, type, ranks, {}};
      if (info.row_multiple != 0) {
        problem.row = info.row_multiple * random.between(1, std::min(8u, info.max_row / info.row_multiple));
        problem.count = uint64_t{problem.row} * random.between(1, 4);
      } else {
        const uint32_t per_line = static_cast<uint32_t>(sizeof(Line)) / element_bytes(type);
        const uint32_t lines = random.between(1, ranks > 4 ? 6 : 10);
        problem.count =
            random.chance(96) ? lines * per_line : random.between(lines * per_line - per_line + 1, lines * per_line);
      }
      for (uint32_t i = 0; i < kMaxParameters; ++i) {
        const ParameterInfo& parameter = info.parameters[i];
        if (parameter.name == nullptr) continue;
        problem.parameter[i] = parameter.is_rank ? random.below(ranks) : random.below(3);
      }
      try {
        check_problem<Operation>(problem);
        return problem;
      } catch (const std::invalid_argument&) {  // of parameters that do not go together
      }
    }
  }

  uint32_t algorithm_;
  Problem problem_;
  Tiling tiling_;
  std::vector<Tensor> tensors_[kMaxBuffers];  // by rank
  std::vector<uint32_t> expected_[kMaxWorldSize];
  std::vector<std::unique_ptr<host::PreparedCall>> calls_;
};

// ---- Which calls there are -----------------------------------------------------------------------------------------

std::unique_ptr<Call> draw_call_of(const Subject& subject, uint32_t ranks, Random& random, const Call* before) {
  const uint32_t algorithm = subject.algorithm;
  const DataType type = subject.type;
  std::unique_ptr<Call> call;
  Registry::at(algorithm, [&]<class A>() {
    if constexpr (std::is_same_v<typename A::Operation, AllReduce>) {
      const auto* const sums = dynamic_cast<const AllReduceCall*>(before);
      call = std::make_unique<AllReduceCall>(algorithm, type, ranks, random, sums);
    } else if constexpr (std::is_same_v<typename A::Operation, AllReduceAddRmsNorm>) {
      if (type == DataType::kFloat16) {
        call = std::make_unique<FusedCall<DataType::kFloat16>>(algorithm, subject.quantization, ranks, random);
      } else {
        call = std::make_unique<FusedCall<DataType::kBFloat16>>(algorithm, subject.quantization, ranks, random);
      }
    } else {
      call = std::make_unique<AnyCall<A>>(algorithm, type, ranks, random);
    }
  });
  return call;
}

}  // namespace

const std::vector<NamedSubject>& subjects() {
  static const std::vector<NamedSubject> all = [] {
    std::vector<NamedSubject> found;
    const auto add = [&](uint32_t number, Quantization quantization) {
      for (const DataType type : info_of(number).types) {
        found.push_back({name_of(number) + suffix_of(quantization), {number, std::nullopt, type, quantization}});
      }
    };
    for (uint32_t number = 0; number < Registry::kCount; ++number) add(number, Quantization::kNone);
    Registry::for_each([&]<class A>() {
      if (!std::is_same_v<typename A::Operation, AllReduceAddRmsNorm>) return;
      add(Registry::index_of<A>(), Quantization::kStatic);
      add(Registry::index_of<A>(), Quantization::kDynamic);
    });
    const char* const forms[] = {"put", "get", "packets"};
    for (uint32_t form = 0; form < std::size(forms); ++form) {
      found.push_back({forms[form], {0, static_cast<Form>(form), DataType::kBFloat16, Quantization::kNone}});
    }
    return found;
  }();
  return all;
}

std::unique_ptr<Call> draw_call(const Subject& subject, bool alone, uint32_t index, uint32_t ranks, Random& random,
                                const Call* before) {
  if (random.chance(64) && !alone) {
    static const std::vector<uint32_t> all_reduces = [] {
      std::vector<uint32_t> found;
      Registry::for_each([&]<class A>() {
        if (std::is_same_v<typename A::Operation, AllReduce>) found.push_back(Registry::index_of<A>());
      });
      return found;
    }();
    const uint32_t algorithm = all_reduces[random.below(all_reduces.size())];
    const auto type = static_cast<DataType>(random.below(kDataTypes));
    return draw_call_of({algorithm, std::nullopt, type, Quantization::kNone}, ranks, random, before);
  }
  if (subject.form) return std::make_unique<MessageCall>(*subject.form, index, ranks, random);
  return draw_call_of(subject, ranks, random, before);
}

}  // namespace drill
