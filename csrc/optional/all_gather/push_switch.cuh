// All-gather by push through the NVLink switch: every rank stores its part, chunk by chunk, once, to the staging memory of all ranks,
// which put it where it belongs.
//
// In step t (switch_chunks.cuh) a block stores chunk t of this rank's part to all ranks, and delivers chunk t - depth of the others'.
// Its own part it delivers from the input. H1: chunks are stored to the first half, and a rank waits until every peer has delivered
// them. R1 of operation.cuh: a block waits for each peer. R2: it uses no slot.
//
// Aliases: what was there before may have been stored by the addresses of the ranks' workspaces. The threads that store fence once,
// after they have begun.
#pragma once

#include "algorithms/all_gather/operation.cuh"
#include "optional/switch_chunks.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllGatherPushSwitch = kKindOf<struct AllGatherPushSwitch>;
inline constexpr uint32_t kAllGatherSwitchTeams = 2;  // one sends, one delivers

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kAllGatherSwitchTeams))
all_gather_push_switch(LLM_COMM_KERNEL_PARAM PartsArgs args) {
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const auto target_of = [&](uint32_t owner) {
    return PartView<D>(args.output, args.parts.part[owner], args.parts.row_elements, args.range);
  };
  const PartView<D> source(args.input, args.parts.part[rank], 0, args.range);
  const PartView<D> own = target_of(rank);
  const Chunks chunks(block, args.tile_lines, PartView<D>::lines_of(args.range.count));

  HBSession session(args.comm, kAllGatherPushSwitch, PartView<D>::bytes_of(args.range.count),
                    SignalRow::of<CommonSignals>(block), shared_memory<Line>());
  const SwitchBuffers buffers(args.comm, World, block, args.tile_lines, args.depth);
  session.wait_for_grids_before(source.precomputed(), own.precomputed());
  session.begin();
  fence_aliases();

  const auto work = [&](uint32_t t) {
    const Team team = Team::of(session, kAllGatherSwitchTeams);
    if (team.number == 0 && t < chunks.count()) {
      const Line* const sent = buffers.of(0, t, rank);
      const uint32_t first = chunks.first(t);
      move_lines(
          team, chunks.lines(t, source.lines()), [&](uint32_t k) { return source.load(first + k); },
          [&](uint32_t k, Line line) {
            buffers.store(sent + k, line);
            own.store(first + k, line);
          });
    }
    if (team.number == 1 && t >= args.depth && t - args.depth < chunks.count()) {
      const uint32_t u = t - args.depth;
      LLM_COMM_UNROLL(1)
      for (uint32_t i = 1; i < World; ++i) {
        const uint32_t from = (rank + i) % World;
        const PartView<D> target = target_of(from);
        const Line* const sent = buffers.of(0, u, from);
        const uint32_t first = chunks.first(u);
        move_lines(
            team, chunks.lines(u, target.lines()), [&](uint32_t k) { return load_line(sent + k); },
            [&](uint32_t k, Line line) { target.store(first + k, line); });
      }
    }
  };
  session.run(chunks.count(), args.depth, work, [](uint32_t) { return 0u; }, HBSession::NothingMore(), FenceAliases());
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllGatherPushSwitch : ChunkedBySwitch<AllGatherPushSwitch> {
  using Operation = AllGather;
  static constexpr AlgorithmInfo kInfo{
      .name = "push_switch", .protocol = "Switch", .title = "all-gather by push through the switch", .by_switch = true};
  static constexpr uint32_t kTeams = kAllGatherSwitchTeams;

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_gather_push_switch<D, World>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
