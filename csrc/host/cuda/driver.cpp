#include "host/cuda/driver.h"

#include <stdexcept>
#include <string>

namespace llm_comm::host {

namespace {

template <class Function>
void load(Function& function, const char* name) {
  constexpr unsigned kVersion = 12000;
  function = reinterpret_cast<Function>(driver_function(name, kVersion));
}

Driver load_driver() {
  Driver driver{};
  load(driver.ctx_get_current, "cuCtxGetCurrent");
  load(driver.device_get_attribute, "cuDeviceGetAttribute");
  load(driver.device_primary_ctx_get_state, "cuDevicePrimaryCtxGetState");
  load(driver.get_error_string, "cuGetErrorString");
  load(driver.launch_kernel_ex, "cuLaunchKernelEx");
  load(driver.occupancy_max_active_blocks, "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  load(driver.occupancy_max_active_clusters, "cuOccupancyMaxActiveClusters");
  load(driver.mem_get_allocation_granularity, "cuMemGetAllocationGranularity");
  load(driver.mem_create, "cuMemCreate");
  load(driver.mem_release, "cuMemRelease");
  load(driver.mem_export_to_shareable_handle, "cuMemExportToShareableHandle");
  load(driver.mem_import_from_shareable_handle, "cuMemImportFromShareableHandle");
  load(driver.mem_address_reserve, "cuMemAddressReserve");
  load(driver.mem_address_free, "cuMemAddressFree");
  load(driver.mem_map, "cuMemMap");
  load(driver.mem_unmap, "cuMemUnmap");
  load(driver.mem_set_access, "cuMemSetAccess");
  load(driver.module_load_data, "cuModuleLoadData");
  load(driver.module_get_function, "cuModuleGetFunction");
  load(driver.module_unload, "cuModuleUnload");
  load(driver.func_set_attribute, "cuFuncSetAttribute");
  load(driver.tensor_map_encode_tiled, "cuTensorMapEncodeTiled");
  return driver;
}

}  // namespace

void* driver_function(const char* name, [[maybe_unused]] unsigned version) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &address, version, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &address, cudaEnableDefault, &found);
#endif
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess || address == nullptr) {
    throw std::runtime_error(std::string("the CUDA driver has no ") + name + " (" + cudaGetErrorString(error) + ")");
  }
  return address;
}

const Driver& Driver::get() {
  static const Driver driver = load_driver();
  return driver;
}

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears the error, so that the caller's next CUDA call does not report it again
  std::string text = std::string(what) + ": " + cudaGetErrorString(error);
  if (error == cudaErrorInsufficientDriver) {
    text += "; this llm_comm was built by CUDA " + std::to_string(CUDART_VERSION / 1000) +
            ", `llm-comm doctor` names the oldest driver for it";
  }
  throw std::runtime_error(text);
}

void check(CUresult error, const char* what) {
  if (error == CUDA_SUCCESS) return;
  const char* text = nullptr;
  Driver::get().get_error_string(error, &text);
  throw std::runtime_error(std::string(what) + ": " + (text != nullptr ? text : "unknown driver error"));
}

DeviceGuard::DeviceGuard(int device) {
  int current = -1;
  check(cudaGetDevice(&current), "cudaGetDevice");
  CUcontext bound = nullptr;
  check(Driver::get().ctx_get_current(&bound), "cuCtxGetCurrent");
  if (current == device && bound != nullptr) return;
  check(cudaSetDevice(device), "cudaSetDevice");
  if (current != device) previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ < 0) return;
  unsigned flags = 0;
  int is_active = 0;
  const CUresult error = Driver::get().device_primary_ctx_get_state(previous_, &flags, &is_active);
  if (error == CUDA_SUCCESS && is_active != 0) cudaSetDevice(previous_);
}

}  // namespace llm_comm::host
