// Bounded waits, used by every kernel. A wait that does not get what it waits for is aborted, and so is its
// communicator on this GPU. The abort leaves a record that names the peer. Every later operation returns at once, so a
// stream of queued calls drains within one time-out.
#pragma once

#include "llm_comm/fault_reports.cuh"
#include "llm_comm/workspace_layout.h"

namespace llm_comm::inline LLM_COMM_TARGET {

// False only in builds that measure the cost of bounded waits (CMake: LLM_COMM_UNBOUNDED_WAITS). There a rank hangs if
// its peer is gone.
#if defined(LLM_COMM_UNBOUNDED_WAITS)
inline constexpr bool kBoundedWaits = false;
#else
inline constexpr bool kBoundedWaits = true;
#endif

// Operation that a rank was executing when a wait expired. Each algorithm of the registry has its position there as its
// number, counted from 1. All kernels outside the library share kUser.
enum class OperationKind : uint32_t { kUser = 0 };

// Each algorithm numbers its phases from 0. kCheckPhase is the phase before them, in which ranks compare their calls
// (algorithms/check_call.cuh).
inline constexpr uint32_t kCheckPhase = 0xFFFF;

enum class ErrorCause : uint32_t {
  kTimeout = 0,               // a wait for `peer` expired
  kMismatch = 1,              // `peer` called another operation, or the same one with other arguments
  kConcurrentUse = 2,         // two operations of this rank overlap
  kPeerExited = 3,            // a wait for `peer` ended because its process has exited
  kNotSymmetric = 4,          // a tensor of `peer` that other ranks were to access is not in symmetric memory
  kNoChannel = 5,             // a kernel asked for a channel to `peer` by semaphore `sequence`, which does not exist
  kOtherSymmetricOffset = 6,  // a tensor of `peer` has not the symmetric offset of rank 0's, as it must
  kSizes = 7,                 // sizes of parts differ between two ranks, or do not fit: HostMailbox::sizes
};

// First error of a communicator. Lies in host memory that the device maps.
struct ErrorRecord {
  uint32_t complete;  // set to 1 after all other fields are written
  uint32_t rank;
  uint32_t peer;
  uint32_t operation;  // OperationKind
  uint32_t phase;
  uint32_t cause;     // ErrorCause
  uint64_t sequence;  // number of the operation on this communicator, from 0
  uint64_t bytes;     // of the message
};

// Arguments of a call that all ranks must agree on. The grid is not part of it: results do not depend on the grid, and
// its inputs are compared at set-up. Ranks compare all words, so the struct has no padding.
struct CallSignature {
  uint32_t operation;  // OperationKind
  uint16_t data_type;  // DataType
  uint16_t row;        // elements of a row, for operations that work on rows; else 0
  uint32_t count;      // elements
  uint32_t number;     // call number, counted by the host from 1; a replay has the number of the captured call
  uint64_t buffers;    // bit i is set if optional buffer i is present
  uint64_t parameter_bits[kMaxParameters];  // the operation's parameters, which are of type double
};

// Reason why sizes of parts are wrong. Ranks find sizes in device memory (all_to_all_v/operation.cuh).
enum class SizesFault : uint32_t {
  kNone = 0,
  kDisagree = 1,        // `rank` sends `rows` to `peer`, which expects `limit`
  kSendsTooMany = 2,    // send_sizes[peer] of `rank` is `rows`, above max_rows, which is `limit`
  kExpectsTooMany = 3,  // recv_sizes[peer] of `rank` is `rows`, above max_rows, which is `limit`
  kInputTooShort = 4,   // send_sizes of `rank` add up to `rows`, its input has `limit`
  kOutputTooShort = 5,  // recv_sizes of `rank` add up to `rows`, its output has `limit`
  kOtherCall = 6,       // max_rows, the bytes of a row or the type of sizes differ between `rank` and `peer`
};

// Numbers of rows above kManyRows are given as kManyRows; so are negative ones.
inline constexpr uint32_t kManyRows = 0xFFFFFFFFu;
struct SizesError {
  SizesFault fault;
  uint32_t rank;
  uint32_t peer;
  uint32_t rows;
  uint32_t limit;
};

// Bit of HostMailbox::end_reasons. All waits and later operations of this GPU must end.
inline constexpr uint32_t kAbortRequest = 1u << 31;

struct HostMailbox {
  ErrorRecord error;
  uint32_t end_reasons;  // set by the host; bit r: the process of rank r has exited, so waits for it must end
  CallSignature calls[kMaxWorldSize];  // by rank; valid if the cause is kMismatch
  SizesError sizes;                    // valid if the cause is kSizes
};

struct WaitBounds {
  HostMailbox* mailbox;
  uint32_t* aborted;    // device memory: set when a wait of this communicator has been aborted
  uint32_t* last_poll;  // device memory, zero at first: time of the last host poll (elect_poller)
  uint32_t* exited;     // device memory, zero at first: end_reasons as the last poller read them
  uint64_t timeout_ns;
  FaultReports fault_reports = {};

