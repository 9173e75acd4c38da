// The driver functions that the runtime has no form of, asked for at run time: the library loads without a driver.
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

  // Throws std::runtime_error where there is no driver or it lacks one of the functions.
  static const Driver& get();
};

// A function of the driver, as it was in a version of CUDA: 12010 is 12.1. Throws std::runtime_error where there is none.
void* driver_function(const char* name, unsigned version);

// Throw std::runtime_error that names `what` and the error.
void check(cudaError_t error, const char* what);
void check(CUresult error, const char* what);

// Makes a device current for a scope, and its context, which the driver's functions need: a thread that has not used CUDA
// has device 0 but no context. Calls that find both already cost two reads. The device before becomes current again
// unless this process has no context on it: to return to device 0, which nobody has asked for, would take some hundred
// MiB there for every rank.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

// For its scope, what this thread calls is no part of a capture, and ends none, whoever captures which stream. It is not
// enough for cudaDeviceSynchronize(), which invalidates every capture of the device.
class BesideCaptures {
 public:
  BesideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~BesideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace llm_comm::host
