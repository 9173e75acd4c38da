#include "host/cuda/registered_memory.h"

#include "host/cuda/driver.h"

namespace llm_comm::host {

RegisteredMemory::RegisteredMemory(uint64_t bytes) : memory_(bytes) {
  void* device = nullptr;
  if (cudaHostRegister(on_host(), bytes, cudaHostRegisterMapped | cudaHostRegisterPortable) == cudaSuccess &&
      cudaHostGetDevicePointer(&device, on_host(), 0) == cudaSuccess) {
    device_ = static_cast<char*>(device);
  } else {
    cudaGetLastError();  // clears the error; users of on_device() report it
  }
}

// In a forked child nothing is registered, and CUDA cannot be used.
RegisteredMemory::~RegisteredMemory() {
  if (device_ == nullptr || !maker_.is_this()) return;
  const RelaxedCaptureMode relaxed;
  cudaHostUnregister(on_host());
}

}  // namespace llm_comm::host
