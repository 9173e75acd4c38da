// Core of an emulated GPU: workspaces in anonymous shared memory, kernels on the executor of the calling thread.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <system_error>
#include <type_traits>

#include "emulator/executor.h"
#include "host/core_impl.h"
#include "host/descriptor.h"
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

// Creates shared memory without a name in any file system.
Descriptor create_memory(const char* name, uint64_t bytes) {
  Descriptor created(memfd_create(name, MFD_CLOEXEC));
  if (!created || ftruncate(created.fd(), static_cast<off_t>(bytes)) != 0) {
    throw std::system_error(errno, std::generic_category(),
                            "cannot create " + std::to_string(bytes) + " bytes of shared memory");
  }
  return created;
}

// Memory of this process that peers can map.
class OwnMemory {
 public:
  OwnMemory() = default;
  OwnMemory(const char* name, uint64_t bytes)
      : bytes_(bytes), descriptor_(create_memory(name, bytes)), mapping_(descriptor_.fd(), bytes) {}

  char* address() const { return mapping_.address(); }

  void vacate_to_zeros() {
    mapping_.vacate_to_zeros();
    descriptor_ = Descriptor();
  }
  void refill(const char* name) {
    Descriptor created = create_memory(name, bytes_);
    mapping_.refill(created.fd());
    descriptor_ = std::move(created);
  }

  // A fabric handle names the descriptor, which stays open with the memory. A descriptor is given away.
  WorkspaceHandle handle(Sharing sharing) {
    if (sharing == Sharing::kDescriptor) return {descriptor_.release(), {}};
    return {-1, "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(descriptor_.fd())};
  }

 private:
  uint64_t bytes_ = 0;
  Descriptor descriptor_;
  SharedMapping mapping_;
};

// Calls use(fd) with the descriptor of a peer's memory.
template <class Use>
auto with_memory_of(const WorkspaceHandle& handle, Use use) {
  if (handle.bytes.empty()) return use(handle.fd);
  const Descriptor opened(open(handle.bytes.c_str(), O_RDWR | O_CLOEXEC));
  if (!opened) throw std::system_error(errno, std::generic_category(), "cannot open " + handle.bytes);
  return use(opened.fd());
}

SharedMapping mapping_of(const WorkspaceHandle& handle, uint64_t bytes) {
  return with_memory_of(handle, [&](int fd) { return SharedMapping(fd, bytes); });
}

constexpr const char* kNameOfWorkspace = "llm_comm_workspace";

class EmulatedMemory {
 public:
  explicit EmulatedMemory(bool multicast) : multicast_(multicast) {}

  WorkspaceHandle create(const WorkspaceLayout& layout, Sharing sharing) {
    if (sharing == Sharing::kIpc) throw std::invalid_argument("an emulated device has no cudaIpc handles");
    sharing_ = sharing;
    bytes_ = layout.bytes();
    local_ = OwnMemory(kNameOfWorkspace, bytes_);
    fill(layout);
    return local_.handle(sharing_);
  }

  void vacate() {
    local_.vacate_to_zeros();
    const uint32_t aborted = 1;
    std::memcpy(local() + offsetof(CommState, aborted), &aborted, sizeof(aborted));
    for (auto& [peer, mapping] : peers_) mapping.vacate();
  }

  WorkspaceHandle refill(const WorkspaceLayout& layout, const std::string& header) {
    local_.refill(kNameOfWorkspace);
    fill(layout);
    std::memcpy(local(), header.data(), header.size());
    return local_.handle(sharing_);
  }

  void remap(int peer, const WorkspaceHandle& handle) {
    with_memory_of(handle, [&](int fd) { peers_.at(peer).refill(fd); });
  }

  char* map(int peer, const WorkspaceHandle& handle) { return (peers_[peer] = mapping_of(handle, bytes_)).address(); }

  SharedMemory allocate(uint64_t bytes) const {
    auto own = std::make_shared<OwnMemory>("llm_comm_heap", bytes);
    WorkspaceHandle handle = own->handle(sharing_);
    char* const address = own->address();
    return {{std::move(own), address}, std::move(handle)};
  }

  std::shared_ptr<char> map_memory(int, uint64_t bytes, const WorkspaceHandle& handle) const {
    const auto mapping = std::make_shared<SharedMapping>(mapping_of(handle, bytes));
    return {mapping, mapping->address()};
  }

  std::shared_ptr<char> for_tensor(std::shared_ptr<char> memory, const std::weak_ptr<const void>&) const {
    return memory;
  }

  // The handle stands in for a multicast object and carries no information: the emulated switch loops over the
  // workspaces. The environment can forbid it as on a GPU, so that tests can check that the question is asked.
  WorkspaceHandle create_multicast() {
    require_multicast_permitted(variable_of_process);
    if (!multicast_) throw std::runtime_error("the core was made without multicast");
    return {create_memory("llm_comm_multicast", sizeof(Line)).release(), {}};
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
      std::memset(local() + region.offset, region.initial_byte, region.bytes);
    }
  }

  bool multicast_;
  Sharing sharing_ = Sharing::kDescriptor;
  uint64_t bytes_ = 0;
  OwnMemory local_;
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
