// HipMemory: the memory of a rank on an AMD GPU (TargetMemory of target.h): workspace, mappings of peers' workspaces,
// and memory of registered windows.
#pragma once

#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <thread>

#include "host/hip/device_memory.h"
#include "host/windows.h"
#include "llm_comm/wait.cuh"

namespace llm_comm::host::amd {

class HipMemory {
 public:
  // Call with the device current.
  explicit HipMemory(int device) : device_(device) {}

  WorkspaceHandle create(const WorkspaceLayout& layout, Sharing sharing) {
    const DeviceScope scope(device_);
    sharing_ = sharing;
    bytes_ = layout.bytes();
    local_ = DeviceMemory();
    local_ = DeviceMemory::allocate(device_, bytes_, sharing_);
    initialise(layout);
    return local_.export_handle();
  }
  char* map(int peer, const WorkspaceHandle& handle) {
    const DeviceScope scope(device_);
    return (peers_[peer] = DeviceMemory::map(device_, bytes_, sharing_, handle)).address();
  }
  char* local() const { return local_.address(); }
  HostMailbox* mailbox() const { return &host_->mailbox; }

  void read(void* to, const char* from, uint64_t bytes) const { copy(to, from, bytes, hipMemcpyDeviceToHost); }
  void write(char* to, const void* from, uint64_t bytes) const { copy(to, from, bytes, hipMemcpyHostToDevice); }
  std::optional<uint64_t> read_soon(const char* from) const {
    const DeviceScope scope(device_);
    if (!copy_soon(&host_->word, from, sizeof(uint64_t))) return std::nullopt;
    return host_->word;
  }

  SharedMemory allocate(uint64_t bytes) const {
    const DeviceScope scope(device_);
    const auto owner = std::make_shared<DeviceMemory>(DeviceMemory::allocate(device_, bytes, sharing_));
    return {{owner, owner->address()}, owner->export_handle()};
  }
  std::shared_ptr<char> map_memory(int, uint64_t bytes, const WorkspaceHandle& handle) const {
    const DeviceScope scope(device_);
    const auto owner = std::make_shared<DeviceMemory>(DeviceMemory::map(device_, bytes, sharing_, handle));
    return {owner, owner->address()};
  }
  // While the core exists, the caller waits for users before it frees the memory. After that nobody knows which streams
  // use it, so the end of the tensor synchronizes the device. No stream of the device may be under capture then.
  std::shared_ptr<char> for_tensor(std::shared_ptr<char> memory, std::weak_ptr<const void> core) const {
    char* const first = memory.get();
    return {first, [device = device_, memory = std::move(memory), core = std::move(core)](char*) {
              if (!core.expired()) return;
              try {
                const DeviceScope scope(device);
                static_cast<void>(hipDeviceSynchronize());
              } catch (const std::exception&) {
                // At process exit the runtime may be gone; then nothing runs.
              }
            }};
  }

  void vacate() {
    const DeviceScope scope(device_);
    local_.fill(kHeaderBytes);
    check(hipMemsetAsync(local(), 0, kHeaderBytes, stream_.get()), "hipMemsetAsync");
    const uint32_t aborted = 1;
    write(local() + offsetof(CommState, aborted), &aborted, sizeof(aborted));
    for (auto& [peer, memory] : peers_) memory.vacate();
  }
  WorkspaceHandle refill(const WorkspaceLayout& layout, const std::string& header) {
    const DeviceScope scope(device_);
    local_.fill();
    initialise(layout);
    write(local(), header.data(), header.size());
    return local_.export_handle();
  }
  void remap(int peer, const WorkspaceHandle& handle) {
    const DeviceScope scope(device_);
    peers_.at(peer).fill_from_peer(handle);
  }

  WorkspaceHandle create_multicast() { refuse_multicast(); }
  void join_multicast(const WorkspaceHandle&) { refuse_multicast(); }
  void add_multicast_device() { refuse_multicast(); }
  char* bind_multicast() { refuse_multicast(); }
  void drop_multicast() {}

  // The memory stays mapped until the process ends, and later launches return at once because the abort word is set.
  void leave_to_graphs() {
    auto* const kept = new (std::nothrow) HipMemory(std::move(*this));
    if (kept == nullptr) return;
    __atomic_fetch_or(&kept->mailbox()->end_reasons, kAbortRequest, __ATOMIC_RELEASE);
    try {
      const DeviceScope scope(kept->device_);
      kept->host_->word = 1;
      kept->copy_soon(kept->local() + offsetof(CommState, aborted), &kept->host_->word, sizeof(uint32_t));
    } catch (const std::exception&) {
      // The runtime is broken, so nothing will start.
    }
  }

 private:
  // Page-locked. Coherent (fine-grained): kernels write it and the host reads it while they run.
  struct HostMemory {
    HostMailbox mailbox;
    uint64_t word;  // staging for words read from the device

    static HostMemory* allocate() {
      void* address = nullptr;
      constexpr unsigned kFlags = hipHostMallocMapped | hipHostMallocCoherent | hipHostMallocPortable;
      check(hipHostMalloc(&address, sizeof(HostMemory), kFlags), "hipHostMalloc");
      return new (address) HostMemory{};
    }
    struct Free {
      void operator()(HostMemory* memory) const {
        const RelaxedCaptureMode relaxed;
        static_cast<void>(hipHostFree(memory));
      }
    };
  };

  [[noreturn]] static void refuse_multicast() { throw std::runtime_error("AMD GPUs have no NVLink multicast"); }

  void initialise(const WorkspaceLayout& layout) const {
    for (const Region& region : layout.regions().region) {
      check(hipMemsetAsync(local() + region.offset, region.initial_byte, region.bytes, stream_.get()),
            "hipMemsetAsync");
    }
    // Before a peer gets the handle: it may write at once.
    stream_.synchronize();
  }

  void copy(void* to, const void* from, uint64_t bytes, hipMemcpyKind kind) const {
    const DeviceScope scope(device_);
    check(hipMemcpyAsync(to, from, bytes, kind, stream_.get()), "hipMemcpyAsync");
    stream_.synchronize();
  }

  // Copies to or from page-locked memory. Returns false if the copy fails or takes longer than kLimit.
  bool copy_soon(void* to, const void* from, uint64_t bytes) const {
    constexpr std::chrono::milliseconds kLimit{100};
    const auto deadline = std::chrono::steady_clock::now() + kLimit;
    hipError_t status = hipStreamQuery(stream_.get());
    if (status != hipSuccess) return false;  // an abandoned copy may still be running
    status = hipMemcpyAsync(to, from, bytes, hipMemcpyDefault, stream_.get());
    if (status == hipSuccess) status = hipErrorNotReady;
    while (status == hipErrorNotReady && std::chrono::steady_clock::now() < deadline) {
      status = hipStreamQuery(stream_.get());
      if (status == hipErrorNotReady) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return status == hipSuccess;
  }

  int device_;
  Sharing sharing_ = Sharing::kDescriptor;
  uint64_t bytes_ = 0;
  std::unique_ptr<HostMemory, HostMemory::Free> host_{HostMemory::allocate()};
  Stream stream_;  // for copies while the caller's streams hold kernels that wait for other ranks
  DeviceMemory local_;
  std::map<int, DeviceMemory> peers_;
};

}  // namespace llm_comm::host::amd
