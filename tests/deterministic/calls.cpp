#include "calls.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "broadcast.cuh"
#include "kernels/fused/args.cuh"
#include "message_passing.cuh"

namespace drill {

namespace {

std::string hex(uint64_t value) {
  char text[20];
  std::snprintf(text, sizeof(text), "%#llx", static_cast<unsigned long long>(value));
  return text;
}

// ---- All-reduce ----------------------------------------------------------------------------------------------------

// One element: what the ranks put in, and the sum. The arithmetic is that of reduce.cuh, which is tested against torch;
// here it matters that the right values meet.
template <DataType D>
uint32_t sum(const std::vector<uint32_t>& values) {
  using E = Element<D>;
  float total = E::value(static_cast<typename E::Storage>(values[0]));
  for (size_t rank = 1; rank < values.size(); ++rank) {
    total += E::value(static_cast<typename E::Storage>(values[rank]));
  }
  return E::round(total);
}

uint32_t sum(DataType type, const std::vector<uint32_t>& values) {
  switch (type) {
    case DataType::kBFloat16:
      return sum<DataType::kBFloat16>(values);
    case DataType::kFloat16:
      return sum<DataType::kFloat16>(values);
    default:
      return sum<DataType::kFloat32>(values);
  }
}

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

class AllReduceCall final : public Call {
 public:
  AllReduceCall(AllReduceAlgorithm algorithm, DataType type, uint32_t ranks, Random& random,
                const AllReduceCall* before)
      : ranks_(ranks) {
    if (random.chance(64) && before != nullptr) {
      type_ = before->type_;
      count_ = before->count_;
      continued_ = before;
    } else {
      type_ = type;
      const uint32_t most_lines = algorithm == AllReduceAlgorithm::kOneShot ? (ranks > 4 ? 5 : 9) : 2 * ranks + 2;
      const uint32_t lines = random.chance(96) ? 1 : random.between(1, most_lines);
      count_ = random.chance(96) ? lines * per_line()
                                 : random.between(lines * per_line() - per_line() + 1, lines * per_line());
    }
    plan_.algorithm = static_cast<uint32_t>(algorithm);
    plan_.blocks = random.between(1, 3);
    plan_.tile_lines_log2 = random.below(ranks > 4 ? 2 : 3);
    plan_.depth = random.below(3);
    plan_.chunk_count = random.chance(32) ? random.between(1 + count_ / 3, 1 + count_) : count_;
    in_place_ = continued_ == nullptr && random.chance(80);
    draw_contents(random);
  }

  void enqueue(World& world, uint32_t rank) override {
    calls_.push_back(world.core(rank).prepare_all_reduce(count_, static_cast<uint32_t>(type_), plan_));
    calls_.back()->run(address(input(rank)), address(output(rank)), 0);
  }

  std::string wrong(uint32_t rank) const override {
    const Buffer& found = output(rank);
    for (uint32_t i = 0; i < count_; ++i) {
      uint32_t value = 0;
      std::memcpy(&value, found.bytes.data() + found.offset + i * element_bytes(), element_bytes());
      if (value == expected_[i]) continue;
      return "element " + std::to_string(i) + " of " + std::to_string(count_) + " is " + hex(value) + ", not " +
             hex(expected_[i]);
    }
    return "";
  }

  uint64_t operations() const override { return (count_ + plan_.chunk_count - 1) / plan_.chunk_count; }

  std::string name() const override {
    const char* const types[] = {"bf16", "fp16", "fp32"};
    return std::string(plan_.algorithm == 0 ? "one_shot" : "two_shot") + " of " + std::to_string(count_) + " " +
           types[static_cast<uint32_t>(type_)] + " (blocks " + std::to_string(plan_.blocks) + ", tile lines " +
           std::to_string(1u << plan_.tile_lines_log2) + ", depth " + std::to_string(plan_.depth) + ", chunks of " +
           std::to_string(plan_.chunk_count) + (in_place_ ? ", in place" : "") +
           (continued_ != nullptr ? ", of the call before)" : ")");
  }

