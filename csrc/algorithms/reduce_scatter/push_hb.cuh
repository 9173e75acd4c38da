// Reduce-scatter by push (HB): every rank stores what it has for the part of another one, chunk by chunk, to the staging memory of
// that one, which sums. The first hop of two-shot all-reduce (HB).
//
// In step t (hb_session.cuh) a block sends chunk t of each part, and sums chunk t - depth of this rank's. H1: chunks are sent to the
// first half. R1 of operation.cuh: a block waits for each peer. R2: it uses no slot.
#pragma once

#include "algorithms/chunked.cuh"
#include "algorithms/reduce_scatter/operation.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kReduceScatterPushHB = kKindOf<struct ReduceScatterPushHB>;
inline constexpr uint32_t kReduceScatterHBTeams = 2;  // one sends, one sums

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kReduceScatterHBTeams))
reduce_scatter_push_hb(LLM_COMM_KERNEL_PARAM PartsArgs args) {
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const auto source_of = [&](uint32_t owner) {
    return PartView<D>(args.input, args.parts.part[owner], args.parts.row_elements, args.range);
  };
  const PartView<D> own = source_of(rank);
  const PartView<D> target(args.output, args.parts.part[rank], 0, args.range);
  const Chunks chunks(block, args.tile_lines, PartView<D>::lines_of(args.range.count));

  HBSession session(args.comm, kReduceScatterPushHB, PartView<D>::bytes_of(args.range.count),
                    SignalRow::of<CommonSignals>(block), shared_memory<Line>());
  const ChunkBuffers buffers(session, World, block, args.tile_lines, args.depth);
  session.wait_for_grids_before(own.precomputed(), target.precomputed());
  session.begin();

  const auto work = [&](uint32_t t) {
    const Team team = Team::of(session, kReduceScatterHBTeams);
    if (team.number == 0 && t < chunks.count()) {
      LLM_COMM_UNROLL(1)
      for (uint32_t i = 1; i < World; ++i) {
        const uint32_t to = (rank + i) % World;  // every rank begins with another one
        const PartView<D> source = source_of(to);
        Line* const sent = buffers.of(to, 0, t, rank);
        const uint32_t first = chunks.first(t);
        move_lines(
            team, chunks.lines(t, source.lines()), [&](uint32_t k) { return source.load(first + k); },
            [&](uint32_t k, Line line) { store_line(sent + k, line); });
      }
    }
    if (team.number == 1 && t >= args.depth && t - args.depth < chunks.count()) {
      const uint32_t u = t - args.depth;
      const uint32_t first = chunks.first(u);
      sum_chunk<D, World>(
          team, chunks.lines(u, target.lines()),
          [&](uint32_t of, uint32_t k) {
            return of == rank ? own.load(first + k) : load_line(buffers.of(rank, 0, u, of) + k);
          },
          [&](uint32_t k, Line line) { target.store(first + k, line); });
    }
  };
  session.run(chunks.count(), args.depth, work, [](uint32_t) { return 0u; });
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct ReduceScatterPushHB : Chunked<ReduceScatterPushHB> {
  using Operation = ReduceScatter;
  static constexpr AlgorithmInfo kInfo{"push_hb", "HB", "reduce-scatter by push (HB)"};
  static constexpr uint32_t kTeams = kReduceScatterHBTeams;

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &reduce_scatter_push_hb<D, World>;
  }

  static constexpr uint64_t part_lines(const Problem& problem, uint64_t units) {
    return divide_up(units * element_bytes(problem.type), sizeof(Line));
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
