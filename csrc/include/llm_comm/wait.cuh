// Waits that always end. A wait that ends without what it waited for is aborted: its communicator ends on this GPU. It leaves
// a record that names the peer, and every later operation returns at once, so a stream of queued calls drains in one
// time-out.
#pragma once

#include "llm_comm/suspicion.cuh"
#include "llm_comm/workspace_layout.h"

namespace llm_comm::inline LLM_COMM_TARGET {

// Whether waits end by themselves. Off only in builds that measure what their bound costs (CMake:
// LLM_COMM_UNBOUNDED_WAITS); there a rank whose peer is gone hangs.
#if defined(LLM_COMM_UNBOUNDED_WAITS)
inline constexpr bool kBoundedWaits = false;
#else
inline constexpr bool kBoundedWaits = true;
#endif

// What a rank was doing when a wait expired. Each algorithm of the registry has a number of its own: its place there, from 1.
// All kernels outside of the library share kUser.
enum class OperationKind : uint32_t { kUser = 0 };

// Phases are numbered by each algorithm, from 0. Before them lies the one in which the ranks compare their calls
// (algorithms/check_call.cuh).
inline constexpr uint32_t kCheckPhase = 0xFFFF;

enum class ErrorCause : uint32_t {
  kTimeout = 0,        // a wait for `peer` expired
  kMismatch = 1,       // `peer` is about to do something else
  kConcurrentUse = 2,  // two operations of this rank run at once
  kPeerExited = 3,     // a wait for `peer`, whose process has exited
  kNotSymmetric = 4,   // a tensor of `peer` that the others were to access is not in symmetric memory
  kNoChannel = 5,      // a kernel asked for a channel to `peer` by semaphore `sequence`; there is none
  kOtherPlace = 6,     // a tensor of `peer` lies elsewhere in symmetric memory than that of rank 0, where it must not
};

// Lies in host memory that the device maps.
struct ErrorRecord {
  uint32_t complete;  // 1 once all other fields are written
  uint32_t rank;
  uint32_t peer;
  uint32_t operation;  // OperationKind
  uint32_t phase;
  uint32_t cause;     // ErrorCause
  uint64_t sequence;  // number of the operation on this communicator, from 0
  uint64_t bytes;     // of the message
};

// What a rank is about to do, as far as the ranks have to agree on it. Not the grid: sums do not depend on it, and what it
// follows from is compared at set-up. Ranks compare all of its words, so it has no gaps.
struct CallSignature {
  uint32_t operation;  // OperationKind
  uint16_t data_type;  // DataType
  uint16_t row;        // elements of a row, for an operation that works by rows; else 0
  uint32_t count;      // elements
  uint32_t number;     // of the launch, as the host counts them from 1; a replay has that of the captured one
  uint64_t buffers;    // bit i: buffer i, which is optional, is there
  uint64_t parameter_bits[kMaxParameters];  // of the operation's parameters, which are of type double
};

// A bit of HostMailbox::end_reasons: all waits of this GPU are to end soon, and all later operations.
inline constexpr uint32_t kAbortRequest = 1u << 31;

struct HostMailbox {
  ErrorRecord error;
  uint32_t end_reasons;                // set by the host; bit r: waits for rank r, whose process has exited, are to end
  CallSignature calls[kMaxWorldSize];  // by rank, where the cause is kMismatch
};

struct WaitBounds {
  HostMailbox* mailbox;
  uint32_t* aborted;    // device memory: set once a wait of this communicator has been aborted
  uint32_t* last_poll;  // device memory, zero at first (elect_poller)
  uint32_t* exited;     // device memory, zero at first: what a poller found in the mailbox: ranks that have exited
  uint64_t timeout_ns;
  Suspicions suspicions = {};

