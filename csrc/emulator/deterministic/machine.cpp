#include <algorithm>
#include <stdexcept>

#include "emulator/deterministic/machine_parts.h"

namespace llm_comm::inline LLM_COMM_TARGET::emulator {

namespace {

// More turns than any schedule of small messages takes.
constexpr uint64_t kMostTurns = 20'000'000;
// Bound on time in units of impatience_ns: a thread that waits without a bound lets time pass without turns.
constexpr uint64_t kMostImpatience = 4096;
// Probability in 256 of giving a turn to a thread whose last poll failed and for which nothing has arrived since.
constexpr uint32_t kIdlePolls = 8;

}  // namespace

Machine::Machine(uint32_t ranks, uint64_t bytes_of_rank, uint64_t impatience_ns)
    : memory_(ranks, bytes_of_rank), impatience_ns_(impatience_ns) {
  activate(this);
}

Machine::~Machine() { activate(nullptr); }

void Machine::reset(uint64_t seed, uint32_t ranks, const ScheduleParameters& parameters) {
  parameters_ = parameters;
  random_ = Random(seed);
  memory_.reset(random_.next(), parameters.memory);
  // A thread of a rank that stopped inside a kernel cannot run another kernel.
  std::erase_if(threads_, [](const auto& thread) { return thread->state != ThreadState::kEnded; });
  idle_.clear();
  for (const auto& thread : threads_) idle_.push_back(thread.get());
  ranks_ = std::vector<Rank>(ranks);
  for (Rank& rank : ranks_) rank.priority = random_.next();
  events_ = {};
  host_actions_.clear();
  watches_.clear();
  event_count_ = now_ = turns_ = quiet_turns_ = fingerprint_ = busy_threads_ = 0;
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

// ---- Scheduling ----------------------------------------------------------------------------------------------------

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
  const SchedulerParameters& parameters = parameters_.scheduler;
  if (parameters.change != 0 && random_.below(1 << 16) < parameters.change) {
    ranks_[random_.below(ranks_.size())].priority = random_.next();
  }
  uint64_t weights[kMaxRanks];
  uint64_t total = 0;
  Rank* foremost = nullptr;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    Rank& rank = ranks_[r];
    weights[r] = 0;
    if (rank.runnable.empty() || is_frozen(rank)) continue;
    weights[r] = parameters.policy == Policy::kUniform ? rank.runnable.size() : parameters.weight[r];
    total += weights[r];
    if (foremost == nullptr || rank.priority > foremost->priority) foremost = &rank;
  }
  if (foremost == nullptr) return nullptr;
  if (parameters.policy == Policy::kPriorities) return choose_of(foremost->runnable);
  uint64_t drawn = random_.below(total);
  size_t r = 0;
  while (drawn >= weights[r]) drawn -= weights[r++];
  return choose_of(ranks_[r].runnable);
}

Machine::Thread* Machine::choose_of(std::vector<Thread*>& threads) {
  Thread* chosen = threads[random_.below(threads.size())];
  for (uint32_t i = 1; i < parameters_.scheduler.samples; ++i) {
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
        break;  // only ends the stall: is_frozen() compares times
      case EventKind::kHost: {
        const std::function<void()> action = host_actions_[event.argument];  // a copy: the action may add others
        action();
        break;
      }
    }
  }
}

// Advances time when nothing but failed polls has happened for a while. Time never advances faster than waiting threads
// can observe. Returns false if no thread waits for time.
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

bool Machine::is_quiet() const { return quiet_turns_ > 2 * busy_threads_; }

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

}  // namespace llm_comm::inline LLM_COMM_TARGET::emulator
