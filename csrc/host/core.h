// One rank's half of a communicator, on a GPU or on an emulated one. Raw addresses and stream handles only:
// the caller owns tensors, streams and the exchange of handles between processes. Not thread-safe, but where it says so.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "algorithms/launch_shape.h"
#include "algorithms/linear/problem.h"

namespace llm_comm::host {

struct CoreOptions {
  int rank;
  int world_size;              // 1..8
  uint64_t slot_bytes;         // a multiple of 16; the workspace holds two slots and a header
  double timeout_s;            // bound of every wait of a kernel
  bool dependent_launch;       // programmatic dependent launch, where the device has it
  bool check_calls;            // the ranks compare each call before they run it
  uint64_t staging_bytes = 0;  // a multiple of 16; for HB
  bool multicast = false;  // the workspace is to be one that a multicast object takes; set-up is by create_multicast()
};

// What a peer needs to map a workspace: a file descriptor, which travels over a unix socket, or bytes (cudaIpc).
struct WorkspaceHandle {
  int fd = -1;  // owned by whoever holds the struct
  std::string bytes;
};

// A launch, as far as the ranks have to agree on it.
struct Call {
  std::string operation;
  std::string data_type;
  uint32_t row;     // elements of a row, for an operation that works by rows; else 0
  uint64_t count;   // elements
  uint64_t number;  // of the launch on this communicator, from 1; a graph's launches are counted when it is captured
  // Of parameters and optional buffers, by name: {"epsilon", "epsilon 1e-05"}, {"residual", "without residual"}.
  std::vector<std::pair<std::string, std::string>> details;
};

// Why a communicator cannot be used any more.
struct OperationError {
  // "timeout", "peer exited": `peer` was waited for, and nothing came; "mismatch": `calls` differ; "concurrent use"; "overlap": found
  // by check_order(), before operation `sequence`; "order": so is this, of `peer`; "not
  // symmetric": a tensor of `peer` that the others were to access is not in symmetric memory; "other place": it is, but elsewhere
  // than that of rank 0, where all must be at one place; "transport": what a kernel asked of a
  // port channel could not be done, and `text` says why.
  std::string cause;
  int rank;
  int peer;
  std::string operation;
  int phase;  // the operation's own numbering; -1: in the comparison before it
  uint64_t sequence;
  uint64_t bytes;
  std::vector<Call> calls;  // by rank
  std::string text;
};

// What has become of a call.
enum class Outcome : uint8_t {
  kFailed,  // nothing of it is enqueued, or not all: the communicator has failed, or its workspaces are released
  kEnqueued,
  kCaptured,  // by a graph, which enqueues it whenever the graph is launched
};

// One kind of call, checked and laid out beforehand: what is left to do is to enqueue it. Must not outlive its Core.
class PreparedCall {
 public:
  virtual ~PreparedCall() = default;

  // Enqueues the call; threads take turns. `buffers`: addresses in the order of the operation's descriptor, 0 for an optional
  // one that is not there.
  virtual Outcome run(const uint64_t* buffers, uint64_t stream) = 0;

  // Whether all buffers that peers are to access are in symmetric memory, where they can. From any thread.
  virtual bool takes([[maybe_unused]] const uint64_t* buffers) const { return true; }
};

// Where a tensor lies in the symmetric heap.
struct Place {
  uint32_t segment;
  uint64_t offset;  // in bytes
};

// A call of a kernel of llm_comm.dsl.
struct ProgramLaunch {
  uint32_t kernel;  // what Core::load_program() has returned
  uint32_t groups;  // of blocks, which wait for each other
  uint32_t blocks;  // of all groups
  uint32_t threads;
  uint32_t shared_bytes;
  Place memory;  // the program's workspace
  uint64_t memory_bytes;
  Place semaphore_words;  // as of Core::channels()
  uint32_t semaphores;
  DataType type;
  uint64_t input_bytes;
  uint64_t output_bytes;
  uint64_t part_bytes;  // of the message: what is cut into chunks
  uint32_t symmetric;   // bit 0: peers use the input; bit 1: the output
};

class Core {
 public:
  virtual ~Core() = default;

