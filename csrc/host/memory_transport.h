// The transport of emulated GPUs, whose memory the proxy reaches as they do.
#pragma once

#include <cstring>
#include <memory>
#include <new>

#include "host/proxy.h"

namespace llm_comm::host {

class MemoryTransport final : public Transport {
 public:
  void begin(uint32_t) override {}
  void put(uint32_t, char* to, const char* from, uint64_t bytes) override { std::memcpy(to, from, bytes); }
  void signal(uint32_t, uint64_t* to, const uint64_t* values, uint32_t count) override {
    for (uint32_t i = 0; i < count; ++i) __atomic_store_n(to + i, values[i], __ATOMIC_RELEASE);
  }
  void echo(uint32_t peer, uint64_t* to, const uint64_t* values, uint32_t count) override {
    signal(peer, to, values, count);
  }
  void finish() override {}
};

class HeapRing final : public RingMemory {
 public:
  explicit HeapRing(uint32_t entries_log2)
      : memory_(new (std::align_val_t{alignof(PortRing)}) char[port_ring_bytes(entries_log2)]()) {}
  char* on_host() const override { return memory_.get(); }
  char* on_device() const override { return memory_.get(); }

 private:
  struct Delete {
    void operator()(char* memory) const { operator delete[](memory, std::align_val_t{alignof(PortRing)}); }
  };
  std::unique_ptr<char[], Delete> memory_;
};

// Emulated ranks share few CPUs, so their proxies do not spin.
inline std::unique_ptr<Ports> make_emulated_ports() {
  using std::chrono::microseconds;
  return std::make_unique<ProxyPorts>(std::make_unique<HeapRing>(ProxyPorts::kEntriesLog2),
                                      std::make_unique<MemoryTransport>(),
                                      Patience{microseconds(0), microseconds(0), microseconds(200), microseconds(100)});
}

}  // namespace llm_comm::host
