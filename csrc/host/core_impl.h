// What a Core does alike on every target. Compiled once per target (LLM_COMM_TARGET): Memory owns the
// workspace and its mappings, Launcher starts kernels.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "host/core.h"
#include "kernels/all_reduce/kernels.cuh"
#include "kernels/check_call.cuh"
#include "kernels/fused/kernels.cuh"
#include "kernels/p2p_test.cuh"

namespace llm_comm::host {

inline void check_options(const CoreOptions& options) {
  if (options.world_size < 1 || options.world_size > kMaxWorldSize || options.rank < 0 ||
      options.rank >= options.world_size) {
    throw std::invalid_argument("rank " + std::to_string(options.rank) + " of " + std::to_string(options.world_size) +
                                ": the world size must be 1 to 8 and the rank below it");
  }
  if (options.slot_bytes == 0 || options.slot_bytes % sizeof(Line) != 0) {
    throw std::invalid_argument("slot_bytes is " + std::to_string(options.slot_bytes) +
                                "; it must be a positive multiple of 16");
  }
  if (!(options.timeout_s > 0)) throw std::invalid_argument("timeout_s must be positive");
}

inline std::string operation_name(uint32_t kind) {
  switch (static_cast<OperationKind>(kind)) {
    case OperationKind::kAllReduceOneShot:
      return "one-shot all-reduce";
    case OperationKind::kAllReduceTwoShot:
      return "two-shot all-reduce";
    case OperationKind::kAddRmsNormOneShot:
      return "one-shot all-reduce + RMSNorm";
    case OperationKind::kAddRmsNormTwoShot:
      return "two-shot all-reduce + RMSNorm";
    case OperationKind::kUser:
      break;
  }
  return "user kernel";
}

inline std::string data_type_name(uint32_t type) {
  switch (static_cast<DataType>(type)) {
    case DataType::kBFloat16:
      return "bf16";
    case DataType::kFloat16:
      return "fp16";
    case DataType::kFloat32:
      return "fp32";
  }
  return "data type " + std::to_string(type);
}

inline std::string cause_name(uint32_t cause) {
  switch (static_cast<ErrorCause>(cause)) {
    case ErrorCause::kMismatch:
      return "mismatch";
    case ErrorCause::kConcurrentUse:
      return "concurrent use";
    case ErrorCause::kPeerExited:
      return "peer exited";
    case ErrorCause::kTimeout:
      break;
  }
  return "timeout";
}

inline Call describe(const CallSignature& call) {
  return {operation_name(call.operation), data_type_name(call.data_type), call.row, call.count, call.number};
}

// Memory:   WorkspaceHandle create(uint64_t bytes, bool use_ipc);   // local workspace, header zero, the rest 0xFF
//           void map(int peer, const WorkspaceHandle&);   char* local();
//           HostMailbox* mailbox();                         // zeroed, mapped by the device
//           void read(void* to, const char* from, uint64_t bytes);
//           std::optional<uint64_t> read_soon(const char* from);   // from another thread; gives up rather than wait
// Launcher: Function<Args> function(void (*)(Args));          // what launch() takes
//           void launch(const Function<Args>&, const Args&, const Grid&, uint64_t stream);
//           uint32_t max_cluster_blocks();                    // 1 where the device has no clusters
//           bool has_room_for_cluster(const Function<Args>&, const Grid&);
//           void p2p_test(const DeviceComm&);   // synchronous
struct Grid {
  uint32_t blocks;
  uint32_t threads;       // of a block
  uint32_t shared_bytes;  // dynamic shared memory of a block
  uint32_t cluster_blocks = 1;
};

inline bool has_error(const HostMailbox& mailbox) {
  return __atomic_load_n(&mailbox.error.complete, __ATOMIC_ACQUIRE) != 0;
}

inline bool has_failed(const HostMailbox& mailbox) {
  return has_error(mailbox) || (__atomic_load_n(&mailbox.end_reasons, __ATOMIC_ACQUIRE) & kAbortRequest) != 0;
}

// The launches of a communicator, one after the other: their numbers, and the kernels that compare them between ranks.
template <class Launcher>
class LaunchQueue {
 public:
  LaunchQueue(Launcher& launcher, bool check_calls) : launcher_(launcher) {
    if (check_calls) check_.emplace(Check{launcher.function(&check_call), launcher.function(&release_call)});
  }

