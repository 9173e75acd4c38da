// Two-shot all-reduce + residual add + RMSNorm in the NVLink switch. Every rank has the switch reduce its segment of
// every row of what all ranks have staged, and stores the sums to the memory of all ranks. Every rank normalizes all
// rows. The kernel is that of two_shot.cuh.
//
// Sums are not in rank order (`sums_in_switch`), but each is made once, so all ranks get the same bits.
//
// Steps of a block, tile by tile:
//   1. It stages this rank's contribution to a tile of every segment in this rank's memory, by plain stores.
//   2. It signals the tile to the blocks of its number on the other ranks, by the signal words of hb_session.cuh.
//   3. When they have done the same, it has the switch reduce its own tile. The sums go as LL lines to the slots of all
//      ranks: [owner][row][line of segment].
//
// Staging memory, first half only: [owner][row][line of segment]. Each line is used once in an operation. H1: a rank
// ends only after it has received every sum of every owner. Each owner made its sums after it had read what all ranks
// had staged for it. So no rank reads this rank's staging memory, or that of a peer, any longer, and all ranks may
// stage again.
//
// Rules of operation.cuh:
//   R1  A block waits for each peer.
//   R2  Every rank receives and resets all sums, its own included.
//   P1  A block waits for blocks of its own number.
//
// Alias fences (switch_channel.cuh): the threads that signal a tile fence before the release. This fence lies between
// - stores to the staging memory through the workspace address (before the block's barrier) and the reduction in the
//   switch,
// on any rank;
// - resets of slot lines and the sums that a peer stores to them: the peer first receives the signal of a tile of this
//   operation.
#pragma once

#include "algorithms/all_reduce_add_rms_norm/two_shot.cuh"
#include "llm_comm/steps.cuh"
#include "optional/multimem.h"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceAddRmsNormTwoShotLdReduce = kKindOf<struct AllReduceAddRmsNormTwoShotLdReduce>;

// First hop of a block. All threads of the block make every call.
class SummedBySwitch {
 public:
  static constexpr bool kToAll = true;
  static constexpr bool kIsSummedBySwitch = true;

  // `owner_lines`: lines that a rank stages for each owner. `incomplete`: a flag that thread 0 has just zeroed; the
  // barrier below orders that. It is set when a tile will have no sum.
  LLM_COMM_DEVICE SummedBySwitch(const AddRmsNormArgs& args, const RowThread& self, LLSession& session,
                                 uint64_t owner_lines, uint32_t* incomplete)
      : args_(args),
        self_(self),
        session_(session),
        switch_(args.comm),
        owner_lines_(owner_lines),
        incomplete_(incomplete),
        row_(SignalRow::of<CommonSignals>(self.cluster * args.cluster_blocks + self.member)),
        talks_(!self.is_own && self.column == 0) {
    block_sync();  // a thread that may not begin sets `incomplete`
  }

  // Stages this rank's contribution to the next tile of the segment of this thread's peer, and signals the peers when
  // the block has done so.
  LLM_COMM_DEVICE void stage(bool has, uint64_t index, Line line) {
    if (has && !session_.aborted()) store_line(staged(self_.peer, index), line);
    if (session_.aborted()) *incomplete_ = 1;
    block_sync();
    if (talks_ && *incomplete_ == 0) {
      fence_aliases();
      store_release(row_.word(args_.comm, self_.peer, self_.rank), word_of_step(session_.sequence(), staged_));
    }
    ++staged_;
  }

  // Waits until all ranks have staged the next tile of this rank's segment. After an aborted wait this tile and all
  // later ones have no sum. A thread that reads `incomplete` late applies it to the previous tile, whose sum is not
  // needed then.
  LLM_COMM_DEVICE void wait() {
    if (talks_) {
      const uint64_t* const said = row_.word(args_.comm, self_.rank, self_.peer);
      const uint64_t step = word_of_step(session_.sequence(), waited_);
      session_.wait_until([&] { return poll_acquire(said, HasReached{step}); }, kScatter);
    }
    ++waited_;
    if (session_.aborted()) *incomplete_ = 1;
    block_sync();
  }

