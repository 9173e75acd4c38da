// CoreImpl: the part of a Core that is the same on every target. Compiled once per target (LLM_COMM_TARGET) with the
// target's memory and launcher (target.h).
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "algorithms/p2p_test.cuh"
#include "host/algorithm_kernels.h"
#include "host/describe.h"
#include "host/descriptor.h"
#include "host/launch_queue.h"
#include "host/own_header.h"
#include "host/ports.h"
#include "host/prepared_experts.h"
#include "host/prepared_linear.h"
#include "host/prepared_program.h"
#include "host/prepared_rope.h"
#include "host/prepared_router.h"
#include "host/programs.h"
#include "host/target.h"
#include "host/windows.h"
#include "llm_comm/channels.cuh"

namespace llm_comm::host {

inline void check_options(const CoreOptions& options) {
  if (options.world_size < 1 || options.world_size > kMaxWorldSize || options.rank < 0 ||
      options.rank >= options.world_size) {
    throw std::invalid_argument("rank " + std::to_string(options.rank) + " of " + std::to_string(options.world_size) +
                                ": the world size must be 1 to " + std::to_string(kMaxWorldSize) +
                                " and the rank below it");
  }
  if (options.slot_bytes == 0 || options.slot_bytes % sizeof(Line) != 0) {
    throw std::invalid_argument("slot_bytes is " + std::to_string(options.slot_bytes) +
                                "; it must be a positive multiple of 16");
  }
  if (!(options.timeout_s > 0)) throw std::invalid_argument("timeout_s must be positive");
}

template <TargetMemory Memory, TargetLauncher Launcher>
class CoreImpl final : public Core {
 public:
  CoreImpl(const CoreOptions& options, Memory memory, Launcher launcher, std::unique_ptr<Ports> ports)
      : options_(options),
        memory_(std::move(memory)),
        launcher_(std::move(launcher)),
        ports_(std::move(ports)),
        queue_(launcher_, options.check_calls),
        windows_(options.rank),
        own_header_(memory_) {
    comm_.mailbox = memory_.mailbox();
    comm_.slot_bytes = options.slot_bytes;
    comm_.staging_bytes = options.staging_bytes;
    comm_.timeout_ns = static_cast<uint64_t>(options.timeout_s * 1e9);
    comm_.rank = static_cast<uint32_t>(options.rank);
    comm_.world_size = static_cast<uint32_t>(options.world_size);
    comm_.ports = ports_->ring();
    comm_.port_entries_log2 = ports_->entries_log2();
  }

  CoreImpl(const CoreImpl&) = delete;
  CoreImpl& operator=(const CoreImpl&) = delete;

  // Running kernels and graphs hold addresses of the workspaces and of the heap, so these are freed only if neither
  // remains.
  ~CoreImpl() override {
    if (comm_.workspace[options_.rank] == nullptr) return;
    const bool has_ended = launcher_.wait_for_last_call();
    ports_->stop();
    if (has_ended && !launcher_.has_been_captured()) {
      wait_for_peers_in_switch();
      return;
    }
    launcher_.leave_to_graphs();
    memory_.leave_to_graphs();
    ports_->leave_to_graphs();
    windows_.leave_to_graphs();
  }

  WorkspaceHandle create_workspace(Sharing sharing) override {
    WorkspaceHandle handle = memory_.create(WorkspaceLayout(options_.slot_bytes, options_.staging_bytes), sharing);
    comm_.workspace[options_.rank] = memory_.local();
    return handle;
  }

  void map_peer(int peer, const WorkspaceHandle& handle) override {
    check_peer("map_peer", peer);
    comm_.workspace[peer] = memory_.map(peer, handle);
  }

  void begin_release() override {
    check_releasable();
    {
      const std::lock_guard<std::mutex> lock(queue_.call_mutex());
      queue_.pause(true);
    }
    launcher_.wait_for_device();
    if (!ports_->is_running()) return;
    uint64_t requests = 0;
    memory_.read(&requests, memory_.local() + kPortsOffset + offsetof(PortState, head), sizeof(requests));
    const auto limit = std::chrono::duration<double>(options_.timeout_s);
    if (!ports_->settle(requests, std::chrono::duration_cast<std::chrono::nanoseconds>(limit))) {
      throw std::runtime_error("the proxy of port channels has not come to the end of its requests");
    }
    had_ports_ = true;
  }

