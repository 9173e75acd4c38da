// Core: one rank's half of a communicator, on a GPU or on an emulated one. The Python bindings, the NCCL library and
// tests use it. It takes raw addresses and stream handles: the caller owns tensors and streams and exchanges handles
// between processes. Not thread-safe, except where a function says so.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "algorithms/launch_shape.h"
#include "algorithms/linear/experts_problem.h"
#include "algorithms/linear/problem.h"
#include "algorithms/linear/rope.h"
#include "algorithms/linear/router.h"

namespace llm_comm::host {

struct CoreOptions {
  int rank;
  int world_size;              // 1..8
  uint64_t slot_bytes;         // a multiple of 16; the workspace holds two slots and a header
  double timeout_s;            // bound of every wait of a kernel
  bool dependent_launch;       // programmatic dependent launch, where the device has it
  bool check_calls;            // ranks compare each call before they run it
  uint64_t staging_bytes = 0;  // a multiple of 16; for HB
  bool multicast = false;      // prepare the workspace for a multicast object (create_multicast())
};

// How peers get this rank's memory. Processes of one machine send a file descriptor over a unix socket, or a cudaIpc
// handle. Fabric handles also reach the other machines of an NVLink domain. On emulated devices a fabric handle names a
// descriptor of this process, and cudaIpc does not exist.
enum class Sharing : uint8_t { kDescriptor, kFabric, kIpc };

// Handle by which a peer maps memory: a file descriptor, or the bytes of a fabric or cudaIpc handle.
struct WorkspaceHandle {
  int fd = -1;  // owned by the holder of the struct
  std::string bytes;
};

// Arguments of a call that ranks must agree on, in words.
struct Call {
  std::string operation;
  std::string data_type;
  uint32_t row;     // elements of a row, for operations that work on rows; else 0
  uint64_t count;   // elements
  uint64_t number;  // call number on this communicator, from 1; a graph's calls are counted at capture
  // Parameters and optional buffers by name: {"epsilon", "epsilon 1e-05"}, {"residual", "without residual"}.
  std::vector<std::pair<std::string, std::string>> details;
};

// Sizes of parts that differ between two ranks, or do not fit (SizesError of wait.cuh, which defines the numbers).
struct WrongSizes {
  // "disagree", "sends too many", "expects too many", "input too short", "output too short" or "other
  // call".
  std::string fault;
  int rank = 0;
  int peer = 0;
  uint32_t rows = 0;
  uint32_t limit = 0;
};

// Reason for which a communicator has failed.
struct OperationError {
  // One of:
  // - "timeout", "peer exited": a wait for `peer` ended without data.
  // - "mismatch": `calls` differ between ranks.
  // - "concurrent use": two operations of this rank overlap; found by the device.
  // - "overlap": two operations of this rank overlap; found by check_order(), before operation `sequence`.
  // - "order": the operations of `peer` have another order; found by check_order(), before operation `sequence`.
  // - "not symmetric": a tensor of `peer` that other ranks were to access is not in symmetric memory.
  // - "other symmetric offset": a tensor of `peer` has another symmetric offset than that of rank 0; all must agree.
  // - "no channel": a kernel asked for a channel that does not exist.
  // - "sizes": sizes of parts are wrong; `sizes` says which.
  // - "transport": a request of a port channel could not be executed; `text` says why.
  std::string cause;
  int rank;
  int peer;
  std::string operation;
  int phase;  // phase number of the operation; -1: in the comparison of calls before it
  uint64_t sequence;
  uint64_t bytes;
  std::vector<Call> calls;  // by rank
  std::string text;
  WrongSizes sizes = {};
};

// Result of PreparedCall::run().
enum class Outcome : uint8_t {
  kFailed,  // not enqueued, or only partly: the communicator has failed, or its workspaces are released
  kEnqueued,
  kCaptured,  // by a graph, which runs the call at each of its launches
};

// A call that is checked and laid out in advance; run() only enqueues it. Must not outlive its Core.
class PreparedCall {
 public:
  virtual ~PreparedCall() = default;

