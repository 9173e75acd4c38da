// All-to-all: a tensor has one shard for each rank, all of one size. Every rank sends shard r to rank r, and gets the
// shards that the ranks have for it, in rank order. Elements are moved as bytes, so any type keeps its bits.
#pragma once

#include "algorithms/shards_operation.h"

namespace llm_comm::inline LLM_COMM_TARGET {

struct AllToAll : ShardsOperation {
  static constexpr OperationInfo kInfo = with_shards(
      {.name = "all_to_all", .title = "all-to-all", .buffers = {{"input"}, {.name = "output", .is_output = true}}});

  static constexpr bool serves(DataType type) { return type == DataType::kByte; }

  static void check(const Problem& problem) {
    check_shards(problem);
    const Shards shards = shards_of(problem);
    for (uint32_t rank = 0; rank < problem.world; ++rank) {
      if (shards.shard[rank].size != shards.shard[0].size) {
        throw std::invalid_argument("size_" + std::to_string(rank) + " is " + std::to_string(shards.shard[rank].size) +
                                    ", size_0 is " + std::to_string(shards.shard[0].size) + "; they must be equal");
      }
    }
  }

  static uint64_t elements(const Problem& problem, uint32_t, uint32_t) {
    const Shards shards = shards_of(problem);
    return shards.rows * shards.row_elements;
  }

  template <class Input>
  static uint32_t expect(const Problem& problem, uint32_t rank, uint64_t i, Input input) {
    const Shards shards = shards_of(problem);
    const uint64_t size = shards.shard[0].size;
    const uint64_t in_row = i % shards.row_elements;
    return input(static_cast<uint32_t>(in_row / size), i - in_row + rank * size + in_row % size);
  }

  // Shard in `tensor`, the input or the output, for or from a rank.
  template <DataType D>
  static LLM_COMM_DEVICE ShardView<D> shard(const ShardsArgs& args, const void* tensor, uint32_t rank) {
    return ShardView<D>(tensor, args.shards.shard[rank], args.shards.row_elements, args.range);
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
