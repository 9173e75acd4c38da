#include "emulator/deterministic/machine.h"

#include <algorithm>
#include <stdexcept>

namespace llm_comm::inline LLM_COMM_TARGET::emulator {

namespace {

// More than any schedule of small messages takes.
constexpr uint64_t kMostTurns = 20'000'000;
// The same in time, which a thread that waits without a bound makes pass for nothing.
constexpr uint64_t kMostImpatience = 4096;
// Of 256 turns: a thread whose last poll failed, though nothing has arrived for it since.
constexpr uint32_t kIdlePolls = 8;

// What is written over the shared memory of a block that has ended.
constexpr uint32_t kOfNobody = 0xDEADB10C;

Machine* active = nullptr;

}  // namespace

struct Machine::Thread : GpuThread {
  Block* block = nullptr;
  ThreadMemory memory;
  uint64_t priority = 0;
  std::vector<Thread*>* list = nullptr;  // runnable or polling of its rank, or none
  size_t position = 0;                   // in the list
  uint32_t last_line = 0;                // that it loaded from

  uint32_t rank() const { return memory.rank; }
};

struct Machine::Cluster {
  std::vector<Block*> blocks;
  std::vector<void*> shared;  // of each block
  uint32_t barriers = 0;      // passed
  uint32_t ended_blocks = 0;
};

struct Machine::Block {
  Grid* grid;
  Cluster* cluster;
  uint32_t index;
  ViewId view;
  std::vector<Thread*> threads;
  std::vector<Warp> warps;
  std::vector<Line> shared;  // of Line, for the alignment
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
  std::deque<Block> blocks;        // that have started
  std::deque<Cluster> clusters;    // the same
  std::vector<uint32_t> to_start;  // numbers of clusters, the next one last
  uint32_t resident_threads = 0;
  uint32_t ended_blocks = 0;
  uint32_t triggered_blocks = 0;
  std::vector<Thread*> awaiting;
  bool completing = false;

  bool is_ended() const { return ended_blocks == launch.config.blocks; }
};

struct Machine::Rank {
  std::deque<Launch> queue;
  std::deque<std::unique_ptr<Grid>> resident;  // the one that runs, and those that have come ahead
  std::vector<Thread*> runnable;
  std::vector<Thread*> polling;
  bool starting = false;
  uint64_t completed = 0;
  uint64_t accesses = 0;
  uint64_t thaw = 0;
  uint64_t frozen_at = 0;
  uint64_t priority = 0;
};

Machine::Machine(uint32_t ranks, uint64_t bytes_of_rank, uint64_t impatience_ns)
    : memory_(ranks, bytes_of_rank), impatience_ns_(impatience_ns) {
  active = this;
}

Machine::~Machine() { active = nullptr; }

void Machine::reset(uint64_t seed, uint32_t ranks, const Temper& temper) {
  temper_ = temper;
  random_ = Random(seed);
  memory_.reset(random_.next(), temper.memory);
  // A thread of a rank that stopped in the middle of a kernel cannot take another.
  std::erase_if(threads_, [](const auto& thread) { return thread->state != ThreadState::kEnded; });
  idle_.clear();
  for (const auto& thread : threads_) idle_.push_back(thread.get());
  ranks_ = std::vector<Rank>(ranks);
  for (Rank& rank : ranks_) rank.priority = random_.next();
  events_ = {};
  host_actions_.clear();
  watches_.clear();
  event_count_ = now_ = turns_ = quiet_turns_ = fingerprint_ = 0;
}

void Machine::at(uint64_t time, std::function<void()> action) {
  host_actions_.push_back(std::move(action));
  add_event(time, EventKind::kHost, static_cast<uint32_t>(host_actions_.size() - 1));
}

void Machine::launch(uint32_t rank, const LaunchConfig& config, std::function<void()> kernel, bool dependent) {
  if (config.blocks == 0 || config.threads == 0) throw std::invalid_argument("emulator: cannot launch an empty grid");
  ranks_[rank].queue.push_back({config, std::move(kernel), dependent});
  try_start(rank);
}

// ---- The schedule --------------------------------------------------------------------------------------------------

bool Machine::is_frozen(const Rank& rank) const { return rank.thaw > now_; }

uint64_t Machine::frozen_until(uint32_t rank) const { return ranks_[rank].thaw; }

uint64_t Machine::accesses(uint32_t rank) const { return ranks_[rank].accesses; }

std::optional<uint64_t> Machine::stalled_at(uint32_t rank) const {
  if (ranks_[rank].thaw == 0) return std::nullopt;
  return ranks_[rank].frozen_at;
}

bool Machine::is_unfinished() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) {
    return rank.thaw != Stall::kForever && (rank.starting || !rank.queue.empty() || !rank.resident.empty());
  });
}

