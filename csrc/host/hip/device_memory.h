// DeviceMemory: uncached memory of an AMD GPU that other processes can map. Used for workspaces and registered windows.
//
// Memory of every kind is uncached: no cache of a GPU keeps a line of it, whoever writes it. The loads and stores of
// platform_hip.cuh go past the caches by bits of their own, but plain accesses of the same lines do not. Kinds:
//
//   kIpc         hipExtMallocWithFlags(hipDeviceMallocUncached), shared by hipIpc handles.
//   kDescriptor  Virtual memory, hipMemCreate(hipMemAllocationTypeUncached), shared by file descriptors. The only kind
//                that can be released while its addresses stay reserved. Needs ROCm 7.1: an earlier
//                hipMemImportFromShareableHandle() expects a pointer to the descriptor instead of its value.
//   kFabric      Not supported: HIP 7.1 has no fabric handles.
#pragma once

#include <cstring>

#include "host/core.h"
#include "host/hip/runtime.h"

namespace llm_comm::host::amd {

// Memory of this process's device, or a mapping of a peer's. Freed or unmapped by the destructor, in any thread. All
// other functions need the device to be current.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(DeviceMemory&& other) noexcept : state_(std::exchange(other.state_, {})) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(state_, other.state_);
    return *this;
  }

  // Errors are ignored: at process exit the runtime, and with it the memory, may be gone.
  ~DeviceMemory() {
    if (state_.kind == Kind::kNone) return;
    try {
      const DeviceScope scope(state_.device);
      if (state_.kind == Kind::kMalloc) static_cast<void>(hipFree(state_.address));
      if (state_.kind == Kind::kIpcMapping) static_cast<void>(hipIpcCloseMemHandle(state_.address));
      if (state_.kind != Kind::kVirtual) return;
      if (state_.mapped_bytes != 0) static_cast<void>(hipMemUnmap(state_.address, state_.mapped_bytes));
      static_cast<void>(hipMemAddressFree(state_.address, state_.bytes));
      if (state_.physical != nullptr) static_cast<void>(hipMemRelease(state_.physical));
    } catch (const std::exception&) {
    }
  }

  // Allocates at least `bytes` on `device`.
  static DeviceMemory allocate(int device, uint64_t bytes, Sharing sharing) {
    DeviceMemory memory;
    if (sharing == Sharing::kIpc) {
      check(hipExtMallocWithFlags(&memory.state_.address, bytes, hipDeviceMallocUncached), "hipExtMallocWithFlags");
      memory.state_.kind = Kind::kMalloc;
      memory.state_.device = device;
    } else {
      memory.reserve(device, bytes, sharing);
      memory.fill();
    }
    return memory;
  }

  // Maps a peer's allocation of `bytes`, given the result of its export_handle(), for access by `device`.
  static DeviceMemory map(int device, uint64_t bytes, Sharing sharing, const WorkspaceHandle& handle) {
    DeviceMemory memory;
    if (sharing == Sharing::kIpc) {
      hipIpcMemHandle_t ipc;
      if (handle.bytes.size() != sizeof(ipc)) {
        throw std::invalid_argument("a hipIpc handle has " + std::to_string(sizeof(ipc)) + " bytes, got " +
                                    std::to_string(handle.bytes.size()));
      }
      std::memcpy(&ipc, handle.bytes.data(), sizeof(ipc));
      check(hipIpcOpenMemHandle(&memory.state_.address, ipc, hipIpcMemLazyEnablePeerAccess), "hipIpcOpenMemHandle");
      memory.state_.kind = Kind::kIpcMapping;
      memory.state_.device = device;
    } else {
      memory.reserve(device, bytes, sharing);
      memory.fill_from_peer(handle);
    }
    return memory;
  }

  char* address() const { return static_cast<char*>(state_.address); }

  // The caller owns the descriptor in the result.
  WorkspaceHandle export_handle() const {
    WorkspaceHandle handle;
    if (state_.kind == Kind::kVirtual) {
      check(hipMemExportToShareableHandle(&handle.fd, state_.physical, kHandleType, 0),
            "hipMemExportToShareableHandle");
      return handle;
    }
    hipIpcMemHandle_t ipc;
    check(hipIpcGetMemHandle(&ipc, state_.address), "hipIpcGetMemHandle");
    handle.bytes.assign(reinterpret_cast<const char*>(&ipc), sizeof(ipc));
    return handle;
  }

  // The next functions replace virtual memory and keep its addresses, which graphs and prepared calls hold. Throw
  // std::runtime_error for hipIpc memory before they change anything.

  // Leaves the addresses without memory.
  void vacate() {
    if (state_.kind != Kind::kVirtual) {
      throw std::runtime_error("the memory is shared by hipIpc, which cannot release it and keep its addresses");
    }
    if (state_.mapped_bytes != 0) check(hipMemUnmap(state_.address, state_.mapped_bytes), "hipMemUnmap");
    state_.mapped_bytes = 0;
    if (state_.physical != nullptr) check(hipMemRelease(state_.physical), "hipMemRelease");
    state_.physical = nullptr;
  }
  // New memory of this device for at least the first `bytes`; by default for all addresses.
  void fill(uint64_t bytes) {
    vacate();
    const hipMemAllocationProp of = properties(state_.device);
    bytes = rounded(of, bytes);
    check(hipMemCreate(&state_.physical, bytes, &of, 0), "hipMemCreate");
    map_physical(bytes);
  }
  void fill() { fill(state_.bytes); }
  // Memory of a peer, given the result of its export_handle().
  void fill_from_peer(const WorkspaceHandle& handle) {
    vacate();
    void* const descriptor = reinterpret_cast<void*>(static_cast<uintptr_t>(handle.fd));
    check(hipMemImportFromShareableHandle(&state_.physical, descriptor, kHandleType),
          "hipMemImportFromShareableHandle");
    map_physical(state_.bytes);
  }

 private:
  enum class Kind { kNone, kMalloc, kIpcMapping, kVirtual };
  static constexpr hipMemAllocationHandleType kHandleType = hipMemHandleTypePosixFileDescriptor;
  static constexpr int kOldestVersion = 70100000;  // of HIP, for kDescriptor: 7.1

  static hipMemAllocationProp properties(int device) {
    hipMemAllocationProp properties{};
    properties.type = hipMemAllocationTypeUncached;
    properties.requestedHandleType = kHandleType;
    properties.location.type = hipMemLocationTypeDevice;
    properties.location.id = device;
    return properties;
  }

  static uint64_t rounded(const hipMemAllocationProp& of, uint64_t bytes) {
    size_t granularity = 0;
    check(hipMemGetAllocationGranularity(&granularity, &of, hipMemAllocationGranularityMinimum),
          "hipMemGetAllocationGranularity");
    return (bytes + granularity - 1) / granularity * granularity;
  }

  // Reserves addresses without memory.
  void reserve(int device, uint64_t bytes, Sharing sharing) {
    if (sharing == Sharing::kFabric) throw std::invalid_argument("fabric handles are not supported on AMD GPUs");
    int version = 0;
    check(hipRuntimeGetVersion(&version), "hipRuntimeGetVersion");
    if (version < kOldestVersion) {
      throw std::runtime_error("sharing memory by file descriptors needs HIP 7.1, this is version " +
                               std::to_string(version) + ": use hipIpc");
    }
    state_.bytes = rounded(properties(device), bytes);
    check(hipMemAddressReserve(&state_.address, state_.bytes, 0, nullptr, 0), "hipMemAddressReserve");
    state_.kind = Kind::kVirtual;
    state_.device = device;
  }

  void map_physical(uint64_t bytes) {
    check(hipMemMap(state_.address, bytes, 0, state_.physical, 0), "hipMemMap");
    state_.mapped_bytes = bytes;
    const hipMemAccessDesc access{properties(state_.device).location, hipMemAccessFlagsProtReadWrite};
    check(hipMemSetAccess(state_.address, bytes, &access, 1), "hipMemSetAccess");
  }

  struct State {
    Kind kind = Kind::kNone;
    int device = -1;
    void* address = nullptr;
    uint64_t bytes = 0;  // of the reserved addresses of kVirtual
    uint64_t mapped_bytes = 0;
    hipMemGenericAllocationHandle_t physical = nullptr;
  };
  State state_;
};

}  // namespace llm_comm::host::amd
