// One-shot all-reduce whose sums the NVLink switch makes: every rank stages its message and has the switch sum all of it.
//
// One hop, in which each rank sends N x bytes and receives 1 x bytes: it is for messages that are short beside the hop. Each rank's
// sums are its own, in an order of their own: ranks may get other bits (`ranks_may_differ`).
//
// In step t (switch_chunks.cuh) a block stages chunk t in this rank's memory and has chunk t - depth summed. H1: what is staged lies
// in the first half, and a rank waits until every peer has ended the step in which it summed the last of it. R1 of operation.cuh: a
// block waits for each peer. R2: it uses no slot.
#pragma once

#include "algorithms/all_reduce/message.cuh"
#include "optional/switch_chunks.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceOneShotLdReduce = kKindOf<struct AllReduceOneShotLdReduce>;
inline constexpr uint32_t kOneShotLdReduceTeams = 2;  // one stages, one sums

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kOneShotLdReduceTeams))
all_reduce_one_shot_ld_reduce(LLM_COMM_KERNEL_PARAM AllReduceArgs args) {
  const uint32_t block = block_number(args.comm);
  const uint32_t depth = args.depth < kMinHBDepth ? kMinHBDepth : args.depth;  // it is cut where chunks are few
  const Message<D> message(args);
  const uint32_t lines = message.lines();
  const Chunks chunks(block, args.tile_lines, lines);

  HBSession session(args.comm, kAllReduceOneShotLdReduce, message.bytes(), SignalRow::of<CommonSignals>(block),
                    shared_memory<Line>());
  const SwitchBuffers buffers(args.comm, 1, block, args.tile_lines, depth);
  session.wait_for_grids_before(message.precomputed());
  session.begin();

  const auto work = [&](uint32_t t) {
    const Team team = Team::of(session, kOneShotLdReduceTeams);
    const auto move = [&](uint32_t u, auto load, auto store) {
      const uint32_t first = chunks.first(u);
      Line* const staged = buffers.of(0, u, 0);
      move_lines(
          team, chunks.lines(u, lines), [&](uint32_t k) { return load(first + k, staged + k); },
          [&](uint32_t k, Line line) { store(first + k, staged + k, line); });
    };
    if (team.number == 0 && t < chunks.count()) {
      move(
          t, [&](uint32_t line, const Line*) { return message.load(line); },
          [&](uint32_t, Line* staged, Line value) { store_line(staged, value); });
    }
    if (team.number == 1 && t >= depth && t - depth < chunks.count()) {
      move(
          t - depth, [&](uint32_t, const Line* staged) { return buffers.sum<D>(staged); },
          [&](uint32_t line, Line*, Line sum) { message.store(line, sum); });
    }
  };
  session.run(chunks.count(), depth, work, [](uint32_t) { return 0u; }, HBSession::NothingMore(), FenceAliases());
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceOneShotLdReduce : ChunkedBySwitch<AllReduceOneShotLdReduce> {
  using Operation = AllReduce;
  static constexpr AlgorithmInfo kInfo{.name = "one_shot_ld_reduce",
                                       .protocol = "Switch",
                                       .title = "one-shot all-reduce, summed by the switch",
                                       .by_switch = true,
                                       .sums_in_switch = true,
                                       .ranks_may_differ = true};
  static constexpr uint32_t kTeams = kOneShotLdReduceTeams;
  static constexpr uint64_t senders(uint64_t) { return 1; }

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_reduce_one_shot_ld_reduce<D, World>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