  // Enqueues the call. Thread-safe: calls are serialized. `buffers`: addresses in the order of the operation's
  // descriptor, 0 for an optional buffer that is absent.
  virtual Outcome run(const uint64_t* buffers, uint64_t stream) = 0;

  // True if all buffers that peers access, if any, are in symmetric memory. Thread-safe.
  virtual bool takes([[maybe_unused]] const uint64_t* buffers) const { return true; }
};

// Symmetric offset of a tensor: its registered window and the offset in it.
struct SymmetricOffset {
  uint32_t window;
  uint64_t offset;  // in bytes
};

// Parameters of a call of a DSL kernel (llm_comm.dsl).
struct ProgramLaunch {
  uint32_t kernel;  // number returned by Core::load_program()
  uint32_t groups;  // groups of blocks; they wait for each other, so as many blocks must run at once
  uint32_t blocks;  // all blocks of the grid
  uint32_t threads;
  uint32_t shared_bytes;
  SymmetricOffset memory;  // the DSL kernel's workspace
  uint64_t memory_bytes;
  SymmetricOffset semaphore_words;  // as for Core::channels()
  uint32_t semaphores;
  DataType type;
  uint64_t input_bytes;
  uint64_t output_bytes;
  uint64_t part_bytes;  // bytes of the message that are cut into chunks
  uint32_t symmetric;   // bit 0: peers access the input; bit 1: the output
};

class Core {
 public:
  virtual ~Core() = default;

  // Allocates and initialises this rank's workspace and returns its handle. Windows are shared in the same way. May be
  // called again to share in another way, before any map_peer().
  virtual WorkspaceHandle create_workspace(Sharing sharing) = 0;
  // Maps a peer's workspace. Does not keep the handle's descriptor.
  virtual void map_peer(int peer, const WorkspaceHandle& handle) = 0;
  virtual uint64_t workspace_bytes() const = 0;

  // Release of the workspaces' memory while the communicator is idle, and its restoration. Addresses stay reserved, so
  // prepared calls, captured graphs and channels() are valid again after the restoration. The symmetric heap is not
  // released. A rank calls a step once every rank has finished the previous step. Not possible with cudaIpc memory or
  // with multicast set up.

  // Refuses further calls, waits for the device, and stops the proxy when it has executed all requests. Throws
  // std::runtime_error if either does not finish; end_release() undoes this step. No stream may be under capture.
  virtual void begin_release() = 0;
  // Releases the memory. Graphs launched from here on do nothing. May be called repeatedly.
  virtual void release_workspaces() = 0;
  // As create_workspace() and map_peer(), at the previous addresses and with the previous content of the header. If one
  // of them fails on a rank, all ranks call release_workspaces() again.
  virtual WorkspaceHandle restore_workspace() = 0;
  virtual void restore_peer(int peer, const WorkspaceHandle& handle) = 0;
  // Accepts calls again. Throws std::runtime_error if the proxy cannot be started.
  virtual void end_release() = 0;

  // NVLink multicast over the workspaces of all ranks, which must be mapped. A rank calls a step once every rank has
  // finished the previous step. If a step fails on one rank, all ranks call drop_multicast(). The steps throw
  // std::runtime_error. If the environment forbids multicast they do so before they look up any driver function for it
  // (multicast_switches.h).

  // Rank 0: creates the multicast object and returns its handle.
  virtual WorkspaceHandle create_multicast() = 0;
  // Other ranks: open the multicast object. Does not keep the handle's descriptor.
  virtual void join_multicast(const WorkspaceHandle& handle) = 0;
  // All ranks must have called this before the first one binds: the driver's bind waits for them without a limit.
  virtual void add_multicast_device() = 0;
  // Binds this rank's workspace and maps the object. After all ranks have done so, switch algorithms can be prepared.
  virtual void bind_multicast() = 0;
  // Undoes all steps. No prepared call of a switch algorithm may exist. The destructor does this too.
  virtual void drop_multicast() = 0;

