// Two-shot all-reduce (2PA, HB, push): every rank sums a slice of the message and sends the sum to all. Plain stores, one
// synchronization for each chunk of a slice.
//
// Two hops, 2 (N-1)/N of the message sent by each rank. In step t (hb_session.cuh) a block scatters what this rank has of chunk t of
// each slice, reduces chunk t - depth of this rank's slice, and collects chunk t - 2 depth of the others'.
//
// Buffers: those of the sums lag `depth` steps behind those of what is scattered, on all ranks, and so does what is said there.
// H1: chunks are scattered to the first half, and all are reduced when a rank ends. H2: sums are sent to the second half, from
// step `depth` on.
//
// R1 of operation.cuh: a block waits for each peer. R2: it uses no slot.
#pragma once

#include "algorithms/all_reduce/chunked_slices.cuh"
#include "algorithms/all_reduce/message.cuh"
#include "algorithms/all_reduce/slices.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceTwoShotHB = kKindOf<struct AllReduceTwoShotHB>;
inline constexpr uint32_t kTwoShotHBTeams = 3;  // one scatters, one reduces, one collects

template <DataType D, int World>
LLM_COMM_KERNEL(max_hb_threads(kTwoShotHBTeams))
all_reduce_two_shot_hb(LLM_COMM_KERNEL_PARAM AllReduceArgs args) {
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const uint32_t depth = args.depth < kMinHBDepth ? kMinHBDepth : args.depth;  // it is cut where chunks are few
  const Message<D> message(args);
  const uint32_t lines = message.lines();
  const uint32_t slice = (lines + World - 1) / World;
  const Chunks chunks(block, args.tile_lines, slice);

  HBSession session(args.comm, kAllReduceTwoShotHB, message.bytes(), SignalRow::of<CommonSignals>(block),
                    shared_memory<Line>());
  const ChunkBuffers buffers(session, World, block, args.tile_lines, depth);
  session.wait_for_grids_before(message.precomputed());
  session.begin();

  const auto lines_of = [&](uint32_t t, uint32_t owner) {
    return chunks.lines(t, lines_of_slice(owner, slice, lines));
  };

  const auto work = [&](uint32_t t) {
    const Team team = Team::of(session, kTwoShotHBTeams);
    if (team.number == 0 && t < chunks.count()) {
      LLM_COMM_UNROLL(1)
      for (uint32_t i = 1; i < World; ++i) {
        const uint32_t to = (rank + i) % World;  // every rank begins with another one
        Line* const target = buffers.of(to, kScatter, t, rank);
        const uint32_t first = to * slice + chunks.first(t);
        move_lines(
            team, lines_of(t, to), [&](uint32_t k) { return message.load(first + k); },
            [&](uint32_t k, Line line) { store_line(target + k, line); });
      }
    }
    if (team.number == 1 && t >= depth && t - depth < chunks.count()) {
      const uint32_t u = t - depth;
      const uint32_t first = rank * slice + chunks.first(u);
      Line* targets[World];
      LLM_COMM_UNROLL(8)
      for (uint32_t i = 1; i < World; ++i) targets[i] = buffers.of((rank + i) % World, kGather, u, rank);
      sum_chunk<D, World>(
          team, lines_of(u, rank),
          [&](uint32_t of, uint32_t k) {
            return of == rank ? message.load(first + k) : load_line(buffers.of(rank, kScatter, u, of) + k);
          },
          [&](uint32_t k, Line line) {
            message.store(first + k, line);
            LLM_COMM_UNROLL(8)
            for (uint32_t i = 1; i < World; ++i) store_line(targets[i] + k, line);
          });
    }
    if (team.number == 2 && t >= 2 * depth) {
      const uint32_t v = t - 2 * depth;
      LLM_COMM_UNROLL(1)
      for (uint32_t i = 1; i < World; ++i) {
        const uint32_t from = (rank + i) % World;
        const Line* const source = buffers.of(rank, kGather, v, from);
        const uint32_t first = from * slice + chunks.first(v);
        move_lines(
            team, lines_of(v, from), [&](uint32_t k) { return load_line(source + k); },
            [&](uint32_t k, Line line) { message.store(first + k, line); });
      }
    }
  };
  session.run(chunks.count(), depth, work, [&](uint32_t t) { return t < 2 * depth ? kScatter : kGather; });
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceTwoShotHB : ChunkedSlices<AllReduceTwoShotHB> {
  using Operation = AllReduce;
  static constexpr AlgorithmInfo kInfo{"two_shot_hb", "HB", "two-shot all-reduce (HB)"};
  static constexpr uint32_t kTeams = kTwoShotHBTeams;

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_reduce_two_shot_hb<D, World>;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