  void release_workspaces() override { own_header_.vacate(); }

  WorkspaceHandle restore_workspace() override {
    return own_header_.refill(WorkspaceLayout(options_.slot_bytes, options_.staging_bytes));
  }

  void restore_peer(int peer, const WorkspaceHandle& handle) override {
    check_peer("restore_peer", peer);
    memory_.remap(peer, handle);
  }

  void end_release() override {
    own_header_.is_back();
    if (std::exchange(had_ports_, false)) start_ports();
    const std::lock_guard<std::mutex> lock(queue_.call_mutex());
    queue_.pause(false);
  }

  WorkspaceHandle create_multicast() override { return memory_.create_multicast(); }
  void join_multicast(const WorkspaceHandle& handle) override { memory_.join_multicast(handle); }
  void add_multicast_device() override { memory_.add_multicast_device(); }
  void bind_multicast() override { comm_.multicast = memory_.bind_multicast(); }
  void drop_multicast() override {
    comm_.multicast = nullptr;
    memory_.drop_multicast();
  }

  // For kernels outside the core that take part in the communicator's operations.
  const DeviceComm& device_comm() const { return comm_; }
  // Starts the proxy. Call it before the first kernel that uses port channels is launched.
  void start_ports() {
    PortOwner owner{{}, workspace_bytes(), comm_.rank, comm_.world_size, nullptr, nullptr};
    std::copy(std::begin(comm_.workspace), std::end(comm_.workspace), owner.workspace);
    owner.has_failed = [mailbox = comm_.mailbox] { return llm_comm::host::has_failed(*mailbox); };
    owner.fail = [this] { end_waits(kAbortRequest); };
    owner.find_in_heap = [this](uint32_t rank, uint64_t symmetric_offset, uint64_t bytes) {
      return windows_.address(rank, symmetric_offset, bytes);
    };
    ports_->start(owner);
  }

  uint64_t workspace_bytes() const override {
    return WorkspaceLayout(options_.slot_bytes, options_.staging_bytes).bytes();
  }

  WorkspaceHandle create_window(uint32_t window, uint64_t bytes) override {
    windows_.check_new(window, bytes);
    SharedMemory own = memory_.allocate(bytes);
    Descriptor descriptor(own.handle.fd);  // closed if the next lines throw
    windows_.add(window, bytes, std::move(own.memory));
    write_window(window);
    descriptor.release();
    return std::move(own.handle);
  }

  void map_window(uint32_t window, int peer, const WorkspaceHandle& handle) override {
    check_peer("map_window", peer);
    windows_.set_peer(window, peer, memory_.map_memory(peer, windows_.bytes(window), handle));
    write_window(window);
  }

  void unmap_window(uint32_t window) override { windows_.drop_peers(window); }
  void close_window(uint32_t window) override { windows_.remove(window); }
  std::shared_ptr<char> memory_of_window(uint32_t window) const override {
    return memory_.for_tensor(windows_.own(window), windows_.life());
  }
  std::optional<SymmetricOffset> find(uint64_t address, uint64_t bytes) const override {
    return windows_.find(address, bytes);
  }

  std::string channels(const SymmetricOffset& memory, uint64_t bytes, const SymmetricOffset& semaphore_words,
                       uint32_t semaphores) override {
    start_ports();
    const Channels channels{comm_, symmetric_offset_at(memory.window, memory.offset), bytes,
                            symmetric_offset_at(semaphore_words.window, semaphore_words.offset), semaphores};
    return {reinterpret_cast<const char*>(&channels), sizeof(channels)};
  }

  void send_marks() override { launcher_.p2p_test(comm_); }

  std::vector<int> peers_unseen() override {
    std::vector<int> unseen;
    for (int peer = 0; peer < options_.world_size; ++peer) {
      Line mark;
      memory_.read(&mark, memory_.local() + kMarksOffset + peer * sizeof(Line), sizeof(Line));
      const bool seen = mark.word[0] == kMarkWord && mark.word[1] == static_cast<uint32_t>(peer) &&
                        mark.word[2] == static_cast<uint32_t>(options_.rank);
      if (!seen) unseen.push_back(peer);
    }
    return unseen;
  }

  uint32_t max_cluster_blocks() override {
    return most_cluster_blocks(launcher_, static_cast<uint32_t>(options_.world_size));
  }

