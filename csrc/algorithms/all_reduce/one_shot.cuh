// One-shot all-reduce (1PA, LL): every rank sends its whole message to every other rank and reduces what it receives.
//
// One hop. Each rank sends (N-1) * bytes, so larger messages use two_shot.cuh. Slot layout: [sender][line], for the
// other ranks.
//
// Rules of operation.cuh:
//   R1  A rank ends after it has received line 0 from every peer.
//   R2  The thread that receives a line resets it.
#pragma once

#include "algorithms/all_reduce/message.cuh"
#include "algorithms/block_sum.cuh"
#include "llm_comm/ll_session.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllReduceOneShot = kKindOf<struct AllReduceOneShot>;

// `SingleTile`: the grid has one block per tile.
template <DataType D, int World, bool SingleTile>
LLM_COMM_KERNEL(kMaxBlockThreads)
all_reduce_one_shot(LLM_COMM_KERNEL_PARAM AllReduceArgs args) {
  constexpr uint32_t kPerLine = Message<D>::kPerLine;
  constexpr uint32_t kWidth = kSumWidth<D, World>;

  const uint32_t block = block_number(args.comm);
  const Ranks<World> ranks(args.comm.world_size);
  const PeerParallel self(args);
  const Message<D> message(args);
  const uint32_t lines = message.lines();
  const uint32_t first = block * self.tile_lines;
  const uint32_t stride = block_count() * self.tile_lines;
  // Two buffers of contributions by rank: a tile is written while slow threads still add the previous one.
  Line* const contributions = shared_memory<Line>();

  LLSession session(args.comm, kAllReduceOneShot, message.bytes(), self.rank, self.peer);
  const uint32_t first_line = first + self.column;
  session.divide_slots(lines, first_line);

  typename Message<D>::Load coming(message, first_line, first_line < lines, args.comm.workspace[self.rank]);
  session.wait_for_grids_before(message.precomputed(), coming.precomputed(), first,
                                reinterpret_cast<uint64_t>(contributions));
  // The next line to send is always in flight. The first one is loaded together with the operation number, which has
  // the same latency.
  Line next;
  const bool begun = session.begin_with_loads(coming, next);

  const auto send = [&](uint32_t tile) {
    const uint32_t line = tile + self.column;
    if (begun && !self.is_own && line < lines) session.send(tile - first, next);
    if (!SingleTile && line + stride < lines) next = message.load(line + stride);
  };
  uint32_t parity = 0;
  const auto reduce = [&](uint32_t tile) {
    const uint32_t line = tile + self.column;
    Line* const received = session.incoming(tile - first);
    Line* const columns = contributions + parity * block_threads();
    parity ^= 1;
    if (line < lines) {
      columns[thread_index()] = self.is_own ? (SingleTile ? next : message.load(line)) : session.receive(received, 0);
    }
    block_sync();
    if (tile == first && thread_index() == 0) session.arrive();
    const uint32_t tile_packs = self.tile_lines * kPerLine / kWidth;
    const auto* const packs = reinterpret_cast<const Pack<D, kWidth>*>(columns);
    for_each_pack<D, World>(tile_packs, [&](uint32_t i) {
      message.store_pack(tile * kPerLine + i * kWidth, sum_in_rank_order<D, World>(packs + i, tile_packs, ranks));
    });
    // Reset after the result is stored: the next operation that uses the line cannot start before this one has ended.
    if (!self.is_own && line < lines) session.reset(received);
  };

  // Threads that abort exit after the skipped send. They are missing only in the sums of this rank, which has an error
  // already. An earlier exit would make ptxas move the load of the line behind the wait for the operation number.
  if constexpr (SingleTile) {
    send(first);
    if (!begun) return;
    reduce(first);
  } else {
    // Reducing lags sending by `depth` tiles, so that the links carry later tiles while earlier ones are waited for.
    const uint32_t lag = args.depth * stride;
    for (uint32_t tile = first; tile < lines + lag; tile += stride) {
      if (tile < lines) send(tile);
      if (!begun) return;
      if (tile >= first + lag && tile - lag < lines) reduce(tile - lag);
    }
  }
}

// Kernel for two ranks: a thread adds the line it receives to its own, so it needs neither shared memory nor a barrier,
// and half as many threads do the same work. A thread's lines are `stride` apart; `depth`: lines it sends ahead of the
// one it adds.
template <DataType D, bool SingleTile>
LLM_COMM_KERNEL(kMaxBlockThreads / 2)
all_reduce_one_shot_pair(LLM_COMM_KERNEL_PARAM AllReduceArgs args) {
  const uint32_t block = block_number(args.comm);
  const uint32_t rank = args.comm.rank;
  const Message<D> message(args);
  const uint32_t lines = message.lines();
  const uint32_t first = block * block_threads() + thread_index();
  const uint32_t stride = block_count() * block_threads();

  LLSession session(args.comm, kAllReduceOneShot, message.bytes(), rank, 1 - rank);
  session.divide_slots(lines, first);
  typename Message<D>::Load coming(message, first, first < lines, args.comm.workspace[rank]);
  session.wait_for_grids_before(message.precomputed(), coming.precomputed(), first);
  // The next line to send is always in flight.
  Line next;
  const bool begun = session.begin_with_loads(coming, next);

  const auto reduce = [&](uint32_t line, Line own) {
    Line* const received = session.incoming(line - first);
    // A sum of two values does not depend on their order.
    const Line contributions[2] = {own, session.receive(received, 0)};
    message.store(line, sum_lines<D, 2>(contributions));
    // Reset after the result is stored: the next operation that uses the line cannot start before this one has ended.
    session.reset(received);
  };

  if (begun && first < lines) session.send(0, next);
  // Arrive while the first answers are in flight. All threads have read the operation number here.
  block_sync();
  if (thread_index() == 0) session.arrive();
  if (!begun || first >= lines) return;
  if constexpr (SingleTile) {
    reduce(first, next);
  } else {
    const uint32_t lag = args.depth * stride;
    if (first + stride < lines) next = message.load(first + stride);
    if (lag == 0) reduce(first, message.load(first));
    for (uint32_t line = first + stride; line < lines + lag; line += stride) {
      if (line < lines) {
        session.send(line - first, next);
        if (line + stride < lines) next = message.load(line + stride);
      }
      if (line >= first + lag && line - lag < lines) reduce(line - lag, message.load(line - lag));
    }
  }
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllReduceOneShot : TiledAllReduce<AllReduceOneShot> {
  static constexpr AlgorithmInfo kInfo{"one_shot", "LL", "one-shot all-reduce"};

  template <DataType D, int World, uint32_t Variant>
  static KernelPointer kernel() {
    if constexpr (World == 2) {
      return &all_reduce_one_shot_pair<D, Variant == 1>;
    } else {
      return &all_reduce_one_shot<D, World, Variant == 1>;
    }
  }

  // One copy of the message for each of the other ranks.
  static constexpr uint64_t slot_lines(uint64_t lines, uint64_t world) { return (world - 1) * lines; }
  static constexpr uint64_t tiled_lines(uint64_t lines, uint64_t) { return lines; }
  static constexpr uint64_t threads_of_line(uint64_t world) { return world == 2 ? 1 : world; }
  // Two buffers for the contributions to a tile.
  static constexpr uint64_t shared_lines(uint64_t tile_lines, uint64_t world) {
    return world == 2 ? 0 : 2 * world * tile_lines;
  }
  // Sends world - 1 copies of the message. Two-shot is far faster where these exceed 4 MiB.
  static constexpr bool is_worth_measuring(uint64_t bytes, uint64_t world) { return bytes * (world - 1) <= 4 << 20; }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
