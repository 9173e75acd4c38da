// One-shot all-gather (1PA, LL): every rank sends its shard to every other rank, which stores it at its position in the
// output. shard_exchange.cuh has the layout of slots and the rules of operation.cuh.
#pragma once

#include "algorithms/all_gather/operation.cuh"
#include "algorithms/shard_exchange.cuh"
#include "algorithms/tiled_shards.h"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllGatherOneShot = kKindOf<struct AllGatherOneShot>;

template <DataType D>
LLM_COMM_KERNEL(kMaxShardThreads)
all_gather_one_shot(LLM_COMM_KERNEL_PARAM ShardsArgs args) {
  const auto source_of = [&](uint32_t) {
    return ShardView<D>(args.input, args.shards.shard[args.comm.rank], 0, args.range);
  };
  const auto target_of = [&](uint32_t peer) {
    return ShardView<D>(args.output, args.shards.shard[peer], args.shards.row_elements, args.range);
  };
  exchange_by_line_and_rank<D>(args, kAllGatherOneShot, source_of, target_of);
}

// Kernel for few ranks: a thread sends a line of this rank's shard to all peers, copies it to the output, and receives
// the same line from all peers. It sends one line ahead of those it waits for. `Plain`: ShardsArgs::is_plain.
template <DataType D, int World, bool Plain>
LLM_COMM_DEVICE void all_gather_by_lines(const ShardsArgs& args, uint32_t block) {
  constexpr uint32_t kPeers = World - 1;
  const uint32_t rank = args.comm.rank;
  const uint32_t slot_lines = ShardView<D>::lines_of(args.range.count);
  LLSessionOf<kPeers> session(args.comm, kAllGatherOneShot, ShardView<D>::bytes_of(args.range.count), rank);
  const ShardView<D> source(args.input, args.shards.shard[rank], 0, args.range);
  const ShardView<D> copy(args.output, args.shards.shard[rank], args.shards.row_elements, args.range);
  ShardView<D> targets[kPeers];
  LLM_COMM_UNROLL(8)
  for (uint32_t i = 0; i < kPeers; ++i) {
    targets[i] = ShardView<D>(args.output, args.shards.shard[session.sender(i)], args.shards.row_elements, args.range);
  }
  const auto lines_of = [&](const ShardView<D>& shard) { return Plain ? slot_lines : shard.lines(); };
  const uint32_t first = block * block_threads() + thread_index();
  const uint32_t stride = block_count() * block_threads();
  const uint32_t greeting = 1;
  const uint32_t sent = at_least(greeting, lines_of(source));
  const uint32_t most = Plain ? slot_lines : at_least(sent, most_lines(targets));

  session.divide_slots(slot_lines, first);
  LLBytes exchange(session, args.comm, slot_lines, first);
  typename ShardView<D>::Load coming(source, first, first < lines_of(source), args.comm.workspace[rank]);
  session.wait_for_grids_before(source.precomputed(), copy.precomputed(), precomputed(targets), coming.precomputed(),
                                first, sent, most);
  Line next;
  const bool begun = session.begin_with_loads(coming, next);

  const auto send = [&](uint32_t line) {
    if (line >= sent) return;
    const bool is_there = Plain || line < source.lines();
    exchange.send(line - first, is_there ? next : Line{});
    if (is_there) copy.template store<Plain>(line, next);
    if (line + stride < lines_of(source)) next = source.template load<Plain>(line + stride);
  };
  const auto receive = [&](uint32_t line) {
    bool is_wanted[kPeers];
    Line received[kPeers];
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < kPeers; ++i) is_wanted[i] = Plain || line < at_least(greeting, targets[i].lines());
    exchange.receive_each(line - first, is_wanted, received, 0);
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < kPeers; ++i) {
      if (line < lines_of(targets[i])) targets[i].template store<Plain>(line, received[i]);
    }
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
    receive(line - stride);
    if (line >= most) return;
  }
}

template <DataType D, int World>
LLM_COMM_KERNEL(kMaxShardThreads)
all_gather_one_shot_by_lines(LLM_COMM_KERNEL_PARAM ShardsArgs args) {
  const uint32_t block = block_number(args.comm);
  if (args.is_plain != 0) {
    all_gather_by_lines<D, World, true>(args, block);
  } else {
    all_gather_by_lines<D, World, false>(args, block);
  }
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllGatherOneShot : TiledShards<AllGatherOneShot> {
  using Operation = AllGather;
  static constexpr AlgorithmInfo kInfo{"one_shot", "LL", "one-shot all-gather"};

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    if constexpr (World <= kMaxWorldByLines) {
      return &all_gather_one_shot_by_lines<D, World>;
    } else {
      return &all_gather_one_shot<D>;
    }
  }

  static constexpr uint64_t slot_bytes(uint64_t lines, uint64_t world) { return LLBytes<1>::slot_bytes(lines, world); }
  static constexpr uint64_t shared_lines(uint64_t, uint64_t) { return 0; }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
