// Core of a CUDA device: the launcher (TargetLauncher of target.h) and device queries.
#include <cuda_runtime.h>

#include <atomic>
#include <memory>
#include <optional>
#include <utility>

#include "host/core_impl.h"
#include "host/cuda/copy_engines.h"
#include "host/cuda/cuda_memory.h"
#include "host/cuda/stream_copies.h"
#include "host/cuda/tensor_map.h"

namespace llm_comm::host {

namespace {

int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

// Loads a kernel and returns the architecture it was compiled for, for example 90. Throws with the driver's message if
// this build has no code for the GPU. Loading waits for the kernels that run on the device.
int load_kernel(const void* kernel) {
  const RelaxedCaptureMode relaxed;
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel), "this build of llm_comm has no kernels for the GPU");
  return attributes.ptxVersion;
}

// Launches through the driver API. The runtime API looks up the kernel in a table at every launch, which costs host
// time in every eager call.
class CudaLauncher {
 public:
  template <class Args>
  using Function = CUfunction;

  // `architecture`: what the kernels were compiled for. Kernels compiled for less than sm_90 support neither dependent
  // launch nor clusters, even where the driver compiles their PTX for a newer GPU.
  CudaLauncher(int device, int architecture, bool dependent_launch)
      : device_(device),
        dependent_launch_(dependent_launch && architecture >= 90),
        has_tensor_maps_(architecture >= 90),
        multiplies_fp8_(architecture >= 89),
        max_cluster_blocks_(architecture >= 90 ? kMostClusterBlocks : 1),
        max_shared_bytes_(static_cast<uint32_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device))),
        sm_count_(static_cast<uint32_t>(device_attribute(cudaDevAttrMultiProcessorCount, device))) {
    check(driver_.ctx_get_current(&context_), "cuCtxGetCurrent");
  }
  CudaLauncher(CudaLauncher&& other) noexcept
      : device_(other.device_),
        context_(other.context_),
        dependent_launch_(other.dependent_launch_),
        has_tensor_maps_(other.has_tensor_maps_),
        multiplies_fp8_(other.multiplies_fp8_),
        max_cluster_blocks_(other.max_cluster_blocks_),
        max_shared_bytes_(other.max_shared_bytes_),
        sm_count_(other.sm_count_),
        last_stream_(other.last_stream_),
        has_last_stream_(other.has_last_stream_),
        has_been_captured_(other.has_been_captured()),
        modules_(std::move(other.modules_)),
        copies_(std::move(other.copies_)),
        order_(std::exchange(other.order_, nullptr)) {}
  CudaLauncher& operator=(CudaLauncher&&) = delete;
  ~CudaLauncher() {
    for (const CUmodule module : modules_) driver_.module_unload(module);
    if (order_ != nullptr) cudaEventDestroy(order_);
  }

  template <class Args>
  CUfunction function(void (*kernel)(Args)) const {
    const DeviceGuard guard(device_);
    const auto symbol = reinterpret_cast<const void*>(kernel);
    load_kernel(symbol);
    if (max_cluster_blocks_ > kPortableClusterBlocks) {
      check(cudaFuncSetAttribute(symbol, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cudaFuncSetAttribute");
    }
    cudaFunction_t function = nullptr;
    check(cudaGetFuncBySymbol(&function, symbol), "cudaGetFuncBySymbol");
    return function;
  }

  CUfunction load(const std::string& image, const std::string& kernel) {
    const DeviceGuard guard(device_);
    const RelaxedCaptureMode relaxed;
    CUmodule module = nullptr;
    check(driver_.module_load_data(&module, image.data()), ("loading kernel " + kernel).c_str());
    modules_.push_back(module);
    CUfunction function = nullptr;
    check(driver_.module_get_function(&function, module, kernel.c_str()), ("kernel " + kernel).c_str());
    return function;
  }

  void leave_to_graphs() { modules_.clear(); }

  uint32_t max_cluster_blocks() const { return max_cluster_blocks_; }
  uint32_t sm_count() const { return sm_count_; }
  bool multiplies_fp8() const { return multiplies_fp8_; }
  uint32_t max_shared_bytes() const { return max_shared_bytes_; }

  // Sets the device's maximum once: a limit chosen for one call must not restrict another one.
  void permit_shared_bytes(CUfunction function) const {
    const DeviceGuard guard(device_);
    check(driver_.func_set_attribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                     static_cast<int>(max_shared_bytes_)),
          "cuFuncSetAttribute");
  }

  // Kernels compiled for less than sm_90 use the address instead.
  void map_matrix(MatrixView& matrix, uint32_t parts, uint32_t box_parts, uint32_t box_rows, uint32_t boxes,
                  BoxUse use) const {
    if (has_tensor_maps_) encode_tensor_map(matrix, parts, box_parts, box_rows, boxes, use);
  }

  // Asks the occupancy API, because the cluster size alone is not enough. Clusters of more than 8 blocks need that many
  // SMs in one GPC. MIG instances, and some whole GPUs, do not have them.
  bool has_room_for_cluster(CUfunction function, const Grid& grid) const {
    if (grid.cluster_blocks == 1) return true;
    const DeviceGuard guard(device_);
    CUlaunchAttribute attributes[1];
    const CUlaunchConfig config = configuration(grid, attributes);
    int clusters = 0;
    const CUresult error = driver_.occupancy_max_active_clusters(&clusters, function, &config);
    switch (error) {
      case CUDA_ERROR_INVALID_CLUSTER_SIZE:  // the device does not support this cluster size
      case CUDA_ERROR_INVALID_VALUE:
      case CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES:
      case CUDA_ERROR_NOT_SUPPORTED:
      case CUDA_ERROR_UNKNOWN:
        return false;
      default:
        check(error, "cuOccupancyMaxActiveClusters");
        return clusters > 0;
    }
  }

  // Bound from the kernel's use of an SM. Fewer blocks run while other kernels occupy the device.
  uint64_t resident_blocks(CUfunction function, const Grid& grid) const {
    const DeviceGuard guard(device_);
    int count = 0;
    if (grid.cluster_blocks > 1) {
      CUlaunchAttribute attributes[1];
      const CUlaunchConfig config = configuration(grid, attributes);
      check(driver_.occupancy_max_active_clusters(&count, function, &config), "cuOccupancyMaxActiveClusters");
      return static_cast<uint64_t>(count) * grid.cluster_blocks;
    }
    check(driver_.occupancy_max_active_blocks(&count, function, static_cast<int>(grid.threads), grid.shared_bytes),
          "cuOccupancyMaxActiveBlocksPerMultiprocessor");
    return static_cast<uint64_t>(count) * sm_count_;
  }

  template <class Args>
  bool launch(CUfunction function, const Args& args, const Grid& grid, uint64_t stream) {
    CUcontext current = nullptr;
    check(driver_.ctx_get_current(&current), "cuCtxGetCurrent");
    std::optional<DeviceGuard> guard;
    if (current != context_) guard.emplace(device_);
    const auto cuda_stream = reinterpret_cast<cudaStream_t>(stream);
    const bool is_captured = is_capturing(cuda_stream);
    if (is_captured) {
      // A captured launch is not ordered against other calls here: it runs when the graph is launched.
      has_been_captured_.store(true, std::memory_order_relaxed);
    } else {
      order_behind_last_call(cuda_stream);
    }
    CUlaunchAttribute attributes[2];
    CUlaunchConfig config = configuration(grid, attributes);
    config.hStream = cuda_stream;
    if (dependent_launch_ && !grid.is_after_copies) {
      CUlaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
      attribute.value.programmaticStreamSerializationAllowed = 1;
    }
    void* parameters[] = {const_cast<Args*>(&args)};
    check(driver_.launch_kernel_ex(&config, function, parameters, nullptr), "launch of a collective");
    return is_captured;
  }

  void copy(const std::vector<Copy>& copies, uint64_t stream) {
    const DeviceGuard guard(device_);
    copies_->enqueue(copies, reinterpret_cast<cudaStream_t>(stream));
  }

  StreamCopies::SideStream side_stream(uint64_t stream) {
    return StreamCopies::SideStream(*copies_, device_, reinterpret_cast<cudaStream_t>(stream));
  }

  // True if graphs hold launches of this object. Thread-safe.
  bool has_been_captured() const { return has_been_captured_.load(std::memory_order_relaxed); }

  // Waits for all launches except those in graphs. Returns false if it cannot wait: the stream is being captured or no
  // longer exists.
  bool wait_for_last_call() const { return !has_last_stream_ || wait_for(reinterpret_cast<uint64_t>(last_stream_)); }

  void wait_for_device() const {
    const DeviceGuard guard(device_);
    check(cudaDeviceSynchronize(), "waiting for the device");
  }

  bool wait_for(uint64_t handle) const {
    const auto stream = reinterpret_cast<cudaStream_t>(handle);
    try {
      const DeviceGuard guard(device_);
      const RelaxedCaptureMode relaxed;
      return !is_capturing(stream) && cudaStreamSynchronize(stream) == cudaSuccess;
    } catch (const std::exception&) {
      return false;
    }
  }

  void p2p_test(const DeviceComm& comm) {
    const DeviceGuard guard(device_);
    const RelaxedCaptureMode relaxed;
    cudaGetLastError();  // clears an error of earlier calls that nobody has checked
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    cuda::p2p_test<<<1, kMaxWorldSize, 0, stream>>>(comm);
    const cudaError_t launched = cudaGetLastError();
    const cudaError_t ended = cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
    check(launched, "launch of the P2P test");
    check(ended, "P2P test");
  }

 private:
  static constexpr uint32_t kPortableClusterBlocks = 8;
  static constexpr uint32_t kMostClusterBlocks = 16;  // of any device; has_room_for_cluster() asks about this one

  // `attributes` has room for one and must live as long as the returned configuration.
  static CUlaunchConfig configuration(const Grid& grid, CUlaunchAttribute* attributes) {
    CUlaunchConfig config{};
    config.gridDimX = grid.blocks;
    config.gridDimY = config.gridDimZ = 1;
    config.blockDimX = grid.threads;
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = grid.shared_bytes;
    config.attrs = attributes;
    if (grid.cluster_blocks > 1) {
      CUlaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
      attribute.value.clusterDim = {grid.cluster_blocks, 1, 1};
    }
    return config;
  }

  // Operations of one communicator alternate between its slots and must not overlap. A call on another stream therefore
  // waits for the last call.
  void order_behind_last_call(cudaStream_t stream) {
    if (has_last_stream_ && stream == last_stream_) return;
    if (has_last_stream_) {
      // Recording an event there would pull this call into the graph.
      if (is_capturing(last_stream_)) {
        throw std::runtime_error(
            "an eager call has to wait for the communicator's last eager call, on another stream, which is being "
            "captured "
            "into a graph now: make the call before the capture begins or after it ends, or use two communicators");
      }
      if (order_ == nullptr) check(cudaEventCreateWithFlags(&order_, cudaEventDisableTiming), "cudaEventCreate");
      check(cudaEventRecord(order_, last_stream_), "cudaEventRecord");
      check(cudaStreamWaitEvent(stream, order_, 0), "cudaStreamWaitEvent");
    }
    last_stream_ = stream;
    has_last_stream_ = true;
  }

  static bool is_capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus capture{};
    check(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
    return capture != cudaStreamCaptureStatusNone;
  }

  const Driver& driver_ = Driver::get();
  int device_;
  CUcontext context_ = nullptr;  // primary context of the device
  bool dependent_launch_;
  bool has_tensor_maps_;
  bool multiplies_fp8_;
  uint32_t max_cluster_blocks_;
  uint32_t max_shared_bytes_;
  uint32_t sm_count_;
  cudaStream_t last_stream_ = nullptr;
  bool has_last_stream_ = false;
  std::atomic<bool> has_been_captured_ = false;
  std::vector<CUmodule> modules_;  // of DSL kernels
  std::unique_ptr<StreamCopies> copies_ = std::make_unique<StreamCopies>();
  cudaEvent_t order_ = nullptr;
};

