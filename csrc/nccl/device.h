// Device functions of the NCCL library, for GPUs (cuda/device.cpp, in the library of CUDA kernels) or emulated GPUs
// (emulated/device.cpp). All functions throw std::runtime_error.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "host/core.h"

namespace llm_comm::nccl {

// The GPU version is in another shared library than its callers.
#pragma GCC visibility push(default)

// True if a real NCCL library can exist that accepts these devices' pointers and streams.
extern const bool kHasRealNccl;
// True if a call returns only after it has ended on all ranks. Communicators of one thread then need threads of their
// own.
extern const bool kCallsAreSynchronous;

struct DeviceInfo {
  std::string name;  // as named in tuning tables
  std::string uuid;  // equal for ranks that share a GPU
  uint32_t sm_count;
  uint32_t max_cluster;
  uint32_t compute_capability;
};

int current_device();
int device_count();
DeviceInfo describe_device(int device);
std::unique_ptr<host::Core> make_core(const host::CoreOptions& options, int device);

// Makes a device current in this thread for a scope.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int previous_;
};

// Runs `step` so that its device calls neither join nor invalidate a stream capture.
void run_in_relaxed_capture_mode(const std::function<void()>& step);

// Enqueues a copy on the stream.
void copy(void* to, const void* from, size_t bytes, uint64_t stream);
void* allocate(size_t bytes);
void release(void* memory);

#pragma GCC visibility pop

}  // namespace llm_comm::nccl
