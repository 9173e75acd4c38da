#include "host/cuda/registered_memory.h"

#include "host/cuda/driver.h"

namespace llm_comm::host {

RegisteredMemory::RegisteredMemory(uint64_t bytes) : memory_(bytes) {
  void* device = nullptr;
  if (cudaHostRegister(on_host(), bytes, cudaHostRegisterMapped | cudaHostRegisterPortable) == cudaSuccess &&
      cudaHostGetDevicePointer(&device, on_host(), 0) == cudaSuccess) {
    device_ = static_cast<char*>(device);
  } else {
    cudaGetLastError();  // whoever needs it says so
  }
}

// In a fork nothing is registered, and CUDA is of no use.
RegisteredMemory::~RegisteredMemory() {
  if (device_ == nullptr || !maker_.is_this()) return;
  const BesideCaptures beside;
  cudaHostUnregister(on_host());
}

}  // namespace llm_comm::host
