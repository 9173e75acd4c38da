// NodeExchange on any target. `Device` must provide:
//
//   std::unique_ptr<RingMemory> memory(uint64_t bytes)    // zeroed, accessible to host and device
//   Patience patience()                                   // of the proxy
//   bool launch(const NodeExchangeArgs&, uint32_t blocks, uint64_t stream)   // true: captured by a graph
//   void wait()                                           // for all launches except those in graphs
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>

#include "algorithms/node_exchange.cuh"
#include "host/node_exchange.h"
#include "host/own_process.h"
#include "host/proxy.h"
#include "host/ucx/ucx_transport.h"

namespace llm_comm::host {

inline void check_options(const NodeExchangeOptions& options) {
  if (options.ranks < 2 || options.ranks > kMaxWorldSize || options.rank >= options.ranks) {
    throw std::invalid_argument("node " + std::to_string(options.rank) + " of " + std::to_string(options.ranks) +
                                ": UCX serves 2 to " + std::to_string(kMaxWorldSize) + " nodes");
  }
  if (options.part_bytes == 0 || options.part_bytes % sizeof(Line) != 0) {
    throw std::invalid_argument("part_bytes is " + std::to_string(options.part_bytes) +
                                "; it must be a positive multiple of 16");
  }
}

template <class Device>
class NodeExchangeImpl final : public NodeExchange {
 public:
  NodeExchangeImpl(const NodeExchangeOptions& options, Device device)
      : options_(options),
        device_(std::move(device)),
        layout_{options.part_bytes, options.ranks},
        mailbox_memory_(device_.memory(sizeof(HostMailbox))),
        notes_(device_.memory(kHeaderBytes)),
        memory_(device_.memory(layout_.bytes())),
        mailbox_(reinterpret_cast<HostMailbox*>(mailbox_memory_->on_host())),
        transport_(std::make_unique<UcxTransport>(memory_->on_host(), layout_.bytes())),
        address_(transport_->address()) {
    DeviceComm& comm = args_.comm;
    for (uint32_t rank = 0; rank < options.ranks; ++rank) {
      comm.workspace[rank] = (rank == options.rank ? memory_ : notes_)->on_device();
    }
    comm.mailbox = reinterpret_cast<HostMailbox*>(mailbox_memory_->on_device());
    comm.rank = options.rank;
    comm.world_size = options.ranks;
    args_.layout = layout_;
    set_limit(options.timeout_s);
  }
  NodeExchangeImpl(const NodeExchangeImpl&) = delete;
  NodeExchangeImpl& operator=(const NodeExchangeImpl&) = delete;

  // Graphs hold addresses of this memory and their kernels need the proxy. The proxy is stopped; the memory is leaked.
  ~NodeExchangeImpl() override {
    close();
    if (!has_been_captured_) return;
    for (auto* const memory : {&mailbox_memory_, &notes_, &memory_}) static_cast<void>(memory->release());
    if (ports_ != nullptr) ports_->leave_to_graphs();
  }

  std::string address() const override { return address_; }

  void connect(const std::vector<std::string>& addresses, const std::vector<std::string>& names) override {
    if (transport_ == nullptr) throw std::runtime_error("the partners are connected already");
    if (addresses.size() != options_.ranks || names.size() != options_.ranks) {
      throw std::runtime_error(std::to_string(addresses.size()) + " addresses and " + std::to_string(names.size()) +
                               " names of " + std::to_string(options_.ranks) + " nodes");
    }
    names_ = names;
    std::vector<UcxTransport::Peer> peers;
    for (uint32_t rank = 0; rank < options_.ranks; ++rank) peers.push_back({addresses[rank], names[rank]});
    const auto has_failed = [mailbox = mailbox_] { return has_ended(*mailbox); };
    transport_->connect(options_.rank, peers, has_failed);
    PortOwner owner{{}, layout_.bytes(), options_.rank, options_.ranks, has_failed, nullptr};
    for (uint32_t rank = 0; rank < options_.ranks; ++rank) owner.workspace[rank] = transport_->memory_of(rank);
    owner.fail = [this] { end_waits(); };
    ports_ = std::make_unique<ProxyPorts>(device_.memory(port_ring_bytes(ProxyPorts::kEntriesLog2)),
                                          std::move(transport_), device_.patience());
    args_.comm.ports = ports_->ring();
    args_.comm.port_entries_log2 = ports_->entries_log2();
    ports_->start(owner);
  }

