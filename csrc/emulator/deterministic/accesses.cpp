// Accesses of threads to modelled memory, and the functions that the platform header calls.
#include <cstring>

#include "emulator/deterministic/machine_parts.h"

namespace llm_comm::inline LLM_COMM_TARGET::emulator {

namespace {

Machine* active = nullptr;

}  // namespace

void Machine::activate(Machine* machine) { active = machine; }

Machine::Thread& Machine::running() const { return static_cast<Thread&>(*running_thread()); }

ThreadMemory& Machine::running_memory() const { return running().memory; }

void Machine::access_begins(Thread& thread) {
  Rank& rank = ranks_[thread.rank()];
  ++rank.accesses;
  ++now_;
  for (const Stall& stall : parameters_.stalls) {
    if (stall.rank != thread.rank() || stall.after != rank.accesses) continue;
    rank.frozen_at = now_;
    rank.thaw = stall.steps == Stall::kForever ? Stall::kForever : now_ + stall.steps;
    if (stall.steps != Stall::kForever) add_event(rank.thaw, EventKind::kThaw, thread.rank());
    thread.fiber.suspend();
    return;
  }
  if (random_.chance(parameters_.scheduler.preempt)) thread.fiber.suspend();
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

// Schedules the arrivals of a store. Called after every store.
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

// Wakes pollers on the rank that owns the line. Threads that poll a peer's memory notice by polling.
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

void Machine::load(const void* address, void* to, uint32_t bytes, uint32_t unit, Order order, Alias alias) {
  Thread& thread = running();
  access_begins(thread);
  const uint64_t offset = memory_.offset_of(address);
  thread.last_line = static_cast<uint32_t>(offset / sizeof(Line));
  memory_.load(thread.memory, now_, address, to, bytes, unit, order, alias);
  const auto* const words = static_cast<const uint32_t*>(to);
  uint64_t value = 0;
  for (uint32_t i = 0; i < bytes / 4; ++i) value = value << 16 ^ words[i];
  record(thread, "loads", offset, value);
}

void Machine::store(void* address, const void* from, uint32_t bytes, uint32_t unit, Order order, Alias alias) {
  Thread& thread = running();
  access_begins(thread);
  memory_.store(thread.memory, now_, address, from, bytes, unit, order, alias);
  const auto* const words = static_cast<const uint32_t*>(from);
  uint64_t value = 0;
  for (uint32_t i = 0; i < bytes / 4; ++i) value = value << 16 ^ words[i];
  record(thread, order == Order::kRelease ? "releases" : "stores", memory_.offset_of(address), value);
  announce_arrivals();
}

uint64_t Machine::modify(void* address, uint32_t bytes, uint64_t (*update)(uint64_t, const void*),
                         const void* arguments, Alias alias) {
  Thread& thread = running();
  access_begins(thread);
  const uint64_t found = memory_.modify(thread.memory, now_, address, bytes, update, arguments, alias);
  record(thread, "modifies", memory_.offset_of(address), found);
  announce_arrivals();
  return found;
}

void Machine::private_access() {
  if (running_thread() == nullptr) return;
  quiet_turns_ = 0;
  if (random_.chance(parameters_.scheduler.preempt)) running().fiber.suspend();
}

void Machine::fence() {
  Thread& thread = running();
  access_begins(thread);
  memory_.fence(thread.memory);
}

void Machine::fence_aliases() {
  Thread& thread = running();
  access_begins(thread);
  memory_.fence_aliases(thread.memory, now_);
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

// ---- Called by the platform header --------------------------------------------------------------------------------

// Memory outside the model is accessed directly and is as strong as the CPU's.

void load(const void* address, void* to, uint32_t bytes, uint32_t unit, Order order, Alias alias) {
  if (active->memory().contains(address)) {
    active->load(address, to, bytes, unit, order, alias);
  } else {
    active->private_access();
    std::memcpy(to, address, bytes);
  }
}

void store(void* address, const void* from, uint32_t bytes, uint32_t unit, Order order, Alias alias) {
  if (active->memory().contains(address)) {
    active->store(address, from, bytes, unit, order, alias);
  } else {
    active->private_access();
    std::memcpy(address, from, bytes);
  }
}

uint64_t modify(void* address, uint32_t bytes, uint64_t (*update)(uint64_t, const void*), const void* arguments,
                Alias alias) {
  if (active->memory().contains(address)) return active->modify(address, bytes, update, arguments, alias);
  uint64_t found = 0;
  std::memcpy(&found, address, bytes);
  const uint64_t value = update(found, arguments);
  std::memcpy(address, &value, bytes);
  return found;
}

void fence() { active->fence(); }
void alias_fence() { active->fence_aliases(); }
uint32_t draw_below(uint32_t bound) { return active->random().below(bound); }
void trigger_dependents() { active->trigger_dependents(); }
void wait_for_prerequisites() { active->wait_for_prerequisites(); }
uint64_t virtual_clock_ns() { return active->now(); }

}  // namespace llm_comm::inline LLM_COMM_TARGET::emulator
