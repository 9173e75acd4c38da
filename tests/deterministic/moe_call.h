// Dispatch and combine of tokens with drawn choices of experts. Ranks have different numbers of tokens, or none.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "algorithms/reference.h"
#include "linear_call.h"
#include "optional/moe_combine/one_shot.cuh"
#include "optional/moe_dispatch/one_shot.cuh"
#include "tilings.h"

namespace drill {

// Tokens of all ranks, and the experts that they have chosen.
struct Routing {
  uint32_t ranks;
  uint32_t max_tokens;
  uint32_t top_k;
  uint32_t rank_experts;
  std::vector<std::vector<int32_t>> topk_ids{};  // by rank: [tokens, top_k]

  static Routing draw(uint32_t ranks, Random& random) {
    Routing routing{ranks, random.between(1, 3), random.between(1, 5), random.between(1, 3)};
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      const uint32_t tokens = random.chance(128) ? routing.max_tokens : random.below(routing.max_tokens + 1);
      auto& ids = routing.topk_ids.emplace_back(tokens * routing.top_k);
      // Often few experts, so that tokens have none on many ranks.
      const uint32_t most = random.chance(96) ? routing.rank_experts : routing.experts();
      for (int32_t& id : ids) id = random.chance(64) ? -1 : static_cast<int32_t>(random.below(most));
    }
    return routing;
  }

  uint32_t experts() const { return rank_experts * ranks; }
  uint32_t places() const { return ranks * max_tokens; }
  uint32_t tokens(uint32_t rank) const { return static_cast<uint32_t>(topk_ids[rank].size()) / top_k; }

  // Number of a token's i-th expert on `owner`, or -1. A place without a token has none.
  int32_t local(uint32_t source, uint32_t token, uint32_t i, uint32_t owner) const {
    if (token >= tokens(source)) return -1;
    const int32_t id = topk_ids[source][token * top_k + i];
    const auto first = static_cast<int32_t>(owner * rank_experts);
    return id >= first && id < first + static_cast<int32_t>(rank_experts) ? id - first : -1;
  }
  bool is_at(uint32_t source, uint32_t token, uint32_t owner) const {
    for (uint32_t i = 0; i < top_k; ++i) {
      if (local(source, token, i, owner) >= 0) return true;
    }
    return false;
  }

  // Calls step(place, source, token) for each place of a rank.
  template <class Step>
  void for_each_place(Step step) const {
    for (uint32_t place = 0; place < places(); ++place) step(place, place / max_tokens, place % max_tokens);
  }

  // As moe_dispatch returns them on `owner`.
  std::vector<int32_t> local_ids(uint32_t owner) const {
    std::vector<int32_t> ids;
    for_each_place([&](uint32_t, uint32_t source, uint32_t token) {
      for (uint32_t i = 0; i < top_k; ++i) ids.push_back(local(source, token, i, owner));
    });
    return ids;
  }

  // `groups`: scales of a row.
  Problem problem(DataType type, uint32_t row_lines, uint32_t groups) const {
    const uint32_t row = row_lines * static_cast<uint32_t>(sizeof(Line)) / element_bytes(type);
    const auto number = [](uint32_t value) { return static_cast<double>(value); };
    return {uint64_t{row} * max_tokens, row, type, ranks, {number(experts()), number(top_k), number(groups)}};
  }

  std::string text() const {
    std::string text = std::to_string(top_k) + " of " + std::to_string(experts()) + " experts, tokens";
    for (uint32_t rank = 0; rank < ranks; ++rank) text += " " + std::to_string(tokens(rank));
    return text + " of " + std::to_string(max_tokens);
  }
};

// Base of both calls.
class MoeCall : public Call {
 public:
  MoeCall(uint32_t algorithm, DataType type, uint32_t ranks, uint32_t groups, Random& random)
      : algorithm_(algorithm),
        routing_(Routing::draw(ranks, random)),
        row_lines_(random.between(1, 6)),
        groups_(groups),
        problem_(routing_.problem(type, row_lines_, groups)),
        tiling_(draw_tiling(algorithm, problem_, random)) {}

