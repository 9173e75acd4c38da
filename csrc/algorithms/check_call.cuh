// Compares the calls of all ranks before they run: in debug mode, and always on emulated devices. LaunchQueue launches
// these kernels.
//
// check_call runs before each operation and release_call after it, on the same stream and in the same graph; the
// kernels of the operations are unaware of them. Every rank sends its call to all ranks and compares all calls. If two
// differ, the communicator fails on all ranks, each of which has all calls for its error, and the operation that
// follows does nothing. Between the two kernels the launch owns the communicator on this GPU: another launch that
// starts on another stream fails the communicator too.
//
// Layout, from kCallsOffset: [sender][kLinesPerCall flag lines]. The flag derives from the operation number, so nothing
// is reset. One entry per sender is enough. A rank that sends its call of operation e + 1 has ended e. By R1 of
// operation.cuh every rank has then begun e, which a rank does only after it has compared the calls of e.
#pragma once

#include "llm_comm/line.cuh"
#include "llm_comm/operation.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

struct CheckCallArgs {
  DeviceComm comm;
  CallSignature call;
  uint64_t bytes;  // message size
};

inline constexpr uint32_t kLinesPerCall = sizeof(CallSignature) / sizeof(FlagLine);
static_assert(sizeof(CallSignature) == 4 * sizeof(uint32_t) + (1 + kMaxParameters) * sizeof(uint64_t), "it has gaps");
static_assert(kLinesPerCall * sizeof(FlagLine) == sizeof(CallSignature), "it is sent in whole lines");
static_assert(kCallsOffset + kMaxWorldSize * kLinesPerCall * sizeof(Line) <= kOutputOffsetsOffset,
              "the region holds all calls");

LLM_COMM_DEVICE bool is_same_call(const CallSignature& a, const CallSignature& b) {
  const auto* const of_a = reinterpret_cast<const FlagLine*>(&a);
  const auto* const of_b = reinterpret_cast<const FlagLine*>(&b);
  bool is_same = true;
  for (uint32_t i = 0; i < kLinesPerCall; ++i) {
    is_same &= of_a[i].data[0] == of_b[i].data[0] && of_a[i].data[1] == of_b[i].data[1];
  }
  return is_same;
}

// Entry of `sender` in the workspace of `receiver`.
LLM_COMM_DEVICE Line* call_lines(const DeviceComm& comm, uint32_t receiver, uint32_t sender) {
  return reinterpret_cast<Line*>(comm.workspace[receiver] + kCallsOffset) + sender * kLinesPerCall;
}

// A received call in shared memory. The kernel runs one block of world_size threads with as many CheckedCall.
struct CheckedCall {
  CallSignature call;
  uint32_t has_arrived;
};

LLM_COMM_KERNEL(kMaxWorldSize) check_call(LLM_COMM_KERNEL_PARAM CheckCallArgs args) {
  grid_dependency_wait();
  grid_dependency_trigger();
  const DeviceComm& comm = args.comm;
  const uint32_t peer = thread_index();
  CheckedCall* const checked = shared_memory<CheckedCall>();  // indexed by rank
  CheckedCall& mine = checked[peer];

  Operation op(comm, static_cast<OperationKind>(args.call.operation), args.bytes);
  if (!op.begin()) return;
  if (peer == comm.rank) {
    if (!op.claim(args.call.number)) {
      op.fail(ErrorCause::kConcurrentUse, comm.rank, kCheckPhase, [] {});
      op.report_failure();
    }
    mine = {args.call, 1};
  } else {
    const auto flag = static_cast<uint32_t>(op.sequence() % 0xFFFFFFFFu + 1);  // never 0, the initial value
    Line* const outgoing = call_lines(comm, peer, comm.rank);
    const Line* const incoming = call_lines(comm, comm.rank, peer);
    const auto* const sent = reinterpret_cast<const FlagLine*>(&args.call);
    auto* const received = reinterpret_cast<FlagLine*>(&mine.call);
    for (uint32_t i = 0; i < kLinesPerCall; ++i) store_packet_relaxed(outgoing + i, FlagLine::encode(sent[i], flag));
    mine.has_arrived = 1;
    for (uint32_t i = 0; i < kLinesPerCall; ++i) {
      Line line{};
      const auto poll = [&] {
        line = load_packet_relaxed(incoming + i);
        return FlagLine::has_arrived(line, flag);
      };
      mine.has_arrived &= op.wait_until(poll, peer, kCheckPhase) ? 1 : 0;
      received[i] = FlagLine::decode(line);
    }
  }
  block_sync();

  if (peer != 0) return;
  uint32_t odd_one = 0;  // first rank that differs from rank 0; all ranks find the same one
  for (uint32_t rank = comm.world_size; rank-- > 0;) {
    if (checked[rank].has_arrived == 0) return;  // the aborted wait has reported its error
    if (!is_same_call(checked[rank].call, checked[0].call)) odd_one = rank;
  }
  if (odd_one == 0) return;
  // The other ranks find the mismatch themselves. A fault report could reach a rank before the call that explains it.
  op.fail(ErrorCause::kMismatch, odd_one, kCheckPhase, [&] {
    for (uint32_t rank = 0; rank < comm.world_size; ++rank) comm.mailbox->calls[rank] = checked[rank].call;
  });
}

// Launched with one thread.
LLM_COMM_KERNEL(1) release_call(LLM_COMM_KERNEL_PARAM CheckCallArgs args) {
  grid_dependency_wait();
  grid_dependency_trigger();
  Operation(args.comm, static_cast<OperationKind>(args.call.operation), args.bytes).release();
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