  // Elects one thread a millisecond (a thousandth of the time-out, if that is shorter) to read host memory for what ends all
  // waits of this GPU. If all threads that wait read it, one after the other, the reads would take longer than the peers poll
  // before they read it too: one late peer would make all ranks late for each other (docs/experiments/late_rank.md).
  LLM_COMM_DEVICE bool elect_poller(uint64_t now) const {
    uint32_t shift = 20;
    LLM_COMM_UNROLL(1)
    while (shift > 0 && timeout_ns >> shift < 1000) --shift;
    const auto look = static_cast<uint32_t>(now >> shift);
    const uint32_t last = load_relaxed(last_poll);
    return look != last && compare_and_swap(last_poll, last, look) == last;
  }
};

// Identity of a wait, for the record.
struct WaitSite {
  uint32_t rank;
  OperationKind operation;
  uint64_t sequence;
  uint64_t bytes;
};

// Ends the communicator on this GPU. True for the first one to call it, which is the one to report.
LLM_COMM_DEVICE bool abort_communicator(const WaitBounds& bounds) {
  return compare_and_swap(bounds.aborted, 0u, 1u) == 0u;
}

// After abort_communicator().
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

// `peer` is whom the wait was for, or whom a note names.
LLM_COMM_DEVICE void record_expired_wait(const WaitBounds& bounds, const WaitSite& site, uint32_t peer,
                                         uint32_t phase) {
  if (!abort_communicator(bounds)) return;
  bounds.suspicions.tell(peer);
  // Time for the notes of ranks whose waits expire now too, unless there is nothing more to find out.
  const uint64_t grace_ns = bounds.timeout_ns / 16;
  const uint64_t start = clock_ns();
  for (;;) {
    const uint32_t culprit = bounds.suspicions.culprit(peer);
    const uint32_t reasons = load_relaxed(&bounds.mailbox->end_reasons);
    const bool has_exited = (reasons >> culprit & 1) != 0;
    if (has_exited || (reasons & kAbortRequest) != 0 || clock_ns() - start >= grace_ns) {
      const ErrorCause cause = has_exited ? ErrorCause::kPeerExited : ErrorCause::kTimeout;
      report_error(bounds, site, cause, culprit, phase);
      return;
    }
    spin_hint();
  }
}

// Where a wait stands whose peer is late.
struct LateWait {
  uint64_t start;  // of the wait, by clock_ns(), and kPeerHasExited; 0: not looked at yet
  bool is_aborted;
};

// The last bit of LateWait::start: the peer's process has exited.
inline constexpr uint64_t kPeerHasExited = 1;

// Ends a wait if its bound has expired, another wait of this communicator has, the peer's process has exited, or the host
// asks to abort.
LLM_COMM_DEVICE LateWait check_wait(uint64_t start, const WaitBounds& bounds, const WaitSite& site, uint32_t peer,
                                    uint32_t phase) {
  const uint64_t now = clock_ns();
  if (start == 0) start = now & ~kPeerHasExited;
  if (load_relaxed(bounds.aborted) != 0) return {start, true};
  // What a peer that has exited had sent was there when the host learnt of it, and has been polled for since the check
  // before.
  const bool has_expired = (start & kPeerHasExited) != 0 || now - start > bounds.timeout_ns;
  if (has_expired || bounds.elect_poller(now)) {
    const uint32_t reasons = load_relaxed(&bounds.mailbox->end_reasons);
    // Of all operations, not of this wait alone: this rank ends the operation without what R1 of operation.cuh asks for,
    // so it must send nothing in later ones. There is nothing to report and no note to leave: the host knows why, and
    // nobody is missing whom this wait could name.
    if ((reasons & kAbortRequest) != 0) {
      abort_communicator(bounds);
      return {start, true};
    }
    uint32_t suspect = peer;
    if (bounds.suspicions.find(suspect) || has_expired) {
      record_expired_wait(bounds, site, suspect, phase);
      return {start, true};
    }
    // For all threads: this one may wait for another rank.
    if (reasons != 0) store_relaxed(bounds.exited, reasons);
  }
  return {start | (load_relaxed(bounds.exited) >> peer & kPeerHasExited), false};
}

// Polls until poll() returns true, or false once check(start), a check_wait(), ends the wait. It is called after every
// kPollsPerCheck failed polls only: a wait that the peer answers in time reads no clock and no abort word.
//
// The loop of polls has one exit: a jump out of it at every poll takes longer. Where kernels wait, the check is a function
// that is called. Inlined, its instructions would lie between the loop and what comes next, and be fetched for nothing
// (docs/experiments/cold_code.md has the figures of both).
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
