// LL exchange of shards with one thread for each line and rank: one-shot all-gather of many ranks, and all-to-all.
//
// One hop; carries arbitrary bytes (ll_bytes.cuh). Slot layout: [sender][line], [sender][mask].
//
// Rules of operation.cuh:
//   R1  A rank ends after it has received line 0 from every peer. A peer sends line 0 even if its shard is empty.
//   R2  The thread that receives a line resets it.
#pragma once

#include "algorithms/shards_operation.h"
#include "llm_comm/ll_bytes.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Thread (k, c) of a block handles line c of each of the block's tiles. It sends that line of source_of(k) to peer k,
// and stores that line of what peer k sends to target_of(k). Threads with k == rank copy from source to target.
template <DataType D, class SourceOf, class TargetOf>
LLM_COMM_DEVICE void exchange_by_line_and_rank(const ShardsArgs& args, OperationKind kind, SourceOf source_of,
                                               TargetOf target_of) {
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const uint32_t peer = thread_index() >> args.tile_lines_log2;
  const uint32_t column = thread_index() & (args.tile_lines - 1);
  const ShardView<D> source = source_of(peer);
  const ShardView<D> target = target_of(peer);
  const uint64_t slot_lines = ShardView<D>::lines_of(args.range.count);
  const uint32_t first = block * args.tile_lines + column;
  const uint32_t stride = block_count() * args.tile_lines;
  const uint32_t greeting = 1;
  const ExchangedLines exchanged(source.lines(), target.lines(), greeting);

  LLSession session(args.comm, kind, ShardView<D>::bytes_of(args.range.count), rank, peer);
  session.divide_slots(slot_lines);
  LLBytes exchange(session, args.comm, slot_lines);
  session.wait_for_grids_before(source.precomputed(), target.precomputed(), first);
  // A thread may leave without sending. Its peers' waits then end with an error. What it does not receive is missing on
  // this rank only, which has an error already.
  if (!session.begin()) return;
  session.enter_slot();

  for (uint32_t line = first; line < exchanged.most(); line += stride) {
    const bool is_there = line < source.lines();
    if (peer == rank) {
      if (is_there) target.store(line, source.load(line));
      continue;
    }
    // A thread sends before it waits, so no two ranks wait for each other.
    if (line < exchanged.sent) exchange.send(line, is_there ? source.load(line) : Line{});
    if (line < exchanged.received) {
      const Line value = exchange.receive(line, 0);
      if (line < target.lines()) target.store(line, value);
    }
  }
  // Each block arrives once. Its threads have all read the operation number by then.
  block_sync();
  if (thread_index() == 0) session.arrive();
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