bool driver_attribute(CUdevice_attribute attribute, int device) {
  int value = 0;
  const CUresult error = Driver::get().device_get_attribute(&value, attribute, device);
  if (error == CUDA_ERROR_INVALID_VALUE) return false;  // the driver is older than the attribute
  check(error, "cuDeviceGetAttribute");
  return value != 0;
}

}  // namespace

std::unique_ptr<Core> make_cuda_core(const CoreOptions& options, int device) {
  check_options(options);
  const DeviceGuard guard(device);
  const RelaxedCaptureMode relaxed;
  const int architecture = load_kernel(reinterpret_cast<const void*>(&cuda::p2p_test));
  return std::make_unique<CoreImpl<CudaMemory, CudaLauncher>>(
      options, CudaMemory(device, options.world_size, options.multicast),
      CudaLauncher(device, architecture, options.dependent_launch), make_cuda_ports(device));
}

DeviceReport cuda_device_report(int device) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  DeviceReport report;
  report.name = properties.name;
  report.compute_capability = properties.major * 10 + properties.minor;
  report.sm_count = device_attribute(cudaDevAttrMultiProcessorCount, device);
  report.vmm = driver_attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device);
  report.posix_fd = driver_attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device);
  report.multicast_supported = driver_attribute(CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, device);
  check(cudaDriverGetVersion(&report.driver_version), "cudaDriverGetVersion");
  return report;
}

}  // namespace llm_comm::host