  void load(const std::vector<uint32_t>& algorithms) override {
    for (const uint32_t number : algorithms) {
      Registry::at(number, [&]<class Algorithm>() { load_kernels<Algorithm>(launcher_, options_.world_size); });
    }
  }

  std::unique_ptr<PreparedCall> prepare(uint32_t algorithm, const Problem& problem, const Tiling& tiling) override {
    if (problem.world != static_cast<uint32_t>(options_.world_size)) {
      throw std::invalid_argument("a call for " + std::to_string(problem.world) + " ranks of a communicator of " +
                                  std::to_string(options_.world_size));
    }
    std::unique_ptr<PreparedCall> call;
    Registry::at(algorithm, [&]<class Algorithm>() {
      call = prepare_algorithm<Algorithm>(queue_, launcher_, windows_, comm_, problem, tiling);
      if constexpr (requires { Algorithm::kUsesPorts; }) start_ports();
    });
    if (call == nullptr) throw std::invalid_argument("there is no algorithm number " + std::to_string(algorithm));
    return call;
  }

  bool multiplies_fp8() const override { return launcher_.multiplies_fp8(); }

  std::vector<LinearChoice> linear_choices(const LinearProblem& problem) const override {
    return linear::choices(problem, launcher_.sm_count(), launcher_.max_shared_bytes());
  }

  std::unique_ptr<PreparedCall> prepare_linear(const LinearProblem& problem, const LinearChoice& choice) override {
    return std::make_unique<PreparedLinear<Launcher>>(launcher_, queue_.call_mutex(), *comm_.mailbox, problem, choice);
  }

  std::unique_ptr<PreparedCall> prepare_experts(const experts::Problem& problem, const experts::Choice& gate_up,
                                                const experts::Choice& down) override {
    return std::make_unique<PreparedExperts<Launcher>>(launcher_, queue_.call_mutex(), *comm_.mailbox, problem, gate_up,
                                                       down);
  }

  std::unique_ptr<PreparedCall> prepare_router(const router::Problem& problem) override {
    return std::make_unique<PreparedRouter<Launcher>>(launcher_, queue_.call_mutex(), *comm_.mailbox, problem);
  }

  std::unique_ptr<PreparedCall> prepare_rope(const rope::Problem& problem, const rope::Choice& choice) override {
    return std::make_unique<PreparedRope<Launcher>>(launcher_, queue_.call_mutex(), *comm_.mailbox, problem, choice);
  }

  uint32_t load_program(const std::string& image, const std::string& kernel, const std::string& title) override {
    return programs_.add([&] { return launcher_.load(image, kernel); }, title);
  }

  std::unique_ptr<PreparedCall> prepare_program(const ProgramLaunch& launch) override {
    return std::make_unique<PreparedProgram<Launcher>>(queue_, launcher_, windows_, comm_,
                                                       programs_.function(launch.kernel), launch);
  }

  std::optional<OperationError> error() const override {
    if (!has_error(*comm_.mailbox)) {
      const std::lock_guard<std::mutex> lock(order_mutex_);
      return order_error_ ? order_error_ : error_of_ports();
    }
    const ErrorRecord& record = comm_.mailbox->error;
    OperationError error{cause_name(record.cause),
                         static_cast<int>(record.rank),
                         static_cast<int>(record.peer),
                         programs_.title(record.operation),
                         record.phase == kCheckPhase ? -1 : static_cast<int>(record.phase),
                         record.sequence,
                         record.bytes,
                         {},
                         {}};
    if (record.cause == static_cast<uint32_t>(ErrorCause::kMismatch)) {
      for (int rank = 0; rank < options_.world_size; ++rank) {
        error.calls.push_back(with_title(describe_in_full(comm_.mailbox->calls[rank]), comm_.mailbox->calls[rank]));
      }
    }
    if (record.cause == static_cast<uint32_t>(ErrorCause::kSizes)) {
      const SizesError& sizes = comm_.mailbox->sizes;
      error.sizes = {fault_name(sizes.fault), static_cast<int>(sizes.rank), static_cast<int>(sizes.peer), sizes.rows,
                     sizes.limit};
    }
    return error;
  }

