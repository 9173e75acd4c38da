// Host memory that a device maps.
#pragma once

#include "host/proxy.h"

namespace llm_comm::host {

// Registered, not allocated by CUDA: at the end of the process CUDA frees what it has allocated, while a proxy may still look for
// requests.
class RegisteredMemory final : public RingMemory {
 public:
  // Of the current device; zeros. on_device() is nullptr where that cannot map it.
  explicit RegisteredMemory(uint64_t bytes);
  RegisteredMemory(const RegisteredMemory&) = delete;
  RegisteredMemory& operator=(const RegisteredMemory&) = delete;
  ~RegisteredMemory() override;

  char* on_host() const override { return host_; }
  char* on_device() const override { return device_; }

 private:
  uint64_t bytes_;
  int pid_;
  char* host_ = nullptr;
  char* device_ = nullptr;
};

}  // namespace llm_comm::host
