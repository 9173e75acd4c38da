// Shards ("parts") of a tensor of rows, for operations in which each rank has one: all-gather concatenates them,
// reduce-scatter distributes them. Any dimension fits: the dimensions before it make the rows, and those after it
// lengthen each shard. For dimension 0 there is one row.
//
// Parameters of such an operation are the number of rows and, for each rank, the elements of its shard in a row, which
// may be 0. Problem::count is the size of the largest shard. Every launch takes the same range of all shards; short
// shards have fewer elements of it, or none.
#pragma once

#include "algorithms/algorithm.h"

namespace llm_comm {

enum PartParameter { kRows, kFirstSize };

constexpr OperationInfo with_parts(OperationInfo info) {
  const char* const names[kMaxWorldSize] = {"size_0", "size_1", "size_2", "size_3",
                                            "size_4", "size_5", "size_6", "size_7"};
  info.parameters[kRows].name = "rows";
  for (int rank = 0; rank < kMaxWorldSize; ++rank) info.parameters[kFirstSize + rank].name = names[rank];
  return info;
}

// Shard of one rank, in elements.
struct Part {
  uint64_t first;   // offset in each row
  uint64_t size;    // in each row
  uint64_t length;  // in all rows
};

struct Parts {
  uint64_t rows;
  uint64_t row_elements;  // of the whole tensor
  Part part[kMaxWorldSize];
};

inline Parts parts_of(const Problem& problem) {
  Parts parts{static_cast<uint64_t>(problem.parameter[kRows]), 0, {}};
  for (uint32_t rank = 0; rank < problem.world; ++rank) {
    const auto size = static_cast<uint64_t>(problem.parameter[kFirstSize + rank]);
    parts.part[rank] = {parts.row_elements, size, size * parts.rows};
    parts.row_elements += size;
  }
  return parts;
}

// Throws std::invalid_argument for parameters that describe no shards, or that contradict `count`.
inline void check_parts(const Problem& problem) {
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
  const Parts parts = parts_of(problem);
  uint64_t longest = 0;
  for (const Part& part : parts.part) longest = part.length > longest ? part.length : longest;
  if (problem.count != longest) {
    refuse("count is " + std::to_string(problem.count) + "; the largest part has " + std::to_string(longest) +
           " elements");
  }
  // Kernels find the row of an element by a 32-bit division.
  if (parts.rows > 1 && longest >> 32 != 0) refuse("a part in rows must have fewer than 2^32 elements");
}

}  // namespace llm_comm