Ending Machine::run() {
  for (;;) {
    handle_due_events();
    if (!memory_.error().empty()) return Ending::kFault;
    if (!is_unfinished()) return Ending::kDone;
    if (turns_ > kMostTurns || now_ > kMostImpatience * impatience_ns_) return Ending::kTooLong;
    Thread* const thread = is_quiet() ? nullptr : choose();
    if (thread != nullptr) {
      turn(*thread);
    } else if (!let_time_pass()) {
      return Ending::kStuck;
    }
  }
}

Machine::Thread* Machine::choose() {
  if (random_.chance(kIdlePolls)) {
    Rank& rank = ranks_[random_.below(ranks_.size())];
    if (!is_frozen(rank) && !rank.polling.empty()) return rank.polling[random_.below(rank.polling.size())];
  }
  const SchedulerTemper& temper = temper_.scheduler;
  if (temper.change != 0 && random_.below(1 << 16) < temper.change) {
    ranks_[random_.below(ranks_.size())].priority = random_.next();
  }
  uint64_t weights[kMaxRanks];
  uint64_t total = 0;
  Rank* foremost = nullptr;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    Rank& rank = ranks_[r];
    weights[r] = 0;
    if (rank.runnable.empty() || is_frozen(rank)) continue;
    weights[r] = temper.policy == Policy::kUniform ? rank.runnable.size() : temper.weight[r];
    total += weights[r];
    if (foremost == nullptr || rank.priority > foremost->priority) foremost = &rank;
  }
  if (foremost == nullptr) return nullptr;
  if (temper.policy == Policy::kPriorities) return choose_of(foremost->runnable);
  uint64_t drawn = random_.below(total);
  size_t r = 0;
  while (drawn >= weights[r]) drawn -= weights[r++];
  return choose_of(ranks_[r].runnable);
}

Machine::Thread* Machine::choose_of(std::vector<Thread*>& threads) {
  Thread* chosen = threads[random_.below(threads.size())];
  for (uint32_t i = 1; i < temper_.scheduler.samples; ++i) {
    Thread* const other = threads[random_.below(threads.size())];
    if (other->priority > chosen->priority) chosen = other;
  }
  return chosen;
}

void Machine::turn(Thread& thread) {
  ++turns_;
  ++now_;
  ++quiet_turns_;
  thread.resume();
  Rank& rank = ranks_[thread.rank()];
  switch (thread.state) {
    case ThreadState::kRunning:
      move_to(thread, thread.found_nothing ? &rank.polling : &rank.runnable);
      break;
    case ThreadState::kAtWarpBarrier:
      quiet_turns_ = 0;
      move_to(thread, nullptr);
      release_warp(thread);
      break;
    case ThreadState::kAtBlockBarrier:
      quiet_turns_ = 0;
      move_to(thread, nullptr);
      ++thread.block->at_barrier;
      release_barrier(*thread.block);
      break;
    case ThreadState::kAtClusterBarrier:
      move_to(thread, nullptr);
      break;
    case ThreadState::kAwaitingGrids:
      move_to(thread, nullptr);
      thread.block->grid->awaiting.push_back(&thread);
      break;
    case ThreadState::kEnded:
      quiet_turns_ = 0;
      move_to(thread, nullptr);
      end_thread(thread);
      return;
  }
  if (thread.at_cluster_barrier) release_cluster(*thread.block->cluster);
}

