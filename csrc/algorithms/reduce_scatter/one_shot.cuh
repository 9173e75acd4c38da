// One-shot reduce-scatter (1PA, LL): every rank sends each peer its contribution to the peer's shard, and reduces what
// it receives for its own. It is the first phase of two-shot all-reduce.
//
// One hop. Slot layout: [sender][line], for the other ranks.
//
// Rules of operation.cuh:
//   R1  A rank ends after it has received line 0 from every peer. A peer sends line 0 even if the shard is empty.
//   R2  The thread that receives a line resets it.
#pragma once

#include "algorithms/block_sum.cuh"
#include "algorithms/reduce_scatter/operation.cuh"
#include "algorithms/tiled_shards.h"
#include "llm_comm/ll_session.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kReduceScatterOneShot = kKindOf<struct ReduceScatterOneShot>;

// Thread (k, c) of a block handles line c of each of the block's tiles. The thread sends that line of peer k's shard to
// peer k, and receives peer k's contribution to that line of this rank's shard. Threads with k == rank load this rank's
// contribution.
template <DataType D, int World>
LLM_COMM_KERNEL(kMaxShardThreads)
reduce_scatter_one_shot(LLM_COMM_KERNEL_PARAM ShardsArgs args) {
  const uint32_t block = block_number(args.comm);
  const Ranks<World> ranks(args.comm.world_size);
  const uint32_t rank = args.comm.rank;
  const uint32_t peer = thread_index() >> args.tile_lines_log2;
  const uint32_t column = thread_index() & (args.tile_lines - 1);
  const ShardView<D> source(args.input, args.shards.shard[peer], args.shards.row_elements, args.range);
  const ShardView<D> target(args.output, args.shards.shard[rank], 0, args.range);
  const uint64_t slot_lines = ShardView<D>::lines_of(args.range.count);
  const uint32_t stride = block_count() * args.tile_lines;
  const uint32_t greeting = 1;
  const ExchangedLines exchanged(source.lines(), target.lines(), greeting);
  const auto lines = static_cast<uint32_t>(slot_lines);
  // Set by threads of the block whose wait was aborted: there is no valid sum then.
  uint32_t* const incomplete = shared_memory<Line>()->word;
  Line* const contributions = shared_memory<Line>() + 1;               // [rank][column]
  Line* const sums = contributions + ranks.count() * args.tile_lines;  // [column]
  if (thread_index() == 0) *incomplete = 0;

  LLSession session(args.comm, kReduceScatterOneShot, ShardView<D>::bytes_of(args.range.count), rank, peer);
  session.divide_slots(slot_lines);
  session.wait_for_grids_before(source.precomputed(), target.precomputed(), reinterpret_cast<uint64_t>(contributions));
  // If begin() fails, the thread stays and does nothing. Others of its block may have begun and must learn that a line
  // is missing.
  const bool begun = session.begin();
  session.enter_slot();

  const uint32_t first = block * args.tile_lines;
  for (uint32_t tile = first; tile < lines; tile += stride) {
    const uint32_t line = tile + column;
    const bool is_there = line < source.lines();
    // A thread sends before it waits, so no two ranks wait for each other.
    if (begun && peer != rank && line < exchanged.sent) session.send(line, is_there ? source.load(line) : Line{});
    if (line < exchanged.received) {
      contributions[thread_index()] = peer != rank ? session.receive(line, 0) : (is_there ? source.load(line) : Line{});
    }
    block_sync();
    if (session.aborted()) *incomplete = 1;  // zero before the first barrier, read after the second
    if (tile == first && thread_index() == 0) session.arrive();
    sum_tile<D, World>(contributions, args.tile_lines, sums, ranks);
    // `sums` is written after the next tile's first block_sync() and read before it. `contributions` is read before
    // this one and written after it.
    block_sync();
    if (line >= exchanged.received || *incomplete != 0) continue;
    if (peer != rank) {
      session.reset(line);
    } else if (line < target.lines()) {
      target.store(line, sums[column]);
    }
  }
}

