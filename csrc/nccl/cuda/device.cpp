#include <cuda_runtime_api.h>

#include "host/cuda/driver.h"
#include "nccl/device.h"

namespace llm_comm::nccl {

const bool kHasRealNccl = true;
const bool kCallsAreSynchronous = false;

int current_device() {
  int device = 0;
  host::check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

int device_count() {
  int count = 0;
  host::check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  return count;
}

DeviceInfo describe_device(int device) {
  cudaDeviceProp properties{};
  host::check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  const auto capability = static_cast<uint32_t>(properties.major * 10 + properties.minor);
  return {properties.name, std::string(properties.uuid.bytes, sizeof(properties.uuid.bytes)),
          static_cast<uint32_t>(properties.multiProcessorCount), properties.major >= 9 ? 16u : 1u, capability};
}

std::unique_ptr<host::Core> make_core(const host::CoreOptions& options, int device) {
  return host::make_cuda_core(options, device);
}

CurrentDevice::CurrentDevice(int device) : previous_(current_device()) {
  if (previous_ != device) host::check(cudaSetDevice(device), "cudaSetDevice");
}
CurrentDevice::~CurrentDevice() {
  int now = -1;
  if (cudaGetDevice(&now) == cudaSuccess && now != previous_) cudaSetDevice(previous_);
}

void run_in_relaxed_capture_mode(const std::function<void()>& step) {
  const host::RelaxedCaptureMode relaxed;
  step();
}

void copy(void* to, const void* from, size_t bytes, uint64_t stream) {
  host::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, reinterpret_cast<cudaStream_t>(stream)),
              "cudaMemcpyAsync");
}

void* allocate(size_t bytes) {
  void* memory = nullptr;
  host::check(cudaMalloc(&memory, bytes), "cudaMalloc");
  return memory;
}
void release(void* memory) { host::check(cudaFree(memory), "cudaFree"); }

}  // namespace llm_comm::nccl