  // Threads take turns by it. What they enqueue is in the order of their turns.
  std::mutex& turn() { return turn_; }

  template <class Args>
  void launch(const typename Launcher::template Function<Args>& function, const Args& args, const Grid& grid,
              const CallSignature& call, uint64_t bytes, uint64_t stream) {
    const uint32_t number = number_.load(std::memory_order_relaxed) + 1;
    kind_.store(static_cast<uint64_t>(call.operation) << 32 | call.data_type << 16 | call.row,
                std::memory_order_relaxed);
    count_.store(call.count, std::memory_order_relaxed);
    number_.store(number, std::memory_order_relaxed);
    if (!check_) {
      launcher_.launch(function, args, grid, stream);
      return;
    }
    CheckCallArgs check{args.comm, call, bytes};
    check.call.number = number;
    const uint32_t ranks = args.comm.world_size;
    const Grid of_ranks{1, ranks, static_cast<uint32_t>(ranks * sizeof(CheckedCall))};
    launcher_.launch(check_->before, check, of_ranks, stream);
    launcher_.launch(function, args, grid, stream);
    launcher_.launch(check_->after, check, Grid{1, 1, 0}, stream);
  }

  // From another thread; one that is just being enqueued may be half there.
  CallSignature last() const {
    const uint64_t kind = kind_.load(std::memory_order_relaxed);
    return {static_cast<uint32_t>(kind >> 32), static_cast<uint16_t>(kind >> 16), static_cast<uint16_t>(kind),
            count_.load(std::memory_order_relaxed), number_.load(std::memory_order_relaxed)};
  }

 private:
  struct Check {
    typename Launcher::template Function<CheckCallArgs> before;
    typename Launcher::template Function<CheckCallArgs> after;
  };

  Launcher& launcher_;
  std::optional<Check> check_;
  std::mutex turn_;
  std::atomic<uint64_t> kind_ = 0;
  std::atomic<uint32_t> count_ = 0;
  std::atomic<uint32_t> number_ = 0;
};

// An all-reduce in chunks: all but the last have `chunk` elements and share a grid.
template <class Launcher>
class PreparedAllReduce final : public PreparedCall {
 public:
  struct Shape {
    typename Launcher::template Function<AllReduceArgs> function;
    Grid grid;
  };

  // `call`: all but its count and number.
  PreparedAllReduce(LaunchQueue<Launcher>& queue, const AllReduceArgs& args, const CallSignature& call, uint64_t count,
                    uint64_t chunk, uint64_t element_bytes, Shape whole, Shape last)
      : queue_(queue),
        args_(args),
        call_(call),
        count_(count),
        chunk_(chunk),
        element_bytes_(element_bytes),
        whole_(whole),
        last_(last) {}

  bool run(uint64_t input, uint64_t output, uint64_t stream) override {
    const std::lock_guard<std::mutex> turn(queue_.turn());
    const HostMailbox& mailbox = *args_.comm.mailbox;
    if (has_failed(mailbox)) return false;
    for (uint64_t done = 0; done < count_; done += chunk_) {
      const bool is_last = count_ - done <= chunk_;
      args_.input = reinterpret_cast<const void*>(input + done * element_bytes_);
      args_.output = reinterpret_cast<void*>(output + done * element_bytes_);
      args_.count = is_last ? count_ - done : chunk_;
      call_.count = static_cast<uint32_t>(args_.count);
      const Shape& shape = is_last ? last_ : whole_;
      queue_.launch(shape.function, args_, shape.grid, call_, args_.count * element_bytes_, stream);
    }
    return !has_failed(mailbox);
  }

 private:
  LaunchQueue<Launcher>& queue_;
  AllReduceArgs args_;
  CallSignature call_;
  uint64_t count_;
  uint64_t chunk_;
  uint64_t element_bytes_;
  Shape whole_;
  Shape last_;
};

// In chunks of rows: all but the last have `chunk` rows and share a grid.
template <class Launcher>
class PreparedFused final : public PreparedAddRmsNorm {
 public:
  struct Shape {
    typename Launcher::template Function<AddRmsNormArgs> function;
    Grid grid;
  };

  // `call`: all but its count and number.
  PreparedFused(LaunchQueue<Launcher>& queue, const AddRmsNormArgs& args, const CallSignature& call, uint64_t rows,
                uint64_t chunk, Shape whole, Shape last)
      : queue_(queue), args_(args), call_(call), rows_(rows), chunk_(chunk), whole_(whole), last_(last) {}

