#include "host/cuda/registered_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

#include "host/cuda/driver.h"

namespace llm_comm::host {

RegisteredMemory::RegisteredMemory(uint64_t bytes) : bytes_(bytes), pid_(getpid()) {
  void* const address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) throw std::bad_alloc();
  host_ = static_cast<char*>(address);
  void* device = nullptr;
  if (cudaHostRegister(address, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable) == cudaSuccess &&
      cudaHostGetDevicePointer(&device, address, 0) == cudaSuccess) {
    device_ = static_cast<char*>(device);
  } else {
    cudaGetLastError();  // whoever needs it says so
  }
}

// In a fork nothing is registered, and CUDA is of no use.
RegisteredMemory::~RegisteredMemory() {
  if (device_ != nullptr && getpid() == pid_) {
    const BesideCaptures beside;
    cudaHostUnregister(host_);
  }
  munmap(host_, bytes_);
}

}  // namespace llm_comm::host