 private:
  struct Buffer {
    std::vector<char> bytes;
    size_t offset;  // of the first element, which need not be aligned to a line
  };

  uint32_t element_bytes() const { return type_ == DataType::kFloat32 ? 4 : 2; }
  uint32_t per_line() const { return static_cast<uint32_t>(sizeof(Line)) / element_bytes(); }
  static uint64_t address(const Buffer& buffer) {
    return reinterpret_cast<uint64_t>(buffer.bytes.data()) + buffer.offset;
  }
  const Buffer& input(uint32_t rank) const { return continued_ != nullptr ? continued_->output(rank) : inputs_[rank]; }
  const Buffer& output(uint32_t rank) const { return in_place_ ? input(rank) : outputs_[rank]; }

  Buffer draw_buffer(Random& random) const {
    Buffer buffer{std::vector<char>((count_ + per_line()) * element_bytes() + sizeof(Line), '\x5A'), 0};
    const uint64_t misaligned = reinterpret_cast<uint64_t>(buffer.bytes.data()) % sizeof(Line);
    buffer.offset = sizeof(Line) - misaligned + (random.chance(64) ? random.below(per_line()) * element_bytes() : 0);
    return buffer;
  }

  void draw_contents(Random& random) {
    for (uint32_t rank = 0; rank < ranks_; ++rank) {
      if (continued_ == nullptr) inputs_.push_back(draw_buffer(random));
      if (!in_place_) outputs_.push_back(draw_buffer(random));
    }
    for (uint32_t i = 0; i < count_; ++i) {
      const bool all_alike = random.chance(16);  // -0.0 of all ranks stays -0.0
      std::vector<uint32_t> values(ranks_, draw_value(type_, random));
      for (uint32_t rank = 0; rank < ranks_; ++rank) {
        if (continued_ != nullptr) {
          values[rank] = continued_->expected_[i];
          continue;
        }
        if (!all_alike) values[rank] = draw_value(type_, random);
        std::memcpy(inputs_[rank].bytes.data() + inputs_[rank].offset + i * element_bytes(), &values[rank],
                    element_bytes());
      }
      expected_.push_back(sum(type_, values));
    }
  }

  uint32_t ranks_;
  DataType type_;
  uint32_t count_;
  host::LaunchPlan plan_{};
  bool in_place_;
  const AllReduceCall* continued_ = nullptr;  // whose results are summed
  std::vector<Buffer> inputs_;
  std::vector<Buffer> outputs_;
  std::vector<uint32_t> expected_;
  std::vector<std::unique_ptr<host::PreparedCall>> calls_;
};

// ---- All-reduce + residual add + RMSNorm ---------------------------------------------------------------------------

// How many representable values lie between two.
uint32_t distance(uint16_t a, uint16_t b) {
  const auto place = [](uint16_t bits) { return bits < 0x8000 ? 0x8000 + bits : 0x10000 - bits; };
  return static_cast<uint32_t>(std::abs(place(a) - place(b)));
}

template <DataType D>
class FusedCall final : public Call {
 public:
  // Rows of several tiles, clusters of as many blocks as have a share of the row, and more rows than clusters: only then
  // does a block meet itself again in what it keeps for two rows, and blocks come to a row at different times.
  FusedCall(AllReduceAlgorithm algorithm, uint32_t ranks, Random& random)
      : ranks_(ranks),
        has_whole_warps_(algorithm == AllReduceAlgorithm::kTwoShot && ranks == 2 && random.chance(12)),
        lines_(has_whole_warps_ ? 4 * kWarpThreads : random.between(1, random.pick({8u, 16u, ranks > 4 ? 16u : 40u}))),
        rows_(random.between(1, random.pick({1u, 2u, 5u}))) {
    const bool one_shot = algorithm == AllReduceAlgorithm::kOneShot;
    const uint32_t segment_unit = kChunkLines * ranks;
    const uint32_t span = one_shot ? lines_ : (lines_ + segment_unit - 1) / segment_unit * kChunkLines;
    plan_.algorithm = static_cast<uint32_t>(algorithm);
    plan_.tile_lines = has_whole_warps_ ? kWarpThreads : kChunkLines * (ranks <= 4 && random.chance(64) ? 2 : 1);
    plan_.cluster_blocks = has_whole_warps_ ? 2 : random.between(1, (span + plan_.tile_lines - 1) / plan_.tile_lines);
    plan_.blocks = plan_.cluster_blocks * random.between(1, 2);
    plan_.depth = random.below(3);
    plan_.chunk_rows = random.between(1, rows_);
    // Blocks without a share of the row, which only grids with a cluster for each row may have.
    if (random.chance(48)) {
      plan_.cluster_blocks = (span + plan_.tile_lines - 1) / plan_.tile_lines + 1;
      plan_.blocks = plan_.cluster_blocks * static_cast<uint32_t>(plan_.chunk_rows);
    }
    const uint32_t hidden = lines_ * kElementsPerLine;
    for (uint32_t i = 0; i < ranks * rows_ * hidden; ++i) input_.push_back(draw(random));
    for (uint32_t i = 0; i < rows_ * hidden; ++i) residual_.push_back(draw(random));
    for (uint32_t i = 0; i < hidden; ++i) weight_.push_back(draw(random));
    normed_.resize(input_.size());
    new_residual_.resize(input_.size());
    for (uint32_t row = 0; row < rows_; ++row) expect_row(row);
  }

