// All-gather by push (HB): every rank stores its part, chunk by chunk, to the staging memory of all others, which put it where it
// belongs.
//
// In step t (hb_session.cuh) a block sends chunk t of this rank's part, and delivers chunk t - depth of the others'. H1: chunks
// are sent to the first half. R1 of operation.cuh: a block waits for each peer. R2: it uses no slot.
#pragma once

#include "algorithms/all_gather/operation.cuh"
#include "algorithms/chunked.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllGatherPushHB = kKindOf<struct AllGatherPushHB>;
inline constexpr uint32_t kAllGatherHBTeams = 2;  // one sends, one delivers

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kAllGatherHBTeams))
all_gather_push_hb(LLM_COMM_KERNEL_PARAM PartsArgs args) {
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const auto target_of = [&](uint32_t owner) {
    return PartView<D>(args.output, args.parts.part[owner], args.parts.row_elements, args.range);
  };
  const PartView<D> source(args.input, args.parts.part[rank], 0, args.range);
  const PartView<D> own = target_of(rank);
  const Chunks chunks(block, args.tile_lines, PartView<D>::lines_of(args.range.count));

  HBSession session(args.comm, kAllGatherPushHB, PartView<D>::bytes_of(args.range.count),
                    SignalRow::of<CommonSignals>(block), shared_memory<Line>());
  const ChunkBuffers buffers(session, World, block, args.tile_lines, args.depth);
  session.wait_for_grids_before(source.precomputed(), own.precomputed());
  session.begin();

  const auto work = [&](uint32_t t) {
    const Team team = Team::of(session, kAllGatherHBTeams);
    if (team.number == 0 && t < chunks.count()) {
      Line* targets[World];
      LLM_COMM_UNROLL(8)
      for (uint32_t i = 1; i < World; ++i) targets[i] = buffers.of((rank + i) % World, 0, t, rank);
      const uint32_t first = chunks.first(t);
      move_lines(
          team, chunks.lines(t, source.lines()), [&](uint32_t k) { return source.load(first + k); },
          [&](uint32_t k, Line line) {
            LLM_COMM_UNROLL(8)
            for (uint32_t i = 1; i < World; ++i) store_line(targets[i] + k, line);
            own.store(first + k, line);
          });
    }
    if (team.number == 1 && t >= args.depth && t - args.depth < chunks.count()) {
      const uint32_t u = t - args.depth;
      LLM_COMM_UNROLL(1)
      for (uint32_t i = 1; i < World; ++i) {
        const uint32_t from = (rank + i) % World;
        const PartView<D> target = target_of(from);
        const Line* const sent = buffers.of(rank, 0, u, from);
        const uint32_t first = chunks.first(u);
        move_lines(
            team, chunks.lines(u, target.lines()), [&](uint32_t k) { return load_line(sent + k); },
            [&](uint32_t k, Line line) { target.store(first + k, line); });
      }
    }
  };
  session.run(chunks.count(), args.depth, work, [](uint32_t) { return 0u; });
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllGatherPushHB : Chunked<AllGatherPushHB> {
  using Operation = AllGather;
  static constexpr AlgorithmInfo kInfo{"push_hb", "HB", "all-gather by push (HB)"};
  static constexpr uint32_t kTeams = kAllGatherHBTeams;

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_gather_push_hb<D, World>;
  }

  static constexpr uint64_t part_lines(const Problem& problem, uint64_t units) {
    return divide_up(units * element_bytes(problem.type), sizeof(Line));
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
