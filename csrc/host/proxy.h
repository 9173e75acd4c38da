// ProxyPorts: the proxy of a communicator. A thread reads the requests of the GPU's port channels from their ring and
// executes them through a Transport. Emulated cores, CUDA cores and NodeExchange use it with different transports.
#pragma once

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "host/own_process.h"
#include "host/port_batch.h"
#include "host/ports.h"

namespace llm_comm::host {

// Moves data to peers. Calls for one peer take effect in order; there is no order between peers. A call may return
// before its data has moved but must not wait for a peer. One thread makes all calls. They throw std::runtime_error if
// the transport has failed.
class Transport {
 public:
  virtual ~Transport() = default;
  // Called first, by the thread that makes all other calls.
  virtual void begin(uint32_t world_size) = 0;
  virtual void put(uint32_t peer, char* to, const char* from, uint64_t bytes) = 0;
  // Stores values to adjacent words of the peer. A peer that sees a value also sees everything sent to it before.
  // `values` need not outlive the call.
  virtual void signal(uint32_t peer, uint64_t* to, const uint64_t* values, uint32_t count) = 0;
  // Stores values to words of this rank once everything sent to `peer` before is complete (local completion).
  virtual void notify_local_completion(uint32_t peer, uint64_t* to, const uint64_t* values, uint32_t count) = 0;
  // Called repeatedly, with or without requests, for transports that need a thread to make progress. Returns true if
  // something advanced.
  virtual bool progress() { return false; }
  // Returns when everything is complete or has failed. Does not throw.
  virtual void finish() = 0;
};

// Zeroed memory that host and device access.
class RingMemory {
 public:
  virtual ~RingMemory() = default;
  virtual char* on_host() const = 0;
  virtual char* on_device() const = 0;
};

// Polling policy of a proxy. `gathers`: time to wait for further requests after one, which may be merged with it. An
// idle proxy spins, then yields, then sleeps, counted from its last request.
struct Patience {
  std::chrono::nanoseconds gathers;
  std::chrono::microseconds spins;
  std::chrono::microseconds yields;  // measured like `spins` from the last request
  std::chrono::microseconds nap;
};

class ProxyPorts final : public Ports {
 public:
  static constexpr uint32_t kEntriesLog2 = 9;

  ProxyPorts(std::unique_ptr<RingMemory> memory, std::unique_ptr<Transport> transport, const Patience& patience)
      : memory_(std::move(memory)), transport_(std::move(transport)), patience_(patience) {}
  ~ProxyPorts() override { stop(); }

  PortRing* ring() const override { return reinterpret_cast<PortRing*>(memory_->on_device()); }
  uint32_t entries_log2() const override { return kEntriesLog2; }
  void start(const PortOwner& owner) override;
  void stop() override;
  bool is_running() const override { return thread_ != nullptr; }
  bool settle(uint64_t requests, std::chrono::nanoseconds limit) override;
  void abandon() override { is_ending_ = true; }
  std::optional<std::string> error() const override;
  void leave_to_graphs() override { static_cast<void>(memory_.release()); }

 private:
  void run(std::promise<void>& has_begun);
  void serve();
  uint32_t take();
  bool take_one();
  void carry_out(uint32_t peer);
  void wait_for_requests(std::chrono::steady_clock::time_point last_request) const;

  std::unique_ptr<RingMemory> memory_;
  std::unique_ptr<Transport> transport_;
  Patience patience_;
  PortOwner owner_{};
  OwnProcess maker_;
  std::unique_ptr<std::thread> thread_;
  std::atomic<bool> is_ending_ = false;
  std::atomic<bool> has_error_ = false;
  std::string error_;      // written before has_error_ is set
  uint64_t position_ = 0;  // ring position of the next request
  PortBatch batches_[kMaxWorldSize];
};

}  // namespace llm_comm::host
