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
  const uint32_t sent = source.lines() > greeting ? source.lines() : greeting;
  const uint32_t received = target.lines() > greeting ? target.lines() : greeting;
  const uint32_t lines = sent > received ? sent : received;

  LLSession session(args.comm, kAllGatherOneShot, PartView<D>::bytes_of(args.range.count), rank, peer);
  session.divide_slots(slot_lines);
  LLBytes exchange(session, args.comm, slot_lines);
  session.wait_for_grids_before(source.precomputed(), target.precomputed(), first);
  // A thread that sends nothing is missed by its peers, whose waits end; what it would have received, by this rank, which has an
  // error.
  if (!session.begin()) return;
  session.enter_slot();

  for (uint32_t line = first; line < lines; line += stride) {
    const bool is_there = line < source.lines();
    if (peer == rank) {
      if (is_there) target.store(line, source.load(line));
      continue;
    }
    // A thread sends before it waits: so no two ranks wait for each other.
    if (line < sent) exchange.send(line, is_there ? source.load(line) : Line{});
    if (line < received) {
      const Line value = exchange.receive(line, 0);
      if (line < target.lines()) target.store(line, value);
    }
  }
  // Every block once, when all its threads have begun: the number of the operation then stands for the next one.
  block_sync();
  if (thread_index() == 0) session.arrive();
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllGatherOneShot : TiledParts<AllGatherOneShot> {
  using Operation = AllGather;
  static constexpr AlgorithmInfo kInfo{"one_shot", "LL", "one-shot all-gather"};
  static constexpr OperationKind kKind = kAllGatherOneShot;

  // One kernel for all worlds.
  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_gather_one_shot<D>;
  }

  static constexpr uint64_t slot_bytes(uint64_t lines, uint64_t world) { return LLBytes::slot_bytes(lines, world); }
  static constexpr uint64_t shared_lines(uint64_t, uint64_t) { return 0; }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
