// One-shot all-to-all of unequal parts (LL): every rank sends each part to its rank, line by line, after a greeting.
//
// One hop; carries arbitrary bytes (ll_bytes.cuh). Slot layout: [sender][line], [sender][mask]. Line 0 of a sender is
// its greeting (all_to_all_v/operation.cuh); line 1 is the first one of its part.
//
// Rules of operation.cuh:
//   R1  A rank ends after it has received the greeting of every peer, also of one with an empty part.
//   R2  The thread that receives a line resets it. A rank receives as many lines as it expects. If a peer has sent
//       another number, its greeting says so, and the communicator ends with an error: no later operation uses the slot.
//
// Waits end: a rank sends all of its greetings before it fails. A receiver of fewer lines than it waits for therefore
// gets a greeting that contradicts its own, and fails, which ends its waits.
#pragma once

#include "algorithms/all_to_all_v/operation.cuh"
#include "algorithms/tiled_shards.h"
#include "llm_comm/ll_bytes.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllToAllVOneShot = kKindOf<struct AllToAllVOneShot>;

// Thread (k, c) of a block handles line c of each of the block's tiles: it exchanges that line with peer k.
template <DataType D>
LLM_COMM_KERNEL(kMaxShardThreads)
all_to_all_v_one_shot(LLM_COMM_KERNEL_PARAM AllToAllVArgs args) {
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const uint32_t peer = thread_index() >> args.tile_lines_log2;
  const uint32_t column = thread_index() & (args.tile_lines - 1);
  const uint32_t greeting = 1;
  const uint64_t slot_lines = greeting + ShardView<D>::lines_of(args.range.count);
  const uint32_t first = block * args.tile_lines + column;
  const uint32_t stride = block_count() * args.tile_lines;

  LLSession session(args.comm, kAllToAllVOneShot, ShardView<D>::bytes_of(args.range.count), rank, peer);
  session.divide_slots(slot_lines);
  LLBytes exchange(session, args.comm, slot_lines);
  session.wait_for_grids_before(first);
  const PartsOfPeer parts(args, peer);
  const ShardView<D> source = view_of_part<D>(args, args.sent, parts.sent());
  const ShardView<D> target = view_of_part<D>(args, args.received, parts.received());
  // A thread may leave without sending. Its peers' waits then end with an error. What it does not receive is missing on
  // this rank only, which has an error already.
  if (!session.begin()) return;
  session.enter_slot();

  if (block == 0) {
    if (first < greeting && peer != rank) exchange.send(first, parts.greeting());
    block_sync();  // a thread that fails ends the operation for those that begin later: these have sent their greetings
  }
  const ExchangedLines exchanged(greeting + source.lines(), greeting + target.lines(), 0);
  for (uint32_t line = first; line < exchanged.most(); line += stride) {
    if (line < greeting) {
      const Line own = parts.greeting();
      const Line heard = peer == rank ? own : exchange.receive(line, 0);
      const SizesError error = compare_greetings(rank, own, peer, heard);
      if (error.fault != SizesFault::kNone && !session.aborted()) fail_for_sizes(args.comm, session.in_wait(), error);
    } else if (peer == rank) {
      if (line < exchanged.sent) target.store(line - greeting, source.load(line - greeting));
    } else {
      // A thread sends before it waits, so no two ranks wait for each other.
      if (line < exchanged.sent) exchange.send(line, source.load(line - greeting));
      if (line < exchanged.received) target.store(line - greeting, exchange.receive(line, 0));
    }
  }
  // Each block arrives once. Its threads have all read the operation number by then.
  block_sync();
  if (thread_index() == 0) session.arrive();
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllToAllVOneShot : TiledShards<AllToAllVOneShot> {
  using Operation = AllToAllV;
  static constexpr AlgorithmInfo kInfo{"one_shot", "LL", "one-shot all-to-all of unequal parts"};

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_to_all_v_one_shot<D>;
  }

  static constexpr uint64_t threads_of_line(uint64_t world) { return world; }
  static constexpr uint64_t slot_bytes(uint64_t lines, uint64_t world) {
    return LLBytes<1>::slot_bytes(lines + 1, world);  // with the greeting
  }
  static constexpr uint64_t shared_lines(uint64_t, uint64_t) { return 0; }

  // The greeting is one more line. With enough blocks no thread handles both the greeting and a line of the part.
  static Grid grid(const Problem& problem, const Tiling& tiling, uint64_t units, const Limits& limits) {
    Grid grid = TiledShards::grid(problem, tiling, units, limits);
    const uint64_t tiles = divide_up(divide_up(units, sizeof(Line)) + 1, uint64_t{tiling.tile_lines});
    grid.blocks = static_cast<uint32_t>(tiling.blocks < tiles ? tiling.blocks : tiles);
    return grid;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
