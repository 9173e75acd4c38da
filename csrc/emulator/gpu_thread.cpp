#include "emulator/gpu_thread.h"

#include <utility>

namespace llm_comm::inline LLM_COMM_TARGET::emulator {

namespace {
thread_local GpuThread* running = nullptr;
}

GpuThread* running_thread() { return running; }

bool Warp::passes_barrier() {
  if (at_barrier == 0 || at_barrier + ended != threads) return false;
  at_barrier = 0;
  ++exchanges;
  return true;
}

void GpuThread::start(const ThreadContext& own, Warp& of_warp, const uint32_t& barriers, std::function<void()> job) {
  context = own;
  state = ThreadState::kRunning;
  warp = &of_warp;
  ++of_warp.threads;
  at_cluster_barrier = false;
  cluster_barriers = &barriers;
  fiber.assign(std::move(job));
}

void GpuThread::resume() {
  found_nothing = false;
  running = this;
  const bool ended = fiber.resume();
  running = nullptr;
  if (ended) state = ThreadState::kEnded;
  warp->ended += state == ThreadState::kEnded;
  warp->at_barrier += state == ThreadState::kAtWarpBarrier;
}

void GpuThread::suspend_as(ThreadState reason) {
  state = reason;
  fiber.suspend();
}

const ThreadContext& self() { return running->context; }

void block_barrier() { running->suspend_as(ThreadState::kAtBlockBarrier); }

float warp_exchange(float value, uint32_t lane) {
  Warp& warp = *running->warp;
  auto& exchanged = warp.exchanged[warp.exchanges % 2];
  exchanged[running->context.thread_index % kWarpThreads] = value;
  running->suspend_as(ThreadState::kAtWarpBarrier);
  return exchanged[lane];
}

void cluster_barrier_arrive() {
  running->at_cluster_barrier = true;
  running->cluster_barriers_arrived = *running->cluster_barriers;
}

void cluster_barrier_wait() {
  GpuThread* const thread = running;
  if (thread->cluster_barriers_arrived == *thread->cluster_barriers) thread->suspend_as(ThreadState::kAtClusterBarrier);
}

void yield() {
  running->found_nothing = true;
  running->fiber.suspend();
}

}  // namespace llm_comm::inline LLM_COMM_TARGET::emulator
