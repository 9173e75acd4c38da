// Parts of a Machine, for the files that implement it: machine.cpp (schedule and time), grids.cpp, accesses.cpp.
#pragma once

#include "emulator/deterministic/machine.h"

namespace llm_comm::inline LLM_COMM_TARGET::emulator {

struct Machine::Thread : GpuThread {
  Block* block = nullptr;
  ThreadMemory memory;
  uint64_t priority = 0;
  std::vector<Thread*>* list = nullptr;  // runnable or polling list of its rank, or nullptr
  size_t position = 0;                   // index in that list
  uint32_t last_line = 0;                // last line that it loaded from

  uint32_t rank() const { return memory.rank; }
};

struct Machine::Cluster {
  std::vector<Block*> blocks;
  std::vector<void*> shared;  // of each block
  uint32_t barriers = 0;      // number of barriers passed
  uint32_t ended_blocks = 0;
};

struct Machine::Block {
  Grid* grid;
  Cluster* cluster;
  uint32_t index;
  ViewId view;
  std::vector<Thread*> threads;
  std::vector<Warp> warps;
  std::vector<Line> shared;  // Line for the alignment
  uint32_t ended = 0;
  uint32_t at_barrier = 0;
  bool triggered = false;
};

struct Machine::Launch {
  LaunchConfig config;
  std::function<void()> kernel;
  bool dependent;
};

struct Machine::Grid {
  uint32_t rank;
  uint64_t number;
  Launch launch;
  std::deque<Block> blocks;        // started blocks
  std::deque<Cluster> clusters;    // started clusters
  std::vector<uint32_t> to_start;  // cluster numbers, the next one last
  uint32_t resident_threads = 0;
  uint32_t ended_blocks = 0;
  uint32_t triggered_blocks = 0;
  std::vector<Thread*> awaiting;
  bool completing = false;

  bool is_ended() const { return ended_blocks == launch.config.blocks; }
};

struct Machine::Rank {
  std::deque<Launch> queue;
  std::deque<std::unique_ptr<Grid>> resident;  // the running grid, then those that started early
  std::vector<Thread*> runnable;
  std::vector<Thread*> polling;
  bool starting = false;
  uint64_t completed = 0;
  uint64_t accesses = 0;
  uint64_t thaw = 0;
  uint64_t frozen_at = 0;
  uint64_t priority = 0;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET::emulator
