// Machine: the emulator's driver "deterministic", for schedules of tests and DSL kernels. All ranks run in one OS
// thread over the weak memory of weak_memory.h. A scheduler explores interleavings. Every decision derives from a seed,
// so a seed replays its schedule access by access.
//
// Time is virtual: a step (an access to modelled memory, or a turn of a thread) takes a nanosecond. While every thread
// only polls, time jumps to the next event; without an event it jumps ahead until waits expire.
#pragma once

#include <cstdio>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <queue>
#include <string>
#include <vector>

#include "emulator/deterministic/weak_memory.h"
#include "emulator/executor.h"
#include "emulator/gpu_thread.h"

namespace llm_comm::inline LLM_COMM_TARGET::emulator {

enum class Policy : uint32_t {
  kUniform,     // any runnable thread
  kWeighted,    // ranks have different speeds
  kPriorities,  // the runnable rank of highest priority; priorities change at times (PCT, Burckhardt, ASPLOS 2010)
};

// Order in which the clusters of a grid start, as far as not all of them run at once.
enum class StartOrder : uint32_t { kAscending, kDescending, kAny };

// Schedule parameters of the scheduler.
struct SchedulerParameters {
  Policy policy = Policy::kUniform;
  uint32_t weight[kMaxRanks] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  uint32_t change = 0;             // probability in 65536 per turn: priorities change
  uint32_t preempt = 0;            // probability in 256 per access: another thread runs first
  uint32_t samples = 1;            // a rank's next thread is the one of highest priority among so many random ones
  uint32_t resident_threads = 64;  // clusters of a grid start while they fit; one always does
  StartOrder start_order = StartOrder::kAny;
  uint32_t launch_delay = 0;      // maximum steps until a grid that may start does start
  uint32_t completion_delay = 0;  // maximum steps until a grid whose threads have ended is complete
};

// A rank pauses for `steps`, starting with its `after`-th access.
struct Stall {
  static constexpr uint64_t kForever = ~uint64_t{0};
  uint32_t rank;
  uint64_t after;
  uint64_t steps;
};

struct ScheduleParameters {
  MemoryParameters memory;
  SchedulerParameters scheduler;
  std::vector<Stall> stalls;
};

enum class Ending {
  kDone,     // all ranks without an endless stall have run all their grids
  kStuck,    // threads wait for a barrier or grid that no thread will reach or end
  kTooLong,  // more turns or time than any schedule needs
  kFault,    // an access that no target defines; fault() describes it
};

class Machine {
 public:
  // `impatience_ns`: size of a jump in time when nothing happens. A schedule must end within 4096 of them.
  Machine(uint32_t ranks, uint64_t bytes_of_rank, uint64_t impatience_ns);
  ~Machine();

  WeakMemory& memory() { return memory_; }

  // Starts a new schedule: no grids, time 0, all memory content visible.
  void reset(uint64_t seed, uint32_t ranks, const ScheduleParameters& parameters);
  // Runs a host action at a time of the schedule.
  void at(uint64_t time, std::function<void()> action);
  // Enqueues a grid on the stream of a rank. `dependent`: it may start once all blocks of the previous grid have called
  // grid_dependency_trigger().
  void launch(uint32_t rank, const LaunchConfig& config, std::function<void()> kernel, bool dependent);
  Ending run();

  // Blocks of such a grid that run at once.
  uint32_t resident_blocks(const LaunchConfig& config) const;

  const std::string& fault() const { return memory_.error(); }
  uint64_t now() const { return now_; }
  // Accesses of the rank's threads, as stalls count them.
  uint64_t accesses(uint32_t rank) const;
  // Start of the rank's last stall, if any.
  std::optional<uint64_t> stalled_at(uint32_t rank) const;
  // Hash of the order and the value of every access.
  uint64_t fingerprint() const { return fingerprint_; }
  void trace_to(std::FILE* file) { trace_ = file; }

  // ---- Agents: access a rank's memory besides its threads; called from at() and watch(), after reset() ----

