// NodeExchange on a CUDA device, through host memory that the device maps.
#include <cuda_runtime.h>

#include "host/cuda/driver.h"
#include "host/cuda/proxy_patience.h"
#include "host/cuda/registered_memory.h"
#include "host/node_exchange_impl.h"

namespace llm_comm::host {

namespace {

class CudaExchangeDevice {
 public:
  explicit CudaExchangeDevice(int device) : device_(device) {
    cudaFuncAttributes attributes{};  // loads the kernel now: the first launch may be captured
    check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&cuda::node_exchange)),
          "this build of llm_comm has no kernels for the GPU");
  }
  CudaExchangeDevice(CudaExchangeDevice&& other) noexcept
      : device_(other.device_), order_(std::exchange(other.order_, nullptr)) {}
  CudaExchangeDevice& operator=(CudaExchangeDevice&&) = delete;
  ~CudaExchangeDevice() {
    if (order_ != nullptr) cudaEventDestroy(order_);
  }

  std::unique_ptr<RingMemory> memory(uint64_t bytes) const {
    const DeviceGuard guard(device_);
    const RelaxedCaptureMode relaxed;
    auto memory = std::make_unique<RegisteredMemory>(bytes);
    if (memory->on_device() == nullptr) {
      throw std::runtime_error("the GPU cannot map " + std::to_string(bytes) +
                               " bytes of host memory, which UCX between nodes needs");
    }
    return memory;
  }

  Patience patience() const { return kPatienceOfGpus; }

  // Calls on different streams use the same memory, so each waits for the previous one.
  bool launch(const NodeExchangeArgs& args, uint32_t blocks, uint64_t handle) {
    const DeviceGuard guard(device_);
    const auto stream = reinterpret_cast<cudaStream_t>(handle);
    cudaStreamCaptureStatus capture{};
    check(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
    const bool is_captured = capture != cudaStreamCaptureStatusNone;
    if (!is_captured && order_ != nullptr) check(cudaStreamWaitEvent(stream, order_, 0), "cudaStreamWaitEvent");
    cuda::node_exchange<<<blocks, kMaxExchangeThreads, sizeof(Line), stream>>>(args);
    check(cudaGetLastError(), "launch of an exchange between nodes");
    if (!is_captured) {
      if (order_ == nullptr) check(cudaEventCreateWithFlags(&order_, cudaEventDisableTiming), "cudaEventCreate");
      check(cudaEventRecord(order_, stream), "cudaEventRecord");
    }
    return is_captured;
  }

  void wait() const {
    if (order_ == nullptr) return;
    const DeviceGuard guard(device_);
    const RelaxedCaptureMode relaxed;
    cudaEventSynchronize(order_);
  }

 private:
  int device_;
  cudaEvent_t order_ = nullptr;  // recorded after the last launch outside graphs
};

}  // namespace

std::unique_ptr<NodeExchange> make_cuda_node_exchange(const NodeExchangeOptions& options, int device) {
  check_options(options);
  const DeviceGuard guard(device);
  const RelaxedCaptureMode relaxed;
  return std::make_unique<NodeExchangeImpl<CudaExchangeDevice>>(options, CudaExchangeDevice(device));
}

}  // namespace llm_comm::host