void Machine::move_to(Thread& thread, std::vector<Thread*>* list) {
  if (thread.list == list) return;
  if (thread.list != nullptr) {
    Thread* const last = thread.list->back();
    (*thread.list)[thread.position] = last;
    last->position = thread.position;
    thread.list->pop_back();
  }
  thread.list = list;
  if (list == nullptr) return;
  thread.position = list->size();
  list->push_back(&thread);
}

// ---- Time ----------------------------------------------------------------------------------------------------------

void Machine::add_event(uint64_t time, EventKind kind, uint32_t argument) {
  events_.push({time, event_count_++, kind, argument});
}

void Machine::handle_due_events() {
  while (!events_.empty() && events_.top().time <= now_) {
    const Event event = events_.top();
    events_.pop();
    quiet_turns_ = 0;
    switch (event.kind) {
      case EventKind::kArrival:
        wake_pollers(event.argument);
        break;
      case EventKind::kStart:
        start_grid(event.argument);
        break;
      case EventKind::kComplete:
        complete_grid(event.argument);
        break;
      case EventKind::kThaw:
        break;  // the time has come, and that is all
      case EventKind::kHost: {
        const std::function<void()> action = host_actions_[event.argument];  // which may add others
        action();
        break;
      }
    }
  }
}

// Nothing but polls in vain has happened for a while, so time has to help. It never passes more quickly than threads
// that wait can see. False if it cannot help: nobody waits.
bool Machine::let_time_pass() {
  if (!events_.empty() && events_.top().time <= now_ + impatience_ns_) {
    now_ = std::max(now_, events_.top().time);
    return true;
  }
  const bool anybody = std::any_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) {
    return !is_frozen(rank) && !(rank.polling.empty() && rank.runnable.empty());
  });
  if (!anybody && events_.empty()) return false;
  if (is_quiet() || !anybody) {
    now_ += impatience_ns_;
    quiet_turns_ = 0;
  }
  poll_all();
  return true;
}

bool Machine::is_quiet() const { return quiet_turns_ > 2 * (threads_.size() - idle_.size()); }

void Machine::poll_all() {
  std::vector<Thread*> all;
  for (const Rank& rank : ranks_) {
    if (!is_frozen(rank)) all.insert(all.end(), rank.polling.begin(), rank.polling.end());
  }
  memory_.set_fresh(true);
  for (Thread* const thread : all) {
    const Rank& rank = ranks_[thread->rank()];
    if (thread->list == &rank.polling && !is_frozen(rank)) turn(*thread);
  }
  memory_.set_fresh(false);
}

// ---- Grids ---------------------------------------------------------------------------------------------------------

void Machine::try_start(uint32_t r) {
  Rank& rank = ranks_[r];
  if (rank.starting || rank.queue.empty()) return;
  if (!rank.resident.empty()) {
    const Grid& before = *rank.resident.back();
    if (!rank.queue.front().dependent || before.triggered_blocks != before.launch.config.blocks) return;
  }
  rank.starting = true;
  add_event(now_ + random_.below(temper_.scheduler.launch_delay + uint64_t{1}), EventKind::kStart, r);
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
  // A GPU would take any number. But each takes room that grids of other ranks or streams on the same GPU may need before the
  // first one can end (operation.cuh, "Progress").
  const auto takes_room = [](const auto& one) { return !one->is_ended(); };
  if (std::count_if(rank.resident.begin(), rank.resident.end(), takes_room) > 2) {
    memory_.fail("a second grid of rank " + std::to_string(r) + " comes ahead of the one that runs");
  }
  draw_order(*rank.resident.back());
  start_clusters(*rank.resident.back());
}

uint32_t Machine::resident_blocks(const LaunchConfig& config) const {
  const uint32_t clusters = temper_.scheduler.resident_threads / (config.threads * config.cluster_blocks);
  return std::max(clusters, 1u) * config.cluster_blocks;
}

void Machine::draw_order(Grid& grid) {
  const LaunchConfig& config = grid.launch.config;
  for (uint32_t cluster = config.blocks / config.cluster_blocks; cluster-- > 0;) grid.to_start.push_back(cluster);
  if (temper_.scheduler.start_order == StartOrder::kDescending)
    std::reverse(grid.to_start.begin(), grid.to_start.end());
  if (temper_.scheduler.start_order != StartOrder::kAny) return;
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
      // Garbage, as a block finds it on a GPU.
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
  for (uint32_t i = 0; i < config.threads; ++i) {
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
    move_to(thread, &ranks_[grid.rank].runnable);
  }
}

