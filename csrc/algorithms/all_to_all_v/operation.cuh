// All-to-all of unequal parts: a tensor of rows has a part for each rank, in rank order and densely packed. Every rank
// sends part r to rank r, and gets the parts that the ranks have for it, in rank order and densely packed. Elements are
// moved as bytes, so any type keeps its bits.
//
// Sizes of parts, in rows, lie in device memory: send_sizes[r] and recv_sizes[r] for each rank r. Kernels read them, so
// a replayed graph takes what they hold at that time. `max_rows` bounds every part and shapes the launches. It is
// Problem::count in rows.
//
// Sizes may be wrong. A rank whose sizes do not fit its tensors or max_rows sends and receives no rows. Sizes of two
// ranks may also disagree. Each rank therefore greets each other rank with a line that says how many rows come and how
// many it expects, or what is wrong. The receiver compares, and fails the communicator with ErrorCause::kSizes. Both
// ranks of a pair that disagrees do so, and all ranks if the sizes of one do not fit. The watchdog notifies the others.
//
// Greetings carry a hash of the call and of max_rows too, in which ranks easily differ. Lines of such a call lie
// elsewhere, so that other lines are read as greetings. The hash is compared first.
//
// Bounds hold whatever the sizes are. A sender sends at most max_rows, which slots and chunks hold. A receiver stores
// no more rows than its own recv_sizes say, which fit its tensor. After an error the content of the output is
// unspecified.
#pragma once

#include "algorithms/shard_view.cuh"
#include "llm_comm/operation.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Parts of this rank's input or output.
struct PartsOfTensor {
  char* tensor;
  const void* sizes;  // rows of the part for or from each rank: int64, or int32
  uint64_t rows;      // of the tensor
};

struct AllToAllVArgs {
  DeviceComm comm;
  PartsOfTensor sent;
  PartsOfTensor received;
  uint64_t row_bytes;
  uint64_t max_rows;
  Range range;          // bytes of every part that the launch takes
  uint32_t tile_lines;  // LL: lines that one peer's threads of a block handle at a time, a power of two
  uint32_t tile_lines_log2;
  uint32_t depth;      // HB: steps that a block is ahead
  uint32_t has_int32;  // sizes are int32
};

// A part, in rows.
struct Part {
  uint64_t first;
  uint64_t rows;
};

// Bits of a greeting's first word that hold a SizesFault.
inline constexpr uint32_t kFaultOfGreeting = 7;

// Parts of this rank for and from one peer, and the greeting for that peer. If this rank's sizes do not fit, all parts
// are empty and every greeting says why. Construct it after the wait for earlier grids, which may write the sizes.
class PartsOfPeer {
 public:
  LLM_COMM_DEVICE PartsOfPeer(const AllToAllVArgs& args, uint32_t peer) {
    SizesError error{SizesFault::kNone, 0, 0, 0, 0};
    received_ = find(args, args.received, peer, SizesFault::kExpectsTooMany, SizesFault::kOutputTooShort, error);
    sent_ = find(args, args.sent, peer, SizesFault::kSendsTooMany, SizesFault::kInputTooShort, error);
    // The hash of the call is that of a launch, which may be the same for other max_rows. The factor spreads their bits.
    const uint32_t tag = (args.comm.call ^ static_cast<uint32_t>(args.max_rows) * 0x9E3779B1u) & ~kFaultOfGreeting;
    greeting_ = {{tag, static_cast<uint32_t>(sent_.rows), static_cast<uint32_t>(received_.rows), 0}};
    if (error.fault != SizesFault::kNone) {
      greeting_ = {{tag | static_cast<uint32_t>(error.fault), error.rows, error.limit, error.peer}};
      sent_ = received_ = {0, 0};
    }
  }

  LLM_COMM_DEVICE Part sent() const { return sent_; }
  LLM_COMM_DEVICE Part received() const { return received_; }
  LLM_COMM_DEVICE Line greeting() const { return greeting_; }

 private:
  // Sets `error` if the sizes do not fit.
  static LLM_COMM_DEVICE Part find(const AllToAllVArgs& args, const PartsOfTensor& parts, uint32_t peer,
                                   SizesFault too_many, SizesFault too_short, SizesError& error) {
    Part part{0, 0};
    uint64_t rows_of_all = 0;
    bool is_too_large = false;
    LLM_COMM_UNROLL(8)
    for (uint32_t rank = 0; rank < args.comm.world_size; ++rank) {
      // A negative size is a large one. A sum that overflows has a size that is too large.
      const uint64_t rows = args.has_int32 != 0
                                ? static_cast<uint64_t>(int64_t{static_cast<const int32_t*>(parts.sizes)[rank]})
                                : static_cast<const uint64_t*>(parts.sizes)[rank];
      if (rank < peer) part.first += rows;
      if (rank == peer) part.rows = rows;
      rows_of_all += rows;
      if (rows <= args.max_rows || is_too_large) continue;
      is_too_large = true;
      error = {too_many, 0, rank, in_32_bits(rows), in_32_bits(args.max_rows)};
    }
    if (!is_too_large && rows_of_all > parts.rows) {
      error = {too_short, 0, 0, in_32_bits(rows_of_all), in_32_bits(parts.rows)};
    }
    return part;
  }

