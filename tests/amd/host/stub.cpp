// Stub of the HIP runtime over host memory, for one thread. Streams execute at once. Memory lies in files without a
// name, so a peer's mapping has another address than the memory itself. Calls that the documentation of HIP forbids are
// noted as misuse.
#include "stub.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <set>

struct ihipStream_t {
  bool is_captured = false;
};
struct ihipEvent_t {
  bool is_captured = false;
};
struct ihipGraph {};

namespace stub {

namespace {

constexpr uint64_t kGranularity = 2 << 20;

struct Physical {
  int fd;
  uint64_t bytes;
  int holders;  // its owner and its mappings
};

struct Range {
  uint64_t bytes;
  Physical* physical = nullptr;  // virtual memory that is mapped
  uint64_t mapped_bytes = 0;
};

int device = 0;
hipStreamCaptureMode mode = hipStreamCaptureModeGlobal;
hipError_t last_error = hipSuccess;
std::map<std::string, std::map<void*, Range>> live;  // kind -> address
std::set<hipStream_t> captured;                      // the first is the origin

// Names of kernels by host stub. Constructors of other translation units register them.
std::map<const void*, std::string>& kernels() {
  static std::map<const void*, std::string> all;
  return all;
}

void note_misuse(const std::string& what) { state().misuse.push_back(what); }

hipError_t fail(hipError_t error) { return last_error = error; }

// True if this call must fail. `is_unsafe`: the call invalidates captures unless the thread's mode is relaxed.
bool fails(const char* name, bool is_unsafe = false) {
  State& all = state();
  all.calls.emplace_back(name);
  if (is_unsafe && !captured.empty() && mode != hipStreamCaptureModeRelaxed) {
    note_misuse(std::string(name) + " during a capture");
  }
  return all.calls.size() == all.failing_call;
}

bool remove(const char* kind, void* address) {
  if (live[kind].erase(address) != 0) return true;
  note_misuse(std::string("release of something that is no ") + kind);
  return false;
}

void* map_file(int fd, uint64_t bytes) { return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0); }

Physical* make_physical(uint64_t bytes) {
  const int fd = memfd_create("stub", MFD_CLOEXEC);
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) note_misuse("ftruncate");
  return new Physical{fd, bytes, 1};
}

void drop(Physical* physical) {
  if (--physical->holders != 0) return;
  close(physical->fd);
  delete physical;
}

bool needs_stream(hipStream_t stream, const char* name) {
  if (stream == nullptr || live["streams"].count(stream) != 0) return true;
  note_misuse(std::string(name) + " of a stream that does not exist");
  return false;
}

}  // namespace

State& state() {
  static State all;
  return all;
}

std::string what_lives() {
  std::string text;
  for (const auto& [kind, objects] : live) {
    if (!objects.empty()) text += (text.empty() ? "" : ", ") + kind + " " + std::to_string(objects.size());
  }
  return text;
}

}  // namespace stub

using namespace stub;  // NOLINT: this file is the stub

#define FAIL_IF_TOLD(...) \
  if (fails(__func__ __VA_OPT__(, ) __VA_ARGS__)) return fail(hipErrorUnknown)

extern "C" {

// ---- Kernels: what clang's host code calls --------------------------------------------------------------------------

void** __hipRegisterFatBinary(const void*) {
  static void* handle = nullptr;
  return &handle;
}
void __hipUnregisterFatBinary(void**) {}
void __hipRegisterFunction(void**, const void* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  kernels()[host] = name;
}
hipError_t __hipPopCallConfiguration(dim3*, dim3*, size_t*, hipStream_t*) { return hipErrorNotSupported; }

// ---- Errors and devices ----------------------------------------------------------------------------------------------

hipError_t hipGetLastError() { return std::exchange(last_error, hipSuccess); }
const char* hipGetErrorString(hipError_t error) { return error == hipErrorUnknown ? kErrorText : "refused"; }
hipError_t hipGetDevice(int* current) {
  FAIL_IF_TOLD();
  *current = device;
  return hipSuccess;
}
hipError_t hipSetDevice(int wanted) {
  FAIL_IF_TOLD();
  if (wanted < 0 || wanted >= kDevices) return fail(hipErrorInvalidDevice);
  device = wanted;
  return hipSuccess;
}
hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_tR0600* properties, int) {
  if (fails("hipGetDeviceProperties")) return fail(hipErrorUnknown);
  std::strncpy(properties->gcnArchName, state().architecture.c_str(), sizeof(properties->gcnArchName) - 1);
  return hipSuccess;
}
hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int) {
  FAIL_IF_TOLD();
  if (attribute == hipDeviceAttributeMultiprocessorCount) return *value = kMultiprocessors, hipSuccess;
  if (attribute == hipDeviceAttributeMaxSharedMemoryPerBlock) return *value = kSharedBytes, hipSuccess;
  return fail(hipErrorInvalidValue);
}
hipError_t hipRuntimeGetVersion(int* version) {
  FAIL_IF_TOLD();
  *version = state().version;
  return hipSuccess;
}
hipError_t hipDeviceSynchronize() {
  FAIL_IF_TOLD();
  if (!captured.empty()) note_misuse("hipDeviceSynchronize during a capture");
  return hipSuccess;
}
hipError_t hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
  FAIL_IF_TOLD();
  *least = 1;
  *greatest = -1;
  return hipSuccess;
}