  uint64_t operations() const override { return launches(problem_, tiling_); }

  std::string name() const override {
    return name_of(algorithm_) + " of rows of " + std::to_string(row_lines_) + " lines and " + std::to_string(groups_) +
           " scales (" + routing_.text() + ", " + text(tiling_) + ")";
  }

 protected:
  void run(World& world, uint32_t rank, const std::vector<uint64_t>& buffers) {
    calls_.push_back(world.core(rank).prepare(algorithm_, problem_, tiling_));
    uint64_t all[kMaxBuffers] = {};
    std::copy(buffers.begin(), buffers.end(), all);
    calls_.back()->run(all, 0);
  }

  template <class T>
  static uint64_t address_of(const std::vector<T>& values) {
    return reinterpret_cast<uint64_t>(values.data());
  }
  // Address behind the ids of a rank's tokens.
  uint64_t end_of_ids(uint32_t rank) const {
    return address_of(routing_.topk_ids[rank]) + routing_.topk_ids[rank].size() * sizeof(int32_t);
  }

  template <class T>
  static std::string touched_in_all(const std::vector<T>& values) {
    return touched_in(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  }

  template <class T>
  static void make_untouched(std::vector<T>& values, size_t count) {
    values.resize(count);
    if (count != 0) std::memset(static_cast<void*>(values.data()), kUntouched, count * sizeof(T));
  }

  uint32_t algorithm_;
  Routing routing_;
  uint32_t row_lines_;
  uint32_t groups_;
  Problem problem_;
  Tiling tiling_;

 private:
  std::vector<std::unique_ptr<host::PreparedCall>> calls_;
};

class DispatchCall final : public MoeCall {
 public:
  DispatchCall(uint32_t algorithm, DataType type, uint32_t ranks, Random& random)
      : MoeCall(algorithm, type, ranks, random.chance(128) ? random.between(1, 9) : 0, random) {
    const auto word = [&] {
      return random.chance(48) ? random.pick({kSentinel, kSentinel - 1}) : random.below(1 << 30);
    };
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      OfRank& of = of_rank_[rank];
      of.x.resize(routing_.tokens(rank) * row_lines_);
      for (Line& line : of.x) line = {{word(), word(), word(), word()}};
      of.topk_weights.resize(routing_.topk_ids[rank].size());
      for (uint32_t& weight : of.topk_weights) weight = word();
      make_untouched(of.rows, size_t{routing_.places()} * row_lines_);
      make_untouched(of.ids, size_t{routing_.places()} * routing_.top_k);
      make_untouched(of.weights, of.ids.size());
      of.x_scales.resize(size_t{routing_.tokens(rank)} * groups_);
      for (uint32_t& scale : of.x_scales) scale = word();
      make_untouched(of.scales, size_t{routing_.places()} * groups_);
    }
  }

  void enqueue(World& world, uint32_t rank) override {
    const OfRank& of = of_rank_[rank];
    run(world, rank,
        {address_of(of.x), address_of(routing_.topk_ids[rank]), end_of_ids(rank), address_of(of.topk_weights),
         address_of(of.rows), address_of(of.ids), address_of(of.weights), address_of_scales(of.x_scales),
         address_of_scales(of.scales)});
  }