  bool run(const AddRmsNormAddresses& addresses, uint64_t stream) override {
    const std::lock_guard<std::mutex> turn(queue_.turn());
    const HostMailbox& mailbox = *args_.comm.mailbox;
    if (has_failed(mailbox)) return false;
    const uint64_t row_bytes = args_.row_lines * sizeof(Line);
    const bool is_quantized = args_.quantization != Quantization::kNone;
    args_.weight = reinterpret_cast<const void*>(addresses.weight);
    for (uint64_t done = 0; done < rows_; done += chunk_) {
      const bool is_last = rows_ - done <= chunk_;
      const uint64_t skipped = done * row_bytes;
      args_.input = reinterpret_cast<const void*>(addresses.input + skipped);
      args_.residual = addresses.residual == 0 ? nullptr : reinterpret_cast<const void*>(addresses.residual + skipped);
      args_.normed = reinterpret_cast<void*>(addresses.normed + (is_quantized ? skipped / 2 : skipped));
      args_.new_residual = reinterpret_cast<void*>(addresses.new_residual + skipped);
      const bool has_scale_per_row = args_.quantization == Quantization::kDynamic;
      args_.scale = reinterpret_cast<float*>(addresses.scale) + (has_scale_per_row ? done : 0);
      args_.rows = static_cast<uint32_t>(is_last ? rows_ - done : chunk_);
      call_.count = args_.rows * call_.row;
      const Shape& shape = is_last ? last_ : whole_;
      queue_.launch(shape.function, args_, shape.grid, call_, args_.rows * row_bytes, stream);
    }
    return !has_failed(mailbox);
  }

 private:
  LaunchQueue<Launcher>& queue_;
  AddRmsNormArgs args_;
  CallSignature call_;
  uint64_t rows_;
  uint64_t chunk_;
  Shape whole_;
  Shape last_;
};

template <class Memory, class Launcher>
class CoreImpl final : public Core {
 public:
  CoreImpl(const CoreOptions& options, Memory memory, Launcher launcher)
      : options_(options),
        memory_(std::move(memory)),
        launcher_(std::move(launcher)),
        queue_(launcher_, options.check_calls) {
    comm_.mailbox = memory_.mailbox();
    comm_.slot_bytes = options.slot_bytes;
    comm_.timeout_ns = static_cast<uint64_t>(options.timeout_s * 1e9);
    comm_.rank = static_cast<uint32_t>(options.rank);
    comm_.world_size = static_cast<uint32_t>(options.world_size);
  }

  WorkspaceHandle create_workspace(bool use_ipc) override {
    WorkspaceHandle handle = memory_.create(workspace_bytes(), use_ipc);
    comm_.workspace[options_.rank] = memory_.local();
    return handle;
  }

  void map_peer(int peer, const WorkspaceHandle& handle) override {
    if (peer < 0 || peer >= options_.world_size || peer == options_.rank) {
      throw std::invalid_argument("map_peer: " + std::to_string(peer) + " is not a peer of rank " +
                                  std::to_string(options_.rank));
    }
    comm_.workspace[peer] = memory_.map(peer, handle);
  }

  // What a kernel outside of the core needs to take part in the communicator's operations.
  const DeviceComm& device_comm() const { return comm_; }

  uint64_t workspace_bytes() const override { return kHeaderBytes + kSlots * options_.slot_bytes; }

  void send_marks() override { launcher_.p2p_test(comm_); }

  std::vector<int> peers_unseen() override {
    std::vector<int> unseen;
    for (int peer = 0; peer < options_.world_size; ++peer) {
      Line mark;
      memory_.read(&mark, memory_.local() + kMarksOffset + peer * sizeof(Line), sizeof(Line));
      const bool seen = mark.word[0] == kMarkWord && mark.word[1] == static_cast<uint32_t>(peer) &&
                        mark.word[2] == static_cast<uint32_t>(options_.rank);
      if (!seen) unseen.push_back(peer);
    }
    return unseen;
  }

