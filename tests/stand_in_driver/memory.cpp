// DeviceMemory (host/cuda/device_memory.cpp) of several ranks in one process, with a stand-in for the driver that knows
// memory objects, their handles and address ranges. Arguments: descriptor or fabric; a function that fails, if any.
#include <cuda.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/cuda/device_memory.h"
#include "rule.h"

using llm_comm::host::DeviceMemory;
using llm_comm::host::Sharing;
using llm_comm::host::WorkspaceHandle;

namespace {

constexpr size_t kGranularity = 2 << 20;

struct Object {
  int references = 0;
  CUmemAllocationHandleType type = CU_MEM_HANDLE_TYPE_NONE;
};

std::map<CUmemGenericAllocationHandle, Object> objects;
std::map<CUdeviceptr, bool> is_mapped;
std::string failing;
CUmemGenericAllocationHandle last_object = 70;
CUdeviceptr last_address = 1ULL << 40;

CUresult call(const char* name) { return failing == name ? CUDA_ERROR_NOT_PERMITTED : CUDA_SUCCESS; }

CUresult get_granularity(size_t* granularity, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *granularity = kGranularity;
  return call("cuMemGetAllocationGranularity");
}
CUresult create(CUmemGenericAllocationHandle* object, size_t bytes, const CUmemAllocationProp* of, unsigned long long) {
  if (call("cuMemCreate") != CUDA_SUCCESS) return call("cuMemCreate");
  rule(bytes > 0 && bytes % kGranularity == 0, "whole granules");
  *object = ++last_object;
  objects[*object] = {1, of->requestedHandleTypes};
  return CUDA_SUCCESS;
}
CUresult release(CUmemGenericAllocationHandle object) {
  rule(objects.count(object) != 0, "an object is released once");
  if (--objects[object].references == 0) objects.erase(object);
  return CUDA_SUCCESS;
}
CUresult export_handle(void* to, CUmemGenericAllocationHandle object, CUmemAllocationHandleType type,
                       unsigned long long) {
  rule(objects.at(object).type == type, "exported as it was created");
  if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
    CUmemFabricHandle handle{};
    std::memcpy(handle.data, &object, sizeof(object));
    std::memcpy(to, &handle, sizeof(handle));
  } else {
    *static_cast<int*>(to) = static_cast<int>(object) + 1000;
  }
  return call("cuMemExportToShareableHandle");
}
CUresult import_handle(CUmemGenericAllocationHandle* object, void* from, CUmemAllocationHandleType type) {
  if (call("cuMemImportFromShareableHandle") != CUDA_SUCCESS) return call("cuMemImportFromShareableHandle");
  if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
    std::memcpy(object, static_cast<CUmemFabricHandle*>(from)->data, sizeof(*object));
  } else {
    *object = reinterpret_cast<uintptr_t>(from) - 1000;
  }
  rule(objects.count(*object) != 0 && objects[*object].type == type, "a handle that was exported, of its type");
  ++objects[*object].references;
  return CUDA_SUCCESS;
}
CUresult reserve(CUdeviceptr* address, size_t, size_t, CUdeviceptr, unsigned long long) {
  if (call("cuMemAddressReserve") != CUDA_SUCCESS) return call("cuMemAddressReserve");
  *address = last_address += 1ULL << 30;
  is_mapped[*address] = false;
  return CUDA_SUCCESS;
}
CUresult free_addresses(CUdeviceptr address, size_t) {
  rule(is_mapped.count(address) != 0 && !is_mapped[address], "addresses are freed when nothing is mapped");
  is_mapped.erase(address);
  return CUDA_SUCCESS;
}
CUresult map(CUdeviceptr address, size_t, size_t, CUmemGenericAllocationHandle object, unsigned long long) {
  if (call("cuMemMap") != CUDA_SUCCESS) return call("cuMemMap");
  rule(objects.count(object) != 0 && !is_mapped.at(address), "an object is mapped where nothing is");
  is_mapped[address] = true;
  return CUDA_SUCCESS;
}
CUresult unmap(CUdeviceptr address, size_t) {
  rule(is_mapped.at(address), "what is mapped is unmapped");
  is_mapped[address] = false;
  return CUDA_SUCCESS;
}
CUresult set_access(CUdeviceptr address, size_t, const CUmemAccessDesc*, size_t) {
  rule(is_mapped.at(address), "access to what is mapped");
  return call("cuMemSetAccess");
}

}  // namespace

// ---- What device_memory.cpp takes of driver.cpp and of the runtime ----

namespace llm_comm::host {

const Driver& Driver::get() {
  static const Driver driver = [] {
    Driver found{};
    found.mem_get_allocation_granularity = get_granularity;
    found.mem_create = create;
    found.mem_release = release;
    found.mem_export_to_shareable_handle = export_handle;
    found.mem_import_from_shareable_handle = import_handle;
    found.mem_address_reserve = reserve;
    found.mem_address_free = free_addresses;
    found.mem_map = map;
    found.mem_unmap = unmap;
    found.mem_set_access = set_access;
    return found;
  }();
  return driver;
}

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(what);
}
void check(CUresult error, const char* what) {
  if (error != CUDA_SUCCESS) throw std::runtime_error(std::string(what) + ": error " + std::to_string(error));
}

DeviceGuard::DeviceGuard(int) {}
DeviceGuard::~DeviceGuard() = default;

}  // namespace llm_comm::host

cudaError_t cudaMalloc(void**, size_t) { return cudaErrorNotSupported; }
cudaError_t cudaFree(void*) { return cudaSuccess; }
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return cudaErrorNotSupported; }
cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return cudaErrorNotSupported; }
cudaError_t cudaIpcCloseMemHandle(void*) { return cudaSuccess; }

namespace {

constexpr int kRanks = 3;
constexpr uint64_t kBytes = 5 << 20;

void share(Sharing sharing) {
  std::vector<DeviceMemory> own;
  std::vector<WorkspaceHandle> handles;
  for (int rank = 0; rank < kRanks; ++rank) {
    own.push_back(DeviceMemory::allocate(rank, kBytes, sharing));
    handles.push_back(own.back().export_handle());
    std::printf("HANDLE fd %s, %zu bytes\n", handles.back().fd >= 0 ? "yes" : "no", handles.back().bytes.size());
  }
  std::vector<DeviceMemory> mapped;
  for (int rank = 1; rank < kRanks; ++rank) mapped.push_back(DeviceMemory::map(0, kBytes, sharing, handles[rank]));
  const char* const before = own[1].address();
  own[1].vacate_but_first_granule();
  for (DeviceMemory& memory : mapped) memory.vacate();
  own[1].refill();
  mapped[0].refill_from_peer(own[1].export_handle());
  std::printf("SHARED %s\n", own[1].address() == before ? "at the same addresses" : "elsewhere");
}

}  // namespace

int main(int argc, char** argv) {
  const Sharing sharing = std::string(argv[1]) == "fabric" ? Sharing::kFabric : Sharing::kDescriptor;
  if (argc > 2) failing = argv[2];
  try {
    if (failing == "short handle") {
      DeviceMemory::map(0, kBytes, sharing, {-1, "short"});
    } else {
      share(sharing);
    }
  } catch (const std::exception& error) {
    std::printf("FAILED %s\n", error.what());
  }
  std::printf("LEFT %zu objects, %zu ranges\n", objects.size(), is_mapped.size());
  return 0;
}
