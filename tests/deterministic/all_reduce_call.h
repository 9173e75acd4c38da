// An all-reduce of a schedule.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "algorithms/registry.h"
#include "any_order.h"
#include "calls.h"
#include "operands.h"
#include "tilings.h"

namespace drill {

// What the schedules know of an algorithm in tiles (TiledAllReduce): draws that let blocks walk over several tiles, and cut
// messages anywhere.
inline Tiling draw_tiling_in_tiles(const Problem& problem, Random& random) {
  Tiling tiling{};
  tiling.blocks = random.between(1, 3);
  tiling.tile_lines = 1u << random.below(problem.world > 4 ? 2 : 3);
  // Machine code of AMD's GPUs: blocks of several waves.
  if (kWarpThreads == 64 && random.chance(64)) tiling.tile_lines = floor_power_of_two(2 * kWarpThreads / problem.world);
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
    // Messages of quantized algorithms are too long for others.
    const bool fits = before != nullptr && (is_quantized() || !before->is_quantized());
    if (random.chance(64) && fits && !before->moves_on_ && !info_of(before->algorithm_).info->sums_in_switch) {
      problem_ = before->problem_;
      continued_ = before;
    } else {
      const uint32_t per_line = static_cast<uint32_t>(sizeof(Line)) / element_bytes(type);
      const uint32_t most_lines = is_quantized() ? ranks * kQuantizedChunkLines * (ranks > 4 ? 2 : 4)
                                  : shares_out() ? 2 * ranks + 2
                                                 : (ranks > 4 ? 5 : 9);
      const uint32_t lines = random.chance(96) ? 1 : random.between(1, most_lines);
      problem_.count =
          random.chance(96) ? lines * per_line : random.between(lines * per_line - per_line + 1, lines * per_line);
    }
    Registry::at(algorithm, [&]<class A>() {
      constexpr bool kInTiles = std::is_base_of_v<TiledAllReduce<A>, A>;
      tiling_ = kInTiles ? draw_tiling_in_tiles(problem_, random) : draw_tiling(algorithm, problem_, random);
    });
    in_place_ = continued_ == nullptr && random.chance(80);
    moves_on_ = random.chance(48);
    draw_contents(random);
  }

  void enqueue(World& world, uint32_t rank) override {
    calls_.push_back(world.core(rank).prepare(algorithm_, problem_, tiling_));
    const uint64_t buffers[] = {input(rank).address(), output(rank).address()};
    calls_.back()->run(buffers, 0);
    if (!moves_on_) return;
    // What comes next on the stream overwrites the output: nothing of the call may need it any more. Not after an error, which
    // the schedule tells from what was written then.
    const uint32_t* const aborted = &state_of(world.device_comm(rank))->aborted;
    world.launch(rank, {1, 1, 0}, [this, rank, aborted] {
      grid_dependency_wait();
      grid_dependency_trigger();
      if (load_relaxed(aborted) != 0) return;
      moved_[rank] = output(rank);
      (in_place_ ? inputs_ : outputs_)[rank].scribble();
    });
  }

  std::string wrong(uint32_t rank) const override {
    const Tensor& result = moved_[rank] ? *moved_[rank] : output(rank);
    const AlgorithmInfo& info = *info_of(algorithm_).info;
    return info.sums_in_switch ? sums_.wrong(result, !info.ranks_may_differ) : result.differs_from(expected_);
  }
  std::string touched(uint32_t rank) const override { return in_place_ ? "" : output(rank).touched(); }

  uint64_t operations() const override { return launches(problem_, tiling_); }

  std::string name() const override {
    return name_of(algorithm_) + " of " + std::to_string(problem_.count) + " " + data_type_name(problem_.type) + " (" +
           text(tiling_) + (in_place_ ? ", in place" : "") + (moves_on_ ? ", overwritten" : "") +
           (continued_ != nullptr ? ", of the call before)" : ")");
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

  // Whether ranks exchange quantized values. Such an algorithm is given a message of a few chunks for every rank.
  bool is_quantized() const { return *info_of(algorithm_).info->wire != 0; }

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
      if (info_of(algorithm_).info->sums_in_switch) sums_.expect(problem_.type, values);
    }
    const auto value = [&](uint32_t rank, uint64_t i) {
      return continued_ != nullptr ? continued_->expected_[i] : inputs_[rank].at(i);
    };
    Registry::at(algorithm_, [&]<class A>() {
      if constexpr (std::is_base_of_v<AllReduce, typename A::Operation>) {
        for (uint64_t i = 0; i < problem_.count; ++i) {
          expected_.push_back(A::Operation::expect(problem_, 0, i, value));
        }
      }
    });
  }

  uint32_t algorithm_;
  Problem problem_;
  Tiling tiling_{};
  bool in_place_;
  bool moves_on_;                             // the output is taken from where it is, and overwritten
  const AllReduceCall* continued_ = nullptr;  // whose results are summed
  std::vector<Tensor> inputs_;
  std::vector<Tensor> outputs_;
  std::optional<Tensor> moved_[kMaxWorldSize];
  std::vector<uint32_t> expected_;
  SwitchSums sums_;  // what counts in place of them where a switch sums
  std::vector<std::unique_ptr<host::PreparedCall>> calls_;
};

}  // namespace drill
