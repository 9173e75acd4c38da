// From what is asked for to the grids that do it: the terms in which algorithms are described, chosen and launched.
//
//   Problem   what is to be computed, the same on every rank
//   Choice    how: the tunables of one row of a tuning table
//   Limits    what bounds a launch: the device and the workspace
//   Tiling    the choice cut to size for the problem, and how much of the message one launch takes
//   Grid      one launch: blocks, threads, cluster, shared memory, and which variant of the kernel
//   Shape     all launches of a call
//
// An algorithm's descriptor turns the first three into a Tiling and a Tiling into Grids (algorithm.h). Both exist once, here
// in C++: Python, libraries and tests ask for them.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "llm_comm/data_type.h"
#include "llm_comm/workspace_layout.h"

namespace llm_comm {

struct Problem {
  uint64_t count;  // elements of a rank's input, at least 1
  uint32_t row;    // of these, elements of a row, for an operation that works by rows; else 0
  DataType type;
  uint32_t world;                    // ranks: 2 to 8
  double parameter[kMaxParameters];  // the operation's own, in the order in which it names them

  // What launches divide among them: rows, or elements.
  uint64_t units() const { return row == 0 ? count : count / row; }
  uint64_t unit_elements() const { return row == 0 ? 1 : row; }
  uint64_t unit_bytes() const { return unit_elements() * element_bytes(type); }
  uint64_t bytes() const { return count * element_bytes(type); }
};

// 0 where an algorithm has no such tunable. A launch never takes more than is asked for, but may take less.
struct Choice {
  uint32_t blocks = 0;         // of a launch, at most
  uint32_t threads = 0;        // of a block, at most
  uint32_t tile_lines = 0;     // 16-byte lines that a block exchanges with each peer at a time
  uint32_t cluster = 0;        // blocks that share a row, at most
  uint32_t depth = 0;          // tiles that a block sends ahead of the one that it waits for
  uint32_t crowded_above = 0;  // blocks of a launch; clusters shrink rather than exceed it
};

struct Limits {
  uint64_t slot_bytes;          // of the workspace
  uint32_t sm_count;            // multiprocessors
  uint32_t max_cluster;         // blocks of a cluster; 1: the device has none
  uint32_t compute_capability;  // 90 for 9.0; 0: emulated
  uint64_t staging_bytes = 0;   // of the workspace

  // Multiprocessors of the device that candidates are for: 1 where nothing is known of it.
  uint32_t multiprocessors() const { return sm_count == 0 ? 1 : sm_count; }
};

struct Tiling {
  uint32_t blocks;  // of a launch, at most; whole clusters
  uint32_t tile_lines;
  uint32_t cluster;
  uint32_t depth;
  uint64_t launch_units;  // of all launches but the last, which takes the rest
};

struct Grid {
  uint32_t blocks;
  uint32_t threads;       // of a block
  uint32_t shared_bytes;  // dynamic shared memory of a block
  uint32_t cluster_blocks = 1;
  uint32_t variant = 0;  // of the algorithm's kernels
  // Not all blocks run at once on the device that launches it (operation.cuh, "Progress"). The core finds out.
  bool takes_tickets = false;
  // It stands behind copies in the stream, so it cannot begin while a grid before it runs.
  bool is_behind_copies = false;
};

struct Shape {
  Tiling tiling;
  uint64_t launches;
  Grid whole;  // of all launches but the last
  Grid last;
};

inline constexpr uint32_t kMaxBlockThreads = 1024;

constexpr uint64_t divide_up(uint64_t a, uint64_t b) { return (a + b - 1) / b; }
constexpr uint32_t divide_up(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// The largest power of two up to n, which is at least 1.
constexpr uint32_t floor_power_of_two(uint32_t n) {
  uint32_t power = 1;
  while (power <= n / 2) power *= 2;
  return power;
}

// The inverse of a demand that grows with n: the most units whose demand is at most `available`; 0 if there are none.
template <class Demand>
constexpr uint64_t most_units(uint64_t available, Demand demand) {
  uint64_t fits = 0;
  for (uint64_t step = uint64_t{1} << 40; step > 0; step /= 2) {
    if (demand(fits + step) <= available) fits += step;
  }
  return fits;
}

}  // namespace llm_comm
