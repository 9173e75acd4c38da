// Reduce-scatter: every rank gets its shard of the sum of all inputs, reduced as in reduce.cuh.
#pragma once

#include "algorithms/reference.h"
#include "algorithms/shards_operation.h"

namespace llm_comm::inline LLM_COMM_TARGET {

struct ReduceScatter : ShardsOperation {
  static constexpr OperationInfo kInfo = with_shards({.name = "reduce_scatter",
                                                      .title = "reduce-scatter",
                                                      .buffers = {{"input"}, {.name = "output", .is_output = true}}});

  static constexpr bool serves(DataType type) { return is_number(type); }

  static uint64_t elements(const Problem& problem, uint32_t buffer, uint32_t rank) {
    const Shards shards = shards_of(problem);
    return buffer == 0 ? shards.rows * shards.row_elements : shards.shard[rank].length;
  }

  // Place in the input of element i of a rank's shard.
  static uint64_t place(const Problem& problem, uint32_t rank, uint64_t i) {
    const Shards shards = shards_of(problem);
    const Shard& shard = shards.shard[rank];
    return i / shard.size * shards.row_elements + shard.first + i % shard.size;
  }

  template <class Input>
  static uint32_t expect(const Problem& problem, uint32_t rank, uint64_t i, Input input) {
    return sum_of_one(problem.type, problem.world, [&](uint32_t of) { return input(of, place(problem, rank, i)); });
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