  static LLM_COMM_DEVICE uint32_t in_32_bits(uint64_t rows) {
    return rows < kManyRows ? static_cast<uint32_t>(rows) : kManyRows;
  }

  Part sent_;
  Part received_;
  Line greeting_;  // {hash of the call | SizesFault, ...}: without a fault, rows that are sent, and that are expected
};

// Fault that the greeting of this rank for `peer` and that of `peer` for this rank show.
LLM_COMM_DEVICE SizesError compare_greetings(uint32_t rank, Line own, uint32_t peer, Line greeting) {
  const auto fault_of = [](uint32_t of, Line said) {
    return SizesError{static_cast<SizesFault>(said.word[0] & kFaultOfGreeting), of, said.word[3], said.word[1],
                      said.word[2]};
  };
  if (((own.word[0] ^ greeting.word[0]) & ~kFaultOfGreeting) != 0) return {SizesFault::kOtherCall, peer, rank, 0, 0};
  if ((own.word[0] & kFaultOfGreeting) != 0) return fault_of(rank, own);
  if ((greeting.word[0] & kFaultOfGreeting) != 0) return fault_of(peer, greeting);
  if (greeting.word[1] != own.word[2]) return {SizesFault::kDisagree, peer, rank, greeting.word[1], own.word[2]};
  if (own.word[1] != greeting.word[2]) return {SizesFault::kDisagree, rank, peer, own.word[1], greeting.word[2]};
  return {SizesFault::kNone, 0, 0, 0, 0};
}

// Fails the communicator on this GPU. Runs rarely, so it is a call outside the hot path.
LLM_COMM_DEVICE_CALL void fail_for_sizes(const DeviceComm& comm, OperationInWait op, SizesError error) {
  const WaitBounds bounds = bounds_of(comm);
  if (!abort_communicator(bounds)) return;
  const bool is_own = error.rank == comm.rank && error.fault == SizesFault::kDisagree;
  comm.mailbox->sizes = error;
  report_error(bounds, {comm.rank, op.kind, op.arrivals / kArrivalsPerOperation, op.bytes}, ErrorCause::kSizes,
               is_own ? error.peer : error.rank, 0);
}

template <DataType D>
LLM_COMM_DEVICE ShardView<D> view_of_part(const AllToAllVArgs& args, const PartsOfTensor& parts, Part part) {
  const uint64_t bytes = part.rows * args.row_bytes;
  return ShardView<D>(parts.tensor + part.first * args.row_bytes, {0, bytes, bytes}, 0, args.range);
}

struct AllToAllV {
  using Args = AllToAllVArgs;
  enum Parameter { kRowBytes, kSizeType };
  enum Buffer { kInput, kOutput, kSendSizes, kRecvSizes, kInputEnd, kOutputEnd };
  // The ends of the tensors differ between ranks, so they are no parameters.
  static constexpr OperationInfo kInfo{.name = "all_to_all_v",
                                       .title = "all-to-all of unequal parts",
                                       .buffers = {{"input"},
                                                   {.name = "output", .is_output = true},
                                                   {"send_sizes"},
                                                   {"recv_sizes"},
                                                   {"input_end"},
                                                   {"output_end"}},
                                       .parameters = {{"row_bytes"}, {"size_type", false, {"int64", "int32"}}}};

  static constexpr bool serves(DataType type) { return type == DataType::kByte; }

  static void check(const Problem& problem) {
    const auto refuse = [](const std::string& why) { throw std::invalid_argument(why); };
    const double row = problem.parameter[kRowBytes];
    const bool is_within = row >= 1 && row <= static_cast<double>(problem.count);
    const uint64_t row_bytes = is_within ? static_cast<uint64_t>(row) : 1;
    if (!is_within || row != static_cast<double>(row_bytes) || problem.count % row_bytes != 0) {
      refuse(std::to_string(problem.count) + " bytes are no rows of " + std::to_string(row) + " bytes");
    }
    if (problem.count / row_bytes >= kManyRows) refuse("a part must have fewer than 2^32 - 1 rows");
    const double type = problem.parameter[kSizeType];
    if (type != 0 && type != 1) refuse("size_type is " + std::to_string(type) + "; it must be 0 (int64) or 1 (int32)");
  }

  static Args arguments(const Problem& problem, const Tiling& tiling, const Grid&) {
    Args args{};
    args.row_bytes = static_cast<uint64_t>(problem.parameter[kRowBytes]);
    args.max_rows = problem.count / args.row_bytes;
    args.has_int32 = problem.parameter[kSizeType] == 1;
    args.tile_lines = tiling.tile_lines;
    args.depth = tiling.depth;
    while (args.tile_lines >> args.tile_lines_log2 > 1) ++args.tile_lines_log2;
    return args;
  }

  static void set_launch(Args& args, const Problem&, const uint64_t* buffers, uint64_t first, uint64_t units) {
    const auto parts = [&](Buffer tensor, Buffer end, Buffer sizes) {
      return PartsOfTensor{reinterpret_cast<char*>(buffers[tensor]), reinterpret_cast<const void*>(buffers[sizes]),
                           (buffers[end] - buffers[tensor]) / args.row_bytes};
    };
    args.sent = parts(kInput, kInputEnd, kSendSizes);
    args.received = parts(kOutput, kOutputEnd, kRecvSizes);
    args.range = {first, units};
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
