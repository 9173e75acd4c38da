// The proxy of a communicator: a thread that takes the requests of its GPU's port channels from their FIFO, and has a transport
// carry them out.
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

// Moves data to the peers. What goes to one peer is done in the order of the calls; between peers there is no order. Calls return
// before that, if they like, but must not wait for a peer. They are made by one thread, and throw std::runtime_error where nothing
// can be moved any more.
class Transport {
 public:
  virtual ~Transport() = default;
  // By the thread that makes all other calls, before them.
  virtual void begin(uint32_t world_size) = 0;
  virtual void put(uint32_t peer, char* to, const char* from, uint64_t bytes) = 0;
  // Stores to neighbouring words of the peer. Who sees one sees what went to the peer before. The values need not stay.
  virtual void signal(uint32_t peer, uint64_t* to, const uint64_t* values, uint32_t count) = 0;
  // Stores to words of this rank once all that went to the peer before has been done.
  virtual void echo(uint32_t peer, uint64_t* to, const uint64_t* values, uint32_t count) = 0;
  // Made again and again, with or without requests: what needs this thread to go on, as networks do. Whether anything has.
  virtual bool progress() { return false; }
  // Returns once everything has been done, or cannot be. Throws nothing.
  virtual void finish() = 0;
};

// Memory of a FIFO, zeros at first, as the host and as the device reach it.
class RingMemory {
 public:
  virtual ~RingMemory() = default;
  virtual char* on_host() const = 0;
  virtual char* on_device() const = 0;
};

// How long a thread looks for one more request behind others, which may become one copy with them; and how it waits that finds
// nothing, from the last request on: it spins, then lets others run, then sleeps.
struct Patience {
  std::chrono::nanoseconds gathers;
  std::chrono::microseconds spins;
  std::chrono::microseconds yields;  // in all, with the time that it spins
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
  std::string error_;      // written before has_error_
  uint64_t position_ = 0;  // of the next request
  PortBatch batches_[kMaxWorldSize];
};

}  // namespace llm_comm::host
