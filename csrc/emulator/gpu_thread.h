// A GPU thread of either driver: a fiber, what it knows of itself, and where it waits for others.
#pragma once

#include <array>

#include "emulator/fiber.h"
#include "llm_comm/platform_emulator.h"

namespace llm_comm::inline LLM_COMM_TARGET::emulator {

enum class ThreadState { kRunning, kAtWarpBarrier, kAtBlockBarrier, kAtClusterBarrier, kAwaitingGrids, kEnded };

struct Warp {
  std::array<float, kWarpThreads> exchanged[2];  // in turn: one is written while slow threads still read the other
  uint32_t threads = 0;
  uint32_t ended = 0;
  uint32_t at_barrier = 0;
  uint32_t exchanges = 0;

  // Whether all its threads have come to the barrier. If so, it is over.
  bool passes_barrier();
};

struct GpuThread {
  Fiber fiber;
  ThreadContext context;
  ThreadState state = ThreadState::kEnded;
  Warp* warp;
  bool found_nothing = false;         // it gave way after a poll that failed
  bool at_cluster_barrier;            // it has arrived there, and may go on until it waits
  const uint32_t* cluster_barriers;   // that its cluster has passed
  uint32_t cluster_barriers_arrived;  // how many it had passed when this thread arrived

  // Gives it a job. `cluster_barriers` is what its cluster counts.
  void start(const ThreadContext& own, Warp& of_warp, const uint32_t& cluster_barriers, std::function<void()> job);
  // Runs it until it gives way. `state` and `found_nothing` say why it did. The warp counts it.
  void resume();
  // Gives way. Called by the thread itself.
  void suspend_as(ThreadState reason);

  bool has_arrived_at_cluster_barrier() const { return at_cluster_barrier || state == ThreadState::kEnded; }
};

// The one that this OS thread is executing; nullptr outside of resume().
GpuThread* running_thread();

}  // namespace llm_comm::inline LLM_COMM_TARGET::emulator