  void enqueue(World& world, uint32_t rank) override {
    const AddRmsNormShape shape{rows_, lines_ * kElementsPerLine, static_cast<uint32_t>(D), 0, kEpsilon};
    calls_.push_back(world.core(rank).prepare_add_rms_norm(shape, plan_));
    const size_t first = rank * residual_.size();
    calls_.back()->run({address(&input_[first]), address(residual_.data()), address(weight_.data()),
                        address(&normed_[first]), address(&new_residual_[first]), 0},
                       0);
  }

  std::string wrong(uint32_t rank) const override {
    for (size_t i = 0; i < residual_.size(); ++i) {
      const uint16_t sum = new_residual_[rank * residual_.size() + i];
      if (sum != expected_residual_[i]) {
        return "element " + std::to_string(i) + " of the residual is " + hex(sum) + ", not " +
               hex(expected_residual_[i]);
      }
      const uint16_t normed = normed_[rank * residual_.size() + i];
      if (distance(normed, expected_normed_[i]) > 1) {
        return "normed element " + std::to_string(i) + " is " + hex(normed) + ", not " + hex(expected_normed_[i]);
      }
    }
    return "";
  }

  uint64_t operations() const override { return (rows_ + plan_.chunk_rows - 1) / plan_.chunk_rows; }

  std::string name() const override {
    return std::string(plan_.algorithm == 0 ? "one_shot" : "two_shot") + " + RMSNorm of " + std::to_string(rows_) +
           " rows of " + std::to_string(lines_) + " lines (blocks " + std::to_string(plan_.blocks) + ", clusters of " +
           std::to_string(plan_.cluster_blocks) + ", tile lines " + std::to_string(plan_.tile_lines) + ", depth " +
           std::to_string(plan_.depth) + ", chunks of " + std::to_string(plan_.chunk_rows) + ")";
  }

 private:
  using AddRmsNormShape = host::AddRmsNorm;
  using E = Element<D>;
  static constexpr float kEpsilon = 1e-5f;

  static uint16_t draw(Random& random) { return static_cast<uint16_t>(draw_number(D, random)); }
  static uint64_t address(const uint16_t* tensor) { return reinterpret_cast<uint64_t>(tensor); }

