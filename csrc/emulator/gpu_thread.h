// GpuThread: a GPU thread of either driver: its fiber, its identity, and the barrier at which it waits.
#pragma once

#include <array>

#include "emulator/fiber.h"
#include "llm_comm/platform_emulator.h"

namespace llm_comm::inline LLM_COMM_TARGET::emulator {

enum class ThreadState { kRunning, kAtWarpBarrier, kAtBlockBarrier, kAtClusterBarrier, kAwaitingGrids, kEnded };

struct Warp {
  std::array<float, kWarpThreads> exchanged[2];  // alternating: one is written while slow threads still read the other
  uint32_t threads = 0;
  uint32_t ended = 0;
  uint32_t at_barrier = 0;
  uint32_t exchanges = 0;

  // If all unfinished threads are at the barrier, releases it and returns true.
  bool passes_barrier();
};

struct GpuThread {
  Fiber fiber;
  ThreadContext context;
  ThreadState state = ThreadState::kEnded;
  Warp* warp;
  bool found_nothing = false;         // it yielded after a failed poll
  bool at_cluster_barrier;            // it has arrived at the barrier and runs until it waits
  const uint32_t* cluster_barriers;   // number of barriers that its cluster has passed
  uint32_t cluster_barriers_arrived;  // value of that counter when this thread arrived

  // Assigns a job. `cluster_barriers`: the cluster's counter of passed barriers.
  void start(const ThreadContext& own, Warp& of_warp, const uint32_t& cluster_barriers, std::function<void()> job);
  // Runs the thread until it yields. `state` and `found_nothing` say why it did. Updates the warp's counters.
  void resume();
  // Yields. Called by the thread itself.
  void suspend_as(ThreadState reason);

  bool has_arrived_at_cluster_barrier() const { return at_cluster_barrier || state == ThreadState::kEnded; }
};

// Thread that this OS thread is executing; nullptr outside resume().
GpuThread* running_thread();

}  // namespace llm_comm::inline LLM_COMM_TARGET::emulator