// ---- Memory ----------------------------------------------------------------------------------------------------------

hipError_t hipHostMalloc(void** address, size_t bytes, unsigned flags) {
  FAIL_IF_TOLD(true);
  if ((flags & hipHostMallocCoherent) == 0 || (flags & hipHostMallocMapped) == 0) note_misuse("flags of hipHostMalloc");
  *address = std::malloc(bytes);
  std::memset(*address, 0xA5, bytes);
  live["host memory"][*address] = {bytes};
  return hipSuccess;
}
hipError_t hipHostFree(void* address) {
  FAIL_IF_TOLD(true);
  if (!remove("host memory", address)) return fail(hipErrorInvalidValue);
  std::free(address);
  return hipSuccess;
}
hipError_t hipExtMallocWithFlags(void** address, size_t bytes, unsigned flags) {
  FAIL_IF_TOLD(true);
  if (flags != hipDeviceMallocUncached) note_misuse("device memory that is cached");
  Physical* const physical = make_physical(bytes);
  *address = map_file(physical->fd, bytes);
  std::memset(*address, 0xA5, bytes);
  live["device memory"][*address] = {bytes, physical, bytes};
  return hipSuccess;
}
hipError_t hipFree(void* address) {
  FAIL_IF_TOLD(true);
  const Range range = live["device memory"][address];
  if (!remove("device memory", address) || range.physical == nullptr) return fail(hipErrorInvalidValue);
  munmap(address, range.bytes);
  drop(range.physical);
  return hipSuccess;
}
hipError_t hipIpcGetMemHandle(hipIpcMemHandle_t* handle, void* address) {
  FAIL_IF_TOLD();
  const auto found = live["device memory"].find(address);
  if (found == live["device memory"].end()) return fail(hipErrorInvalidValue);
  std::memcpy(handle->reserved, &found->second.physical, sizeof(Physical*));
  return hipSuccess;
}
hipError_t hipIpcOpenMemHandle(void** address, hipIpcMemHandle_t handle, unsigned flags) {
  FAIL_IF_TOLD(true);
  if (flags != hipIpcMemLazyEnablePeerAccess) note_misuse("flags of hipIpcOpenMemHandle");
  Physical* physical = nullptr;
  std::memcpy(&physical, handle.reserved, sizeof(physical));
  *address = map_file(physical->fd, physical->bytes);
  live["hipIpc mappings"][*address] = {physical->bytes};
  return hipSuccess;
}
hipError_t hipIpcCloseMemHandle(void* address) {
  FAIL_IF_TOLD(true);
  const Range range = live["hipIpc mappings"][address];
  if (!remove("hipIpc mappings", address)) return fail(hipErrorInvalidValue);
  munmap(address, range.bytes);
  return hipSuccess;
}

