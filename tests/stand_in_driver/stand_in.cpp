// A driver that is none: the functions that host/cuda/multicast_memory.cpp takes, for ranks that all live in one process. It
// records calls and refuses what CUDA's documentation does not allow. What `stand_in_fail` names fails.
#include <cuda.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <string>

#include "rule.h"

#if defined(cuMulticastBindMem) || defined(cuDeviceGet)
#error "the driver's header gives functions other names"
#endif

namespace {

constexpr size_t kGranularity = 2 << 20;
constexpr CUdeviceptr kFirstAddress = 1ULL << 40;

struct Object {
  CUmulticastObjectProp properties{};
  std::set<CUdevice> devices;
  std::map<CUdevice, size_t> bound;
  int references = 0;
};
struct Range {
  size_t bytes = 0;
  bool is_mapped = false;
};

std::map<CUmemGenericAllocationHandle, Object> objects;
std::map<CUdeviceptr, Range> ranges;
std::string failing;
bool has_multicast = true;
CUdevice current = 0;

bool is_aligned(uint64_t value) { return value % kGranularity == 0; }

CUresult call(const char* name) {
  std::printf("%d %s\n", current, name);
  return failing == name ? CUDA_ERROR_SYSTEM_NOT_READY : CUDA_SUCCESS;
}

}  // namespace

extern "C" {

// ---- For the program that drives the test ----

void stand_in_rank(int rank) { current = rank; }
void stand_in_fail(const char* name) { failing = name; }
void stand_in_without_multicast() { has_multicast = false; }
// What is left when all is dropped.
int stand_in_leaked() {
  int left = static_cast<int>(objects.size() + ranges.size());
  return left;
}

// ---- The driver ----

CUresult CUDAAPI cuGetErrorString(CUresult, const char** text) {
  *text = "the stand-in fails here";
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return call("cuDeviceGet");
}

CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  rule(attribute == CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, "another attribute");
  *value = has_multicast ? 1 : 0;
  return call("cuDeviceGetAttribute");
}

CUresult CUDAAPI cuMulticastGetGranularity(size_t* granularity, const CUmulticastObjectProp* of,
                                           CUmulticastGranularity_flags) {
  rule(of->numDevices >= 2 && of->flags == 0, "properties of the object");
  *granularity = kGranularity;
  return call("cuMulticastGetGranularity");
}

CUresult CUDAAPI cuMulticastCreate(CUmemGenericAllocationHandle* handle, const CUmulticastObjectProp* of) {
  const CUresult result = call("cuMulticastCreate");
  if (result != CUDA_SUCCESS) return result;
  rule(is_aligned(of->size) && of->size > 0, "D2: the size is a multiple of the granularity");
  rule(of->handleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && of->flags == 0, "D2: kinds of handles");
  *handle = 71;
  objects[*handle].properties = *of;
  objects[*handle].references = 1;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemExportToShareableHandle(void* fd, CUmemGenericAllocationHandle handle,
                                              CUmemAllocationHandleType type, unsigned long long flags) {
  rule(objects.count(handle) != 0 && flags == 0, "D3: an object is exported");
  rule(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, "D3: as a descriptor");
  const CUresult result = call("cuMemExportToShareableHandle");
  if (result == CUDA_SUCCESS) *static_cast<int*>(fd) = static_cast<int>(handle) + 1000;
  return result;
}

CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* fd,
                                                CUmemAllocationHandleType) {
  const CUresult result = call("cuMemImportFromShareableHandle");
  if (result != CUDA_SUCCESS) return result;
  *handle = reinterpret_cast<uintptr_t>(fd) - 1000;
  rule(objects.count(*handle) != 0, "D3: a handle that was exported");
  ++objects[*handle].references;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device) {
  const CUresult result = call("cuMulticastAddDevice");
  if (result != CUDA_SUCCESS) return result;
  Object& object = objects.at(handle);
  rule(object.devices.insert(device).second, "D4: a device is added once");
  rule(object.devices.size() <= object.properties.numDevices, "D4: the team has numDevices");
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMulticastBindMem(CUmemGenericAllocationHandle handle, size_t offset,
                                    CUmemGenericAllocationHandle memory, size_t memory_offset, size_t bytes,
                                    unsigned long long flags) {
  const CUresult result = call("cuMulticastBindMem");
  if (result != CUDA_SUCCESS) return result;
  Object& object = objects.at(handle);
  rule(object.devices.size() == object.properties.numDevices, "D4: all devices are added before the first bind");
  rule(offset == 0 && memory_offset == 0 && flags == 0 && is_aligned(bytes), "D5: offsets and size");
  rule(bytes <= object.properties.size && memory != 0, "D5: within the object");
  rule(object.bound.emplace(current, bytes).second, "D5: bound once");
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr hint,
                                     unsigned long long flags) {
  const CUresult result = call("cuMemAddressReserve");
  if (result != CUDA_SUCCESS) return result;
  rule(is_aligned(alignment) && hint == 0 && flags == 0, "D6: aligned to the granularity");
  *address = kFirstAddress + (ranges.size() << 30);
  while (ranges.count(*address) != 0) *address += 1ULL << 30;
  ranges[*address].bytes = bytes;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                          unsigned long long flags) {
  const CUresult result = call("cuMemMap");
  if (result != CUDA_SUCCESS) return result;
  Object& object = objects.at(handle);
  rule(object.devices.size() == object.properties.numDevices, "D4: all devices are added before the object is mapped");
  rule(is_aligned(address) && is_aligned(bytes) && offset == 0 && flags == 0, "D6: alignment");
  rule(ranges.at(address).bytes == bytes && !ranges.at(address).is_mapped, "D6: of a range that is free");
  ranges[address].is_mapped = true;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count) {
  const CUresult result = call("cuMemSetAccess");
  if (result != CUDA_SUCCESS) return result;
  rule(ranges.at(address).is_mapped && ranges.at(address).bytes == bytes, "D6: of the mapping");
  rule(count == 1 && access->location.type == CU_MEM_LOCATION_TYPE_DEVICE && access->location.id == current &&
           access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
       "D6: for this device");
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr address, size_t bytes) {
  rule(ranges.at(address).is_mapped && ranges.at(address).bytes == bytes, "D8: the size of the mapping");
  ranges[address].is_mapped = false;
  return call("cuMemUnmap");
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  rule(!ranges.at(address).is_mapped && ranges.at(address).bytes == bytes, "D8: the range, when it is unmapped");
  ranges.erase(address);
  return call("cuMemAddressFree");
}

CUresult CUDAAPI cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device, size_t offset, size_t bytes) {
  Object& object = objects.at(handle);
  rule(offset == 0 && object.bound.count(device) != 0 && object.bound[device] == bytes, "D8: as it was bound");
  object.bound.erase(device);
  return call("cuMulticastUnbind");
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
  Object& object = objects.at(handle);
  rule(object.references > 0 && object.bound.count(current) == 0, "D8: unbound before it is released");
  if (--object.references == 0) objects.erase(handle);
  return call("cuMemRelease");
}
}