  std::unique_ptr<PreparedCall> prepare_all_reduce(uint64_t count, uint32_t data_type,
                                                   const LaunchPlan& plan) override {
    const auto type = static_cast<DataType>(data_type);
    const uint64_t element_bytes = type == DataType::kFloat32 ? 4 : 2;
    if (options_.world_size == 1) throw std::invalid_argument("a world of one has nothing to sum");
    if (count == 0 || plan.chunk_count == 0) throw std::invalid_argument("count and chunk_count must be positive");
    const uint64_t chunk = count < plan.chunk_count ? count : plan.chunk_count;
    if (chunk >> 32 != 0) throw std::invalid_argument("chunk_count must be below 2^32");
    const uint64_t last = (count - 1) % chunk + 1;
    AllReduceArgs args{};
    args.comm = comm_;
    args.tile_lines = 1u << plan.tile_lines_log2;
    args.tile_lines_log2 = plan.tile_lines_log2;
    const auto whole = shape(chunk, element_bytes, type, plan);
    const uint64_t stride = uint64_t{whole.grid.blocks} << plan.tile_lines_log2;
    args.depth = useful_depth(plan.depth, (chunk * element_bytes / sizeof(Line) + stride) / stride);
    const auto kind = static_cast<AllReduceAlgorithm>(plan.algorithm) == AllReduceAlgorithm::kOneShot
                          ? OperationKind::kAllReduceOneShot
                          : OperationKind::kAllReduceTwoShot;
    const CallSignature call{static_cast<uint32_t>(kind), static_cast<uint16_t>(data_type), 0, 0, 0};
    return std::make_unique<PreparedAllReduce<Launcher>>(queue_, args, call, count, chunk, element_bytes, whole,
                                                         shape(last, element_bytes, type, plan));
  }

  uint32_t max_cluster_blocks() override {
    const AddRmsNormKernel kernel =
        add_rms_norm_kernel(AllReduceAlgorithm::kOneShot, DataType::kBFloat16, options_.world_size, true, true);
    if (kernel == nullptr) return 1;
    // The largest block that there is: where it fits, all do.
    Grid grid{0, kMaxFusedThreads, static_cast<uint32_t>(kPartialBytes + kMaxFusedThreads * sizeof(Line))};
    const auto function = launcher_.function(kernel);
    uint32_t blocks = launcher_.max_cluster_blocks();
    for (; blocks > 1; blocks /= 2) {
      grid.blocks = grid.cluster_blocks = blocks;
      if (launcher_.has_room_for_cluster(function, grid)) break;
    }
    return blocks;
  }

  std::unique_ptr<PreparedAddRmsNorm> prepare_add_rms_norm(const AddRmsNorm& operation,
                                                           const FusedPlan& plan) override {
    const auto world = static_cast<uint32_t>(options_.world_size);
    if (world == 1) throw std::invalid_argument("a world of one has nothing to fuse with");
    if (operation.hidden == 0 || operation.hidden % kElementsPerLine != 0 || operation.hidden > kMaxHidden) {
      throw std::invalid_argument("hidden is " + std::to_string(operation.hidden) +
                                  "; it must be a multiple of 8 up to 16384");
    }
    if (operation.quantization > static_cast<uint32_t>(Quantization::kDynamic)) {
      throw std::invalid_argument("there is no quantization " + std::to_string(operation.quantization));
    }
    if (operation.rows == 0 || plan.chunk_rows == 0) {
      throw std::invalid_argument("rows and chunk_rows must be positive");
    }
    const uint64_t chunk = operation.rows < plan.chunk_rows ? operation.rows : plan.chunk_rows;
    const uint64_t last = (operation.rows - 1) % chunk + 1;
    const uint32_t segment_unit = kChunkLines * world;
    AddRmsNormArgs args{};
    args.comm = comm_;
    args.row_lines = operation.hidden / kElementsPerLine;
    args.segment_lines = (args.row_lines + segment_unit - 1) / segment_unit * kChunkLines;
    args.tile_lines = plan.tile_lines;
    args.cluster_blocks = plan.cluster_blocks;
    args.depth = useful_depth(plan.depth, chunk * args.row_lines);
    args.quantization = static_cast<Quantization>(operation.quantization);
    args.epsilon = operation.epsilon;
    args.reciprocal_hidden = 1.0f / static_cast<float>(operation.hidden);
    if (chunk * args.row_lines >> 32 != 0) throw std::invalid_argument("chunk_rows holds more than 2^32 lines");
    const auto type = static_cast<DataType>(operation.data_type);
    const auto kind = static_cast<AllReduceAlgorithm>(plan.algorithm) == AllReduceAlgorithm::kOneShot
                          ? OperationKind::kAddRmsNormOneShot
                          : OperationKind::kAddRmsNormTwoShot;
    const CallSignature call{static_cast<uint32_t>(kind), static_cast<uint16_t>(operation.data_type),
                             static_cast<uint16_t>(operation.hidden), 0, 0};
    return std::make_unique<PreparedFused<Launcher>>(queue_, args, call, operation.rows, chunk,
                                                     fused_shape(args, chunk, type, plan),
                                                     fused_shape(args, last, type, plan));
  }

