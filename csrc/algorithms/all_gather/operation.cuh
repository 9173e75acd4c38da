// All-gather: every rank gets the shards of all ranks, concatenated along a dimension. Elements are moved as bytes, so
// any type keeps its bits; push_fp8_hb.cuh alone quantizes numbers.
#pragma once

#include "algorithms/shards_operation.h"

namespace llm_comm::inline LLM_COMM_TARGET {

struct AllGather : ShardsOperation {
  static constexpr OperationInfo kInfo = with_shards(
      {.name = "all_gather", .title = "all-gather", .buffers = {{"input"}, {.name = "output", .is_output = true}}});

  static constexpr bool serves(DataType type) { return type == DataType::kByte; }

  static uint64_t elements(const Problem& problem, uint32_t buffer, uint32_t rank) {
    const Shards shards = shards_of(problem);
    return buffer == 0 ? shards.shard[rank].length : shards.rows * shards.row_elements;
  }

  template <class Input>
  static uint32_t expect(const Problem& problem, uint32_t, uint64_t i, Input input) {
    const Shards shards = shards_of(problem);
    const uint64_t row = i / shards.row_elements;
    uint32_t rank = 0;
    const auto in_row = i % shards.row_elements;
    while (in_row >= shards.shard[rank].first + shards.shard[rank].size) ++rank;
    return input(rank, row * shards.shard[rank].size + in_row - shards.shard[rank].first);
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
