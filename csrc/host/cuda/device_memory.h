// Device memory that other processes can map: VMM with POSIX file descriptors, or cudaMalloc with cudaIpc handles.
#pragma once

#include <string>

#include "host/core.h"
#include "host/cuda/driver.h"

namespace llm_comm::host {

// Memory of this process's device, or a mapping of a peer's. Released when it goes.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(DeviceMemory&& other) noexcept { swap(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~DeviceMemory();

  // Allocates at least `bytes` on `device`.
  static DeviceMemory allocate(int device, uint64_t bytes);      // VMM
  static DeviceMemory allocate_ipc(int device, uint64_t bytes);  // cudaMalloc
  // Maps what export_handle() of a peer's allocation of `bytes` gave, for access by `device`.
  static DeviceMemory map(int device, uint64_t bytes, const WorkspaceHandle& handle);

  // The caller owns the descriptor in the result.
  WorkspaceHandle export_handle() const;
  char* address() const { return address_; }
  uint64_t bytes() const { return bytes_; }  // at least those that were asked for
  // Of memory by VMM; throws std::runtime_error for other memory.
  CUmemGenericAllocationHandle vmm_handle() const;

 private:
  enum class Kind { kNone, kVmm, kMalloc, kIpcMapping };

  void swap(DeviceMemory& other) noexcept;
  void map_vmm();

  Kind kind_ = Kind::kNone;
  int device_ = -1;
  char* address_ = nullptr;
  uint64_t bytes_ = 0;
  CUmemGenericAllocationHandle vmm_ = 0;
  bool has_vmm_ = false;
  bool mapped_ = false;
};

}  // namespace llm_comm::host