  std::optional<OperationError> error() const override {
    if (!has_error(*comm_.mailbox)) return std::nullopt;
    const ErrorRecord& record = comm_.mailbox->error;
    OperationError error{cause_name(record.cause),
                         static_cast<int>(record.rank),
                         static_cast<int>(record.peer),
                         operation_name(record.operation),
                         record.phase == kCheckPhase ? -1 : static_cast<int>(record.phase),
                         record.sequence,
                         record.bytes,
                         {}};
    if (record.cause == static_cast<uint32_t>(ErrorCause::kMismatch)) {
      for (int rank = 0; rank < options_.world_size; ++rank) {
        error.calls.push_back(describe(comm_.mailbox->calls[rank]));
      }
    }
    return error;
  }

  Call last_call() const override { return describe(queue_.last()); }

  std::optional<uint64_t> operations_ended() override {
    const char* const state = comm_.workspace[options_.rank];
    if (state == nullptr) return std::nullopt;
    const auto arrivals = memory_.read_soon(state + offsetof(CommState, arrivals));
    if (!arrivals) return std::nullopt;
    return *arrivals / kArrivalsPerOperation;
  }

  void abort() override { end_waits(kAbortRequest); }

  void peer_exited(int peer) override {
    if (peer < 0 || peer >= options_.world_size) {
      throw std::invalid_argument("there is no rank " + std::to_string(peer) + " among " +
                                  std::to_string(options_.world_size));
    }
    end_waits(1u << peer);
  }

 private:
  void end_waits(uint32_t reason) { __atomic_fetch_or(&comm_.mailbox->end_reasons, reason, __ATOMIC_RELEASE); }

  // No block sends further ahead than its last tile; kernels count tiles of more in 32 bits.
  static uint32_t useful_depth(uint32_t depth, uint64_t tiles_of_block) {
    return static_cast<uint32_t>(depth < tiles_of_block ? depth : tiles_of_block);
  }

  typename PreparedAllReduce<Launcher>::Shape shape(uint64_t count, uint64_t element_bytes, DataType type,
                                                    const LaunchPlan& plan) {
    const auto algorithm = static_cast<AllReduceAlgorithm>(plan.algorithm);
    const auto world = static_cast<uint64_t>(options_.world_size);
    const uint64_t lines = (count * element_bytes + sizeof(Line) - 1) / sizeof(Line);
    const uint64_t slice = (lines + world - 1) / world;
    const bool one_shot = algorithm == AllReduceAlgorithm::kOneShot;
    const uint64_t tiled_lines = one_shot ? lines : slice;
    const uint64_t slot_lines = one_shot ? world * lines : 2 * world * slice;
    const uint64_t tile_lines = uint64_t{1} << plan.tile_lines_log2;
    const uint64_t tiles = (tiled_lines + tile_lines - 1) / tile_lines;
    const uint64_t threads = world * tile_lines;
    const uint64_t shared_lines = one_shot ? 2 * threads : threads + tile_lines + 1;
    const uint64_t blocks = plan.blocks < tiles ? plan.blocks : tiles;
    if (slot_lines * sizeof(Line) > options_.slot_bytes) {
      throw std::invalid_argument("a message of " + std::to_string(count * element_bytes) + " bytes needs a slot of " +
                                  std::to_string(slot_lines * sizeof(Line)) + " bytes, the workspace has slots of " +
                                  std::to_string(options_.slot_bytes) + ": lower chunk_count or raise workspace_bytes");
    }
    const AllReduceKernel kernel = all_reduce_kernel(algorithm, type, options_.world_size, blocks == tiles);
    if (kernel == nullptr || blocks == 0 || blocks >= kArrivalsPerOperation || threads > kMaxBlockThreads) {
      throw std::invalid_argument("no kernel for algorithm " + std::to_string(plan.algorithm) + ", data type " +
                                  std::to_string(static_cast<uint32_t>(type)) + ", " + std::to_string(plan.blocks) +
                                  " blocks of " + std::to_string(threads) + " threads");
    }
    const Grid grid{static_cast<uint32_t>(blocks), static_cast<uint32_t>(threads),
                    static_cast<uint32_t>(shared_lines * sizeof(Line))};
    return {launcher_.function(kernel), grid};
  }