  // Symmetric heap: registered windows that have the same size on every rank and that all ranks map. The
  // caller chooses their numbers, below kMaxWindows and the same on all ranks. The heap may change while other threads
  // enqueue calls.

  // Allocates this rank's memory of a window and returns its handle.
  virtual WorkspaceHandle create_window(uint32_t window, uint64_t bytes) = 0;
  // Maps a peer's memory of a window. Does not keep the handle's descriptor.
  virtual void map_window(uint32_t window, int peer, const WorkspaceHandle& handle) = 0;
  // Unmaps the peers' memory of a window. No enqueued work may still use it.
  virtual void unmap_window(uint32_t window) = 0;
  // Removes a window after unmap_window(). This rank's memory lives as long as it has an owner.
  virtual void close_window(uint32_t window) = 0;
  // This rank's memory of a window. The returned pointer owns it, also after the core is destroyed.
  virtual std::shared_ptr<char> memory_of_window(uint32_t window) const = 0;
  // Symmetric offset of `bytes` of this rank's memory, if one window contains them.
  virtual std::optional<SymmetricOffset> find(uint64_t address, uint64_t bytes) const = 0;

  // Returns the bytes of a Channels (llm_comm/channels.cuh) for user kernels: the tensor of `bytes` at `memory`, and
  // `semaphores` semaphores per pair of ranks and kind at `semaphore_words`, which must be zero. Starts the proxy.
  // Throws std::runtime_error if the proxy cannot be started.
  virtual std::string channels(const SymmetricOffset& memory, uint64_t bytes, const SymmetricOffset& semaphore_words,
                               uint32_t semaphores) = 0;

  // send_marks() writes a mark to the header of every rank's workspace. peers_unseen(), after a barrier of all ranks,
  // returns the peers whose mark did not arrive.
  virtual void send_marks() = 0;
  virtual std::vector<int> peers_unseen() = 0;

  // Largest cluster, in blocks, that this device supports for every kernel; a power of two. 1: the device has no
  // clusters.
  virtual uint32_t max_cluster_blocks() = 0;

  // Loads the kernels of algorithms, given by registry number (planner.h). prepare() loads other kernels on demand,
  // even during stream capture; the driver then waits for all running kernels of the device.
  virtual void load(const std::vector<uint32_t>& algorithms) = 0;

  // `algorithm`: registry number. Throws std::invalid_argument if the algorithm, the workspace or the device does not
  // support the call.
  virtual std::unique_ptr<PreparedCall> prepare(uint32_t algorithm, const Problem& problem, const Tiling& tiling) = 0;

  // True if FP8 linear layers have kernels for this device: sm_89 or later.
  virtual bool multiplies_fp8() const = 0;

  // linear::choices() for this device.
  virtual std::vector<LinearChoice> linear_choices(const LinearProblem& problem) const = 0;

  // Prepares a linear layer, which involves no other rank. Throws std::invalid_argument if the layer or the device does
  // not support it. Buffers of the call, contiguous and 16-byte aligned:
  // - x [tokens, inputs]
  // - weight [outputs, inputs], or with twice as many rows if the epilogue is an activation
  // - out [tokens, outputs]
  // - bias: one element of the type of out for each row of the weight, or 0
  // - FP8 only: the fp32 scales of x and of the weight, one each or one per row
  //
  // The kernel reads the weight, its scales and the bias before earlier grids of the stream have ended. Whatever writes
  // them must have ended before the call.
  virtual std::unique_ptr<PreparedCall> prepare_linear(const LinearProblem& problem, const LinearChoice& choice) = 0;

