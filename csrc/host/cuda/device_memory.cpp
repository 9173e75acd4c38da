#include "host/cuda/device_memory.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace llm_comm::host {

namespace {

CUmemAllocationHandleType type_of(Sharing sharing) {
  return sharing == Sharing::kFabric ? CU_MEM_HANDLE_TYPE_FABRIC : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
}

CUmemAllocationProp allocation_properties(int device, CUmemAllocationHandleType type) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  properties.requestedHandleTypes = type;
  return properties;
}

uint64_t round_to_granularity(int device, CUmemAllocationHandleType type, uint64_t bytes) {
  const CUmemAllocationProp properties = allocation_properties(device, type);
  size_t granularity = 0;
  check(Driver::get().mem_get_allocation_granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
        "cuMemGetAllocationGranularity");
  return (bytes + granularity - 1) / granularity * granularity;
}

// check() of a call with handles of `type`. Fabric handles have conditions that the driver's text does not name.
void check_of(CUmemAllocationHandleType type, CUresult error, const char* what) {
  if (error == CUDA_SUCCESS || type != CU_MEM_HANDLE_TYPE_FABRIC) return check(error, what);
  try {
    check(error, what);
  } catch (const std::runtime_error& of_driver) {
    throw std::runtime_error(std::string(of_driver.what()) +
                             ". Fabric handles need a GPU in an NVLink domain, the service nvidia-imex on each of its "
                             "hosts, and a channel in /dev/nvidia-caps-imex-channels that this process may open");
  }
}

template <class Handle>
Handle as(const WorkspaceHandle& handle, const char* name) {
  Handle copy;
  if (handle.bytes.size() != sizeof(copy)) {
    throw std::invalid_argument("a " + std::string(name) + " handle has " + std::to_string(sizeof(copy)) +
                                " bytes, got " + std::to_string(handle.bytes.size()));
  }
  std::memcpy(&copy, handle.bytes.data(), sizeof(copy));
  return copy;
}

}  // namespace

// Memory of kVmm that has addresses alone.
DeviceMemory DeviceMemory::reserved(int device, uint64_t bytes, Sharing sharing) {
  DeviceMemory memory;
  memory.kind_ = Kind::kVmm;
  memory.type_ = type_of(sharing);
  memory.device_ = device;
  memory.bytes_ = round_to_granularity(device, memory.type_, bytes);
  memory.reserve();
  return memory;
}

DeviceMemory DeviceMemory::allocate(int device, uint64_t bytes, Sharing sharing) {
  const DeviceGuard guard(device);
  if (sharing != Sharing::kIpc) {
    DeviceMemory memory = reserved(device, bytes, sharing);
    memory.create_and_map(memory.bytes_);
    return memory;
  }
  void* address = nullptr;
  check(cudaMalloc(&address, bytes), "cudaMalloc");
  DeviceMemory memory;
  memory.kind_ = Kind::kMalloc;
  memory.device_ = device;
  memory.bytes_ = bytes;
  memory.address_ = static_cast<char*>(address);
  return memory;
}

