// Shards of a tensor of rows, for operations in which each rank has one: all-gather concatenates them, reduce-scatter
// distributes them, all-to-all exchanges them. Any dimension fits: the dimensions before it make the rows, and those after it
// lengthen each shard. For dimension 0 there is one row.
//
// Parameters of such an operation are the number of rows and, for each rank, the elements of its shard in a row, which
// may be 0. Problem::count is the size of the largest shard. Every launch takes the same range of all shards; short
// shards have fewer elements of it, or none.
#pragma once

#include "algorithms/algorithm.h"

namespace llm_comm {

enum ShardParameter { kRows, kFirstSize };

constexpr OperationInfo with_shards(OperationInfo info) {
  const char* const names[kMaxWorldSize] = {"size_0",  "size_1",  "size_2",  "size_3", "size_4",  "size_5",
                                            "size_6",  "size_7",  "size_8",  "size_9", "size_10", "size_11",
                                            "size_12", "size_13", "size_14", "size_15"};
  info.parameters[kRows].name = "rows";
  for (int rank = 0; rank < kMaxWorldSize; ++rank) info.parameters[kFirstSize + rank].name = names[rank];
  return info;
}

// Shard of one rank, in elements.
struct Shard {
  uint64_t first;   // offset in each row
  uint64_t size;    // in each row
  uint64_t length;  // in all rows
};

struct Shards {
  uint64_t rows;
  uint64_t row_elements;  // of the whole tensor
  Shard shard[kMaxWorldSize];
};

inline Shards shards_of(const Problem& problem) {
  Shards shards{static_cast<uint64_t>(problem.parameter[kRows]), 0, {}};
  for (uint32_t rank = 0; rank < problem.world; ++rank) {
    const auto size = static_cast<uint64_t>(problem.parameter[kFirstSize + rank]);
    shards.shard[rank] = {shards.row_elements, size, size * shards.rows};
    shards.row_elements += size;
  }
  return shards;
}

// Throws std::invalid_argument for parameters that describe no shards, or that contradict `count`.
inline void check_shards(const Problem& problem) {
  const auto refuse = [](const std::string& why) { throw std::invalid_argument(why); };
  // A double holds every integer up to this one; no memory is larger.
  constexpr double kMost = static_cast<double>(uint64_t{1} << 48);
  for (int i = 0; i <= kFirstSize + static_cast<int>(problem.world) - 1; ++i) {
    const double value = problem.parameter[i];
    const bool is_count = value >= 0 && value <= kMost && value == static_cast<double>(static_cast<uint64_t>(value));
    if (!is_count || (i == kRows && value == 0)) {
      refuse((i == kRows ? std::string("rows") : "size_" + std::to_string(i - kFirstSize)) + " is " +
             std::to_string(value) + "; it must be a whole number" + (i == kRows ? " above 0" : ""));
    }
  }
  for (int i = kFirstSize + static_cast<int>(problem.world); i < kMaxParameters; ++i) {
    if (problem.parameter[i] != 0) refuse("size_" + std::to_string(i - kFirstSize) + " is of no rank");
  }
  const Shards shards = shards_of(problem);
  uint64_t longest = 0;
  for (const Shard& shard : shards.shard) longest = shard.length > longest ? shard.length : longest;
  if (problem.count != longest) {
    refuse("count is " + std::to_string(problem.count) + "; the largest shard has " + std::to_string(longest) +
           " elements");
  }
  // Kernels find the row of an element by a 32-bit division.
  if (shards.rows > 1 && longest >> 32 != 0) refuse("a shard in rows must have fewer than 2^32 elements");
}

}  // namespace llm_comm
