// CudaMemory: the memory of a rank on a CUDA device (TargetMemory of target.h): workspace, mappings of peers'
// workspaces, and memory of registered windows.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "host/cuda/device_memory.h"
#include "host/cuda/multicast_memory.h"
#include "host/multicast_switches.h"
#include "host/windows.h"
#include "llm_comm/wait.cuh"

namespace llm_comm::host {

class HostMemory {
 public:
  HostMemory() {
    void* address = nullptr;
    check(cudaHostAlloc(&address, sizeof(Content), cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
    void* device_address = nullptr;
    const cudaError_t error = cudaHostGetDevicePointer(&device_address, address, 0);
    if (error != cudaSuccess || device_address != address) {
      cudaFreeHost(address);
      check(error, "cudaHostGetDevicePointer");
      throw std::runtime_error("this device has no unified addressing");
    }
    content_ = new (address) Content{};
  }
  HostMemory(HostMemory&& other) noexcept { std::swap(content_, other.content_); }
  HostMemory& operator=(HostMemory&&) = delete;
  ~HostMemory() {
    if (content_ != nullptr) cudaFreeHost(content_);
  }
  HostMailbox* mailbox() const { return &content_->mailbox; }
  uint64_t* word() const { return &content_->word; }  // staging for words read from the device

 private:
  struct Content {
    HostMailbox mailbox;
    uint64_t word;
  };
  Content* content_ = nullptr;
};

// Stream for copies to and from device memory while the caller's streams hold kernels that wait for other ranks.
class SideStream {
 public:
  SideStream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate"); }
  SideStream(SideStream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  SideStream& operator=(SideStream&&) = delete;
  ~SideStream() {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  // Without a time limit.
  void fill(char* to, uint8_t byte, uint64_t bytes) const {
    const RelaxedCaptureMode relaxed;
    check(cudaMemsetAsync(to, byte, bytes, stream_), "cudaMemsetAsync");
  }
  void read_all(void* to, const char* from, uint64_t bytes) const {
    const RelaxedCaptureMode relaxed;
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync");
    wait("reading the workspace");
  }
  void write_all(char* to, const void* from, uint64_t bytes) const {
    const RelaxedCaptureMode relaxed;
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
    wait("writing the workspace");
  }
  void wait(const char* what) const {
    const RelaxedCaptureMode relaxed;
    check(cudaStreamSynchronize(stream_), what);
  }

  // The host memory must be page-locked. Return false if the copy fails or takes longer than kLimit.
  bool read(void* to, const char* from, uint64_t bytes) const { return copy(to, from, bytes, cudaMemcpyDeviceToHost); }
  bool write(char* to, const void* from, uint64_t bytes) const { return copy(to, from, bytes, cudaMemcpyHostToDevice); }

 private:
  bool copy(void* to, const void* from, uint64_t bytes, cudaMemcpyKind kind) const {
    const RelaxedCaptureMode relaxed;
    return cudaStreamQuery(stream_) == cudaSuccess &&  // an abandoned copy may still be running
           cudaMemcpyAsync(to, from, bytes, kind, stream_) == cudaSuccess && ends_soon();
  }

  static constexpr std::chrono::milliseconds kLimit{100};

  bool ends_soon() const {
    const auto deadline = std::chrono::steady_clock::now() + kLimit;
    cudaError_t status = cudaErrorNotReady;
    while (status == cudaErrorNotReady && std::chrono::steady_clock::now() < deadline) {
      status = cudaStreamQuery(stream_);
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return status == cudaSuccess;
  }

  cudaStream_t stream_ = nullptr;
};

// This rank's memory of a registered window, or its mapping of a peer's. May be freed by any thread, and after the
// core.
class WindowMemory {
 public:
  WindowMemory(int device, DeviceMemory memory) : device_(device), memory_(std::move(memory)) {}
  WindowMemory(const WindowMemory&) = delete;
  WindowMemory& operator=(const WindowMemory&) = delete;
  ~WindowMemory() {
    try {
      const DeviceGuard guard(device_);
      const RelaxedCaptureMode relaxed;
      memory_ = DeviceMemory();
    } catch (const std::exception&) {
      // At process exit the driver, and with it the memory, may be gone.
    }
  }

  char* address() const { return memory_.address(); }
  WorkspaceHandle export_handle() const { return memory_.export_handle(); }

 private:
  int device_;
  DeviceMemory memory_;
};

// Memory of a tensor in a registered window. While the core exists, the caller waits for users before it frees the
// memory. After that nobody knows which streams use it, so the destructor synchronizes the device. No stream of the
// device may be under capture then.
class TensorMemory {
 public:
  TensorMemory(int device, std::shared_ptr<char> memory, std::weak_ptr<const void> core)
      : device_(device), memory_(std::move(memory)), core_(std::move(core)) {}
  TensorMemory(const TensorMemory&) = delete;
  TensorMemory& operator=(const TensorMemory&) = delete;
  ~TensorMemory() {
    if (!core_.expired()) return;
    try {
      const DeviceGuard guard(device_);
      const RelaxedCaptureMode relaxed;
      if (cudaDeviceSynchronize() != cudaSuccess) cudaGetLastError();  // context is broken, so nothing runs
    } catch (const std::exception&) {
      // At process exit.
    }
  }

 private:
  int device_;
  std::shared_ptr<char> memory_;
  std::weak_ptr<const void> core_;
};

class CudaMemory {
 public:
  // `multicast`: allocate a workspace that a multicast object accepts, if the device supports multicast.
  CudaMemory(int device, int world_size, bool multicast)
      : device_(device), world_size_(world_size), wants_multicast_(multicast) {}
  CudaMemory(CudaMemory&&) = default;
  CudaMemory& operator=(CudaMemory&&) = delete;
  ~CudaMemory() {
    if (local_.address() == nullptr) return;
    try {
      leaving_ = std::make_unique<Leaving>(device_);
    } catch (const std::exception&) {
      // The context is broken, so nothing runs.
    }
  }

  // For graphs that hold launches and may outlive the communicator. The memory stays mapped until the process ends, and
  // later launches return at once because the abort word is set.
  void leave_to_graphs() {
    auto* const kept = new (std::nothrow) CudaMemory(std::move(*this));
    if (kept == nullptr) return;
    __atomic_fetch_or(&kept->mailbox()->end_reasons, kAbortRequest, __ATOMIC_RELEASE);
    try {
      const DeviceGuard guard(kept->device_);
      *kept->host_.word() = 1;
      kept->side_stream_.write(kept->local() + offsetof(CommState, aborted), kept->host_.word(), sizeof(uint32_t));
    } catch (const std::exception&) {
      // The context is broken, so nothing will start.
    }
  }

  WorkspaceHandle create(const WorkspaceLayout& layout, Sharing sharing) {
    const DeviceGuard guard(device_);
    const RelaxedCaptureMode relaxed;
    sharing_ = sharing;
    bytes_ = rounded_for_multicast(layout.bytes());
    local_ = DeviceMemory();
    local_ = DeviceMemory::allocate(device_, bytes_, sharing_);
    fill(layout);
    return local_.export_handle();
  }

  void vacate() {
    const DeviceGuard guard(device_);
    const RelaxedCaptureMode relaxed;
    local_.vacate_but_first_granule();
    side_stream_.fill(local_.address(), 0, kHeaderBytes);
    const uint32_t aborted = 1;
    side_stream_.write_all(local_.address() + offsetof(CommState, aborted), &aborted, sizeof(aborted));
    for (auto& [peer, memory] : peers_) memory.vacate();
  }

  WorkspaceHandle refill(const WorkspaceLayout& layout, const std::string& header) {
    const DeviceGuard guard(device_);
    const RelaxedCaptureMode relaxed;
    local_.refill();
    fill(layout, &header);
    return local_.export_handle();
  }

  void remap(int peer, const WorkspaceHandle& handle) {
    const RelaxedCaptureMode relaxed;
    peers_.at(peer).refill_from_peer(handle);
  }

  char* map(int peer, const WorkspaceHandle& handle) {
    const RelaxedCaptureMode relaxed;
    return (peers_[peer] = DeviceMemory::map(device_, bytes_, sharing_, handle)).address();
  }

  WorkspaceHandle create_multicast() {
    const DeviceGuard guard(device_);
    const RelaxedCaptureMode relaxed;
    return multicast().create(local_.bytes());
  }
  void join_multicast(const WorkspaceHandle& handle) {
    const DeviceGuard guard(device_);
    const RelaxedCaptureMode relaxed;
    multicast().join(local_.bytes(), handle);
  }
  void add_multicast_device() {
    const DeviceGuard guard(device_);
    const RelaxedCaptureMode relaxed;
    multicast().add_device();
  }
  char* bind_multicast() {
    const DeviceGuard guard(device_);
    const RelaxedCaptureMode relaxed;
    return multicast().bind(local_.vmm_handle(), local_.bytes());
  }
  void drop_multicast() {
    const DeviceGuard guard(device_);
    const RelaxedCaptureMode relaxed;
    multicast_.reset();
  }

  SharedMemory allocate(uint64_t bytes) const {
    const RelaxedCaptureMode relaxed;
    const auto owner = std::make_shared<WindowMemory>(device_, DeviceMemory::allocate(device_, bytes, sharing_));
    return {{owner, owner->address()}, owner->export_handle()};
  }

  std::shared_ptr<char> map_memory(int, uint64_t bytes, const WorkspaceHandle& handle) const {
    const RelaxedCaptureMode relaxed;
    const auto owner = std::make_shared<WindowMemory>(device_, DeviceMemory::map(device_, bytes, sharing_, handle));
    return {owner, owner->address()};
  }

  std::shared_ptr<char> for_tensor(std::shared_ptr<char> memory, std::weak_ptr<const void> core) const {
    char* const first = memory.get();
    return {std::make_shared<TensorMemory>(device_, std::move(memory), std::move(core)), first};
  }

  void write(char* to, const void* from, uint64_t bytes) const {
    const DeviceGuard guard(device_);
    side_stream_.write_all(to, from, bytes);
  }

  char* local() const { return local_.address(); }
  HostMailbox* mailbox() const { return host_.mailbox(); }

  void read(void* to, const char* from, uint64_t bytes) const {
    const DeviceGuard guard(device_);
    side_stream_.read_all(to, from, bytes);
  }

  std::optional<uint64_t> read_soon(const char* from) const {
    const DeviceGuard guard(device_);
    if (!side_stream_.read(host_.word(), from, sizeof(uint64_t))) return std::nullopt;
    return *host_.word();
  }

 private:
  // `header`: replaces the initial content of the first bytes.
  void fill(const WorkspaceLayout& layout, const std::string* header = nullptr) const {
    for (const Region& region : layout.regions().region) {
      side_stream_.fill(local_.address() + region.offset, region.initial_byte, region.bytes);
    }
    if (header != nullptr) side_stream_.write_all(local_.address(), header->data(), header->size());
    side_stream_.wait("initialising the workspace");  // before a peer gets the handle: it may write at once
  }

  MulticastMemory& multicast() const {
    if (multicast_ == nullptr) throw std::runtime_error(why_no_multicast_);
    return *multicast_;
  }

  // Rounds the workspace size to the granularity of multicast objects. If multicast is impossible, returns `bytes` and
  // keeps the reason for the multicast set-up to report.
  uint64_t rounded_for_multicast(uint64_t bytes) {
    multicast_.reset();
    // Multicast objects are passed on as descriptors, and do not take memory of cudaIpc.
    const bool by_descriptor = sharing_ == Sharing::kDescriptor;
    why_no_multicast_ = by_descriptor ? "the core was made without multicast"
                                      : "workspaces are not shared by file descriptors, as multicast needs";
    if (!wants_multicast_ || !by_descriptor) return bytes;
    try {
      constexpr unsigned kVersion = 12010;  // CUDA 12.1, the first version with multicast
      const MulticastDriver driver{[](const char* name) { return driver_function(name, kVersion); },
                                   variable_of_process};
      auto multicast = std::make_unique<MulticastMemory>(driver, device_, world_size_);
      const uint64_t granularity = multicast->granularity(bytes);
      if (granularity == 0) throw std::runtime_error("the driver gives no granularity of multicast objects");
      multicast_ = std::move(multicast);
      return (bytes + granularity - 1) / granularity * granularity;
    } catch (const std::runtime_error& error) {
      why_no_multicast_ = error.what();
      return bytes;
    }
  }

  // Scope for freeing memory: makes the device current and keeps captures of other threads intact.
  struct Leaving {
    explicit Leaving(int device) : guard(device) {}
    DeviceGuard guard;
    RelaxedCaptureMode relaxed;
  };

  std::unique_ptr<Leaving> leaving_;  // first member, so that it is destroyed last
  int device_;
  int world_size_;
  bool wants_multicast_;
  std::string why_no_multicast_;
  Sharing sharing_ = Sharing::kDescriptor;
  uint64_t bytes_ = 0;
  HostMemory host_;
  SideStream side_stream_;
  DeviceMemory local_;
  std::map<int, DeviceMemory> peers_;
  std::unique_ptr<MulticastMemory> multicast_;  // destroyed before the workspace that it binds
};

}  // namespace llm_comm::host
