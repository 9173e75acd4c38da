// RegisteredMemory: host memory that a device maps, for request rings and the staging memory of NodeExchange.
#pragma once

#include "host/anonymous_memory.h"
#include "host/own_process.h"

namespace llm_comm::host {

// Registered instead of allocated by CUDA: CUDA frees its own allocations at process exit, while a proxy may still
// poll.
class RegisteredMemory final : public RingMemory {
 public:
  // Zeroed, and registered with the current device. on_device() is nullptr if the device cannot map it.
  explicit RegisteredMemory(uint64_t bytes);
  RegisteredMemory(const RegisteredMemory&) = delete;
  RegisteredMemory& operator=(const RegisteredMemory&) = delete;
  ~RegisteredMemory() override;

  char* on_host() const override { return memory_.on_host(); }
  char* on_device() const override { return device_; }

 private:
  AnonymousMemory memory_;
  OwnProcess maker_;
  char* device_ = nullptr;
};

}  // namespace llm_comm::host