  // Squares are summed in double precision: `normed` may differ by a rounding, the residual may not.
  void expect_row(uint32_t row) {
    const uint32_t hidden = lines_ * kElementsPerLine;
    double squares = 0;
    for (uint32_t i = row * hidden; i < (row + 1) * hidden; ++i) {
      std::vector<uint32_t> values;
      for (uint32_t rank = 0; rank < ranks_; ++rank) values.push_back(input_[rank * residual_.size() + i]);
      const auto reduced = static_cast<uint16_t>(sum<D>(values));
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

  uint32_t ranks_;
  bool has_whole_warps_;  // each holds four chunks in a row, which it delivers at once
  uint32_t lines_;        // of a row
  uint32_t rows_;
  host::FusedPlan plan_{};
  std::vector<uint16_t> input_;  // [rank][row][element], as are normed and new_residual
  std::vector<uint16_t> residual_;
  std::vector<uint16_t> weight_;
  std::vector<uint16_t> normed_;
  std::vector<uint16_t> new_residual_;
  std::vector<uint16_t> expected_residual_;
  std::vector<uint16_t> expected_normed_;
  std::vector<std::unique_ptr<host::PreparedAddRmsNorm>> calls_;
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
    world.launch(rank, {ranks_ - 1, threads_, sizeof(Line)}, [=] { kernel(args); });
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

// ---- Broadcast -----------------------------------------------------------------------------------------------------

class BroadcastCall final : public Call {
 public:
  BroadcastCall(uint32_t ranks, Random& random) : ranks_(ranks), root_(random.below(ranks)) {
    const uint32_t lines = random.between(1, 4);
    for (uint32_t i = 0; i < lines; ++i) {
      lines_.push_back(draw_line(random));
      for (uint32_t& word : lines_.back().word) word &= 0x7FFFFFFFu;  // no sentinels, which would change
    }
    received_.resize(ranks * lines);
  }

  void enqueue(World& world, uint32_t rank) override {
    const auto lines = static_cast<uint32_t>(lines_.size());
    const BroadcastArgs args{world.device_comm(rank), lines_.data(), received_.data() + rank * lines, lines, root_};
    world.launch(rank, {1, ranks_, 0}, [=] { broadcast(args); });
  }

  std::string wrong(uint32_t rank) const override {
    for (size_t i = 0; rank != root_ && i < lines_.size(); ++i) {
      if (differ(received_[rank * lines_.size() + i], lines_[i])) {
        return "line " + std::to_string(i) + " is not what rank " + std::to_string(root_) + " sent";
      }
    }
    return "";
  }

  uint64_t operations() const override { return 1; }
  std::string name() const override {
    return "broadcast of " + std::to_string(lines_.size()) + " lines by rank " + std::to_string(root_);
  }

 private:
  uint32_t ranks_;
  uint32_t root_;
  std::vector<Line> lines_;
  std::vector<Line> received_;
};

}  // namespace

std::unique_ptr<Call> draw_call(const Subject& subject, uint32_t index, uint32_t ranks, Random& random,
                                const Call* before) {
  const bool other = random.chance(64);
  if (subject.kind == Subject::Kind::kMessages && !other) {
    return std::make_unique<MessageCall>(static_cast<Form>(subject.variant), index, ranks, random);
  }
  if (subject.kind == Subject::Kind::kFused && !other) {
    const auto algorithm = static_cast<AllReduceAlgorithm>(subject.variant);
    if (subject.type == DataType::kFloat16) {
      return std::make_unique<FusedCall<DataType::kFloat16>>(algorithm, ranks, random);
    }
    return std::make_unique<FusedCall<DataType::kBFloat16>>(algorithm, ranks, random);
  }
  if (subject.kind == Subject::Kind::kBroadcast && !other) return std::make_unique<BroadcastCall>(ranks, random);
  uint32_t algorithm = subject.variant;
  DataType type = subject.type;
  if (subject.kind != Subject::Kind::kAllReduce || other) {
    algorithm = random.below(2);
    type = static_cast<DataType>(random.below(3));
  }
  return std::make_unique<AllReduceCall>(static_cast<AllReduceAlgorithm>(algorithm), type, ranks, random,
                                         dynamic_cast<const AllReduceCall*>(before));
}

}  // namespace drill
