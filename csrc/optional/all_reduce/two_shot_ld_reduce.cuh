// Two-shot all-reduce whose sums the NVLink switch makes: every rank has the switch sum a slice of what all have staged, and stores
// the sum to the memory of all.
//
// Each rank sends (N+1)/N of the message, all of it to the switch and the sums of its slice, and receives as much. Sums are not in
// rank order (`sums_in_switch`), but each is made once, so all ranks get the same bits.
//
// In step t (switch_chunks.cuh) a block stages chunk t of each slice in this rank's memory, has chunk t - depth of this rank's slice
// summed and stored to all, and collects chunk t - 2 depth of every slice, this rank's own too, from where it was stored.
//
// Buffers: H1: what is staged lies in the first half; all ranks' sums of it have been stored, and signalled, when a rank ends.
// H2: sums are stored to the second half, from step `depth` on. R1 of operation.cuh: a block waits for each peer. R2: it uses no
// slot.
#pragma once

#include "algorithms/all_reduce/chunked_slices.cuh"
#include "algorithms/all_reduce/message.cuh"
#include "algorithms/all_reduce/slices.cuh"
#include "optional/switch_chunks.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceTwoShotLdReduce = kKindOf<struct AllReduceTwoShotLdReduce>;
inline constexpr uint32_t kTwoShotLdReduceTeams = 3;  // one stages, one sums, one collects

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kTwoShotLdReduceTeams))
all_reduce_two_shot_ld_reduce(LLM_COMM_KERNEL_PARAM AllReduceArgs args) {
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const uint32_t depth = args.depth < kMinHBDepth ? kMinHBDepth : args.depth;  // it is cut where chunks are few
  const Message<D> message(args);
  const uint32_t lines = message.lines();
  const uint32_t slice = (lines + World - 1) / World;
  const Chunks chunks(block, args.tile_lines, slice);

  HBSession session(args.comm, kAllReduceTwoShotLdReduce, message.bytes(), SignalRow::of<CommonSignals>(block),
                    shared_memory<Line>());
  const SwitchBuffers buffers(args.comm, World, block, args.tile_lines, depth);
  session.wait_for_grids_before(message.precomputed());
  session.begin();

  const auto lines_of = [&](uint32_t t, uint32_t owner) {
    return chunks.lines(t, lines_of_slice(owner, slice, lines));
  };

  const auto work = [&](uint32_t t) {
    const Team team = Team::of(session, kTwoShotLdReduceTeams);
    if (team.number == 0 && t < chunks.count()) {
      LLM_COMM_UNROLL(1)
      for (uint32_t owner = 0; owner < World; ++owner) {
        Line* const staged = buffers.of(kScatter, t, owner);
        const uint32_t first = owner * slice + chunks.first(t);
        move_lines(
            team, lines_of(t, owner), [&](uint32_t k) { return message.load(first + k); },
            [&](uint32_t k, Line line) { store_line(staged + k, line); });
      }
    }
    if (team.number == 1 && t >= depth && t - depth < chunks.count()) {
      const uint32_t u = t - depth;
      const Line* const staged = buffers.of(kScatter, u, rank);
      Line* const sums = buffers.of(kGather, u, rank);
      move_lines(
          team, lines_of(u, rank), [&](uint32_t k) { return buffers.sum<D>(staged + k); },
          [&](uint32_t k, Line sum) { buffers.store(sums + k, sum); });
    }
    if (team.number == 2 && t >= 2 * depth) {
      const uint32_t v = t - 2 * depth;
      LLM_COMM_UNROLL(1)
      for (uint32_t i = 1; i <= World; ++i) {
        const uint32_t owner = (rank + i) % World;
        const Line* const sums = buffers.of(kGather, v, owner);
        const uint32_t first = owner * slice + chunks.first(v);
        move_lines(
            team, lines_of(v, owner), [&](uint32_t k) { return load_line(sums + k); },
            [&](uint32_t k, Line line) { message.store(first + k, line); });
      }
    }
  };
  session.run(
      chunks.count(), depth, work, [&](uint32_t t) { return t < 2 * depth ? kScatter : kGather; },
      HBSession::NothingMore(), FenceAliases());
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceTwoShotLdReduce : ChunkedBySwitch<AllReduceTwoShotLdReduce> {
  using Operation = AllReduce;
  static constexpr AlgorithmInfo kInfo{.name = "two_shot_ld_reduce",
                                       .protocol = "Switch",
                                       .title = "two-shot all-reduce, summed by the switch",
                                       .by_switch = true,
                                       .sums_in_switch = true};
  static constexpr uint32_t kTeams = kTwoShotLdReduceTeams;
  static constexpr uint64_t part_lines(const Problem& problem, uint64_t units) {
    return ChunkedSlices<AllReduceTwoShotLdReduce>::part_lines(problem, units);
  }

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_reduce_two_shot_ld_reduce<D, World>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