// Kernel for few ranks: a thread sends a line of every peer's shard and adds what it receives to this rank's own. It
// sends one line ahead of those it waits for. `Plain`: ShardsArgs::is_plain.
template <DataType D, int World, bool Plain>
LLM_COMM_DEVICE void reduce_scatter_by_lines(const ShardsArgs& args, uint32_t block) {
  constexpr uint32_t kPeers = World - 1;
  const uint32_t rank = args.comm.rank;
  const uint32_t slot_lines = ShardView<D>::lines_of(args.range.count);
  LLSessionOf<kPeers> session(args.comm, kReduceScatterOneShot, ShardView<D>::bytes_of(args.range.count), rank);
  ShardView<D> sources[kPeers];
  LLM_COMM_UNROLL(8)
  for (uint32_t k = 0; k < kPeers; ++k) {
    sources[k] = ShardView<D>(args.input, args.shards.shard[session.receiver(k)], args.shards.row_elements, args.range);
  }
  const ShardView<D> own(args.input, args.shards.shard[rank], args.shards.row_elements, args.range);
  const ShardView<D> target(args.output, args.shards.shard[rank], 0, args.range);
  const auto lines_of = [&](const ShardView<D>& shard) { return Plain ? slot_lines : shard.lines(); };
  const uint32_t first = block * block_threads() + thread_index();
  const uint32_t stride = block_count() * block_threads();
  const uint32_t greeting = 1;
  const uint32_t received = at_least(greeting, lines_of(target));
  const uint32_t most = Plain ? slot_lines : at_least(received, most_lines(sources));

  session.divide_slots(slot_lines, first);
  typename ShardView<D>::Load coming[kPeers];
  uint64_t first_loads = 0;
  LLM_COMM_UNROLL(8)
  for (uint32_t k = 0; k < kPeers; ++k) {
    const bool is_there = first < lines_of(sources[k]);
    coming[k] = typename ShardView<D>::Load(sources[k], first, is_there, args.comm.workspace[rank]);
    first_loads += coming[k].precomputed();
  }
  session.wait_for_grids_before(precomputed(sources), own.precomputed(), target.precomputed(), first_loads, first,
                                received, most);
  Line next[kPeers];
  const bool begun = session.begin_with_loads(coming, next);

  const auto send = [&](uint32_t line) {
    LLM_COMM_UNROLL(8)
    for (uint32_t k = 0; k < kPeers; ++k) {
      const uint32_t there = lines_of(sources[k]);
      if (line >= at_least(greeting, there)) continue;
      session.send_to(k, line - first, Plain || line < there ? next[k] : Line{});
      if (line + stride < there) next[k] = sources[k].template load<Plain>(line + stride);
    }
  };
  const auto reduce = [&](uint32_t line) {
    if (line >= received) return;
    const bool is_there = Plain || line < target.lines();
    const Line contribution = is_there ? own.template load<Plain>(line) : Line{};
    bool all_wanted[kPeers];
    Line others[kPeers];
    LLM_COMM_UNROLL(8)
    for (bool& is_wanted : all_wanted) is_wanted = true;
    session.receive_each(line - first, all_wanted, others, 0);
    if (session.aborted()) return;
    if (is_there) target.template store<Plain>(line, sum_with_others<D, World>(rank, contribution, others));
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < kPeers; ++i) session.reset_of(i, line - first);
  };
  for (uint32_t line = first;; line += stride) {
    if (begun) send(line);
    if (line == first) {
      // Arrive while the first answers are in flight. All threads have read the operation number here.
      block_sync();
      if (thread_index() == 0) session.arrive();
      if (!begun || first >= most) return;
      continue;
    }
    reduce(line - stride);
    if (line >= most) return;
  }
}

template <DataType D, int World>
LLM_COMM_KERNEL(kMaxShardThreads)
reduce_scatter_one_shot_by_lines(LLM_COMM_KERNEL_PARAM ShardsArgs args) {
  const uint32_t block = block_number(args.comm);
  if (args.is_plain != 0) {
    reduce_scatter_by_lines<D, World, true>(args, block);
  } else {
    reduce_scatter_by_lines<D, World, false>(args, block);
  }
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct ReduceScatterOneShot : TiledShards<ReduceScatterOneShot> {
  using Operation = ReduceScatter;
  static constexpr AlgorithmInfo kInfo{"one_shot", "LL", "one-shot reduce-scatter"};

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    if constexpr (World <= kMaxWorldByLines) {
      return &reduce_scatter_one_shot_by_lines<D, World>;
    } else {
      return &reduce_scatter_one_shot<D, World>;
    }
  }

  // One region for each of the other ranks.
  static constexpr uint64_t slot_bytes(uint64_t lines, uint64_t world) { return (world - 1) * lines * sizeof(Line); }
  // `incomplete`, the contributions to a tile, its sums.
  static constexpr uint64_t shared_lines(uint64_t tile_lines, uint64_t world) {
    return world <= kMaxWorldByLines ? 0 : 1 + (world + 1) * tile_lines;
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