  // Allocates and initialises this rank's workspace and returns its handle. `use_ipc`: cudaIpc instead of a
  // file descriptor. May be called again to change the kind, before any map_peer.
  virtual WorkspaceHandle create_workspace(bool use_ipc) = 0;
  // Maps a peer's workspace. Takes the handle's descriptor only for the call.
  virtual void map_peer(int peer, const WorkspaceHandle& handle) = 0;
  virtual uint64_t workspace_bytes() const = 0;

  // The workspaces' memory can be given back while nobody uses it, and taken again later. Addresses stay, so what has been prepared,
  // captured or handed out (channels()) is good again then; the heap stays as it is. Ranks take a step only after all have done the
  // one before. Not for memory of cudaIpc, nor while multicast is set up.

  // Refuses calls from now on, waits for the device, and has the proxy end when it has done what was asked of it. Throws
  // std::runtime_error where one of them does not come to its end; end_release() undoes it. No stream may be under capture.
  virtual void begin_release() = 0;
  // Gives the memory back. What graphs launch from now on does nothing. More than once is no error.
  virtual void release_workspaces() = 0;
  // As create_workspace() and map_peer(), at the addresses of before, and with what the header held. If one of them fails on a
  // rank, all call release_workspaces() again.
  virtual WorkspaceHandle restore_workspace() = 0;
  virtual void restore_peer(int peer, const WorkspaceHandle& handle) = 0;
  // Takes calls again. Throws std::runtime_error where the proxy cannot be started.
  virtual void end_release() = 0;

  // NVLink multicast over the workspaces of all ranks, which are mapped. Ranks take a step only after all have done the one
  // before; where one has failed, all drop what they have. Throw std::runtime_error, where the environment forbids multicast
  // before anything of it is looked up (multicast_switches.h).

  // Of rank 0: makes the object of all ranks and returns its handle.
  virtual WorkspaceHandle create_multicast() = 0;
  // Of the others. Takes the handle's descriptor only for the call.
  virtual void join_multicast(const WorkspaceHandle& handle) = 0;
  // All ranks have done it before the first binds: to bind waits for them, without end.
  virtual void add_multicast_device() = 0;
  // Binds this rank's workspace and maps the object. When all ranks have, calls of algorithms by the switch can be prepared.
  virtual void bind_multicast() = 0;
  // Undoes all of it. No prepared call of such an algorithm may be left. The core's end does it too.
  virtual void drop_multicast() = 0;

  // The symmetric heap: segments that are as large on every rank, and that all ranks map. Their numbers are below kMaxSegments,
  // and the caller's, the same on all ranks. What changes the heap may come while other threads enqueue calls.

  // Allocates this rank's memory of a segment and returns its handle.
  virtual WorkspaceHandle create_segment(uint32_t segment, uint64_t bytes, bool use_ipc) = 0;
  // Maps a peer's. Takes the handle's descriptor only for the call.
  virtual void map_segment(uint32_t segment, int peer, const WorkspaceHandle& handle) = 0;
  // Drops the mappings of peers' memory. Nothing that is enqueued may still use them.
  virtual void unmap_segment(uint32_t segment) = 0;
  // Drops the segment, whose mappings are gone. This rank's memory stays as long as somebody owns it.
  virtual void close_segment(uint32_t segment) = 0;
  // This rank's memory of a segment; whoever holds it owns it too, also when the core is gone.
  virtual std::shared_ptr<char> memory_of_segment(uint32_t segment) const = 0;
  // Where `bytes` of this rank's memory lie, if in one segment.
  virtual std::optional<Place> find(uint64_t address, uint64_t bytes) const = 0;

  // What a kernel outside of the library is given, as bytes: a Channels (llm_comm/channels.cuh) for the tensor of `bytes` at `memory`,
  // with so many semaphores of each pair and kind at `semaphore_words`, which are zero at first. From now on requests of port
  // channels are carried out. Throws std::runtime_error where that cannot be.
  virtual std::string channels(const Place& memory, uint64_t bytes, const Place& semaphore_words,
                               uint32_t semaphores) = 0;

  // Marks the header of every rank's workspace; peers_unseen() then, after a barrier of all ranks, names
  // those whose mark did not come.
  virtual void send_marks() = 0;
  virtual std::vector<int> peers_unseen() = 0;

  // The most blocks of a cluster, a power of two, that this device has room for whatever the kernel; 1: it has no clusters.
  virtual uint32_t max_cluster_blocks() = 0;

