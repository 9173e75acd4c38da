// What the library asks of its GPUs, or of emulated ones: cuda/device.cpp, which is in the library of CUDA kernels, and
// emulated/device.cpp.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "host/core.h"

namespace llm_comm::nccl {

// Those of GPUs are in another library than what asks for them.
#pragma GCC visibility push(default)

// Whether there may be an NCCL library that takes these devices' pointers and streams.
extern const bool kHasRealNccl;
// Whether a call returns only when it has ended on all ranks: then communicators of one thread need threads of their own.
extern const bool kCallsAreSynchronous;

struct DeviceInfo {
  std::string name;  // as tuning tables have it
  std::string uuid;  // the same for all ranks that use one GPU
  uint32_t sm_count;
  uint32_t max_cluster;
  uint32_t compute_capability;
};

int current_device();
int device_count();
DeviceInfo describe_device(int device);
std::unique_ptr<host::Core> make_core(const host::CoreOptions& options, int device);

// For a scope, in this thread.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int previous_;
};

// What `step` asks of the device is no part of a capture, and ends none, whichever stream is captured.
void run_beside_captures(const std::function<void()>& step);

// Behind what the stream holds.
void copy(void* to, const void* from, size_t bytes, uint64_t stream);
void* allocate(size_t bytes);
void release(void* memory);

#pragma GCC visibility pop

// All throw std::runtime_error.
}  // namespace llm_comm::nccl
