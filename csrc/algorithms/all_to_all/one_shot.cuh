// One-shot all-to-all (LL): every rank sends each shard to its rank, line by line. shard_exchange.cuh has the layout of
// slots and the rules of operation.cuh.
#pragma once

#include "algorithms/all_to_all/operation.cuh"
#include "algorithms/shard_exchange.cuh"
#include "algorithms/tiled_shards.h"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr OperationKind kAllToAllOneShot = kKindOf<struct AllToAllOneShot>;

template <DataType D>
LLM_COMM_KERNEL(kMaxShardThreads)
all_to_all_one_shot(LLM_COMM_KERNEL_PARAM ShardsArgs args) {
  exchange_by_line_and_rank<D>(
      args, kAllToAllOneShot, [&](uint32_t peer) { return AllToAll::shard<D>(args, args.input, peer); },
      [&](uint32_t peer) { return AllToAll::shard<D>(args, args.output, peer); });
}

// ---- Descriptor ----------------------------------------------------------------------------------------------------

struct AllToAllOneShot : TiledShards<AllToAllOneShot> {
  using Operation = AllToAll;
  static constexpr AlgorithmInfo kInfo{"one_shot", "LL", "one-shot all-to-all"};

  template <DataType D, int World, uint32_t Variant>
  static auto kernel() {
    return &all_to_all_one_shot<D>;
  }

  // Each peer gets other lines, so a thread handles those of one peer.
  static constexpr uint64_t threads_of_line(uint64_t world) { return world; }
  static constexpr uint64_t slot_bytes(uint64_t lines, uint64_t world) { return LLBytes<1>::slot_bytes(lines, world); }
  static constexpr uint64_t shared_lines(uint64_t, uint64_t) { return 0; }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