// A shuffle exchanges values and orders no memory.
void Machine::release_warp(Thread& thread) {
  if (!thread.warp->passes_barrier()) return;
  for (Thread* const lane : thread.block->threads) {
    if (lane->warp == thread.warp) release(*lane, ThreadState::kAtWarpBarrier);
  }
}

// On a GPU the cluster's barrier orders memory too; no kernel of this library needs that of memory that ranks share.
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
  }
  block.threads.clear();  // other blocks take them, maybe while this one's cluster still runs
  std::fill(block.shared.begin(), block.shared.end(), Line{{kOfNobody, kOfNobody, kOfNobody, kOfNobody}});
  if (++block.cluster->ended_blocks == block.cluster->blocks.size()) check_ended(*block.cluster);
  grid.resident_threads -= grid.launch.config.threads;
  ++grid.ended_blocks;
  if (!block.triggered) ++grid.triggered_blocks;
  start_clusters(grid);
  try_start(grid.rank);
  complete_if_ended(grid.rank);
}

// The shared memory of a block that has ended belongs to another one. Who still wrote there is found by what it left.
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
  add_event(now_ + random_.below(temper_.scheduler.completion_delay + uint64_t{1}), EventKind::kComplete, r);
}

void Machine::complete_grid(uint32_t r) {
  Rank& rank = ranks_[r];
  for (const Block& block : rank.resident.front()->blocks) memory_.join_into_rank(block.view, r);
  rank.resident.pop_front();
  memory_.end_grids(r, ++rank.completed);
  if (!rank.resident.empty()) {
    std::vector<Thread*>& awaiting = rank.resident.front()->awaiting;
    for (Thread* const thread : awaiting) release(*thread, ThreadState::kAwaitingGrids);
    awaiting.clear();
  }
  complete_if_ended(r);
  try_start(r);
}

// ---- What threads do -----------------------------------------------------------------------------------------------

Machine::Thread& Machine::running() const { return static_cast<Thread&>(*running_thread()); }

void Machine::access_begins(Thread& thread) {
  Rank& rank = ranks_[thread.rank()];
  ++rank.accesses;
  ++now_;
  for (const Stall& stall : temper_.stalls) {
    if (stall.rank != thread.rank() || stall.after != rank.accesses) continue;
    rank.frozen_at = now_;
    rank.thaw = stall.steps == Stall::kForever ? Stall::kForever : now_ + stall.steps;
    if (stall.steps != Stall::kForever) add_event(rank.thaw, EventKind::kThaw, thread.rank());
    thread.fiber.suspend();
    return;
  }
  if (random_.chance(temper_.scheduler.preempt)) thread.fiber.suspend();
}

void Machine::record(const Thread& thread, const char* what, uint64_t offset, uint64_t value) {
  fingerprint_ = mix(fingerprint_ + now_) + mix(value + (offset << 20) + thread.context.thread_index);
  if (trace_ == nullptr) return;
  const uint64_t of_rank = memory_.bytes_of_rank();
  std::fprintf(trace_, "%llu rank %u grid %llu block %u thread %u: %s rank %u + %llu: %016llx\n",
               static_cast<unsigned long long>(now_), thread.rank(),
               static_cast<unsigned long long>(thread.memory.grid), thread.context.block_index,
               thread.context.thread_index, what, static_cast<unsigned>(offset / of_rank),
               static_cast<unsigned long long>(offset % of_rank), static_cast<unsigned long long>(value));
}

// After every store.
void Machine::announce_arrivals() {
  quiet_turns_ = 0;
  for (const Arrival& arrival : memory_.arrivals()) {
    if (arrival.time <= now_) {
      wake_pollers(arrival.line);
    } else {
      add_event(arrival.time, EventKind::kArrival, arrival.line);
    }
  }
  memory_.arrivals().clear();
}

