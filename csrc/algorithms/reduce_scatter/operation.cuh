// Reduce-scatter: every rank gets its shard of the sum of all inputs, reduced as in reduce.cuh.
#pragma once

#include "algorithms/parts_operation.h"
#include "algorithms/reference.h"

namespace llm_comm::inline LLM_COMM_TARGET {

struct ReduceScatter : PartsOperation {
  static constexpr OperationInfo kInfo = with_parts({.name = "reduce_scatter",
                                                     .title = "reduce-scatter",
                                                     .buffers = {{"input"}, {.name = "output", .is_output = true}}});

  static constexpr bool serves(DataType type) { return is_number(type); }

  static uint64_t elements(const Problem& problem, uint32_t buffer, uint32_t rank) {
    const Parts parts = parts_of(problem);
    return buffer == 0 ? parts.rows * parts.row_elements : parts.part[rank].length;
  }

  template <class Input>
  static uint32_t expect(const Problem& problem, uint32_t rank, uint64_t i, Input input) {
    const Parts parts = parts_of(problem);
    const Part& part = parts.part[rank];
    const uint64_t place = i / part.size * parts.row_elements + part.first + i % part.size;
    return sum_of_one(problem.type, problem.world, [&](uint32_t of) { return input(of, place); });
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
