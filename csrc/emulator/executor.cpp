#include "emulator/executor.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "emulator/fiber.h"

namespace llm_comm::inline emulated::emulator {

namespace {

enum class ThreadState { kRunning, kAtBarrier, kEnded };

struct GpuThread {
  Fiber fiber;
  ThreadContext context;
  ThreadState state;
  bool found_nothing;  // it gave way after a poll that failed
};

thread_local GpuThread* running = nullptr;

// Rounds in which every thread only polled before the process sleeps rather than yields. Ranks share few
// CPUs: spinning would keep the rank that is waited for from running.
constexpr int kYieldRounds = 16;

void let_others_run(int fruitless_rounds) {
  if (fruitless_rounds < kYieldRounds) {
    sched_yield();
  } else {
    const timespec pause{0, 50'000};
    nanosleep(&pause, nullptr);
  }
}

}  // namespace

const ThreadContext& self() { return running->context; }

void block_barrier() {
  GpuThread* const thread = running;
  thread->state = ThreadState::kAtBarrier;
  thread->fiber.suspend();
}

void yield() {
  GpuThread* const thread = running;
  thread->found_nothing = true;
  thread->fiber.suspend();
}

struct Executor::Block {
  std::vector<std::unique_ptr<GpuThread>> threads;
  std::vector<Line> shared;  // of Line, for the alignment
  uint32_t ended = 0;
  uint32_t at_barrier = 0;
};

Executor::Executor() = default;
Executor::~Executor() = default;

void Executor::run(const LaunchConfig& config, const std::function<void()>& kernel) {
  if (config.blocks == 0 || config.threads == 0 || config.threads > 1024) {
    throw std::invalid_argument("emulator: cannot launch " + std::to_string(config.blocks) + " blocks of " +
                                std::to_string(config.threads) + " threads: need at least 1 block of 1 to 1024");
  }
  next_block_ = 0;
  int fruitless_rounds = 0;
  for (start_blocks(config, kernel); !resident_.empty(); start_blocks(config, kernel)) {
    bool progress = false;
    for (auto& block : resident_) progress |= advance(*block);
    const auto ended = [](const auto& block) { return block->ended == block->threads.size(); };
    const auto first_ended = std::stable_partition(resident_.begin(), resident_.end(), std::not_fn(ended));
    std::move(first_ended, resident_.end(), std::back_inserter(idle_));
    resident_.erase(first_ended, resident_.end());
    fruitless_rounds = progress ? 0 : fruitless_rounds + 1;
    if (!progress) let_others_run(fruitless_rounds);
  }
}

void Executor::start_blocks(const LaunchConfig& config, const std::function<void()>& kernel) {
  const size_t limit = std::max<size_t>(1, kResidentThreads / config.threads);
  for (; next_block_ < config.blocks && resident_.size() < limit; ++next_block_) {
    if (idle_.empty()) idle_.push_back(std::make_unique<Block>());
    std::unique_ptr<Block> block = std::move(idle_.back());
    idle_.pop_back();
    block->ended = block->at_barrier = 0;
    block->shared.resize((config.shared_bytes + sizeof(Line) - 1) / sizeof(Line));
    block->threads.resize(config.threads);
    for (uint32_t i = 0; i < config.threads; ++i) {
      auto& thread = block->threads[i];
      if (!thread) thread = std::make_unique<GpuThread>();
      thread->context = {i, next_block_, config.threads, config.blocks, block->shared.data()};
      thread->state = ThreadState::kRunning;
      thread->fiber.assign(kernel);
    }
    resident_.push_back(std::move(block));
  }
}

// One turn for every thread of the block that can run. Returns whether any did more than poll in vain.
bool Executor::advance(Block& block) {
  bool progress = false;
  for (auto& thread : block.threads) {
    if (thread->state != ThreadState::kRunning) continue;
    thread->found_nothing = false;
    running = thread.get();
    const bool ended = thread->fiber.resume();
    running = nullptr;
    progress |= !thread->found_nothing;
    if (ended) {
      thread->state = ThreadState::kEnded;
      ++block.ended;
    } else if (thread->state == ThreadState::kAtBarrier) {
      ++block.at_barrier;
    }
  }
  if (block.at_barrier != 0 && block.at_barrier + block.ended == block.threads.size()) {
    block.at_barrier = 0;
    for (auto& thread : block.threads) {
      if (thread->state == ThreadState::kAtBarrier) thread->state = ThreadState::kRunning;
    }
  }
  return progress;
}

}  // namespace llm_comm::inline emulated::emulator
