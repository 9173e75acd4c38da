// Grids of a rank: how they start, what blocks their threads, and how they end.
#include <algorithm>

#include "emulator/deterministic/machine_parts.h"

namespace llm_comm::inline LLM_COMM_TARGET::emulator {

namespace {

// Pattern written over the shared memory of a block that has ended.
constexpr uint32_t kOfNobody = 0xDEADB10C;

}  // namespace

void Machine::try_start(uint32_t r) {
  Rank& rank = ranks_[r];
  if (rank.starting || rank.queue.empty()) return;
  if (!rank.resident.empty()) {
    const Grid& before = *rank.resident.back();
    if (!rank.queue.front().dependent || before.triggered_blocks != before.launch.config.blocks) return;
  }
  rank.starting = true;
  add_event(now_ + random_.below(parameters_.scheduler.launch_delay + uint64_t{1}), EventKind::kStart, r);
}

void Machine::start_grid(uint32_t r) {
  Rank& rank = ranks_[r];
  rank.starting = false;
  auto grid = std::make_unique<Grid>();
  grid->rank = r;
  grid->number = rank.completed + rank.resident.size();
  grid->launch = std::move(rank.queue.front());
  rank.queue.pop_front();
  rank.resident.push_back(std::move(grid));
  // A GPU would accept any number of resident grids. Each takes room that grids of other ranks or streams on the same
  // GPU may need before the first one can end (operation.cuh, "Progress").
  const auto takes_room = [](const auto& one) { return !one->is_ended(); };
  if (std::count_if(rank.resident.begin(), rank.resident.end(), takes_room) > 2) {
    memory_.fail("a second grid of rank " + std::to_string(r) + " comes ahead of the one that runs");
  }
  draw_order(*rank.resident.back());
  start_clusters(*rank.resident.back());
}

uint32_t Machine::resident_blocks(const LaunchConfig& config) const {
  const uint32_t clusters = parameters_.scheduler.resident_threads / (config.threads * config.cluster_blocks);
  return std::max(clusters, 1u) * config.cluster_blocks;
}

void Machine::draw_order(Grid& grid) {
  const LaunchConfig& config = grid.launch.config;
  for (uint32_t cluster = config.blocks / config.cluster_blocks; cluster-- > 0;) grid.to_start.push_back(cluster);
  if (parameters_.scheduler.start_order == StartOrder::kDescending)
    std::reverse(grid.to_start.begin(), grid.to_start.end());
  if (parameters_.scheduler.start_order != StartOrder::kAny) return;
  for (size_t i = grid.to_start.size(); i > 1; --i) std::swap(grid.to_start[i - 1], grid.to_start[random_.below(i)]);
}

void Machine::start_clusters(Grid& grid) {
  const LaunchConfig& config = grid.launch.config;
  const uint32_t threads = config.threads * config.cluster_blocks;
  const uint32_t most = resident_blocks(config) * config.threads;
  while (!grid.to_start.empty() && grid.resident_threads + threads <= most) {
    const uint32_t first = grid.to_start.back() * config.cluster_blocks;
    grid.to_start.pop_back();
    Cluster& cluster = grid.clusters.emplace_back();
    for (uint32_t i = 0; i < config.cluster_blocks; ++i) {
      Block& block = grid.blocks.emplace_back();
      block.grid = &grid;
      block.cluster = &cluster;
      block.index = first + i;
      block.view = memory_.new_view();
      block.warps.resize((config.threads + kWarpThreads - 1) / kWarpThreads);
      // Uninitialised, as on a GPU.
      const auto garbage = static_cast<uint32_t>(random_.next());
      block.shared.assign((config.shared_bytes + sizeof(Line) - 1) / sizeof(Line),
                          {garbage, garbage, garbage, garbage});
      cluster.blocks.push_back(&block);
      cluster.shared.push_back(block.shared.data());
    }
    grid.resident_threads += threads;
    for (Block* const block : cluster.blocks) start_threads(*block);
  }
}

void Machine::start_threads(Block& block) {
  Grid& grid = *block.grid;
  const LaunchConfig& config = grid.launch.config;
  for (uint32_t i = 0; i < config.threads; i += config.fiber_threads) {
    if (idle_.empty()) {
      threads_.push_back(std::make_unique<Thread>());
      idle_.push_back(threads_.back().get());
    }
    Thread& thread = *idle_.back();
    idle_.pop_back();
    thread.start({i, block.index, config.threads, config.blocks, config.cluster_blocks, block.shared.data(),
                  block.cluster->shared.data()},
                 block.warps[i / kWarpThreads], block.cluster->barriers, [&grid] { grid.launch.kernel(); });
    thread.block = &block;
    thread.memory = {grid.rank, grid.number, block.view, memory_.new_view(), 0, {}, {}};
    thread.priority = random_.next();
    thread.list = nullptr;
    block.threads.push_back(&thread);
    busy_threads_ += config.fiber_threads;
    move_to(thread, &ranks_[grid.rank].runnable);
  }
}

// A shuffle exchanges values and does not order memory.
void Machine::release_warp(Thread& thread) {
  if (!thread.warp->passes_barrier()) return;
  for (Thread* const lane : thread.block->threads) {
    if (lane->warp == thread.warp) release(*lane, ThreadState::kAtWarpBarrier);
  }
}

// A GPU's cluster barrier also orders memory. No kernel of this library needs that for memory that ranks share.
void Machine::release_cluster(Cluster& cluster) {
  const auto has_arrived = [](const Thread* thread) { return thread->has_arrived_at_cluster_barrier(); };
  for (const Block* const block : cluster.blocks) {
    if (!std::all_of(block->threads.begin(), block->threads.end(), has_arrived)) return;
  }
  ++cluster.barriers;
  quiet_turns_ = 0;
  for (const Block* const block : cluster.blocks) {
    for (Thread* const thread : block->threads) {
      thread->at_cluster_barrier = false;
      release(*thread, ThreadState::kAtClusterBarrier);
    }
  }
}

void Machine::release(Thread& thread, ThreadState state) {
  if (thread.state != state) return;
  thread.state = ThreadState::kRunning;
  move_to(thread, &ranks_[thread.rank()].runnable);
}

void Machine::release_barrier(Block& block) {
  if (block.at_barrier == 0 || block.at_barrier + block.ended != block.threads.size()) return;
  block.at_barrier = 0;
  for (Thread* const thread : block.threads) {
    if (thread->state != ThreadState::kAtBlockBarrier) continue;
    memory_.join_into_view(thread->memory.thread, block.view);
    release(*thread, ThreadState::kAtBlockBarrier);
  }
}

void Machine::end_thread(Thread& thread) {
  Block& block = *thread.block;
  Grid& grid = *block.grid;
  ++block.ended;
  release_warp(thread);
  release_barrier(block);
  release_cluster(*block.cluster);
  if (block.ended != block.threads.size()) return;
  for (Thread* const ended : block.threads) {
    memory_.join_into_view(ended->memory.thread, block.view);
    memory_.free_view(ended->memory.thread);
    idle_.push_back(ended);
    busy_threads_ -= grid.launch.config.fiber_threads;
  }
  block.threads.clear();  // other blocks reuse them, possibly while this block's cluster still runs
  std::fill(block.shared.begin(), block.shared.end(), Line{{kOfNobody, kOfNobody, kOfNobody, kOfNobody}});
  if (++block.cluster->ended_blocks == block.cluster->blocks.size()) check_ended(*block.cluster);
  grid.resident_threads -= grid.launch.config.threads;
  ++grid.ended_blocks;
  if (!block.triggered) ++grid.triggered_blocks;
  start_clusters(grid);
  try_start(grid.rank);
  complete_if_ended(grid.rank);
}

// Detects stores to the shared memory of a block that has ended, which on a GPU may belong to another block already.
void Machine::check_ended(const Cluster& cluster) {
  for (const Block* const block : cluster.blocks) {
    for (const Line& line : block->shared) {
      for (const uint32_t word : line.word) {
        if (word == kOfNobody) continue;
        memory_.fail("block " + std::to_string(block->index) + " has ended when another one writes to its memory");
        return;
      }
    }
  }
}

void Machine::complete_if_ended(uint32_t r) {
  Rank& rank = ranks_[r];
  if (rank.resident.empty()) return;
  Grid& oldest = *rank.resident.front();
  if (!oldest.is_ended() || oldest.completing) return;
  oldest.completing = true;
  add_event(now_ + random_.below(parameters_.scheduler.completion_delay + uint64_t{1}), EventKind::kComplete, r);
}

void Machine::complete_grid(uint32_t r) {
  Rank& rank = ranks_[r];
  for (const Block& block : rank.resident.front()->blocks) memory_.join_into_rank(block.view, r);
  rank.resident.pop_front();
  memory_.end_grids(r, ++rank.completed, now_);
  if (!rank.resident.empty()) {
    std::vector<Thread*>& awaiting = rank.resident.front()->awaiting;
    for (Thread* const thread : awaiting) release(*thread, ThreadState::kAwaitingGrids);
    awaiting.clear();
  }
  complete_if_ended(r);
  try_start(r);
}

}  // namespace llm_comm::inline LLM_COMM_TARGET::emulator
