#include "emulator/executor.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "emulator/gpu_thread.h"
#include "llm_comm/platform_emulator_multicast.h"

namespace llm_comm::inline LLM_COMM_TARGET::emulator {

namespace {

// Rounds of failed polls after which the process sleeps instead of yielding. Ranks share few CPUs: spinning would keep
// the rank that is waited for from running.
constexpr int kYieldRounds = 16;

void let_others_run(int fruitless_rounds) {
  if (fruitless_rounds < kYieldRounds) {
    sched_yield();
  } else {
    const timespec pause{0, 50'000};
    nanosleep(&pause, nullptr);
  }
}

// Random generator of the executor that runs on this OS thread.
thread_local std::minstd_rand* drawing = nullptr;

}  // namespace

uint32_t draw_below(uint32_t bound) { return static_cast<uint32_t>((*drawing)()) / 16 % bound; }

struct Executor::Block {
  std::vector<std::unique_ptr<GpuThread>> threads;
  std::vector<Warp> warps;
  std::vector<Line> shared;  // Line for the alignment
  uint32_t ended = 0;
  uint32_t at_barrier = 0;
};

struct Executor::Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<void*> shared;  // of each block
  uint32_t barriers = 0;      // number of barriers passed
};

Executor::Executor(uint32_t seed) : random_(seed + 1) {}
Executor::~Executor() = default;

void Executor::run(const LaunchConfig& config, const std::function<void()>& kernel) {
  if (config.blocks == 0 || config.threads == 0 || config.threads > 1024) {
    throw std::invalid_argument("emulator: cannot launch " + std::to_string(config.blocks) + " blocks of " +
                                std::to_string(config.threads) + " threads: need at least 1 block of 1 to 1024");
  }
  if (config.cluster_blocks == 0 || config.blocks % config.cluster_blocks != 0) {
    throw std::invalid_argument("emulator: " + std::to_string(config.blocks) + " blocks are no whole clusters of " +
                                std::to_string(config.cluster_blocks));
  }
  // Stores of earlier grids and copies of this OS thread are performed before those of this grid, as step 3 of
  // operation.cuh ("Reuse") requires. Otherwise a CPU with weak memory order could perform a reset of a line after a peer
  // has written the line again, which loses the peer's data.
  fence_system();
  drawing = &random_;
  draw_order(config.blocks / config.cluster_blocks);
  int fruitless_rounds = 0;
  for (start_clusters(config, kernel); !resident_.empty(); start_clusters(config, kernel)) {
    bool progress = false;
    for (auto& cluster : resident_) progress |= advance(*cluster);
    const auto runs = [](const auto& cluster) {
      const auto ended = [](const auto& block) { return block->ended == block->threads.size(); };
      return !std::all_of(cluster->blocks.begin(), cluster->blocks.end(), ended);
    };
    const auto first_ended = std::stable_partition(resident_.begin(), resident_.end(), runs);
    for (auto cluster = first_ended; cluster != resident_.end(); ++cluster) {
      std::move((*cluster)->blocks.begin(), (*cluster)->blocks.end(), std::back_inserter(idle_));
    }
    resident_.erase(first_ended, resident_.end());
    fruitless_rounds = progress ? 0 : fruitless_rounds + 1;
    if (!progress) let_others_run(fruitless_rounds);
  }
}

void Executor::draw_order(uint32_t clusters) {
  order_.resize(clusters);
  std::iota(order_.begin(), order_.end(), 0);
  switch (random_() % 3) {
    case 0:
      std::reverse(order_.begin(), order_.end());
      break;
    case 1:
      std::shuffle(order_.begin(), order_.end(), random_);
      break;
    default:
      break;
  }
}

void Executor::start_clusters(const LaunchConfig& config, const std::function<void()>& kernel) {
  const size_t limit = resident_blocks(config.threads, config.cluster_blocks) / config.cluster_blocks;
  while (!order_.empty() && resident_.size() < limit) {
    uint32_t next_block = order_.back() * config.cluster_blocks;
    order_.pop_back();
    auto cluster = std::make_unique<Cluster>();
    for (uint32_t i = 0; i < config.cluster_blocks; ++i) {
      if (idle_.empty()) idle_.push_back(std::make_unique<Block>());
      cluster->blocks.push_back(std::move(idle_.back()));
      idle_.pop_back();
      auto& shared = cluster->blocks.back()->shared;
      shared.resize((config.shared_bytes + sizeof(Line) - 1) / sizeof(Line));
      cluster->shared.push_back(shared.data());
    }
    for (auto& block : cluster->blocks) {
      block->ended = block->at_barrier = 0;
      block->threads.resize(config.threads);
      block->warps.assign((config.threads + kWarpThreads - 1) / kWarpThreads, Warp{});
      for (uint32_t i = 0; i < config.threads; ++i) {
        auto& thread = block->threads[i];
        if (!thread) thread = std::make_unique<GpuThread>();
        thread->start({i, next_block, config.threads, config.blocks, config.cluster_blocks, block->shared.data(),
                       cluster->shared.data()},
                      block->warps[i / kWarpThreads], cluster->barriers, kernel);
      }
      ++next_block;
    }
    resident_.push_back(std::move(cluster));
  }
}

bool Executor::advance(Cluster& cluster) {
  bool progress = false;
  for (auto& block : cluster.blocks) progress |= advance(cluster, *block);
  return progress;
}

// Gives every runnable thread of the block one turn. Returns true if any thread did more than a failed poll.
bool Executor::advance(Cluster& cluster, Block& block) {
  bool progress = false;
  for (auto& thread : block.threads) {
    if (thread->state != ThreadState::kRunning) continue;
    thread->resume();
    progress |= !thread->found_nothing;
    block.ended += thread->state == ThreadState::kEnded;
    block.at_barrier += thread->state == ThreadState::kAtBlockBarrier;
  }
  const auto release = [](Block& where, ThreadState state) {
    for (auto& thread : where.threads) {
      if (thread->state == state) thread->state = ThreadState::kRunning;
    }
  };
  for (uint32_t i = 0; i < block.warps.size(); ++i) {
    if (!block.warps[i].passes_barrier()) continue;
    for (uint32_t lane = 0; lane < block.warps[i].threads; ++lane) {
      auto& thread = block.threads[i * kWarpThreads + lane];
      if (thread->state == ThreadState::kAtWarpBarrier) thread->state = ThreadState::kRunning;
    }
  }
  if (block.at_barrier != 0 && block.at_barrier + block.ended == block.threads.size()) {
    block.at_barrier = 0;
    release(block, ThreadState::kAtBlockBarrier);
  }
  const auto has_arrived = [](const auto& thread) { return thread->has_arrived_at_cluster_barrier(); };
  for (auto& other : cluster.blocks) {
    if (!std::all_of(other->threads.begin(), other->threads.end(), has_arrived)) return progress;
  }
  ++cluster.barriers;
  for (auto& other : cluster.blocks) {
    for (auto& thread : other->threads) thread->at_cluster_barrier = false;
    release(*other, ThreadState::kAtClusterBarrier);
  }
  return progress;
}

}  // namespace llm_comm::inline LLM_COMM_TARGET::emulator
