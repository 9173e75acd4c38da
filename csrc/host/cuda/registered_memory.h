// Host memory that a device maps.
#pragma once

#include "host/anonymous_memory.h"
#include "host/own_process.h"

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

  char* on_host() const override { return memory_.on_host(); }
  char* on_device() const override { return device_; }

 private:
  AnonymousMemory memory_;
  OwnProcess maker_;
  char* device_ = nullptr;
};

}  // namespace llm_comm::host