  // Has the switch reduce a line of that tile and stores the sum at the offset of `target` on every rank.
  template <DataType D>
  LLM_COMM_DEVICE void sum(bool has, uint64_t index, const Line* target) const {
    if (!has || *incomplete_ != 0) return;
    switch_.send(switch_.at(target), switch_.load_reduce<D>(switch_.at(staged(self_.rank, index))));
  }

 private:
  LLM_COMM_DEVICE Line* staged(uint32_t owner, uint64_t index) const {
    return staging_of(args_.comm, self_.rank, 0) + owner * owner_lines_ + index;
  }

  const AddRmsNormArgs& args_;
  const RowThread& self_;
  LLSession& session_;
  SwitchChannel switch_;
  uint64_t owner_lines_;
  uint32_t* incomplete_;
  SignalRow row_;  // signal words of the block
  bool talks_;     // one thread per peer
  uint32_t staged_ = 0;
  uint32_t waited_ = 0;
};

template <DataType D, int World, bool SingleTile, Output Rows>
LLM_COMM_KERNEL(kMaxTwoShotThreads)
all_reduce_add_rms_norm_two_shot_ld_reduce(LLM_COMM_KERNEL_PARAM AddRmsNormArgs args) {
  sum_and_norm_in_two_shots<D, World, SingleTile, Rows, SummedBySwitch>(args, kAllReduceAddRmsNormTwoShotLdReduce);
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceAddRmsNormTwoShotLdReduce : TwoShotInClusters<AllReduceAddRmsNormTwoShotLdReduce> {
  using Base = TwoShotInClusters<AllReduceAddRmsNormTwoShotLdReduce>;
  static constexpr AlgorithmInfo kInfo{.name = "two_shot_ld_reduce",
                                       .protocol = "Switch",
                                       .title = "two-shot all-reduce + RMSNorm, summed by the switch",
                                       .uses_multimem = true,
                                       .sums_in_switch = true};
  static constexpr uint32_t kVariants = 4;
  // One for every owner. As many lines are staged.
  static constexpr uint64_t slot_segments(uint64_t world) { return world; }

  // The launch bounds of the kernels leave 128 registers for each thread.
  static constexpr uint32_t resident_threads(const Limits&) { return kMaxTwoShotThreads; }

  static Tiling tile(const Problem& problem, const TuningParameters& tuning, const Limits& limits) {
    TuningParameters fitting = tuning;
    if (fitting.blocks > CommonSignals::kBlocks) fitting.blocks = CommonSignals::kBlocks;
    return Base::tile(problem, fitting, within_both(limits));
  }

  static Grid grid(const Problem& problem, const Tiling& tiling, uint64_t units, const Limits& limits) {
    check_multimem(limits);
    const Grid grid = Base::grid(problem, tiling, units, within_both(limits));
    if (grid.blocks > CommonSignals::kBlocks) {
      throw std::invalid_argument("a grid of " + std::to_string(grid.blocks) + " blocks; there are signals for " +
                                  std::to_string(CommonSignals::kBlocks));
    }
    const uint64_t tiles_of_row = divide_up(uint64_t{span(problem)}, uint64_t{tiling.tile_lines} * grid.cluster_blocks);
    const uint64_t rows_of_block = divide_up(units, uint64_t{grid.blocks / grid.cluster_blocks});
    if (tiles_of_row * rows_of_block >> kMaxStepsLog2 != 0) {
      throw std::invalid_argument("a launch of " + std::to_string(units) + " rows takes too many steps: raise blocks");
    }
    return grid;
  }

  template <DataType D, int World, uint32_t Variant>
  static KernelPointer kernel() {
    return &all_reduce_add_rms_norm_two_shot_ld_reduce<D, World, (Variant & 1) != 0,
                                                       output_of(Variant >> 1, kVariants / 2)>;
  }

 private:
  // A row takes as many lines of a slot as of one half of the staging memory, so both limits apply.
  static Limits within_both(Limits limits) {
    if (limits.slot_bytes > limits.staging_bytes / 2) limits.slot_bytes = limits.staging_bytes / 2;
    return limits;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
