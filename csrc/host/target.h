// Concepts that a target must implement for CoreImpl: memory of a rank (TargetMemory) and kernel launches
// (TargetLauncher). A compile error names what a target lacks. Targets: GPUs, the emulator, the deterministic emulator
// of the tests.
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "algorithms/linear/args.h"
#include "host/copy.h"
#include "host/core.h"
#include "host/windows.h"
#include "llm_comm/program.cuh"

namespace llm_comm::host {

// Owns the workspace and all mappings.
template <class M>
concept TargetMemory = requires(M memory, const WorkspaceLayout& layout, const WorkspaceHandle& handle, int peer,
                                uint64_t bytes, Sharing sharing, void* to, char* address, const char* from,
                                const std::string& header, std::shared_ptr<char> own, std::weak_ptr<const void> core) {
  // Creates and initialises the local workspace; maps a peer's; returns the local address. All memory of the target is
  // shared as the workspace is.
  { memory.create(layout, sharing) } -> std::same_as<WorkspaceHandle>;
  { memory.map(peer, handle) } -> std::same_as<char*>;
  { memory.local() } -> std::same_as<char*>;
  // Zeroed host memory, mapped by the device.
  { memory.mailbox() } -> std::same_as<HostMailbox*>;

  // Access to workspaces. read_soon() returns empty instead of waiting; one thread at a time calls it. write() is for
  // the local workspace only.
  memory.read(to, from, bytes);
  { memory.read_soon(from) } -> std::same_as<std::optional<uint64_t>>;
  memory.write(address, from, bytes);

  // Memory of this rank that peers can map, and the mapping of a peer's.
  { memory.allocate(bytes) } -> std::same_as<SharedMemory>;
  { memory.map_memory(peer, bytes, handle) } -> std::same_as<std::shared_ptr<char>>;
  // allocate()d memory for a tensor, which may outlive the core.
  { memory.for_tensor(own, core) } -> std::same_as<std::shared_ptr<char>>;

  // vacate() releases the memory of all workspaces. Their addresses stay reserved, and the local header makes graph
  // launches do nothing. refill() is create() at the same address, with `header` written first. remap() is map() at the
  // same address.
  memory.vacate();
  { memory.refill(layout, header) } -> std::same_as<WorkspaceHandle>;
  memory.remap(peer, handle);

  // As in Core. bind_multicast() returns the address of the mapped object, never nullptr.
  { memory.create_multicast() } -> std::same_as<WorkspaceHandle>;
  memory.join_multicast(handle);
  memory.add_multicast_device();
  { memory.bind_multicast() } -> std::same_as<char*>;
  memory.drop_multicast();

  // Leaks the memory for graphs that may still use it, and makes their launches do nothing.
  memory.leave_to_graphs();
};

// Side stream for copies that overlap the launches. At most one exists per stream.
template <class B>
concept SideStreamCopies = requires(B side_stream, const std::vector<Copy>& copies, uint32_t number) {
  side_stream.follow();      // later copies wait for all launches so far
  side_stream.copy(copies);  // in order with earlier copies; copies marked is_stored are treated alike
  side_stream.record_event(number);
  side_stream.wait_event(number);  // later launches wait for the copies enqueued before record_event(number)
  side_stream.join();              // later launches wait for all copies
};

// Starts kernels. `Function<Args>` is the handle of a kernel void(Args).
template <class L>
concept TargetLauncher =
    requires(L launcher, void (*kernel)(LinearArgs), typename L::template Function<LinearArgs> function,
             const LinearArgs& args, const Grid& grid, uint64_t stream, const std::vector<Copy>& copies,
             MatrixView& matrix, uint32_t number, BoxUse use, const std::string& text, const DeviceComm& comm) {
      { launcher.function(kernel) } -> std::same_as<typename L::template Function<LinearArgs>>;
      // As Core::load_program(). Loaded kernels survive leave_to_graphs().
      { launcher.load(text, text) } -> std::same_as<typename L::template Function<ProgramArgs>>;
      launcher.leave_to_graphs();

      // Returns whether a graph captures the launch.
      { launcher.launch(function, args, grid, stream) } -> std::same_as<bool>;
      // Enqueues copies after every earlier launch, in any order among themselves.
      launcher.copy(copies, stream);
      { launcher.side_stream(stream) } -> SideStreamCopies;

      // Device properties. max_cluster_blocks() is 1 on devices without clusters.
      { launcher.sm_count() } -> std::same_as<uint32_t>;
      { launcher.max_cluster_blocks() } -> std::same_as<uint32_t>;
      { launcher.max_shared_bytes() } -> std::same_as<uint32_t>;
      { launcher.multiplies_fp8() } -> std::same_as<bool>;
      { launcher.has_room_for_cluster(function, grid) } -> std::same_as<bool>;
      // Blocks of this grid that can run at once.
      { launcher.resident_blocks(function, grid) } -> std::same_as<uint64_t>;

      // Allows launches of `function` to use max_shared_bytes().
      launcher.permit_shared_bytes(function);
      // Fills in target-specific fields of a matrix view: (matrix, parts, box_parts, box_rows, boxes, use).
      launcher.map_matrix(matrix, number, number, number, number, use);

      // True if graphs may still launch kernels.
      { launcher.has_been_captured() } -> std::same_as<bool>;
      // wait_for: the work of a stream. wait_for_device: all work of the device; throws std::runtime_error.
      // wait_for_last_call: all launches except those of graphs. False: cannot wait.
      { launcher.wait_for(stream) } -> std::same_as<bool>;
      launcher.wait_for_device();
      { launcher.wait_for_last_call() } -> std::same_as<bool>;
      // Synchronous.
      launcher.p2p_test(comm);
    };

}  // namespace llm_comm::host
