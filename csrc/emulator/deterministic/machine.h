// Driver "deterministic" of the emulator: all ranks in one OS thread, over the weak memory of weak_memory.h. A scheduler
// explores interleavings; every choice it makes follows from a seed, so a seed replays its schedule to the last access.
//
// Time is virtual: a step (an access to shared memory, or a turn of a thread) takes a nanosecond. Where every thread
// only polls, time jumps to the next event, and where there is none, ahead, until waits expire.
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
  kUniform,     // any thread that can run
  kWeighted,    // ranks have speeds
  kPriorities,  // the foremost rank that can run; at times another becomes foremost (PCT, Burckhardt, ASPLOS 2010)
};

// In which order the clusters of a grid start, as far as not all of them run at once.
enum class StartOrder : uint32_t { kAscending, kDescending, kAny };

// How the scheduler is biased in a schedule.
struct SchedulerTemper {
  Policy policy = Policy::kUniform;
  uint32_t weight[kMaxRanks] = {1, 1, 1, 1, 1, 1, 1, 1};
  uint32_t change = 0;             // of 65536 turns: priorities change
  uint32_t preempt = 0;            // of 256 accesses: another thread goes first
  uint32_t samples = 1;            // a rank's next thread is the foremost of so many drawn
  uint32_t resident_threads = 64;  // clusters of a grid start as long as they fit in, one always
  StartOrder start_order = StartOrder::kAny;
  uint32_t launch_delay = 0;      // steps at most until a grid that may start does
  uint32_t completion_delay = 0;  // steps at most until a grid whose threads have ended is complete
};

// A rank does nothing for a time, from its `after`-th access on.
struct Stall {
  static constexpr uint64_t kForever = ~uint64_t{0};
  uint32_t rank;
  uint64_t after;
  uint64_t steps;
};

struct Temper {
  MemoryTemper memory;
  SchedulerTemper scheduler;
  std::vector<Stall> stalls;
};

enum class Ending {
  kDone,     // all ranks that are not stalled for ever have run all their grids
  kStuck,    // threads wait for a barrier or a grid that nobody will reach or end
  kTooLong,  // more turns, or time, than any schedule needs
  kFault,    // an access that no target defines: fault() says which
};

class Machine {
 public:
  // `impatience_ns`: by how much time jumps where nothing happens. A schedule has to end within 4096 of them.
  Machine(uint32_t ranks, uint64_t bytes_of_rank, uint64_t impatience_ns);
  ~Machine();

  WeakMemory& memory() { return memory_; }

  // Begins a new schedule: no grids, time 0, memory visible as it is.
  void reset(uint64_t seed, uint32_t ranks, const Temper& temper);
  // What the host does at a time of the schedule.
  void at(uint64_t time, std::function<void()> action);
  // Enqueues a grid on the stream of a rank. `dependent`: it may start once the blocks of the one before have called
  // grid_dependency_trigger().
  void launch(uint32_t rank, const LaunchConfig& config, std::function<void()> kernel, bool dependent);
  Ending run();

  // Blocks of such grids that run at once.
  uint32_t resident_blocks(const LaunchConfig& config) const;

  const std::string& fault() const { return memory_.error(); }
  uint64_t now() const { return now_; }
  // How many accesses the rank's threads have made, as stalls count them.
  uint64_t accesses(uint32_t rank) const;
  // When the rank's last stall began, if any has.
  std::optional<uint64_t> stalled_at(uint32_t rank) const;
  // Changes with every access, its order and its value.
  uint64_t fingerprint() const { return fingerprint_; }
  void trace_to(std::FILE* file) { trace_ = file; }

  // ---- For agents: who accesses memory of a rank beside its threads, from at() and watch(), after reset() ----

  // What an agent brings to its accesses. Agents of one rank with one `block` share what is joined into that view.
  ThreadMemory agent_of(uint32_t rank, ViewId block) {
    return {rank, ~uint64_t{0}, block, memory_.new_view(), 0, {}, {}};
  }
  void load(ThreadMemory& agent, const void* address, void* to, uint32_t bytes, uint32_t unit, Order order);
  void store(ThreadMemory& agent, void* address, const void* from, uint32_t bytes, uint32_t unit, Order order);
  // Calls `action` whenever a store to these bytes of a rank's memory arrives there.
  void watch(const void* first, uint64_t bytes, std::function<void()> action);
  // Until when the rank does nothing; Stall::kForever; now() or less: it goes on.
  uint64_t frozen_until(uint32_t rank) const;
  Random& random() { return random_; }

  // Accesses of the running thread.
  void load(const void* address, void* to, uint32_t bytes, uint32_t unit, Order order, Alias alias);
  void store(void* address, const void* from, uint32_t bytes, uint32_t unit, Order order, Alias alias);
  uint64_t modify(void* address, uint32_t bytes, uint64_t (*update)(uint64_t, const void*), const void* arguments,
                  Alias alias);
  // To memory that ranks do not share: only lets others go first at times. Also called by the host, where it is nothing.
  void private_access();
  void fence();
  void fence_aliases();
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

  // The one whose threads call the platform header; nullptr: none.
  static void activate(Machine* machine);
  Thread& running() const;
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
  Temper temper_;
  Random random_{0};
  std::vector<Rank> ranks_;
  std::vector<std::unique_ptr<Thread>> threads_;  // all there are
  std::vector<Thread*> idle_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<std::function<void()>> host_actions_;
  std::vector<Watch> watches_;
  uint64_t event_count_ = 0;
  uint64_t now_ = 0;
  uint64_t turns_ = 0;
  uint64_t quiet_turns_ = 0;  // in which no thread did more than poll
  uint64_t fingerprint_ = 0;
  std::FILE* trace_ = nullptr;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET::emulator
