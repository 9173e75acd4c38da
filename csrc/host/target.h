// What a target gives a core: the memory of a rank, and how kernels are launched. Concepts, so that a target which lacks
// something is told what. There are three: GPUs, the emulator, and the deterministic emulator of the tests.
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
#include "host/segments.h"
#include "llm_comm/program.cuh"

namespace llm_comm::host {

// Owns the workspace and its mappings.
template <class M>
concept TargetMemory = requires(M memory, const WorkspaceLayout& layout, const WorkspaceHandle& handle, int peer,
                                uint64_t bytes, bool use_ipc, void* to, char* address, const char* from,
                                const std::string& header, std::shared_ptr<char> own, std::weak_ptr<const void> core) {
  // The local workspace, initialised by region; and those of peers.
  { memory.create(layout, use_ipc) } -> std::same_as<WorkspaceHandle>;
  { memory.map(peer, handle) } -> std::same_as<char*>;
  { memory.local() } -> std::same_as<char*>;
  // Zeroed at first, and mapped by the device.
  { memory.mailbox() } -> std::same_as<HostMailbox*>;

  // Of workspaces. read_soon() gives up rather than wait; one thread at a time calls it. write() is for the local one.
  memory.read(to, from, bytes);
  { memory.read_soon(from) } -> std::same_as<std::optional<uint64_t>>;
  memory.write(address, from, bytes);

  // Memory of this rank for peers to map, and theirs.
  { memory.allocate(bytes, use_ipc) } -> std::same_as<SharedMemory>;
  { memory.map_memory(peer, bytes, handle) } -> std::same_as<std::shared_ptr<char>>;
  // The same memory for a tensor, which may outlive the core.
  { memory.for_tensor(own, core) } -> std::same_as<std::shared_ptr<char>>;

  // vacate() gives the memory of all workspaces back. Their addresses stay, and the own header then says that calls do
  // nothing. refill() is create() at the same addresses, with `header` written first; remap() is map() there.
  memory.vacate();
  { memory.refill(layout, header) } -> std::same_as<WorkspaceHandle>;
  memory.remap(peer, handle);

  // As of Core. bind_multicast() returns where the object is mapped, never nullptr.
  { memory.create_multicast() } -> std::same_as<WorkspaceHandle>;
  memory.join_multicast(handle);
  memory.add_multicast_device();
  { memory.bind_multicast() } -> std::same_as<char*>;
  memory.drop_multicast();

  // Keeps the memory for what may still use it, and lets it do nothing.
  memory.leave_to_graphs();
};

// Copies in a stream beside that of the launches. There is one of a stream at a time.
template <class B>
concept CopiesBeside = requires(B beside, const std::vector<Copy>& copies, uint32_t number) {
  beside.follow();      // what it copies from now on comes behind all launches so far
  beside.copy(copies);  // behind what it has copied; those that a kernel stores, as the others
  beside.mark(number);
  beside.hold(number);  // launches from now on come behind what had been copied at mark(number)
  beside.join();        // launches from now on come behind all copies
};

// Starts kernels. `Function<Args>` is what launch() takes for a kernel void(Args).
template <class L>
concept TargetLauncher =
    requires(L launcher, void (*kernel)(LinearArgs), typename L::template Function<LinearArgs> function,
             const LinearArgs& args, const Grid& grid, uint64_t stream, const std::vector<Copy>& copies,
             MatrixView& matrix, uint32_t number, BoxUse use, const std::string& text, const DeviceComm& comm) {
      { launcher.function(kernel) } -> std::same_as<typename L::template Function<LinearArgs>>;
      // As of Core::load_program(). What has been loaded stays behind leave_to_graphs().
      { launcher.load(text, text) } -> std::same_as<typename L::template Function<ProgramArgs>>;
      launcher.leave_to_graphs();

      // Returns whether a graph captures it.
      { launcher.launch(function, args, grid, stream) } -> std::same_as<bool>;
      // Behind all launches, in no order.
      launcher.copy(copies, stream);
      { launcher.beside(stream) } -> CopiesBeside;

      // Of the device. max_cluster_blocks() is 1 where it has no clusters.
      { launcher.sm_count() } -> std::same_as<uint32_t>;
      { launcher.max_cluster_blocks() } -> std::same_as<uint32_t>;
      { launcher.max_shared_bytes() } -> std::same_as<uint32_t>;
      { launcher.multiplies_fp8() } -> std::same_as<bool>;
      { launcher.has_room_for_cluster(function, grid) } -> std::same_as<bool>;
      // Blocks of such grids that run at once.
      { launcher.resident_blocks(function, grid) } -> std::same_as<uint64_t>;

      // A launch of it may take max_shared_bytes() from now on.
      launcher.permit_shared_bytes(function);
      // Fills in what the target wants beside address and size: (matrix, parts, box_rows, boxes, use).
      launcher.map_matrix(matrix, number, number, number, use);

      // Launches may still come, from graphs.
      { launcher.has_been_captured() } -> std::same_as<bool>;
      // Until what the stream holds has ended; all that the device runs (throws std::runtime_error); all launches but those
      // of graphs. False where that cannot be waited for.
      { launcher.wait_for(stream) } -> std::same_as<bool>;
      launcher.wait_for_device();
      { launcher.wait_for_last_call() } -> std::same_as<bool>;
      // Synchronous.
      launcher.p2p_test(comm);
    };

}  // namespace llm_comm::host
