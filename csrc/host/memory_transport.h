// The transport of emulated GPUs, whose memory the proxy reaches as they do.
#pragma once

#include <sys/mman.h>

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

// Memory of this process alone; pages take memory that are written.
class AnonymousMemory final : public RingMemory {
 public:
  explicit AnonymousMemory(uint64_t bytes) : bytes_(bytes) {
    void* const address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) throw std::bad_alloc();
    address_ = static_cast<char*>(address);
  }
  AnonymousMemory(const AnonymousMemory&) = delete;
  AnonymousMemory& operator=(const AnonymousMemory&) = delete;
  ~AnonymousMemory() override { munmap(address_, bytes_); }
  char* on_host() const override { return address_; }
  char* on_device() const override { return address_; }

 private:
  uint64_t bytes_;
  char* address_ = nullptr;
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
