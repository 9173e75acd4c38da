// Proxy transport of emulated GPUs: the proxy accesses their memory directly.
#pragma once

#include <cstring>
#include <memory>

#include "host/anonymous_memory.h"
#include "host/proxy.h"

namespace llm_comm::host {

class MemoryTransport final : public Transport {
 public:
  void begin(uint32_t) override {}
  void put(uint32_t, char* to, const char* from, uint64_t bytes) override { std::memcpy(to, from, bytes); }
  void signal(uint32_t, uint64_t* to, const uint64_t* values, uint32_t count) override {
    for (uint32_t i = 0; i < count; ++i) __atomic_store_n(to + i, values[i], __ATOMIC_RELEASE);
  }
  void notify_local_completion(uint32_t peer, uint64_t* to, const uint64_t* values, uint32_t count) override {
    signal(peer, to, values, count);
  }
  void finish() override {}
};

// Emulated ranks share few CPUs, so their proxies do not spin.
inline Patience emulated_patience() {
  using std::chrono::microseconds;
  return {microseconds(0), microseconds(0), microseconds(200), microseconds(100)};
}

inline std::unique_ptr<Ports> make_emulated_ports() {
  return std::make_unique<ProxyPorts>(std::make_unique<AnonymousMemory>(port_ring_bytes(ProxyPorts::kEntriesLog2)),
                                      std::make_unique<MemoryTransport>(), emulated_patience());
}

}  // namespace llm_comm::host
