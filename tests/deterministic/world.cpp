#include "world.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <optional>
#include <stdexcept>
#include <utility>

#include "gcn/wave.h"
#include "host/core_impl.h"
#include "schedules/port_actor.h"

namespace drill {

namespace {

// Workspaces are released between operations, while no kernel runs: there is nothing to be scheduled.
[[noreturn]] void refuse_release() { throw std::logic_error("a schedule releases workspaces"); }

class RankMemory {
 public:
  RankMemory(emulator::WeakMemory& memory, uint32_t rank) : memory_(&memory), rank_(rank) {}

  host::WorkspaceHandle create(const WorkspaceLayout& layout, host::Sharing) {
    std::memset(local(), 0, memory_->bytes_of_rank());
    for (const Region& region : layout.regions().region) {
      std::memset(local() + region.offset, region.initial_byte, region.bytes);
    }
    return {};
  }
  char* map(int peer, const host::WorkspaceHandle&) { return memory_->of_rank(static_cast<uint32_t>(peer)); }
  // Kernels only ask whether it is there: the emulated switch loops over the workspaces.
  host::WorkspaceHandle create_multicast() { return {}; }
  void join_multicast(const host::WorkspaceHandle&) {}
  void add_multicast_device() {}
  char* bind_multicast() { return memory_->of_rank(0); }
  void drop_multicast() {}
  host::SharedMemory allocate(uint64_t) const { return {in_window(rank_), {}}; }
  std::shared_ptr<char> map_memory(int peer, uint64_t, const host::WorkspaceHandle&) const {
    return in_window(static_cast<uint32_t>(peer));
  }
  std::shared_ptr<char> for_tensor(std::shared_ptr<char> memory, const std::weak_ptr<const void>&) const {
    return memory;
  }
  void write(char* to, const void* from, uint64_t bytes) const { std::memcpy(to, from, bytes); }
  char* local() const { return memory_->of_rank(rank_); }
  HostMailbox* mailbox() const { return mailbox_.get(); }
  void leave_to_graphs() {}
  void read(void* to, const char* from, uint64_t bytes) const { std::memcpy(to, from, bytes); }
  std::optional<uint64_t> read_soon(const char*) const { return std::nullopt; }
  void vacate() { refuse_release(); }
  host::WorkspaceHandle refill(const WorkspaceLayout&, const std::string&) { refuse_release(); }
  void remap(int, const host::WorkspaceHandle&) { refuse_release(); }

 private:
  // The machine's, whoever uses it.
  std::shared_ptr<char> in_window(uint32_t rank) const {
    return {std::shared_ptr<void>(), memory_->of_rank(rank) + kWindowOffset};
  }

  emulator::WeakMemory* memory_;
  uint32_t rank_;
  std::unique_ptr<HostMailbox> mailbox_ = std::make_unique<HostMailbox>();
};

class StreamLauncher {
 public:
  template <class Args>
  using Function = void (*)(Args);

  StreamLauncher(emulator::Machine& machine, uint32_t rank, const gcn::MachineCode* machine_code)
      : machine_(&machine), rank_(rank), machine_code_(machine_code) {}

  template <class Args>
  Function<Args> function(void (*kernel)(Args)) const {
    return kernel;
  }
  // Programs have schedules of their own (schedules/program_schedule.cpp).
  Function<ProgramArgs> load(const std::string&, const std::string& kernel) const {
    throw std::logic_error("a schedule loads kernel " + kernel);
  }
  void leave_to_graphs() {}
  template <class Args>
  bool launch(Function<Args> kernel, const Args& args, const Grid& grid, uint64_t) {
    emulator::LaunchConfig config = config_of(grid);
    std::function<void()> job = [=] { kernel(args); };
    const gcn::Kernel* const code = machine_code_of(reinterpret_cast<const void*>(kernel));
    if (code != nullptr) {
      config.fiber_threads = gcn::kLanes;
      job =
          gcn::job_of(*machine_, *code, config, &args, sizeof(args), kHeaderBytes, kHeaderBytes + kSlots * kSlotBytes);
    }
    machine_->launch(rank_, config, std::move(job), code == nullptr);  // grids of AMD's GPUs never overlap
    if (!side_copies_.empty()) enqueue_some();
    return false;
  }
  // What stands beside the launches is put among them, at any place that its order with them permits.
  class SideStream {
   public:
    explicit SideStream(StreamLauncher& launcher) : launcher_(launcher) {}

