// Types that lead from a call to its launches. Descriptors, tables, the planner and the cores use them.
//
//   Problem            the call, the same on every rank
//   TuningParameters   one row of a tuning table
//   Limits             bounds of a launch: device and workspace
//   Tiling             the tuning parameters fitted to the problem, and the units that one launch takes
//   Grid               launch config of one launch: blocks, threads, cluster, shared memory, kernel variant
//   Shape              all launches of a call
//
// An algorithm's descriptor (algorithm.h) computes a Tiling from the first three, and Grids from a Tiling. Both exist
// once, in C++; Python, libraries and tests call them.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "llm_comm/data_type.h"
#include "llm_comm/platform_types.h"
#include "llm_comm/workspace_layout.h"

namespace llm_comm {

struct Problem {
  uint64_t count;  // elements of a rank's input, at least 1
  uint32_t row;    // elements of a row, for operations that work on rows; else 0
  DataType type;
  uint32_t world;                    // number of ranks: 2 to kMaxWorldSize
  double parameter[kMaxParameters];  // parameters of the operation, in the order of its descriptor

  // Units that launches divide among them: rows or elements.
  uint64_t units() const { return row == 0 ? count : count / row; }
  uint64_t unit_elements() const { return row == 0 ? 1 : row; }
  uint64_t unit_bytes() const { return unit_elements() * element_bytes(type); }
  uint64_t bytes() const { return count * element_bytes(type); }
};

// Fields that an algorithm does not have are 0. A launch never uses more than the values here, but may use less.
struct TuningParameters {
  uint32_t blocks = 0;         // maximum per launch
  uint32_t threads = 0;        // maximum per block
  uint32_t tile_lines = 0;     // 16-byte lines that a block exchanges with each peer at a time
  uint32_t cluster = 0;        // maximum blocks that share a row
  uint32_t depth = 0;          // tiles that a block sends ahead of the one it waits for
  uint32_t crowded_above = 0;  // blocks of a launch above which clusters shrink
};

struct Limits {
  uint64_t slot_bytes;          // of the workspace
  uint32_t sm_count;            // SMs
  uint32_t max_cluster;         // maximum blocks of a cluster; 1: the device has no clusters
  uint32_t compute_capability;  // 90 for 9.0; 0: emulated
  uint64_t staging_bytes = 0;   // of the workspace

  // SMs of the device that candidates are for; 1 if unknown.
  uint32_t multiprocessors() const { return sm_count == 0 ? 1 : sm_count; }
};

struct Tiling {
  uint32_t blocks;  // maximum per launch; whole clusters
  uint32_t tile_lines;
  uint32_t cluster;
  uint32_t depth;
  uint64_t launch_units;  // of every launch but the last, which takes the rest
};

struct Grid {
  uint32_t blocks;
  uint32_t threads;       // per block
  uint32_t shared_bytes;  // dynamic shared memory per block
  uint32_t cluster_blocks = 1;
  uint32_t variant = 0;  // index among the algorithm's kernels
  // Not all blocks run at once on this device (P2 of operation.cuh). The core sets it.
  bool takes_tickets = false;
  // The grid follows copies on its stream, so dependent launch cannot start it early.
  bool is_after_copies = false;
};

struct Shape {
  Tiling tiling;
  uint64_t launches;
  Grid whole;  // of every launch but the last
  Grid last;
};

inline constexpr uint32_t kMaxBlockThreads = 1024;

LLM_COMM_HOST_DEVICE constexpr uint64_t divide_up(uint64_t a, uint64_t b) { return (a + b - 1) / b; }
LLM_COMM_HOST_DEVICE constexpr uint32_t divide_up(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// Largest power of two up to n; n is at least 1.
constexpr uint32_t floor_power_of_two(uint32_t n) {
  uint32_t power = 1;
  while (power <= n / 2) power *= 2;
  return power;
}

// Largest number of units whose `demand`, which grows with their number, is at most `available`; 0 if there is none.
template <class Demand>
constexpr uint64_t most_units(uint64_t available, Demand demand) {
  uint64_t fits = 0;
  for (uint64_t step = uint64_t{1} << 40; step > 0; step /= 2) {
    if (demand(fits + step) <= available) fits += step;
  }
  return fits;
}

}  // namespace llm_comm