  // Loads the kernels of algorithms, by their numbers in the registry (planner.h). Other kernels are loaded when a call is prepared, in
  // the capture of a stream too: the driver then waits for all kernels that run on the device.
  virtual void load(const std::vector<uint32_t>& algorithms) = 0;

  // `algorithm`: its number in the registry. Throws std::invalid_argument for what the algorithm, the workspace or the device does not
  // take.
  virtual std::unique_ptr<PreparedCall> prepare(uint32_t algorithm, const Problem& problem, const Tiling& tiling) = 0;

  // Whether linear layers of FP8 have kernels for this device: from sm_89 on.
  virtual bool multiplies_fp8() const = 0;

  // As linear::choices, on this device.
  virtual std::vector<LinearChoice> linear_choices(const LinearProblem& problem) const = 0;

  // A linear layer, which no other rank takes part in. Buffers of the call: x [tokens, inputs], weight [outputs, inputs], or twice as
  // many rows where the epilogue is an activation, and out [tokens, outputs], contiguous and 16-byte aligned; then the
  // bias, an element of the type of out for each row of the weight, or 0; of FP8 then the fp32 scales of x and of the
  // weight, one or as many as rows each. The weight, its scales and the bias are read before the grids ahead in the
  // stream have ended: what writes them must have ended before the call. Throws std::invalid_argument for what the layer
  // or the device does not take.
  virtual std::unique_ptr<PreparedCall> prepare_linear(const LinearProblem& problem, const LinearChoice& choice) = 0;

  // A kernel of llm_comm.dsl, by which `prepare_program()` names it. `image`: a cubin; for an emulated GPU the path of a shared
  // library. `title`: of its calls, for errors. All ranks load the same kernels in the same order; one that fails counts. Throws
  // std::runtime_error for what cannot be loaded.
  virtual uint32_t load_program(const std::string& image, const std::string& kernel, const std::string& title) = 0;
  // Buffers of the call: input and output. Throws std::invalid_argument for what does not fit the heap or the device.
  virtual std::unique_ptr<PreparedCall> prepare_program(const ProgramLaunch& launch) = 0;

  // For a thread that watches this rank. None of these waits for another rank.

  // The first error of a kernel, if any, or what check_order() has found. Reads host memory only.
  virtual std::optional<OperationError> error() const = 0;
  // Looks whether operations overlapped, or had another order than on a peer (host/order_of_operations.h), and ends the communicator
  // if so: only those of graphs can. Reads a few words of all workspaces and waits for no operation. From any thread.
  virtual void check_order() = 0;
  // Ends all waits of this rank's kernels, now and later; its calls fail from now on.
  virtual void abort() = 0;
  // The process of `peer` has exited: waits of this rank's kernels for it end, unless what they wait for has come. Throws
  // std::invalid_argument where there is no such rank.
  virtual void peer_exited(int peer) = 0;
  // What this rank has enqueued last, without its details; number 0: nothing yet.
  virtual Call last_call() const = 0;
  // Graphs hold launches of this core: its workspace stays mapped until the process ends, and what a graph that outlives the core
  // launches does nothing.
  virtual bool has_been_captured() const = 0;
  // Waits until what a stream holds has ended, unless it is being captured. Ends no capture of any stream.
  virtual void wait_for(uint64_t stream) = 0;

  // How many operations the device has ended; nothing if the device does not answer soon. From any thread.
  virtual std::optional<uint64_t> operations_ended() = 0;
};

// Of a rank's words of the semaphores that Core::channels() takes, and of what it returns.
uint64_t bytes_of_semaphores(uint32_t world_size, uint32_t semaphores);
uint64_t bytes_of_channels();

std::unique_ptr<Core> make_emulated_core(const CoreOptions& options);
// Throws std::runtime_error where CUDA is not compiled in or the device cannot be used.
[[gnu::visibility("default")]] std::unique_ptr<Core> make_cuda_core(const CoreOptions& options, int device);

struct DeviceReport {
  std::string name;
  int compute_capability;  // major * 10 + minor
  int sm_count;
  bool vmm;
  bool posix_fd;
  bool multicast_supported;  // what the driver says; reading it touches no multicast object
  int driver_version;        // as CUDA reports it: 13000 is 13.0
};
[[gnu::visibility("default")]] DeviceReport cuda_device_report(int device);

}  // namespace llm_comm::host