  typename PreparedFused<Launcher>::Shape fused_shape(const AddRmsNormArgs& args, uint64_t rows, DataType type,
                                                      const FusedPlan& plan) const {
    const auto algorithm = static_cast<AllReduceAlgorithm>(plan.algorithm);
    const auto world = static_cast<uint64_t>(options_.world_size);
    const bool one_shot = algorithm == AllReduceAlgorithm::kOneShot;
    const uint64_t slot_lines = rows * world * (one_shot ? args.row_lines : 2 * args.segment_lines);
    if (slot_lines * sizeof(Line) > options_.slot_bytes) {
      throw std::invalid_argument(std::to_string(rows) + " rows of " + std::to_string(args.row_lines * sizeof(Line)) +
                                  " bytes need a slot of " + std::to_string(slot_lines * sizeof(Line)) +
                                  " bytes, the workspace has slots of " + std::to_string(options_.slot_bytes) +
                                  ": lower chunk_rows or raise workspace_bytes");
    }
    const uint64_t exchanging = world * plan.tile_lines;
    const uint64_t threads = (exchanging + kWarpThreads - 1) / kWarpThreads * kWarpThreads;
    if (plan.tile_lines == 0 || plan.tile_lines % kChunkLines != 0 || threads > kMaxFusedThreads) {
      throw std::invalid_argument("tile_lines is " + std::to_string(plan.tile_lines) +
                                  "; it must be a multiple of 8, and world_size times it at most 1024");
    }
    const uint64_t cluster = plan.cluster_blocks;
    if (cluster == 0 || cluster > launcher_.max_cluster_blocks()) {
      throw std::invalid_argument("cluster_blocks is " + std::to_string(cluster) + "; this device takes 1 to " +
                                  std::to_string(launcher_.max_cluster_blocks()));
    }
    const uint64_t clusters = plan.blocks / cluster < rows ? plan.blocks / cluster : rows;
    const uint64_t span = one_shot ? args.row_lines : args.segment_lines;
    const bool single_tile = clusters == rows && span <= cluster * plan.tile_lines;
    // The argument in rms_norm.cuh about rows after each other wants a share of every row for every block.
    const bool has_empty_block = (cluster - 1) * plan.tile_lines >= span;
    const AddRmsNormKernel kernel = add_rms_norm_kernel(algorithm, type, options_.world_size, single_tile,
                                                        args.quantization != Quantization::kNone);
    if (kernel == nullptr || clusters == 0 || clusters * cluster >= kArrivalsPerOperation ||
        (!one_shot && threads > kMaxTwoShotThreads) ||
        (!single_tile && (threads > kMaxLoopThreads || has_empty_block))) {
      throw std::invalid_argument("no kernel for algorithm " + std::to_string(plan.algorithm) + ", data type " +
                                  std::to_string(static_cast<uint32_t>(type)) + ", " + std::to_string(plan.blocks) +
                                  " blocks of " + std::to_string(threads) + " threads in clusters of " +
                                  std::to_string(cluster));
    }
    const uint64_t shared_lines = kPartialBytes / sizeof(Line) +
                                  (one_shot ? (single_tile ? threads : 2 * threads) : exchanging + plan.tile_lines + 1);
    const Grid grid{static_cast<uint32_t>(clusters * cluster), static_cast<uint32_t>(threads),
                    static_cast<uint32_t>(shared_lines * sizeof(Line)), static_cast<uint32_t>(cluster)};
    const auto function = launcher_.function(kernel);
    if (!launcher_.has_room_for_cluster(function, grid)) {
      throw std::invalid_argument("this device has no room for clusters of " + std::to_string(cluster) + " blocks of " +
                                  std::to_string(threads) + " threads and " + std::to_string(grid.shared_bytes) +
                                  " bytes of shared memory: lower cluster_blocks");
    }
    return {function, grid};
  }

  CoreOptions options_;
  Memory memory_;
  Launcher launcher_;
  LaunchQueue<Launcher> queue_;
  DeviceComm comm_{};
};

}  // namespace llm_comm::host