hipError_t hipMemGetAllocationGranularity(size_t* granularity, const hipMemAllocationProp* properties,
                                          hipMemAllocationGranularity_flags) {
  FAIL_IF_TOLD();
  if (properties->location.type != hipMemLocationTypeDevice) note_misuse("memory of no device");
  *granularity = kGranularity;
  return hipSuccess;
}
hipError_t hipMemCreate(hipMemGenericAllocationHandle_t* handle, size_t bytes, const hipMemAllocationProp* properties,
                        unsigned long long) {
  FAIL_IF_TOLD(true);
  if (properties->type != hipMemAllocationTypeUncached) note_misuse("virtual memory that is cached");
  if (properties->location.id != device) note_misuse("memory of a device that is not current");
  if (bytes % kGranularity != 0) return fail(hipErrorInvalidValue);
  Physical* const physical = make_physical(bytes);
  *handle = reinterpret_cast<hipMemGenericAllocationHandle_t>(physical);
  live["physical memory"][physical] = {bytes};
  return hipSuccess;
}
hipError_t hipMemRelease(hipMemGenericAllocationHandle_t handle) {
  FAIL_IF_TOLD(true);
  if (!remove("physical memory", handle)) return fail(hipErrorInvalidValue);
  drop(reinterpret_cast<Physical*>(handle));
  return hipSuccess;
}
hipError_t hipMemExportToShareableHandle(void* to, hipMemGenericAllocationHandle_t handle,
                                         hipMemAllocationHandleType type, unsigned long long) {
  FAIL_IF_TOLD();
  if (type != hipMemHandleTypePosixFileDescriptor) return fail(hipErrorInvalidValue);
  *static_cast<int*>(to) = dup(reinterpret_cast<Physical*>(handle)->fd);
  return hipSuccess;
}
hipError_t hipMemImportFromShareableHandle(hipMemGenericAllocationHandle_t* handle, void* from,
                                           hipMemAllocationHandleType) {
  FAIL_IF_TOLD(true);
  const int fd = dup(static_cast<int>(reinterpret_cast<intptr_t>(from)));
  if (fd < 0) return fail(hipErrorInvalidValue);
  auto* const physical = new Physical{fd, static_cast<uint64_t>(lseek(fd, 0, SEEK_END)), 1};
  *handle = reinterpret_cast<hipMemGenericAllocationHandle_t>(physical);
  live["physical memory"][physical] = {physical->bytes};
  return hipSuccess;
}
hipError_t hipMemAddressReserve(void** address, size_t bytes, size_t, void*, unsigned long long) {
  FAIL_IF_TOLD(true);
  if (bytes % kGranularity != 0) return fail(hipErrorInvalidValue);
  *address = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  live["addresses"][*address] = {bytes};
  return hipSuccess;
}
hipError_t hipMemAddressFree(void* address, size_t bytes) {
  FAIL_IF_TOLD(true);
  const Range range = live["addresses"][address];
  if (range.bytes != bytes || range.physical != nullptr) note_misuse("addresses that are mapped, or of another size");
  if (!remove("addresses", address)) return fail(hipErrorInvalidValue);
  munmap(address, bytes);
  return hipSuccess;
}
// Maps without access, which hipMemSetAccess() grants.
hipError_t hipMemMap(void* address, size_t bytes, size_t, hipMemGenericAllocationHandle_t handle, unsigned long long) {
  FAIL_IF_TOLD(true);
  Range& range = live["addresses"][address];
  auto* const physical = reinterpret_cast<Physical*>(handle);
  if (bytes > range.bytes || bytes > physical->bytes || range.physical != nullptr) return fail(hipErrorInvalidValue);
  mmap(address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->fd, 0);
  range.physical = physical;
  range.mapped_bytes = bytes;
  ++physical->holders;
  return hipSuccess;
}
hipError_t hipMemSetAccess(void* address, size_t bytes, const hipMemAccessDesc* access, size_t count) {
  FAIL_IF_TOLD(true);
  if (count != 1 || access->location.id != device || access->flags != hipMemAccessFlagsProtReadWrite) {
    return fail(hipErrorInvalidValue);
  }
  if (live["addresses"][address].mapped_bytes != bytes) return fail(hipErrorInvalidValue);
  mprotect(address, bytes, PROT_READ | PROT_WRITE);
  return hipSuccess;
}
hipError_t hipMemUnmap(void* address, size_t bytes) {
  FAIL_IF_TOLD(true);
  Range& range = live["addresses"][address];
  if (range.physical == nullptr || range.mapped_bytes != bytes) return fail(hipErrorInvalidValue);
  mmap(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  drop(std::exchange(range.physical, nullptr));
  range.mapped_bytes = 0;
  return hipSuccess;
}

// ---- Streams, events, graphs -----------------------------------------------------------------------------------------

hipError_t hipThreadExchangeStreamCaptureMode(hipStreamCaptureMode* wanted) {
  FAIL_IF_TOLD();
  std::swap(*wanted, mode);
  return hipSuccess;
}
hipError_t hipStreamCreateWithPriority(hipStream_t* stream, unsigned flags, int priority) {
  FAIL_IF_TOLD(true);
  if (flags != hipStreamNonBlocking || priority != -1) note_misuse("stream without the greatest priority");
  *stream = new ihipStream_t;
  live["streams"][*stream] = {};
  return hipSuccess;
}
hipError_t hipStreamDestroy(hipStream_t stream) {
  FAIL_IF_TOLD(true);
  if (captured.count(stream) != 0) note_misuse("end of a stream that is captured");
  if (!remove("streams", stream)) return fail(hipErrorInvalidHandle);
  delete stream;
  return hipSuccess;
}
hipError_t hipStreamIsCapturing(hipStream_t stream, hipStreamCaptureStatus* status) {
  FAIL_IF_TOLD();
  if (!needs_stream(stream, __func__)) return fail(hipErrorInvalidHandle);
  *status = captured.count(stream) != 0 ? hipStreamCaptureStatusActive : hipStreamCaptureStatusNone;
  return hipSuccess;
}
hipError_t hipStreamSynchronize(hipStream_t stream) {
  FAIL_IF_TOLD(true);
  if (!needs_stream(stream, __func__)) return fail(hipErrorInvalidHandle);
  if (captured.count(stream) != 0) note_misuse("hipStreamSynchronize of a stream that is captured");
  return hipSuccess;
}
hipError_t hipStreamQuery(hipStream_t stream) {
  FAIL_IF_TOLD(true);
  return needs_stream(stream, __func__) ? hipSuccess : fail(hipErrorInvalidHandle);
}
hipError_t hipEventCreateWithFlags(hipEvent_t* event, unsigned flags) {
  FAIL_IF_TOLD();
  if (flags != hipEventDisableTiming) note_misuse("event with timing");
  *event = new ihipEvent_t;
  live["events"][*event] = {};
  return hipSuccess;
}
hipError_t hipEventDestroy(hipEvent_t event) {
  FAIL_IF_TOLD();
  if (!remove("events", event)) return fail(hipErrorInvalidHandle);
  delete event;
  return hipSuccess;
}
hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) {
  FAIL_IF_TOLD();
  event->is_captured = captured.count(stream) != 0;
  return hipSuccess;
}
// A stream that waits for an event of a capture joins the capture.
hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned) {
  FAIL_IF_TOLD();
  if (event->is_captured) captured.insert(stream);
  return hipSuccess;
}
hipError_t hipStreamBeginCapture(hipStream_t stream, hipStreamCaptureMode) {
  captured.insert(stream);
  return hipSuccess;
}
hipError_t hipStreamEndCapture(hipStream_t, hipGraph_t*) {
  captured.clear();
  return hipSuccess;
}