    void follow() { launcher_.enqueue_some(); }
    void copy(const std::vector<host::Copy>& copies) {
      launcher_.side_copies_.push_back(copies);
      ++count_;
      launcher_.enqueue_some();
    }
    void record_event(uint32_t number) {
      events_.resize(std::max<size_t>(events_.size(), number + 1));
      events_[number] = count_;
    }
    void wait_event(uint32_t number) {
      launcher_.enqueue_all_but(count_ - events_.at(number));
      launcher_.enqueue_some();
    }
    void join() { launcher_.enqueue_all_but(0); }

   private:
    StreamLauncher& launcher_;
    std::vector<uint64_t> events_;  // how many copies come before
    uint64_t count_ = 0;            // of all copies
  };
  SideStream side_stream(uint64_t) { return SideStream(*this); }

  // By a few threads, so that what is copied comes in any order.
  void copy(const std::vector<host::Copy>& copies, uint64_t) {
    machine_->launch(
        rank_, {1, kCopyThreads, 0},
        [=] {
          grid_dependency_wait();
          for (const host::Copy& copy : copies) {
            const auto* const from = reinterpret_cast<const Line*>(copy.from);
            auto* const to = reinterpret_cast<Line*>(copy.to);
            for (uint64_t i = thread_index(); i < copy.bytes / sizeof(Line); i += kCopyThreads) {
              store_line(to + i, load_line(from + i));
            }
          }
        },
        true);
  }
  uint32_t max_cluster_blocks() const { return kMaxClusterBlocks; }
  uint32_t sm_count() const { return 2; }
  uint32_t max_shared_bytes() const { return 227 * 1024; }
  bool multiplies_fp8() const { return true; }
  template <class Args>
  void permit_shared_bytes(Function<Args>) const {}
  void map_matrix(MatrixView&, uint32_t, uint32_t, uint32_t, uint32_t, BoxUse) const {}
  template <class Args>
  bool has_room_for_cluster(Function<Args>, const Grid&) const {
    return true;
  }
  template <class Args>
  uint64_t resident_blocks(Function<Args>, const Grid& grid) const {
    return machine_->resident_blocks(config_of(grid));
  }
  bool has_been_captured() const { return false; }
  bool wait_for(uint64_t) { return true; }
  bool wait_for_last_call() { return true; }
  void wait_for_device() { refuse_release(); }
  void p2p_test(const DeviceComm& comm) {
    machine_->launch(rank_, {1, kMaxWorldSize, 0}, [=] { llm_comm::p2p_test(comm); }, false);
  }

 private:
  static constexpr uint32_t kCopyThreads = 3;

  void enqueue_all_but(uint64_t left) {
    while (side_copies_.size() > left) {
      const std::vector<host::Copy> next = std::move(side_copies_.front());
      side_copies_.pop_front();
      copy(next, 0);
    }
  }
  void enqueue_some() { enqueue_all_but(machine_->random().below(side_copies_.size() + 1)); }

  static emulator::LaunchConfig config_of(const Grid& grid) {
    return {grid.blocks, grid.threads, grid.shared_bytes, grid.cluster_blocks};
  }

  // The machine code of an emulated kernel, if a file has it.
  const gcn::Kernel* machine_code_of(const void* kernel) const {
    Dl_info found{};
    if (machine_code_ == nullptr || dladdr(kernel, &found) == 0 || found.dli_saddr != kernel) return nullptr;
    return machine_code_->find(found.dli_sname);
  }