  void check_order() override {
    if (comm_.workspace[options_.rank] == nullptr || has_failed(*comm_.mailbox)) return;
    std::optional<OperationError> found;
    const auto own = own_header_.order_of(comm_.workspace[options_.rank]);
    if (!own) return;
    const auto report = [&](const char* cause, int peer) {
      found = OperationError{cause, options_.rank, peer, "", 0, own->operations, 0, {}, {}};
    };
    if (own->has_overlap()) report("overlap", options_.rank);
    for (int peer = 0; peer < options_.world_size && !found; ++peer) {
      if (peer == options_.rank) continue;
      const auto other = own_header_.order_of(comm_.workspace[peer]);
      if (other && own->differs_from(*other)) report("order", peer);
    }
    // An operation that a failure interrupted may not have counted itself, so it must not be reported as an order
    // error.
    if (!found || has_failed(*comm_.mailbox)) return;
    {
      const std::lock_guard<std::mutex> lock(order_mutex_);
      if (!order_error_) order_error_ = std::move(found);
    }
    end_waits(kAbortRequest);
  }

  Call last_call() const override {
    const CallSignature last = queue_.last();
    Call call = with_title(describe(last), last);
    call.number = queue_.launches();
    return call;
  }

  std::optional<uint64_t> operations_ended() override {
    if (comm_.workspace[options_.rank] == nullptr) return std::nullopt;
    return own_header_.operations_ended();
  }

  bool has_been_captured() const override { return launcher_.has_been_captured(); }
  void wait_for(uint64_t stream) override { launcher_.wait_for(stream); }

  void abort() override {
    end_waits(kAbortRequest);
    ports_->abandon();
  }

  void peer_exited(int peer) override {
    if (peer < 0 || peer >= options_.world_size) {
      throw std::invalid_argument("there is no rank " + std::to_string(peer) + " among " +
                                  std::to_string(options_.world_size));
    }
    end_waits(1u << peer);
  }

 private:
  Call with_title(Call call, const CallSignature& signature) const {
    call.operation = programs_.title(signature.operation);
    return call;
  }

  std::optional<OperationError> error_of_ports() const {
    const std::optional<std::string> text = ports_->error();
    if (!text) return std::nullopt;
    return OperationError{"transport", options_.rank, options_.rank, "", 0, 0, 0, {}, *text};
  }

  void check_releasable() const {
    if (comm_.multicast != nullptr) throw std::runtime_error("NVLink multicast is set up over the workspaces");
    if (comm_.workspace[options_.rank] == nullptr) throw std::runtime_error("there is no workspace");
  }

  void check_peer(const char* call, int peer) const {
    if (peer < 0 || peer >= options_.world_size || peer == options_.rank) {
      throw std::invalid_argument(std::string(call) + ": " + std::to_string(peer) + " is not a peer of rank " +
                                  std::to_string(options_.rank));
    }
  }

  // Writes the addresses of a registered window to the workspace, where kernels read them.
  void write_window(uint32_t window) {
    const Windows::Addresses addresses = windows_.addresses(window);
    memory_.write(memory_.local() + kHeapOffset + window * sizeof(addresses), &addresses, sizeof(addresses));
  }

  // A peer may still reduce from this rank's memory in the switch, so the memory must stay bound until every peer has
  // finished as many operations as this rank. Bounded by the time-out; skipped after a failure.
  void wait_for_peers_in_switch() {
    if (comm_.multicast == nullptr) return;
    const auto own = operations_ended();
    const auto limit = std::chrono::duration<double>(options_.timeout_s);
    const auto deadline = std::chrono::steady_clock::now() + limit;
    for (const char* const workspace : comm_.workspace) {
      while (workspace != nullptr && own && !has_failed(*comm_.mailbox) &&
             std::chrono::steady_clock::now() < deadline) {
        const auto arrivals = memory_.read_soon(workspace + offsetof(CommState, arrivals));
        if (!arrivals || *arrivals / kArrivalsPerOperation >= *own) break;
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
  }

  void end_waits(uint32_t reason) { __atomic_fetch_or(&comm_.mailbox->end_reasons, reason, __ATOMIC_RELEASE); }

  CoreOptions options_;
  Memory memory_;
  Launcher launcher_;
  std::unique_ptr<Ports> ports_;
  LaunchQueue<Launcher> queue_;
  Windows windows_;
  Programs<Launcher> programs_;
  OwnHeader<Memory> own_header_;
  mutable std::mutex order_mutex_;
  std::optional<OperationError> order_error_;  // guarded by order_mutex_
  bool had_ports_ = false;                     // start the proxy again in end_release()
  DeviceComm comm_{};
};

}  // namespace llm_comm::host