// Those of the rank that the line belongs to. Who polls a peer's memory finds out by polling.
void Machine::wake_pollers(uint32_t line) {
  for (const Watch& watch : watches_) {
    if (watch.first_line <= line && line <= watch.last_line) watch.action();
  }
  const uint64_t home = line * sizeof(Line) / memory_.bytes_of_rank();
  if (home >= ranks_.size()) return;
  Rank& rank = ranks_[home];
  for (size_t i = rank.polling.size(); i-- > 0;) {
    if (rank.polling[i]->last_line == line) move_to(*rank.polling[i], &rank.runnable);
  }
}

void Machine::load(const void* address, void* to, uint32_t bytes, uint32_t unit, Order order) {
  Thread& thread = running();
  access_begins(thread);
  const uint64_t offset = memory_.offset_of(address);
  thread.last_line = static_cast<uint32_t>(offset / sizeof(Line));
  memory_.load(thread.memory, now_, address, to, bytes, unit, order);
  const auto* const words = static_cast<const uint32_t*>(to);
  uint64_t value = 0;
  for (uint32_t i = 0; i < bytes / 4; ++i) value = value << 16 ^ words[i];
  record(thread, "loads", offset, value);
}

void Machine::store(void* address, const void* from, uint32_t bytes, uint32_t unit, Order order) {
  Thread& thread = running();
  access_begins(thread);
  memory_.store(thread.memory, now_, address, from, bytes, unit, order);
  const auto* const words = static_cast<const uint32_t*>(from);
  uint64_t value = 0;
  for (uint32_t i = 0; i < bytes / 4; ++i) value = value << 16 ^ words[i];
  record(thread, order == Order::kRelease ? "releases" : "stores", memory_.offset_of(address), value);
  announce_arrivals();
}

uint64_t Machine::modify(void* address, uint32_t bytes, uint64_t (*update)(uint64_t, const void*),
                         const void* arguments) {
  Thread& thread = running();
  access_begins(thread);
  const uint64_t found = memory_.modify(thread.memory, now_, address, bytes, update, arguments);
  record(thread, "modifies", memory_.offset_of(address), found);
  announce_arrivals();
  return found;
}

void Machine::private_access() {
  if (running_thread() != nullptr && random_.chance(temper_.scheduler.preempt)) running().fiber.suspend();
}

void Machine::fence() {
  Thread& thread = running();
  access_begins(thread);
  memory_.fence(thread.memory);
}

void Machine::trigger_dependents() {
  Block& block = *running().block;
  if (block.triggered) return;
  block.triggered = true;
  ++block.grid->triggered_blocks;
  try_start(block.grid->rank);
}

void Machine::wait_for_prerequisites() {
  Thread& thread = running();
  if (thread.memory.grid == ranks_[thread.rank()].completed) return;
  thread.suspend_as(ThreadState::kAwaitingGrids);
}

// ---- What the platform header calls --------------------------------------------------------------------------------

// Memory that ranks do not share is as strong as the CPU's.

void load(const void* address, void* to, uint32_t bytes, uint32_t unit, Order order) {
  if (active->memory().contains(address)) {
    active->load(address, to, bytes, unit, order);
  } else {
    active->private_access();
    std::memcpy(to, address, bytes);
  }
}

void store(void* address, const void* from, uint32_t bytes, uint32_t unit, Order order) {
  if (active->memory().contains(address)) {
    active->store(address, from, bytes, unit, order);
  } else {
    active->private_access();
    std::memcpy(address, from, bytes);
  }
}

uint64_t modify(void* address, uint32_t bytes, uint64_t (*update)(uint64_t, const void*), const void* arguments) {
  if (active->memory().contains(address)) return active->modify(address, bytes, update, arguments);
  uint64_t found = 0;
  std::memcpy(&found, address, bytes);
  const uint64_t value = update(found, arguments);
  std::memcpy(address, &value, bytes);
  return found;
}

void fence() { active->fence(); }
void trigger_dependents() { active->trigger_dependents(); }
void wait_for_prerequisites() { active->wait_for_prerequisites(); }
uint64_t virtual_clock_ns() { return active->now(); }

}  // namespace llm_comm::inline LLM_COMM_TARGET::emulator