  // Creates the memory state of an agent. Agents of one rank with the same `block` share the view joined into it.
  ThreadMemory agent_of(uint32_t rank, ViewId block) {
    return {rank, ~uint64_t{0}, block, memory_.new_view(), 0, {}, {}};
  }
  void load(ThreadMemory& agent, const void* address, void* to, uint32_t bytes, uint32_t unit, Order order);
  void store(ThreadMemory& agent, void* address, const void* from, uint32_t bytes, uint32_t unit, Order order);
  // Calls `action` whenever a store to these bytes arrives at the rank that owns them.
  void watch(const void* first, uint64_t bytes, std::function<void()> action);
  // Time until which the rank pauses; Stall::kForever; not later than now(): it runs.
  uint64_t frozen_until(uint32_t rank) const;
  Random& random() { return random_; }

  // Accesses of the running thread.
  void load(const void* address, void* to, uint32_t bytes, uint32_t unit, Order order, Alias alias);
  void store(void* address, const void* from, uint32_t bytes, uint32_t unit, Order order, Alias alias);
  uint64_t modify(void* address, uint32_t bytes, uint64_t (*update)(uint64_t, const void*), const void* arguments,
                  Alias alias);
  // Access to memory outside the model: may let another thread run first. It is progress: threads poll memory of the
  // model. No effect when the host calls it.
  void private_access();
  void fence();
  void fence_aliases();
  // Fences of hardware that has one for each direction (WeakMemory).
  void acquire() { memory_.acquire(running_memory()); }
  uint32_t begin_release() { return memory_.begin_release(running_memory()); }
  void end_release(uint32_t snapshot) { WeakMemory::end_release(running_memory(), snapshot); }
  void trigger_dependents();
  void wait_for_prerequisites();

 private:
  struct Block;
  struct Cluster;
  struct Grid;
  struct Thread;
  struct Launch;
  struct Rank;
  struct Watch {
    uint64_t first_line;
    uint64_t last_line;
    std::function<void()> action;
  };
  enum class EventKind { kArrival, kStart, kComplete, kThaw, kHost };
  struct Event {
    uint64_t time;
    uint64_t order;
    EventKind kind;
    uint32_t argument;  // a line, a rank, or an index into host_actions_
    bool operator>(const Event& other) const { return time != other.time ? time > other.time : order > other.order; }
  };

  // Sets the machine whose threads call the platform header; nullptr: none.
  static void activate(Machine* machine);
  Thread& running() const;
  ThreadMemory& running_memory() const;
  bool is_frozen(const Rank& rank) const;
  bool is_unfinished() const;
  void access_begins(Thread& thread);
  void record(const Thread& thread, const char* what, uint64_t offset, uint64_t value);
  void record(const ThreadMemory& agent, const char* what, uint64_t offset, uint64_t value);
  void announce_arrivals();
  void wake_pollers(uint32_t line);
  void add_event(uint64_t time, EventKind kind, uint32_t argument);
  void handle_due_events();
  bool let_time_pass();
  bool is_quiet() const;
  void poll_all();
  Thread* choose();
  Thread* choose_of(std::vector<Thread*>& threads);
  void turn(Thread& thread);
  void move_to(Thread& thread, std::vector<Thread*>* list);
  void release(Thread& thread, ThreadState state);
  void release_warp(Thread& thread);
  void release_barrier(Block& block);
  void release_cluster(Cluster& cluster);
  void end_thread(Thread& thread);
  void check_ended(const Cluster& cluster);
  void try_start(uint32_t rank);
  void start_grid(uint32_t rank);
  void draw_order(Grid& grid);
  void start_clusters(Grid& grid);
  void start_threads(Block& block);
  void complete_if_ended(uint32_t rank);
  void complete_grid(uint32_t rank);

  WeakMemory memory_;
  uint64_t impatience_ns_;
  ScheduleParameters parameters_;
  Random random_{0};
  std::vector<Rank> ranks_;
  std::vector<std::unique_ptr<Thread>> threads_;  // all threads, idle ones included
  std::vector<Thread*> idle_;
  uint64_t busy_threads_ = 0;  // GPU threads of all fibers that are not idle
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<std::function<void()>> host_actions_;
  std::vector<Watch> watches_;
  uint64_t event_count_ = 0;
  uint64_t now_ = 0;
  uint64_t turns_ = 0;
  uint64_t quiet_turns_ = 0;  // turns in which no thread did more than poll
  uint64_t fingerprint_ = 0;
  std::FILE* trace_ = nullptr;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET::emulator
