// Core of an emulated GPU: workspaces in anonymous shared memory, kernels on the executor of the calling thread.
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <system_error>
#include <type_traits>

#include "emulator/executor.h"
#include "host/core_impl.h"
#include "host/loaded_kernel.h"
#include "host/memory_transport.h"
#include "host/multicast_switches.h"

namespace llm_comm::host {

namespace {

class SharedMapping {
 public:
  SharedMapping() = default;
  SharedMapping(int fd, uint64_t bytes) : bytes_(bytes) {
    void* const address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED) {
      throw std::system_error(errno, std::generic_category(), "cannot map " + std::to_string(bytes) + " bytes");
    }
    address_ = static_cast<char*>(address);
  }
  SharedMapping(SharedMapping&& other) noexcept { *this = std::move(other); }
  SharedMapping& operator=(SharedMapping&& other) noexcept {
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~SharedMapping() {
    if (address_ != nullptr) munmap(address_, bytes_);
  }
  char* address() const { return address_; }

  // Replace the memory behind the mapping without changing its address: refill() by the memory of a descriptor,
  // vacate() by inaccessible memory, vacate_to_zeros() by zeroed memory of this process that is allocated on demand.
  void refill(int fd) { replace(PROT_READ | PROT_WRITE, MAP_SHARED, fd); }
  void vacate() { replace(PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1); }
  void vacate_to_zeros() { replace(PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1); }

 private:
  void replace(int access, int flags, int fd) {
    if (mmap(address_, bytes_, access, flags | MAP_FIXED, fd, 0) != address_) {
      throw std::system_error(errno, std::generic_category(), "cannot map " + std::to_string(bytes_) + " bytes again");
    }
  }

  char* address_ = nullptr;
  uint64_t bytes_ = 0;
};

// Creates shared memory without a name in any file system and returns its descriptor for peers.
WorkspaceHandle create_memory(const char* name, uint64_t bytes) {
  WorkspaceHandle handle;
  handle.fd = memfd_create(name, MFD_CLOEXEC);
  if (handle.fd < 0 || ftruncate(handle.fd, static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    if (handle.fd >= 0) close(handle.fd);
    throw std::system_error(error, std::generic_category(),
                            "cannot create " + std::to_string(bytes) + " bytes of shared memory");
  }
  return handle;
}

// create_memory(), also mapped in this process.
WorkspaceHandle create_shared(const char* name, uint64_t bytes, bool use_ipc, SharedMapping& local) {
  if (use_ipc) throw std::invalid_argument("an emulated device has no cudaIpc handles");
  const WorkspaceHandle handle = create_memory(name, bytes);
  try {
    local = SharedMapping(handle.fd, bytes);
  } catch (...) {
    close(handle.fd);
    throw;
  }
  return handle;
}

std::shared_ptr<char> owner_of(SharedMapping mapping) {
  const auto owner = std::make_shared<SharedMapping>(std::move(mapping));
  return {owner, owner->address()};
}

class EmulatedMemory {
 public:
  explicit EmulatedMemory(bool multicast) : multicast_(multicast) {}

  WorkspaceHandle create(const WorkspaceLayout& layout, bool use_ipc) {
    bytes_ = layout.bytes();
    WorkspaceHandle handle = create_shared("llm_comm_workspace", bytes_, use_ipc, local_);
    fill(layout);
    return handle;
  }

  void vacate() {
    local_.vacate_to_zeros();
    const uint32_t aborted = 1;
    std::memcpy(local_.address() + offsetof(CommState, aborted), &aborted, sizeof(aborted));
    for (auto& [peer, mapping] : peers_) mapping.vacate();
  }

  WorkspaceHandle refill(const WorkspaceLayout& layout, const std::string& header) {
    WorkspaceHandle handle = create_memory("llm_comm_workspace", bytes_);
    try {
      local_.refill(handle.fd);
    } catch (...) {
      close(handle.fd);
      throw;
    }
    fill(layout);
    std::memcpy(local_.address(), header.data(), header.size());
    return handle;
  }

  void remap(int peer, const WorkspaceHandle& handle) { peers_.at(peer).refill(handle.fd); }

  char* map(int peer, const WorkspaceHandle& handle) {
    return (peers_[peer] = SharedMapping(handle.fd, bytes_)).address();
  }

  SharedMemory allocate(uint64_t bytes, bool use_ipc) const {
    SharedMapping own;
    WorkspaceHandle handle = create_shared("llm_comm_heap", bytes, use_ipc, own);
    return {owner_of(std::move(own)), std::move(handle)};
  }

  std::shared_ptr<char> map_memory(int, uint64_t bytes, const WorkspaceHandle& handle) const {
    return owner_of(SharedMapping(handle.fd, bytes));
  }

  std::shared_ptr<char> for_tensor(std::shared_ptr<char> memory, const std::weak_ptr<const void>&) const {
    return memory;
  }

  // The handle stands in for a multicast object and carries no information: the emulated switch loops over the
  // workspaces. The environment can forbid it as on a GPU, so that tests can check that the question is asked.
  WorkspaceHandle create_multicast() {
    require_multicast_permitted(variable_of_process);
    if (!multicast_) throw std::runtime_error("the core was made without multicast");
    SharedMapping unused;
    return create_shared("llm_comm_multicast", sizeof(Line), false, unused);
  }
  void join_multicast(const WorkspaceHandle& handle) {
    require_multicast_permitted(variable_of_process);
    const SharedMapping unused(handle.fd, sizeof(Line));
  }
  void add_multicast_device() {}
  // Kernels only test the pointer for nullptr.
  char* bind_multicast() {
    static char anything;
    return &anything;
  }
  void drop_multicast() {}

  char* local() const { return local_.address(); }
  void write(char* to, const void* from, uint64_t bytes) const { std::memcpy(to, from, bytes); }
  HostMailbox* mailbox() const { return mailbox_.get(); }
  void leave_to_graphs() {}
  void read(void* to, const char* from, uint64_t bytes) const { std::memcpy(to, from, bytes); }
  // Acquires, so that words are read in the order of the calls, as the copies of a stream are.
  std::optional<uint64_t> read_soon(const char* from) const {
    return load_acquire(reinterpret_cast<const uint64_t*>(from));
  }

 private:
  void fill(const WorkspaceLayout& layout) {
    for (const Region& region : layout.regions().region) {
      std::memset(local_.address() + region.offset, region.initial_byte, region.bytes);
    }
  }

  bool multicast_;
  uint64_t bytes_ = 0;
  SharedMapping local_;
  std::map<int, SharedMapping> peers_;
  std::unique_ptr<HostMailbox> mailbox_ = std::make_unique<HostMailbox>();
};

// Properties of an emulated GPU: those of the largest real ones, but with few SMs.
constexpr uint32_t kMaxEmulatedCluster = 16;
constexpr uint32_t kEmulatedSharedBytes = 227 * 1024;
constexpr uint32_t kEmulatedMultiprocessors = 4;  // must agree with runtime/devices.py

class EmulatedLauncher {
 public:
  explicit EmulatedLauncher(uint32_t rank) : executor_(std::make_unique<emulator::Executor>(rank)) {}

  template <class Args>
  using Function = std::conditional_t<std::is_same_v<Args, ProgramArgs>, LoadedKernel, void (*)(Args)>;

  LoadedKernel load(const std::string& library, const std::string& kernel) const {
    return LoadedKernel(library, kernel, sizeof(ProgramArgs));
  }
  void leave_to_graphs() {}

  template <class Args>
  Function<Args> function(void (*kernel)(Args)) const {
    return kernel;
  }

  bool launch(const LoadedKernel& kernel, const ProgramArgs& args, const Grid& grid, uint64_t) {
    kernel.run(grid.blocks, grid.threads, grid.shared_bytes, &args);
    return false;
  }

  template <class Args>
  bool launch(void (*kernel)(Args), const Args& args, const Grid& grid, uint64_t) {
    executor_->run({grid.blocks, grid.threads, grid.shared_bytes, grid.cluster_blocks}, [&] { kernel(args); });
    return false;
  }

  void copy(const std::vector<Copy>& copies, uint64_t) {
    for (const Copy& copy : copies) std::memmove(copy.to, copy.from, copy.bytes);
  }

  // Nothing overlaps a launch: it has ended when launch() returns.
  struct SideStream {
    EmulatedLauncher& launcher;
    void follow() {}
    void copy(const std::vector<Copy>& copies) { launcher.copy(copies, 0); }
    void record_event(uint32_t) {}
    void wait_event(uint32_t) {}
    void join() {}
  };
  SideStream side_stream(uint64_t) { return {*this}; }

  uint32_t max_cluster_blocks() const { return kMaxEmulatedCluster; }
  uint32_t sm_count() const { return kEmulatedMultiprocessors; }
  uint32_t max_shared_bytes() const { return kEmulatedSharedBytes; }
  bool multiplies_fp8() const { return true; }
  template <class Args>
  void permit_shared_bytes(void (*)(Args)) const {}
  void map_matrix(MatrixView&, uint32_t, uint32_t, uint32_t, uint32_t, BoxUse) const {}
  template <class Function>
  bool has_room_for_cluster(const Function&, const Grid&) const {
    return true;
  }

  template <class Function>
  uint64_t resident_blocks(const Function&, const Grid& grid) const {
    return emulator::Executor::resident_blocks(grid.threads, grid.cluster_blocks);
  }

  bool has_been_captured() const { return false; }
  void wait_for_device() {}
  bool wait_for(uint64_t) { return true; }
  bool wait_for_last_call() { return true; }
  void p2p_test(const DeviceComm& comm) {
    executor_->run({1, kMaxWorldSize, 0}, [&] { emulated::p2p_test(comm); });
  }

 private:
  std::unique_ptr<emulator::Executor> executor_;
};

}  // namespace

uint64_t bytes_of_semaphores(uint32_t world_size, uint32_t semaphores) {
  return Channels::bytes_of_semaphores(world_size, semaphores);
}
uint64_t bytes_of_channels() { return sizeof(Channels); }

std::unique_ptr<Core> make_emulated_core(const CoreOptions& options) {
  check_options(options);
  return std::make_unique<CoreImpl<EmulatedMemory, EmulatedLauncher>>(
      options, EmulatedMemory(options.multicast), EmulatedLauncher(static_cast<uint32_t>(options.rank)),
      make_emulated_ports());
}

}  // namespace llm_comm::host