  std::string wrong(uint32_t rank) const override {
    const OfRank& of = of_rank_[rank];
    std::string found;
    const std::vector<int32_t> ids = routing_.local_ids(rank);
    routing_.for_each_place([&](uint32_t place, uint32_t source, uint32_t token) {
      const std::string what = " of token " + std::to_string(token) + " of rank " + std::to_string(source);
      for (uint32_t i = 0; i < routing_.top_k; ++i) {
        const size_t choice = size_t{place} * routing_.top_k + i;
        const uint32_t weight = ids[choice] < 0 ? 0 : of_rank_[source].topk_weights[token * routing_.top_k + i];
        if (of.ids[choice] != ids[choice]) {
          found = "id " + std::to_string(i) + what + " is " + std::to_string(of.ids[choice]) + ", not " +
                  std::to_string(ids[choice]);
        }
        if (of.weights[choice] != weight) found = "weight " + std::to_string(i) + what + " is not " + hex(weight);
      }
      const auto compare = [&](const auto& received, const auto& sent, size_t count) {
        if (count == 0) return;
        const auto* const row = reinterpret_cast<const char*>(received.data() + place * count);
        const size_t row_bytes = count * sizeof(received[0]);
        if (!routing_.is_at(source, token, rank)) {
          if (const std::string touched = touched_in(row, row_bytes); !touched.empty()) found = touched + what;
        } else if (std::memcmp(row, sent.data() + token * count, row_bytes) != 0) {
          found = "a row" + what + " is another";
        }
      };
      compare(of.rows, of_rank_[source].x, row_lines_);
      compare(of.scales, of_rank_[source].x_scales, groups_);
    });
    return found;
  }

  std::string touched(uint32_t rank) const override {
    const OfRank& of = of_rank_[rank];
    return touched_in_all(of.rows) + touched_in_all(of.ids) + touched_in_all(of.weights) + touched_in_all(of.scales);
  }

 private:
  struct OfRank {
    Lines x;
    std::vector<uint32_t> topk_weights;
    Lines rows;
    std::vector<int32_t> ids;
    std::vector<uint32_t> weights;
    std::vector<uint32_t> x_scales;
    std::vector<uint32_t> scales;
  };

  // A rank without tokens has scales too.
  uint64_t address_of_scales(const std::vector<uint32_t>& scales) const {
    return groups_ == 0 ? 0 : scales.empty() ? sizeof(Line) : address_of(scales);
  }

  OfRank of_rank_[kMaxWorldSize];
};

class CombineCall final : public MoeCall {
 public:
  CombineCall(uint32_t algorithm, DataType type, uint32_t ranks, Random& random)
      : MoeCall(algorithm, type, ranks, 0, random) {
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      ids_[rank] = routing_.local_ids(rank);
      y_[rank].resize(size_t{routing_.places()} * row_lines_);
      for (size_t i = 0; i < y_[rank].size() * kElements; ++i) {
        put(y_[rank], i, static_cast<uint16_t>(draw_value(type, random)));
      }
      make_untouched(out_[rank], size_t{routing_.tokens(rank)} * row_lines_);
    }
  }

  void enqueue(World& world, uint32_t rank) override {
    run(world, rank,
        {address_of(y_[rank]), address_of(ids_[rank]), address_of(routing_.topk_ids[rank]), end_of_ids(rank),
         address_of(out_[rank])});
  }

  std::string wrong(uint32_t rank) const override {
    const size_t row = size_t{row_lines_} * kElements;
    for (size_t i = 0; i < out_[rank].size() * kElements; ++i) {
      const auto token = static_cast<uint32_t>(i / row);
      const uint32_t expected = expect(rank, token, i % row);
      if (element(out_[rank], i) == expected) continue;
      return "element " + std::to_string(i % row) + " of token " + std::to_string(token) + " is " +
             hex(element(out_[rank], i)) + ", not " + hex(expected);
    }
    return "";
  }

  std::string touched(uint32_t rank) const override { return touched_in_all(out_[rank]); }

 private:
  uint32_t expect(uint32_t source, uint32_t token, size_t i) const {
    std::vector<uint32_t> summands;
    const size_t place = size_t{source} * routing_.max_tokens + token;
    for (uint32_t owner = 0; owner < routing_.ranks; ++owner) {
      if (routing_.is_at(source, token, owner)) {
        summands.push_back(element(y_[owner], place * row_lines_ * kElements + i));
      }
    }
    if (summands.empty()) return 0;
    return sum_of_one(problem_.type, static_cast<uint32_t>(summands.size()), [&](uint32_t n) { return summands[n]; });
  }

  Lines y_[kMaxWorldSize];
  std::vector<int32_t> ids_[kMaxWorldSize];
  Lines out_[kMaxWorldSize];
};

}  // namespace drill