  // Elects one thread per millisecond to read end_reasons in host memory. With time-outs below a second the interval is
  // a thousandth of the time-out. If every waiting thread read host memory, the reads would queue up for longer than
  // the peers poll before they read it too: one late peer would make all ranks late for each other
  // (docs/experiments/late_rank.md).
  LLM_COMM_DEVICE bool elect_poller(uint64_t now) const {
    uint32_t shift = 20;
    LLM_COMM_UNROLL(1)
    while (shift > 0 && timeout_ns >> shift < 1000) --shift;
    const auto look = static_cast<uint32_t>(now >> shift);
    const uint32_t last = load_relaxed(last_poll);
    return look != last && compare_and_swap(last_poll, last, look) == last;
  }
};

// Identity of a wait, for the error record.
struct WaitSite {
  uint32_t rank;
  OperationKind operation;
  uint64_t sequence;
  uint64_t bytes;
};

// Fails the communicator on this GPU. Returns true to the first caller, which must then report the error.
LLM_COMM_DEVICE bool abort_communicator(const WaitBounds& bounds) {
  return compare_and_swap(bounds.aborted, 0u, 1u) == 0u;
}

// Call only after abort_communicator() returned true.
LLM_COMM_DEVICE void report_error(const WaitBounds& bounds, const WaitSite& site, ErrorCause cause, uint32_t peer,
                                  uint32_t phase) {
  ErrorRecord& record = bounds.mailbox->error;
  record.rank = site.rank;
  record.peer = peer;
  record.operation = static_cast<uint32_t>(site.operation);
  record.phase = phase;
  record.cause = static_cast<uint32_t>(cause);
  record.sequence = site.sequence;
  record.bytes = site.bytes;
  store_release(&record.complete, 1u);
}

// Fails the communicator and reports the failed peer. `peer`: the rank that the wait was for, or that a fault report
// names.
LLM_COMM_DEVICE void record_expired_wait(const WaitBounds& bounds, const WaitSite& site, uint32_t peer,
                                         uint32_t phase) {
  if (!abort_communicator(bounds)) return;
  bounds.fault_reports.send(peer);
  // Waits for fault reports of ranks whose waits expire at the same time, unless the cause is already certain.
  const uint64_t grace_ns = bounds.timeout_ns / 16;
  const uint64_t start = clock_ns();
  for (;;) {
    const uint32_t failed_peer = bounds.fault_reports.failed_peer(peer);
    const uint32_t reasons = load_relaxed(&bounds.mailbox->end_reasons);
    const bool has_exited = (reasons >> failed_peer & 1) != 0;
    if (has_exited || (reasons & kAbortRequest) != 0 || clock_ns() - start >= grace_ns) {
      const ErrorCause cause = has_exited ? ErrorCause::kPeerExited : ErrorCause::kTimeout;
      report_error(bounds, site, cause, failed_peer, phase);
      return;
    }
    spin_hint();
  }
}

// State of a wait whose peer is late.
struct LateWait {
  uint64_t start;  // clock_ns() at the first check, with kPeerHasExited as its last bit; 0: not checked yet
  bool is_aborted;
};

// Last bit of LateWait::start: the process of the peer has exited.
inline constexpr uint64_t kPeerHasExited = 1;

// Ends a wait in four cases: its time-out has expired, another wait of this communicator was aborted, the peer's
// process has exited, or the host requests an abort.
LLM_COMM_DEVICE LateWait check_wait(uint64_t start, const WaitBounds& bounds, const WaitSite& site, uint32_t peer,
                                    uint32_t phase) {
  const uint64_t now = clock_ns();
  if (start == 0) start = now & ~kPeerHasExited;
  if (load_relaxed(bounds.aborted) != 0) return {start, true};
  // Data from an exited peer has arrived before the host reports the exit, and the polls since the last check have
  // looked for it. So a second check with the exit bit set means that the data will not come.
  const bool has_expired = (start & kPeerHasExited) != 0 || now - start > bounds.timeout_ns;
  if (has_expired || bounds.elect_poller(now)) {
    const uint32_t reasons = load_relaxed(&bounds.mailbox->end_reasons);
    // The host's request fails the whole communicator, not only this wait. This rank leaves the operation without what
    // R1 of operation.cuh requires, so it must not send in later operations. It writes no error record and no fault
    // report: the host knows the reason, and no rank is missing.
    if ((reasons & kAbortRequest) != 0) {
      abort_communicator(bounds);
      return {start, true};
    }
    uint32_t suspect = peer;
    if (bounds.fault_reports.find(suspect) || has_expired) {
      record_expired_wait(bounds, site, suspect, phase);
      return {start, true};
    }
    // Publish the reasons: other threads may be waiting for another rank.
    if (reasons != 0) store_relaxed(bounds.exited, reasons);
  }
  return {start | (load_relaxed(bounds.exited) >> peer & kPeerHasExited), false};
}

// Polls until poll() returns true. Returns false if check(start), a check_wait(), ends the wait. The check runs after
// every kPollsPerCheck failed polls, so a wait that is answered in time reads neither the clock nor the abort word.
//
// The polling loop has a single exit because a second exit in every poll is slower. In kernels the check is a function
// call. Inlined, its instructions would lie between the loop and the code after it and be fetched for nothing
// (docs/experiments/cold_code.md).
template <class Poll, class Check>
LLM_COMM_DEVICE bool poll_until(Poll poll, Check check) {
  if constexpr (!kBoundedWaits) {
    while (!poll()) spin_hint();
    return true;
  }
  LateWait late{};
  for (;;) {
    uint32_t polls = 0;
    bool has_come;
    LLM_COMM_UNROLL(1)
    do {
      has_come = poll();
      if (!has_come) spin_hint();
    } while (!has_come && ++polls < kPollsPerCheck);
    if (has_come) return true;
    late = check(late.start);
    if (late.is_aborted) return false;
  }
}

template <class Poll>
LLM_COMM_DEVICE bool wait_until(Poll poll, const WaitBounds& bounds, const WaitSite& site, uint32_t peer,
                                uint32_t phase) {
  return poll_until(poll, [&](uint64_t start) { return check_wait(start, bounds, site, peer, phase); });
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
