// Reduce-scatter whose sums the NVLink switch makes: every rank stages what it has for all parts, and has the switch sum its own.
//
// Each rank sends its input once and receives its part: no more than that crosses its links. Sums are not in rank order
// (`sums_in_switch`).
//
// In step t (switch_chunks.cuh) a block stages chunk t of each part in this rank's memory, and has chunk t - depth of this rank's
// part summed. H1: what is staged lies in the first half, and a rank waits until every peer has ended the step in which it summed
// the last of it. R1 of operation.cuh: a block waits for each peer. R2: it uses no slot.
#pragma once

#include "algorithms/reduce_scatter/operation.cuh"
#include "optional/switch_chunks.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kReduceScatterLdReduce = kKindOf<struct ReduceScatterLdReduce>;
inline constexpr uint32_t kReduceScatterLdReduceTeams = 2;  // one stages, one sums

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kReduceScatterLdReduceTeams))
reduce_scatter_ld_reduce(LLM_COMM_KERNEL_PARAM PartsArgs args) {
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const PartView<D> target(args.output, args.parts.part[rank], 0, args.range);
  const Chunks chunks(block, args.tile_lines, PartView<D>::lines_of(args.range.count));

  HBSession session(args.comm, kReduceScatterLdReduce, PartView<D>::bytes_of(args.range.count),
                    SignalRow::of<CommonSignals>(block), shared_memory<Line>());
  const SwitchBuffers buffers(args.comm, World, block, args.tile_lines, args.depth);
  session.wait_for_grids_before(target.precomputed());
  session.begin();

  const auto work = [&](uint32_t t) {
    const Team team = Team::of(session, kReduceScatterLdReduceTeams);
    if (team.number == 0 && t < chunks.count()) {
      LLM_COMM_UNROLL(1)
      for (uint32_t owner = 0; owner < World; ++owner) {
        const PartView<D> source(args.input, args.parts.part[owner], args.parts.row_elements, args.range);
        Line* const staged = buffers.of(0, t, owner);
        const uint32_t first = chunks.first(t);
        move_lines(
            team, chunks.lines(t, source.lines()), [&](uint32_t k) { return source.load(first + k); },
            [&](uint32_t k, Line line) { store_line(staged + k, line); });
      }
    }
    if (team.number == 1 && t >= args.depth && t - args.depth < chunks.count()) {
      const uint32_t u = t - args.depth;
      const Line* const staged = buffers.of(0, u, rank);
      const uint32_t first = chunks.first(u);
      move_lines(
          team, chunks.lines(u, target.lines()), [&](uint32_t k) { return buffers.sum<D>(staged + k); },
          [&](uint32_t k, Line sum) { target.store(first + k, sum); });
    }
  };
  session.run(chunks.count(), args.depth, work, [](uint32_t) { return 0u; }, HBSession::NothingMore(), FenceAliases());
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct ReduceScatterLdReduce : ChunkedBySwitch<ReduceScatterLdReduce> {
  using Operation = ReduceScatter;
  static constexpr AlgorithmInfo kInfo{.name = "ld_reduce",
                                       .protocol = "Switch",
                                       .title = "reduce-scatter, summed by the switch",
                                       .by_switch = true,
                                       .sums_in_switch = true};
  static constexpr uint32_t kTeams = kReduceScatterLdReduceTeams;

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &reduce_scatter_ld_reduce<D, World>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
