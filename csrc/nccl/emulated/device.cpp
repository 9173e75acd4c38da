// Emulated GPUs: host memory; streams are ignored.
#include <cstdlib>
#include <cstring>
#include <new>

#include "nccl/device.h"

namespace llm_comm::nccl {

const bool kHasRealNccl = false;
const bool kCallsAreSynchronous = true;

namespace {
constexpr int kDevices = 8;
thread_local int device_of_thread = 0;
}  // namespace

int current_device() { return device_of_thread; }
int device_count() { return kDevices; }
DeviceInfo describe_device(int) { return {"emulated", "", 4, 16, 0}; }

std::unique_ptr<host::Core> make_core(const host::CoreOptions& options, int) {
  return host::make_emulated_core(options);
}

CurrentDevice::CurrentDevice(int device) : previous_(device_of_thread) { device_of_thread = device; }
CurrentDevice::~CurrentDevice() { device_of_thread = previous_; }

void run_in_relaxed_capture_mode(const std::function<void()>& step) { step(); }

void copy(void* to, const void* from, size_t bytes, uint64_t) { std::memmove(to, from, bytes); }

void* allocate(size_t bytes) {
  constexpr size_t kAlignment = 4096;
  void* const memory = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void release(void* memory) { std::free(memory); }

}  // namespace llm_comm::nccl
