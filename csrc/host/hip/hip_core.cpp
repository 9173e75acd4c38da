// Core of an AMD GPU: the launcher (TargetLauncher of target.h). Compile as HIP (clang -x hip), with the kernels and
// with `-include hip/hip_runtime_api.h`, which declares what clang's host stubs of the kernels call.
//
// Not supported: NVLink multicast, clusters, programmatic dependent launch, linear layers, experts and routers, DSL
// kernels, and port channels.
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "host/core_impl.h"
#include "host/hip/hip_core.h"
#include "host/hip/hip_memory.h"

namespace llm_comm::host {

namespace amd {

namespace {

hipStream_t stream_of(uint64_t stream) { return reinterpret_cast<hipStream_t>(stream); }

void enqueue(const std::vector<Copy>& copies, hipStream_t stream) {
  for (const Copy& copy : copies) {
    check(hipMemcpyAsync(copy.to, copy.from, copy.bytes, hipMemcpyDefault, stream), "hipMemcpyAsync");
  }
}

// Side stream of a stream, with the events that order the two. A capture of the stream includes the side stream.
struct Lane {
  Stream stream;
  Event begin;
  Event end;
  std::deque<Event> events;
};

class SideStream {
 public:
  SideStream(int device, Lane& lane, hipStream_t stream) : scope_(device), lane_(lane), stream_(stream) {}

  void follow() {
    lane_.begin.record(stream_);
    lane_.begin.wait(lane_.stream.get());
  }
  void copy(const std::vector<Copy>& copies) { enqueue(copies, lane_.stream.get()); }
  void record_event(uint32_t number) {
    while (lane_.events.size() <= number) lane_.events.emplace_back();
    lane_.events[number].record(lane_.stream.get());
  }
  void wait_event(uint32_t number) { lane_.events.at(number).wait(stream_); }
  void join() {
    lane_.end.record(lane_.stream.get());
    lane_.end.wait(stream_);
  }

 private:
  DeviceScope scope_;
  Lane& lane_;
  hipStream_t stream_;
};

class HipLauncher {
 public:
  // Handle of a kernel: the address of its host stub.
  template <class Args>
  using Function = const void*;

  explicit HipLauncher(int device)
      : device_(device),
        sm_count_(attribute(hipDeviceAttributeMultiprocessorCount)),
        max_shared_bytes_(attribute(hipDeviceAttributeMaxSharedMemoryPerBlock)) {}

  // Loads the kernel now: loading at the first launch may wait for running kernels, which may be waiting for peers.
  template <class Args>
  const void* function(void (*kernel)(Args)) const {
    if (kernel == nullptr) {
      throw std::invalid_argument(
          "llm_comm has no such kernel for AMD GPUs; linear layers, experts and routers have none");
    }
    const DeviceScope scope(device_);
    hipFuncAttributes attributes{};
    const auto* const stub = reinterpret_cast<const void*>(kernel);
    check(hipFuncGetAttributes(&attributes, stub), "hipFuncGetAttributes: this build has no kernels for the GPU");
    return stub;
  }
  const void* load(const std::string&, const std::string& kernel) const {
    throw std::runtime_error("kernel " + kernel + ": llm_comm compiles no DSL kernels for AMD GPUs");
  }
  void leave_to_graphs() {}

  uint32_t max_cluster_blocks() const { return 1; }
  uint32_t sm_count() const { return sm_count_; }
  uint32_t max_shared_bytes() const { return max_shared_bytes_; }
  bool multiplies_fp8() const { return false; }
  bool has_room_for_cluster(const void*, const Grid& grid) const { return grid.cluster_blocks == 1; }

  // Bound from the kernel's use of a compute unit. Fewer blocks run while other kernels occupy the device.
  uint64_t resident_blocks(const void* function, const Grid& grid) const {
    const DeviceScope scope(device_);
    int blocks = 0;
    check(hipOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, static_cast<int>(grid.threads),
                                                       grid.shared_bytes),
          "hipOccupancyMaxActiveBlocksPerMultiprocessor");
    return static_cast<uint64_t>(blocks) * sm_count_;
  }

  // For linear layers, experts and routers, whose kernels function() refuses.
  void permit_shared_bytes(const void*) const {}
  void map_matrix(MatrixView&, uint32_t, uint32_t, uint32_t, uint32_t, BoxUse) const {}

  template <class Args>
  bool launch(const void* function, const Args& args, const Grid& grid, uint64_t stream) {
    const DeviceScope scope(device_);
    const bool is_captured = is_capturing(stream_of(stream));
    if (is_captured) {
      // A captured launch is not ordered against other calls here: it runs when the graph is launched.
      has_been_captured_->store(true, std::memory_order_relaxed);
    } else {
      order_behind_last_call(stream_of(stream));
    }
    launch_kernel(function, args, grid.blocks, grid.threads, grid.shared_bytes, stream_of(stream));
    return is_captured;
  }

