// One-shot reduce-scatter (1PA, LL): every rank sends to each other rank what it has for its part, and sums what it gets for its
// own. The first phase of two-shot all-reduce.
//
// One hop. Slot: [sender][line], of the other ranks.
//
// The rules of operation.cuh: R1, a rank ends after it has received line 0 from every peer, which sends one even where the part
// is empty; R2, the thread that receives a line re-arms it.
#pragma once

#include "algorithms/block_sum.cuh"
#include "algorithms/reduce_scatter/operation.cuh"
#include "algorithms/tiled_parts.h"
#include "llm_comm/ll_session.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kReduceScatterOneShot{6};

// Thread (k, c) of a block exchanges line c of each of the block's tiles with peer k: it sends of peer k's part, and receives of
// this rank's; those of this rank contribute its own.
template <DataType D, int World>
LLM_COMM_KERNEL(kMaxBlockThreads)
reduce_scatter_one_shot(LLM_COMM_KERNEL_PARAM PartsArgs args) {
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const uint32_t peer = thread_index() >> args.tile_lines_log2;
  const uint32_t column = thread_index() & (args.tile_lines - 1);
  const PartView<D> source(args.input, args.parts.part[peer], args.parts.row_elements, args.range);
  const PartView<D> target(args.output, args.parts.part[rank], 0, args.range);
  const uint64_t slot_lines = PartView<D>::lines_of(args.range.count);
  const uint32_t stride = block_count() * args.tile_lines;
  const uint32_t greeting = 1;
  const ExchangedLines exchanged(source.lines(), target.lines(), greeting);
  const auto lines = static_cast<uint32_t>(slot_lines);
  // Set by threads of the block whose wait has been aborted: there is no sum to deliver then.
  uint32_t* const incomplete = shared_memory<Line>()->word;
  Line* const contributions = shared_memory<Line>() + 1;       // [rank][column]
  Line* const sums = contributions + World * args.tile_lines;  // [column]
  if (thread_index() == 0) *incomplete = 0;

  LLSession session(args.comm, kReduceScatterOneShot, PartView<D>::bytes_of(args.range.count), rank, peer);
  session.divide_slots(slot_lines);
  session.wait_for_grids_before(source.precomputed(), target.precomputed(), reinterpret_cast<uint64_t>(contributions));
  // A thread that may not begin stays without doing anything: others of its block may have begun, and must learn that a
  // line is incomplete.
  const bool begun = session.begin();
  session.enter_slot();

  const uint32_t first = block * args.tile_lines;
  for (uint32_t tile = first; tile < lines; tile += stride) {
    const uint32_t line = tile + column;
    const bool is_there = line < source.lines();
    // A thread sends before it waits: so no two ranks wait for each other.
    if (begun && peer != rank && line < exchanged.sent) session.send(line, is_there ? source.load(line) : Line{});
    if (line < exchanged.received) {
      contributions[thread_index()] = peer != rank ? session.receive(line, 0) : (is_there ? source.load(line) : Line{});
    }
    block_sync();
    if (session.aborted()) *incomplete = 1;  // between the barriers: it has been zero before, and is read after
    if (tile == first && thread_index() == 0) session.arrive();
    sum_tile<D, World>(contributions, args.tile_lines, sums);
    // The sums are read before the next tile's first block_sync() and written after it; contributions are
    // written after this one and read before it.
    block_sync();
    if (line >= exchanged.received || *incomplete != 0) continue;
    if (peer != rank) {
      session.re_arm(line);
    } else if (line < target.lines()) {
      target.store(line, sums[column]);
    }
  }
}

// Two ranks: a thread sends a line of the peer's part, and adds the one that it gets to this rank's own. It sends one line ahead of the
// one that it waits for.
template <DataType D>
LLM_COMM_KERNEL(kMaxBlockThreads / 2)
reduce_scatter_one_shot_pair(LLM_COMM_KERNEL_PARAM PartsArgs args) {
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const uint32_t peer = 1 - rank;
  const PartView<D> source(args.input, args.parts.part[peer], args.parts.row_elements, args.range);
  const PartView<D> own(args.input, args.parts.part[rank], args.parts.row_elements, args.range);
  const PartView<D> target(args.output, args.parts.part[rank], 0, args.range);
  const uint64_t slot_lines = PartView<D>::lines_of(args.range.count);
  const uint32_t first = block * block_threads() + thread_index();
  const uint32_t stride = block_count() * block_threads();
  const uint32_t greeting = 1;
  const ExchangedLines exchanged(source.lines(), target.lines(), greeting);

  LLSession session(args.comm, kReduceScatterOneShot, PartView<D>::bytes_of(args.range.count), rank, peer);
  session.divide_slots(slot_lines);
  typename PartView<D>::Load coming(source, first, first < source.lines(), args.comm.workspace[rank]);
  session.wait_for_grids_before(source.precomputed(), own.precomputed(), target.precomputed(), coming.precomputed(),
                                first);
  Line next;
  const bool begun = session.begin_beside(coming, next);

  const auto send = [&](uint32_t line) {
    if (line >= exchanged.sent) return;
    session.send(line, line < source.lines() ? next : Line{});
    if (line + stride < source.lines()) next = source.load(line + stride);
  };
  if (begun) send(first);
  // While the first answers are on their way. All threads know the number of the operation by now.
  block_sync();
  if (thread_index() == 0) session.arrive();
  if (!begun) return;
  for (uint32_t line = first; line < exchanged.most(); line += stride) {
    send(line + stride);
    if (line >= exchanged.received) continue;
    const bool is_there = line < target.lines();
    const Line contribution = is_there ? own.load(line) : Line{};
    // The sum of two does not depend on their order.
    const Line contributions[2] = {contribution, session.receive(line, 0)};
    if (session.aborted()) continue;
    if (is_there) target.store(line, sum_lines<D, 2>(contributions));
    session.re_arm(line);
  }
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct ReduceScatterOneShot : TiledParts<ReduceScatterOneShot> {
  using Operation = ReduceScatter;
  static constexpr AlgorithmInfo kInfo{"one_shot", "LL", "one-shot reduce-scatter"};
  static constexpr OperationKind kKind = kReduceScatterOneShot;

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    if constexpr (World == 2) {
      return &reduce_scatter_one_shot_pair<D>;
    } else {
      return &reduce_scatter_one_shot<D, World>;
    }
  }

  // A part for each of the other ranks.
  static constexpr uint64_t slot_bytes(uint64_t lines, uint64_t world) { return (world - 1) * lines * sizeof(Line); }
  static constexpr uint64_t threads_of_line(uint64_t world) { return world == 2 ? 1 : world; }
  // `incomplete`, the contributions to a tile, its sums.
  static constexpr uint64_t shared_lines(uint64_t tile_lines, uint64_t world) {
    return world == 2 ? 0 : 1 + (world + 1) * tile_lines;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
