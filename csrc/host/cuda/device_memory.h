// DeviceMemory: device memory that other processes can map, by VMM with POSIX file descriptors or fabric handles, or by
// cudaMalloc with cudaIpc handles. Used for workspaces and registered windows.
#pragma once

#include "host/core.h"
#include "host/cuda/driver.h"

namespace llm_comm::host {

// Memory of this process's device, or a mapping of a peer's. Freed or unmapped by the destructor.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(DeviceMemory&& other) noexcept { swap(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~DeviceMemory();

  // Allocates at least `bytes` on `device`: by cudaMalloc for kIpc, else by VMM.
  static DeviceMemory allocate(int device, uint64_t bytes, Sharing sharing);
  // Maps a peer's allocation of `bytes`, given the result of its export_handle(), for access by `device`.
  static DeviceMemory map(int device, uint64_t bytes, Sharing sharing, const WorkspaceHandle& handle);

  // The caller owns the descriptor in the result.
  WorkspaceHandle export_handle() const;
  char* address() const { return address_; }
  uint64_t bytes() const { return bytes_; }  // at least the requested size
  // For VMM memory only; throw std::runtime_error for other memory before they change anything. They replace the
  // physical memory and keep the addresses, which graphs and prepared calls hold.
  void vacate();                                         // the addresses have no memory
  void vacate_but_first_granule();                       // the first granule gets new private memory
  void refill();                                         // new memory of this device, as allocate()
  void refill_from_peer(const WorkspaceHandle& handle);  // as map()
  // For VMM memory only; throws std::runtime_error for other memory.
  CUmemGenericAllocationHandle vmm_handle() const;

 private:
  enum class Kind { kNone, kVmm, kMalloc, kIpcMapping };

  static DeviceMemory reserved(int device, uint64_t bytes, Sharing sharing);

  void swap(DeviceMemory& other) noexcept;
  void check_vmm(const char* what) const;
  void reserve();
  void create_and_map(uint64_t bytes);
  void import_and_map(const WorkspaceHandle& handle);
  void map_vmm(uint64_t bytes);

  Kind kind_ = Kind::kNone;
  CUmemAllocationHandleType type_ = CU_MEM_HANDLE_TYPE_NONE;  // of VMM memory
  int device_ = -1;
  char* address_ = nullptr;
  uint64_t bytes_ = 0;
  CUmemGenericAllocationHandle vmm_ = 0;
  bool has_vmm_ = false;
  uint64_t mapped_bytes_ = 0;
};

}  // namespace llm_comm::host