  bool run(uint64_t input, uint64_t output, const std::vector<NodePiece>& pieces, uint64_t stream) override {
    check_process();
    const std::lock_guard<std::mutex> lock(call_mutex_);
    if (ports_ == nullptr || is_closed_) throw std::runtime_error("the partners are not connected");
    if (pieces.size() != options_.ranks) {
      throw std::invalid_argument(std::to_string(pieces.size()) + " pieces for " + std::to_string(options_.ranks) +
                                  " nodes");
    }
    args_.input = reinterpret_cast<const char*>(input);
    args_.output = reinterpret_cast<char*>(output);
    uint64_t longest = 1;
    for (uint32_t rank = 0; rank < options_.ranks; ++rank) {
      const NodePiece& piece = pieces[rank];
      args_.piece[rank] = {piece.from, piece.bytes_out, piece.to, piece.bytes_in};
      longest = std::max({longest, piece.bytes_out, piece.bytes_in});
    }
    const uint64_t parts = (longest - 1) / layout_.part_bytes + 1;
    for (uint64_t part = 0; part < parts; part += kMaxExchangeBlocks) {
      if (has_ended(*mailbox_)) return false;
      args_.first_part = part;
      const auto blocks = static_cast<uint32_t>(std::min<uint64_t>(parts - part, kMaxExchangeBlocks));
      if (device_.launch(args_, blocks, stream)) has_been_captured_ = true;
    }
    return !has_ended(*mailbox_);
  }

  void set_limit(double timeout_s) override {
    if (!(timeout_s > 0)) throw std::invalid_argument("timeout_s must be positive");
    check_process();
    const std::lock_guard<std::mutex> lock(call_mutex_);
    args_.comm.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
  }

  std::string error() const override {
    if (ports_ != nullptr) {
      if (const std::optional<std::string> text = ports_->error()) return *text;
    }
    const ErrorRecord& record = mailbox_->error;
    if (__atomic_load_n(&record.complete, __ATOMIC_ACQUIRE) != 0) {
      return "nothing came from " + names_[record.peer] + " in time (LLM_COMM_TIMEOUT_S)";
    }
    return has_ended(*mailbox_) ? "it was ended" : "";
  }

  void abort() override { end_waits(); }
  bool has_been_captured() const override { return has_been_captured_; }

  void close() override {
    if (!maker_.is_this()) return;
    const std::lock_guard<std::mutex> lock(call_mutex_);
    if (std::exchange(is_closed_, true)) return;
    device_.wait();
    if (ports_ == nullptr) return;
    // A kernel ends when its partners' data has arrived. The proxy may not have executed its own requests by then.
    if (!has_ended(*mailbox_)) ports_->settle(requests(), std::chrono::nanoseconds(args_.comm.timeout_ns));
    ports_->stop();
  }

 private:
  static bool has_ended(const HostMailbox& mailbox) {
    return __atomic_load_n(&mailbox.error.complete, __ATOMIC_ACQUIRE) != 0 ||
           __atomic_load_n(&mailbox.end_reasons, __ATOMIC_ACQUIRE) != 0;
  }
  // Requests that kernels have made.
  uint64_t requests() const {
    const char* const state = memory_->on_host() + kPortsOffset;
    return __atomic_load_n(&reinterpret_cast<const PortState*>(state)->head, __ATOMIC_ACQUIRE);
  }
  // Call before locking call_mutex_: in a forked child a thread that does not exist there may hold the lock.
  void check_process() const {
    if (!maker_.is_this())
      throw std::runtime_error("this exchange belongs to the process that this one was forked from");
  }
  void end_waits() { __atomic_fetch_or(&mailbox_->end_reasons, kAbortRequest, __ATOMIC_RELEASE); }

  NodeExchangeOptions options_;
  Device device_;
  ExchangeLayout layout_;
  std::unique_ptr<RingMemory> mailbox_memory_;
  std::unique_ptr<RingMemory> notes_;  // stands in for the other ranks' fault reports; nobody reads it
  std::unique_ptr<RingMemory> memory_;
  HostMailbox* mailbox_;
  std::unique_ptr<UcxTransport> transport_;  // moved to ports_ in connect()
  std::string address_;
  std::unique_ptr<ProxyPorts> ports_;
  std::vector<std::string> names_;
  OwnProcess maker_;
  std::mutex call_mutex_;    // serializes calls and what ends them
  NodeExchangeArgs args_{};  // guarded by call_mutex_ after connect()
  std::atomic<bool> has_been_captured_ = false;
  bool is_closed_ = false;  // guarded by call_mutex_
};

}  // namespace llm_comm::host
