// CUDA driver functions without a runtime counterpart, and helpers for the device and for captures. The functions are
// looked up at run time, so the library loads without a driver. Used by all of host/cuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace llm_comm::host {

struct Driver {
  decltype(&cuCtxGetCurrent) ctx_get_current;
  decltype(&cuDeviceGetAttribute) device_get_attribute;
  decltype(&cuDevicePrimaryCtxGetState) device_primary_ctx_get_state;
  decltype(&cuGetErrorString) get_error_string;
  decltype(&cuLaunchKernelEx) launch_kernel_ex;
  decltype(&cuOccupancyMaxActiveBlocksPerMultiprocessor) occupancy_max_active_blocks;
  decltype(&cuOccupancyMaxActiveClusters) occupancy_max_active_clusters;
  decltype(&cuMemGetAllocationGranularity) mem_get_allocation_granularity;
  decltype(&cuMemCreate) mem_create;
  decltype(&cuMemRelease) mem_release;
  decltype(&cuMemExportToShareableHandle) mem_export_to_shareable_handle;
  decltype(&cuMemImportFromShareableHandle) mem_import_from_shareable_handle;
  decltype(&cuMemAddressReserve) mem_address_reserve;
  decltype(&cuMemAddressFree) mem_address_free;
  decltype(&cuMemMap) mem_map;
  decltype(&cuMemUnmap) mem_unmap;
  decltype(&cuMemSetAccess) mem_set_access;
  decltype(&cuModuleLoadData) module_load_data;
  decltype(&cuModuleGetFunction) module_get_function;
  decltype(&cuModuleUnload) module_unload;
  decltype(&cuFuncSetAttribute) func_set_attribute;
  decltype(&cuTensorMapEncodeTiled) tensor_map_encode_tiled;

  // Throws std::runtime_error if there is no driver or it lacks a function.
  static const Driver& get();
};

// Looks up a driver function of a CUDA version (12010 is 12.1). Throws std::runtime_error if the driver lacks it.
void* driver_function(const char* name, unsigned version);

// Throw std::runtime_error with `what` and the error text.
void check(cudaError_t error, const char* what);
void check(CUresult error, const char* what);

// Makes a device and its context current for a scope; driver functions need the context. A thread that has not used
// CUDA has device 0 but no context. If both are current already, the cost is two reads. The destructor returns to the
// previous device only if this process has a context on it: creating one on device 0 would take some hundred MiB there
// for every rank.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

// For its scope, calls of this thread neither join nor invalidate a stream capture, whichever thread captures. Not
// sufficient for cudaDeviceSynchronize(), which invalidates every capture of the device.
class RelaxedCaptureMode {
 public:
  RelaxedCaptureMode() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCaptureMode() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCaptureMode(const RelaxedCaptureMode&) = delete;
  RelaxedCaptureMode& operator=(const RelaxedCaptureMode&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace llm_comm::host