  // In order on the caller's stream. Copies marked is_stored are treated as all others.
  void copy(const std::vector<Copy>& copies, uint64_t stream) {
    const DeviceScope scope(device_);
    enqueue(copies, stream_of(stream));
  }
  SideStream side_stream(uint64_t stream) {
    const DeviceScope scope(device_);
    return {device_, lanes_[stream_of(stream)], stream_of(stream)};
  }

  // True if graphs hold launches of this object. Thread-safe.
  bool has_been_captured() const { return has_been_captured_->load(std::memory_order_relaxed); }

  // Returns false if it cannot wait: the stream is being captured or no longer exists.
  bool wait_for_last_call() const { return !last_stream_ || wait_for(reinterpret_cast<uint64_t>(*last_stream_)); }
  bool wait_for(uint64_t stream) const {
    try {
      const DeviceScope scope(device_);
      return !is_capturing(stream_of(stream)) && hipStreamSynchronize(stream_of(stream)) == hipSuccess;
    } catch (const std::exception&) {
      return false;
    }
  }
  void wait_for_device() const {
    const DeviceScope scope(device_);
    check(hipDeviceSynchronize(), "hipDeviceSynchronize");
  }

  void p2p_test(const DeviceComm& comm) const {
    const DeviceScope scope(device_);
    static_cast<void>(hipGetLastError());  // clears an error of earlier calls that nobody has checked
    const Stream stream;
    launch_kernel(reinterpret_cast<const void*>(&hip::p2p_test), comm, 1, kMaxWorldSize, 0, stream.get());
    stream.synchronize();
  }

 private:
  uint32_t attribute(hipDeviceAttribute_t attribute) const {
    int value = 0;
    check(hipDeviceGetAttribute(&value, attribute, device_), "hipDeviceGetAttribute");
    return static_cast<uint32_t>(value);
  }

  template <class Args>
  static void launch_kernel(const void* function, const Args& args, uint32_t blocks, uint32_t threads,
                            uint32_t shared_bytes, hipStream_t stream) {
    void* parameters[] = {const_cast<Args*>(&args)};
    check(hipLaunchKernel(function, dim3(blocks), dim3(threads), parameters, shared_bytes, stream), "hipLaunchKernel");
  }

  // Operations of one communicator alternate between its slots and must not overlap. A call on another stream therefore
  // waits for the last call.
  void order_behind_last_call(hipStream_t stream) {
    if (last_stream_ && stream == *last_stream_) return;
    if (last_stream_) {
      // Recording an event there would pull this call into the graph.
      if (is_capturing(*last_stream_)) {
        throw std::runtime_error(
            "an eager call has to wait for the communicator's last eager call, on another stream, which is being "
            "captured into a graph now: make the call before the capture begins or after it ends, or use two "
            "communicators");
      }
      if (order_ == nullptr) order_ = std::make_unique<Event>();
      order_->record(*last_stream_);
      order_->wait(stream);
    }
    last_stream_ = stream;
  }

  int device_;
  uint32_t sm_count_;
  uint32_t max_shared_bytes_;
  std::unique_ptr<std::atomic<bool>> has_been_captured_ = std::make_unique<std::atomic<bool>>(false);
  std::optional<hipStream_t> last_stream_;
  std::unique_ptr<Event> order_;
  std::map<hipStream_t, Lane> lanes_;
};

class NoPorts final : public Ports {
 public:
  PortRing* ring() const override { return nullptr; }
  uint32_t entries_log2() const override { return 0; }
  void start(const PortOwner&) override {
    throw std::runtime_error("port channels are not supported on AMD GPUs: choose an algorithm without them");
  }
  void stop() override {}
  void abandon() override {}
  std::optional<std::string> error() const override { return std::nullopt; }
  void leave_to_graphs() override {}
};

void require_architecture(int device) {
  hipDeviceProp_t properties{};
  check(hipGetDeviceProperties(&properties, device), "hipGetDeviceProperties");
  const std::string name = properties.gcnArchName;  // with features, as gfx942:sramecc+:xnack-
  const std::string architecture = name.substr(0, name.find(':'));
  if (architecture == "gfx942" || architecture == "gfx950") return;
  throw std::runtime_error("device " + std::to_string(device) + " is " + architecture +
                           "; llm_comm has kernels for gfx942 and gfx950 (MI300 and MI350 series)");
}

}  // namespace

}  // namespace amd

std::unique_ptr<Core> make_hip_core(const CoreOptions& options, int device) {
  check_options(options);
  const amd::DeviceScope scope(device);
  amd::require_architecture(device);
  return std::make_unique<CoreImpl<amd::HipMemory, amd::HipLauncher>>(
      options, amd::HipMemory(device), amd::HipLauncher(device), std::make_unique<amd::NoPorts>());
}

}  // namespace llm_comm::host