  // Prepares experts, two launches that involve no other rank (experts.h). Throws std::invalid_argument if they or the
  // device do not serve the problem. Buffers of the call: experts::kBuffers.
  virtual std::unique_ptr<PreparedCall> prepare_experts(const experts::Problem& problem, const experts::Choice& gate_up,
                                                        const experts::Choice& down) = 0;

  // Prepares a router of experts, one launch that involves no other rank (router.h). Throws std::invalid_argument if it
  // or the device does not serve the problem. Buffers of the call: router::kBuffers. The kernel reads the weight early,
  // as a linear layer does.
  virtual std::unique_ptr<PreparedCall> prepare_router(const router::Problem& problem) = 0;

  // Prepares a layer of q, k and v, one launch that involves no other rank (rope.h). Throws std::invalid_argument if it
  // or the device does not serve the problem. Buffers of the call: rope::kBuffers. The kernel reads the weight, the bias
  // and the norms' weights early, as a linear layer does.
  virtual std::unique_ptr<PreparedCall> prepare_rope(const rope::Problem& problem, const rope::Choice& choice) = 0;

  // Loads a DSL kernel and returns the number that prepare_program() takes. `image`: a cubin; for an emulated GPU the
  // path of a shared library. `title`: name of its calls in error messages. All ranks load the same kernels in the same
  // order; a failed load uses up a number. Throws std::runtime_error if the kernel cannot be loaded.
  virtual uint32_t load_program(const std::string& image, const std::string& kernel, const std::string& title) = 0;
  // Prepares a DSL kernel. Buffers of the call: input and output. Throws std::invalid_argument if the heap or the
  // device does not support the launch.
  virtual std::unique_ptr<PreparedCall> prepare_program(const ProgramLaunch& launch) = 0;

  // For a watchdog thread of this rank. None of these functions waits for another rank.

  // First error of a kernel, of the proxy, or found by check_order(). Reads host memory only.
  virtual std::optional<OperationError> error() const = 0;
  // Checks whether operations of this rank overlapped or had another order than on a peer (host/order_of_operations.h).
  // Fails the communicator if so. Only graph replays can cause either. Reads a few words of all workspaces and waits
  // for no operation. Thread-safe.
  virtual void check_order() = 0;
  // Ends all current and later waits of this rank's kernels. Later calls fail.
  virtual void abort() = 0;
  // Reports that the process of `peer` has exited. Waits for it end unless their data has arrived. Throws
  // std::invalid_argument if there is no such rank.
  virtual void peer_exited(int peer) = 0;
  // Last call that this rank enqueued, without its details. Number 0: none.
  virtual Call last_call() const = 0;
  // True if graphs hold calls of this core. The workspace then stays mapped until the process ends, and a graph that
  // outlives the core does nothing when it is launched.
  virtual bool has_been_captured() const = 0;
  // Waits for the work of a stream, unless the stream is under capture. Does not invalidate the capture of any stream.
  virtual void wait_for(uint64_t stream) = 0;

  // Number of operations that the device has finished; empty if the device does not answer soon. Thread-safe.
  virtual std::optional<uint64_t> operations_ended() = 0;
};

// Bytes of a rank's semaphore words for Core::channels(), and of the value that it returns.
uint64_t bytes_of_semaphores(uint32_t world_size, uint32_t semaphores);
uint64_t bytes_of_channels();

std::unique_ptr<Core> make_emulated_core(const CoreOptions& options);
// Throws std::runtime_error if CUDA is not compiled in or the device cannot be used.
[[gnu::visibility("default")]] std::unique_ptr<Core> make_cuda_core(const CoreOptions& options, int device);

struct DeviceReport {
  std::string name;
  int compute_capability;  // major * 10 + minor
  int sm_count;
  bool vmm;
  bool posix_fd;
  bool multicast_supported;  // as the driver reports it; the query creates no multicast object
  int driver_version;        // in CUDA's encoding: 13000 is 13.0
};
[[gnu::visibility("default")]] DeviceReport cuda_device_report(int device);

}  // namespace llm_comm::host
