// One-shot all-gather (1PA, LL): every rank sends its part to every other rank, which puts it where it belongs.
//
// One hop, and any bytes (ll_bytes.cuh). Slot: [sender][line], [sender][mask].
//
// The rules of operation.cuh: R1, a rank ends after it has received line 0 from every peer, which sends one even where its part
// is empty; R2, the thread that receives a line re-arms it.
#pragma once

#include "algorithms/all_gather/operation.cuh"
#include "algorithms/tiled_parts.h"
#include "llm_comm/ll_bytes.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllGatherOneShot{5};

// Thread (k, c) of a block sends line c of each of the block's tiles of this rank's part to peer k, and receives that of
// peer k; those of this rank copy.
template <DataType D>
LLM_COMM_KERNEL(kMaxBlockThreads)
all_gather_one_shot(LLM_COMM_KERNEL_PARAM PartsArgs args) {
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const uint32_t peer = thread_index() >> args.tile_lines_log2;
  const uint32_t column = thread_index() & (args.tile_lines - 1);
  const PartView<D> source(args.input, args.parts.part[rank], 0, args.range);
  const PartView<D> target(args.output, args.parts.part[peer], args.parts.row_elements, args.range);
  const uint64_t slot_lines = PartView<D>::lines_of(args.range.count);
  const uint32_t first = block * args.tile_lines + column;
  const uint32_t stride = block_count() * args.tile_lines;
  const uint32_t greeting = 1;
  const ExchangedLines exchanged(source.lines(), target.lines(), greeting);

  LLSession session(args.comm, kAllGatherOneShot, PartView<D>::bytes_of(args.range.count), rank, peer);
  session.divide_slots(slot_lines);
  LLBytes exchange(session, args.comm, slot_lines);
  session.wait_for_grids_before(source.precomputed(), target.precomputed(), first);
  // A thread that sends nothing is missed by its peers, whose waits end; what it would have received, by this rank, which has an
  // error.
  if (!session.begin()) return;
  session.enter_slot();

  for (uint32_t line = first; line < exchanged.most(); line += stride) {
    const bool is_there = line < source.lines();
    if (peer == rank) {
      if (is_there) target.store(line, source.load(line));
      continue;
    }
    // A thread sends before it waits: so no two ranks wait for each other.
    if (line < exchanged.sent) exchange.send(line, is_there ? source.load(line) : Line{});
    if (line < exchanged.received) {
      const Line value = exchange.receive(line, 0);
      if (line < target.lines()) target.store(line, value);
    }
  }
  // Every block once, when all its threads have begun: the number of the operation then stands for the next one.
  block_sync();
  if (thread_index() == 0) session.arrive();
}

// Two ranks: a thread sends a line of this rank's part, copies it, and receives the same line of the peer's. It sends one line ahead of
// the one that it waits for.
template <DataType D>
LLM_COMM_KERNEL(kMaxBlockThreads / 2)
all_gather_one_shot_pair(LLM_COMM_KERNEL_PARAM PartsArgs args) {
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const uint32_t peer = 1 - rank;
  const PartView<D> source(args.input, args.parts.part[rank], 0, args.range);
  const PartView<D> copy(args.output, args.parts.part[rank], args.parts.row_elements, args.range);
  const PartView<D> target(args.output, args.parts.part[peer], args.parts.row_elements, args.range);
  const uint64_t slot_lines = PartView<D>::lines_of(args.range.count);
  const uint32_t first = block * block_threads() + thread_index();
  const uint32_t stride = block_count() * block_threads();
  const uint32_t greeting = 1;
  const ExchangedLines exchanged(source.lines(), target.lines(), greeting);

  LLSession session(args.comm, kAllGatherOneShot, PartView<D>::bytes_of(args.range.count), rank, peer);
  session.divide_slots(slot_lines);
  LLBytes exchange(session, args.comm, slot_lines);
  typename PartView<D>::Load coming(source, first, first < source.lines(), args.comm.workspace[rank]);
  session.wait_for_grids_before(source.precomputed(), copy.precomputed(), target.precomputed(), coming.precomputed(),
                                first);
  Line next;
  const bool begun = session.begin_beside(coming, next);

  const auto send = [&](uint32_t line) {
    if (line >= exchanged.sent) return;
    const bool is_there = line < source.lines();
    exchange.send(line, is_there ? next : Line{});
    if (is_there) copy.store(line, next);
    if (line + stride < source.lines()) next = source.load(line + stride);
  };
  if (begun) send(first);
  // While the first answers are on their way. All threads know the number of the operation by now.
  block_sync();
  if (thread_index() == 0) session.arrive();
  if (!begun) return;
  for (uint32_t line = first; line < exchanged.most(); line += stride) {
    send(line + stride);
    if (line < exchanged.received) {
      const Line value = exchange.receive(line, 0);
      if (line < target.lines()) target.store(line, value);
    }
  }
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllGatherOneShot : TiledParts<AllGatherOneShot> {
  using Operation = AllGather;
  static constexpr AlgorithmInfo kInfo{"one_shot", "LL", "one-shot all-gather"};
  static constexpr OperationKind kKind = kAllGatherOneShot;

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    if constexpr (World == 2) {
      return &all_gather_one_shot_pair<D>;
    } else {
      return &all_gather_one_shot<D>;
    }
  }

  static constexpr uint64_t slot_bytes(uint64_t lines, uint64_t world) { return LLBytes::slot_bytes(lines, world); }
  static constexpr uint64_t threads_of_line(uint64_t world) { return world == 2 ? 1 : world; }
  static constexpr uint64_t shared_lines(uint64_t, uint64_t) { return 0; }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
