// Zeroed memory of one process: request rings and mailboxes. Emulated devices use it as it is; CUDA devices register it
// (cuda/registered_memory.h).
#pragma once

#include <sys/mman.h>

#include <new>

#include "host/proxy.h"

namespace llm_comm::host {

// Pages use physical memory only after they are written.
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

}  // namespace llm_comm::host