  emulator::Machine* machine_;
  uint32_t rank_;
  const gcn::MachineCode* machine_code_;
  std::deque<std::vector<host::Copy>> side_copies_;  // that have not been put among the launches
};

}  // namespace

struct World::Member {
  host::CoreImpl<RankMemory, StreamLauncher> core;
  ChannelCounters counters[kMaxWorldSize] = {};
  uint64_t symmetric_bytes = 0;  // that have been taken
};

World::World(emulator::Machine& machine, uint32_t ranks, uint64_t first_operation, bool check_calls,
             const gcn::MachineCode* machine_code)
    : machine_(machine), first_operation_(first_operation) {
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const host::CoreOptions options{static_cast<int>(rank),
                                    static_cast<int>(ranks),
                                    kSlotBytes,
                                    static_cast<double>(kTimeoutNs) / 1e9,
                                    true,
                                    check_calls,
                                    staging_bytes_of(ranks)};
    char* const ring = machine.memory().of_rank(rank) + kRingOffset;
    members_.emplace_back(
        new Member{{options, RankMemory(machine.memory(), rank), StreamLauncher(machine, rank, machine_code),
                    std::make_unique<schedules::PortActor>(machine, rank, ring)},
                   {},
                   0});
    host::Core& own = core(rank);
    own.create_workspace(host::Sharing::kDescriptor);
    CommState state{};
    state.order = host::OrderOnRank::sum_of_numbers(first_operation);
    state.arrivals = first_operation * kArrivalsPerOperation;
    std::memcpy(machine.memory().of_rank(rank), &state, sizeof(state));
    for (uint32_t peer = 0; peer < ranks; ++peer) {
      if (peer != rank) own.map_peer(static_cast<int>(peer), {});
    }
    own.bind_multicast();
    own.create_window(0, kWindowBytes);
    for (uint32_t peer = 0; peer < ranks; ++peer) {
      if (peer != rank) own.map_window(0, static_cast<int>(peer), {});
    }
  }
}

World::~World() = default;

host::Core& World::core(uint32_t rank) { return members_[rank]->core; }
const DeviceComm& World::device_comm(uint32_t rank) const { return members_[rank]->core.device_comm(); }

void World::start_ports(uint32_t rank) { members_[rank]->core.start_ports(); }

ChannelCounters* World::channel_counters(uint32_t rank) { return members_[rank]->counters; }

void World::launch(uint32_t rank, const emulator::LaunchConfig& config, std::function<void()> kernel) {
  machine_.launch(rank, config, std::move(kernel), true);
}

char* World::take_symmetric(uint32_t rank, uint64_t bytes) {
  uint64_t& taken = members_[rank]->symmetric_bytes;
  const uint64_t first = taken;
  taken += (bytes + sizeof(Line) - 1) / sizeof(Line) * sizeof(Line);
  if (taken > kWindowBytes) throw std::length_error("the calls of a schedule take too much symmetric memory");
  return machine_.memory().of_rank(rank) + kWindowOffset + first;
}

std::string World::not_reset(uint32_t rank) {
  const char* const slots = machine_.memory().of_rank(rank) + kHeaderBytes;
  for (uint64_t offset = 0; offset < kSlots * kSlotBytes; offset += sizeof(uint32_t)) {
    uint32_t word;
    std::memcpy(&word, slots + offset, sizeof(word));
    if (word == kSentinel) continue;
    return "rank " + std::to_string(rank) + ": byte " + std::to_string(offset) +
           " of the slots is not reset to the sentinel";
  }
  return "";
}

uint64_t World::operations_counted(uint32_t rank) {
  CommState state;
  std::memcpy(&state, machine_.memory().of_rank(rank), sizeof(state));
  return operations_before(state.arrivals / kArrivalsPerOperation);
}

host::OrderOnRank World::order(uint32_t rank) {
  CommState state;
  std::memcpy(&state, machine_.memory().of_rank(rank), sizeof(state));
  return {state.arrivals / kArrivalsPerOperation, state.order};
}

uint64_t World::operations_before(uint64_t sequence) const {
  return (sequence - first_operation_) * kArrivalsPerOperation /
         kArrivalsPerOperation;  // numbers wrap with the counter
}

}  // namespace drill