hipError_t hipMemcpyAsync(void* to, const void* from, size_t bytes, hipMemcpyKind, hipStream_t stream) {
  FAIL_IF_TOLD();
  if (!needs_stream(stream, __func__)) return fail(hipErrorInvalidHandle);
  if (captured.count(stream) == 0) std::memmove(to, from, bytes);
  return hipSuccess;
}
hipError_t hipMemsetAsync(void* to, int value, size_t bytes, hipStream_t stream) {
  FAIL_IF_TOLD();
  if (!needs_stream(stream, __func__)) return fail(hipErrorInvalidHandle);
  if (captured.count(stream) == 0) std::memset(to, value, bytes);
  return hipSuccess;
}

// ---- Launches --------------------------------------------------------------------------------------------------------

hipError_t hipFuncGetAttributes(hipFuncAttributes* attributes, const void* function) {
  FAIL_IF_TOLD(true);
  if (kernels().count(function) == 0) return fail(hipErrorInvalidDeviceFunction);
  attributes->maxThreadsPerBlock = 1024;
  return hipSuccess;
}
hipError_t hipOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int, size_t) {
  FAIL_IF_TOLD();
  if (kernels().count(function) == 0) return fail(hipErrorInvalidDeviceFunction);
  *blocks = kBlocksOfMultiprocessor;
  return hipSuccess;
}
hipError_t hipLaunchKernel(const void* function, dim3 blocks, dim3 threads, void** arguments, size_t shared_bytes,
                           hipStream_t stream) {
  FAIL_IF_TOLD();
  if (kernels().count(function) == 0) return fail(hipErrorInvalidDeviceFunction);
  if (!needs_stream(stream, __func__)) return fail(hipErrorInvalidHandle);
  if (threads.x == 0 || threads.x > 1024 || blocks.x == 0 || shared_bytes > kSharedBytes) {
    return fail(hipErrorInvalidConfiguration);
  }
  Launch launch{kernels()[function], blocks.x, threads.x, shared_bytes, stream, device, {}};
  if (!state().noted.empty() && launch.kernel.find(state().noted) != std::string::npos) {
    launch.arguments.assign(static_cast<const char*>(arguments[0]), state().parameter_bytes);
  }
  state().launches.push_back(launch);
  if (captured.count(stream) == 0 && state().run_kernel) state().run_kernel(launch, arguments[0]);
  return hipSuccess;
}

}  // extern "C"
