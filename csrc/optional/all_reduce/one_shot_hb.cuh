// One-shot all-reduce (1PA, HB, push): every rank stores its whole message, chunk by chunk, to the staging memory of all others, and
// each sums all of it. Plain stores, one synchronization for each chunk.
//
// One hop, N-1 times the message sent by each rank: of two ranks as much as in two hops, so it is for them.
//
// In step t (hb_session.cuh) a block sends chunk t to each peer and sums chunk t - depth. H1: chunks are sent to the first half. R1
// of operation.cuh: a block waits for each peer. R2: it uses no slot.
#pragma once

#include "algorithms/all_reduce/message.cuh"
#include "algorithms/chunked.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceOneShotHB = kKindOf<struct AllReduceOneShotHB>;
inline constexpr uint32_t kOneShotHBTeams = 2;  // one sends, one sums

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kOneShotHBTeams))
all_reduce_one_shot_hb(LLM_COMM_KERNEL_PARAM AllReduceArgs args) {
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const uint32_t depth = args.depth < kMinHBDepth ? kMinHBDepth : args.depth;  // it is cut where chunks are few
  const Message<D> message(args);
  const uint32_t lines = message.lines();
  const Chunks chunks(block, args.tile_lines, lines);

  HBSession session(args.comm, kAllReduceOneShotHB, message.bytes(), SignalRow::of<CommonSignals>(block),
                    shared_memory<Line>());
  const ChunkBuffers buffers(session, World, block, args.tile_lines, depth);
  session.wait_for_grids_before(message.precomputed());
  session.begin();

  const auto work = [&](uint32_t t) {
    const Team team = Team::of(session, kOneShotHBTeams);
    if (team.number == 0 && t < chunks.count()) {
      Line* targets[World];
      LLM_COMM_UNROLL(8)
      for (uint32_t i = 1; i < World; ++i) targets[i] = buffers.of((rank + i) % World, 0, t, rank);
      const uint32_t first = chunks.first(t);
      move_lines(
          team, chunks.lines(t, lines), [&](uint32_t k) { return message.load(first + k); },
          [&](uint32_t k, Line line) {
            LLM_COMM_UNROLL(8)
            for (uint32_t i = 1; i < World; ++i) store_line(targets[i] + k, line);
          });
    }
    if (team.number == 1 && t >= depth && t - depth < chunks.count()) {
      const uint32_t u = t - depth;
      const uint32_t first = chunks.first(u);
      sum_chunk<D, World>(
          team, chunks.lines(u, lines),
          [&](uint32_t of, uint32_t k) {
            return of == rank ? message.load(first + k) : load_line(buffers.of(rank, 0, u, of) + k);
          },
          [&](uint32_t k, Line line) { message.store(first + k, line); });
    }
  };
  session.run(chunks.count(), depth, work, [](uint32_t) { return 0u; });
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceOneShotHB : Chunked<AllReduceOneShotHB> {
  using Operation = AllReduce;
  static constexpr AlgorithmInfo kInfo{"one_shot_hb", "HB", "one-shot all-reduce (HB)"};
  static constexpr uint32_t kTeams = kOneShotHBTeams;
  static constexpr uint64_t part_lines(const Problem& problem, uint64_t units) {
    return divide_up(units * element_bytes(problem.type), sizeof(Line));
  }

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_reduce_one_shot_hb<D, World>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