DeviceMemory DeviceMemory::map(int device, uint64_t bytes, Sharing sharing, const WorkspaceHandle& handle) {
  const DeviceGuard guard(device);
  if (sharing != Sharing::kIpc) {
    DeviceMemory memory = reserved(device, bytes, sharing);
    memory.import_and_map(handle);
    return memory;
  }
  const auto ipc = as<cudaIpcMemHandle_t>(handle, "cudaIpc");
  void* address = nullptr;
  check(cudaIpcOpenMemHandle(&address, ipc, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
  DeviceMemory memory;
  memory.kind_ = Kind::kIpcMapping;
  memory.device_ = device;
  memory.bytes_ = bytes;
  memory.address_ = static_cast<char*>(address);
  return memory;
}

WorkspaceHandle DeviceMemory::export_handle() const {
  WorkspaceHandle handle;
  if (kind_ != Kind::kVmm) {
    const DeviceGuard guard(device_);
    cudaIpcMemHandle_t ipc;
    check(cudaIpcGetMemHandle(&ipc, address_), "cudaIpcGetMemHandle");
    handle.bytes.assign(reinterpret_cast<const char*>(&ipc), sizeof(ipc));
    return handle;
  }
  CUmemFabricHandle fabric;
  const bool is_fabric = type_ == CU_MEM_HANDLE_TYPE_FABRIC;
  void* const to = is_fabric ? static_cast<void*>(&fabric) : &handle.fd;
  check_of(type_, Driver::get().mem_export_to_shareable_handle(to, vmm_, type_, 0), "cuMemExportToShareableHandle");
  if (is_fabric) handle.bytes.assign(reinterpret_cast<const char*>(&fabric), sizeof(fabric));
  return handle;
}

CUmemGenericAllocationHandle DeviceMemory::vmm_handle() const {
  if (kind_ != Kind::kVmm)
    throw std::runtime_error("the memory is shared by cudaIpc, which multicast objects do not take");
  return vmm_;
}

void DeviceMemory::vacate() {
  check_vmm("be released");
  const DeviceGuard guard(device_);
  const Driver& driver = Driver::get();
  if (mapped_bytes_ != 0) check(driver.mem_unmap(reinterpret_cast<CUdeviceptr>(address_), mapped_bytes_), "cuMemUnmap");
  mapped_bytes_ = 0;
  if (has_vmm_) check(driver.mem_release(vmm_), "cuMemRelease");
  has_vmm_ = false;
}

void DeviceMemory::vacate_but_first_granule() {
  vacate();
  const DeviceGuard guard(device_);
  create_and_map(round_to_granularity(device_, type_, 1));
}

void DeviceMemory::refill() {
  vacate();
  const DeviceGuard guard(device_);
  create_and_map(bytes_);
}

void DeviceMemory::refill_from_peer(const WorkspaceHandle& handle) {
  vacate();
  const DeviceGuard guard(device_);
  import_and_map(handle);
}

void DeviceMemory::check_vmm(const char* what) const {
  if (kind_ != Kind::kVmm) {
    throw std::runtime_error(std::string("the memory is shared by cudaIpc, which cannot ") + what +
                             " and keep its addresses");
  }
}

void DeviceMemory::reserve() {
  CUdeviceptr address = 0;
  check(Driver::get().mem_address_reserve(&address, bytes_, 0, 0, 0), "cuMemAddressReserve");
  address_ = reinterpret_cast<char*>(address);
}

void DeviceMemory::create_and_map(uint64_t bytes) {
  const CUmemAllocationProp properties = allocation_properties(device_, type_);
  check_of(type_, Driver::get().mem_create(&vmm_, bytes, &properties, 0), "cuMemCreate");
  has_vmm_ = true;
  map_vmm(bytes);
}

void DeviceMemory::import_and_map(const WorkspaceHandle& handle) {
  void* from = reinterpret_cast<void*>(static_cast<uintptr_t>(handle.fd));
  CUmemFabricHandle fabric;
  if (type_ == CU_MEM_HANDLE_TYPE_FABRIC) {
    fabric = as<CUmemFabricHandle>(handle, "fabric");
    from = &fabric;
  }
  check_of(type_, Driver::get().mem_import_from_shareable_handle(&vmm_, from, type_), "cuMemImportFromShareableHandle");
  has_vmm_ = true;
  map_vmm(bytes_);
}

void DeviceMemory::map_vmm(uint64_t bytes) {
  const Driver& driver = Driver::get();
  const auto address = reinterpret_cast<CUdeviceptr>(address_);
  check(driver.mem_map(address, bytes, 0, vmm_, 0), "cuMemMap");
  mapped_bytes_ = bytes;
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device_;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  check(driver.mem_set_access(address, bytes, &access, 1), "cuMemSetAccess");
}

// Errors are ignored: at process exit the driver, and with it the memory, may be gone.
DeviceMemory::~DeviceMemory() {
  switch (kind_) {
    case Kind::kNone:
      return;
    case Kind::kMalloc:
      cudaFree(address_);
      return;
    case Kind::kIpcMapping:
      cudaIpcCloseMemHandle(address_);
      return;
    case Kind::kVmm:
      break;
  }
  const Driver& driver = Driver::get();
  const auto address = reinterpret_cast<CUdeviceptr>(address_);
  if (mapped_bytes_ != 0) driver.mem_unmap(address, mapped_bytes_);
  if (address_ != nullptr) driver.mem_address_free(address, bytes_);
  if (has_vmm_) driver.mem_release(vmm_);
}

void DeviceMemory::swap(DeviceMemory& other) noexcept {
  std::swap(kind_, other.kind_);
  std::swap(type_, other.type_);
  std::swap(device_, other.device_);
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  std::swap(vmm_, other.vmm_);
  std::swap(has_vmm_, other.has_vmm_);
  std::swap(mapped_bytes_, other.mapped_bytes_);
}

}  // namespace llm_comm::host
