// DeviceComm: a communicator as kernels see it. Operation: one collective operation as one thread sees it. Every kernel
// of the library uses both. The protocols that make operations safe and make them progress are proved here.
//
// Reuse: why two slots are enough for any sequence of sizes, grids and algorithms
// ------------------------------------------------------------------------------
// Operations of a communicator are numbered 0, 1, 2, ... in the same order on all ranks. Operation e uses slot e % 2.
// Two rules bind every algorithm:
//
//   R1: When a rank ends operation e, it has received, directly or through others, something that every other rank
//       sent in e. So it knows that every rank has begun e.
//   R2: In operation e a rank resets every line that it received in its own slot to the sentinel. It ends e only when
//       that is done.
//
// Claim: when rank B writes into the slot of rank A for operation e, all lines of that slot hold the sentinel. Steps:
//   1. B has begun e. A grid begins after the earlier grids of its stream have ended (grid_dependency_wait), so B has
//      ended e - 1.
//   2. By R1, A has begun e - 1. So A has ended e - 2, the last operation that used this slot.
//   3. By R2, all its lines hold the sentinel.
//
// Step 3 needs A's resets to be performed before B's stores, though B reads no release of A. griddepcontrol.wait and
// the end of a grid ensure that the stores of earlier grids are performed. A's resets and B's stores to A's memory are
// both performed in one place, the L2 of A. The PTX memory model by itself does not order the two
// (docs/operate/failures.md). On GPUs of AMD that place is A's memory: lines go past the caches, and the workspace is
// uncached.
//
// The argument does not depend on which block or thread handles a line. Sizes and grids may therefore change from one
// operation to the next. One slot would not be enough: B may end e before A has read what B sent in e.
//
// Numbering. The operation number lives in device memory, so a CUDA graph can be replayed any number of times, between
// other graphs and eager calls. All blocks read one word and add to it, without waiting: block 0 adds
// kArrivalsPerOperation - (blocks - 1), every other block adds 1. The number is the word divided by
// kArrivalsPerOperation. It increases only when the last block of an operation has arrived. A block that starts late
// therefore reads its own operation's number, and grids of different sizes need no reset.
//
// Progress: why every grid ends
// ------------------------------------------------------------------------------
// A block waits for blocks of other ranks, which may not have started: a grid may have more blocks than fit on a
// device, and a device starts blocks in any order. Two rules make every grid end. All ranks launch the same grid.
//
//   P1: A block waits only for blocks of the same or of lower numbers.
//   P2: Block numbers follow the order in which blocks start. If all blocks of a grid run at once, the hardware's block
//       index serves as the number. Else each block takes a ticket when it starts.
//
// Take the lowest number that has not ended on every rank. It has started everywhere, or starts as soon as a lower one
// ends. By P1 it does not wait for blocks that start later, so it ends.
//
// P2 assumes that the communicator has the device to itself. docs/operate/failures.md ("Streams and groups") says what
// other kernels may take of it.
//
// Tickets. The tickets are a counter that wraps to 0 with the last ticket of a grid. A block takes its ticket before it
// allows the next grid to launch, so two grids of a stream never take tickets at the same time.
//
// A block allows the next grid to launch only after grid_dependency_wait(). At most one grid of a stream is therefore
// resident besides the running one. An earlier trigger would make all enqueued grids resident, each waiting in
// grid_dependency_wait(). They would take the room that grids of other ranks on this device, or of another
// communicator, need before the first of them can end (docs/experiments/progress.md).
#pragma once

#include "llm_comm/port_ring.h"
#include "llm_comm/wait.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr uint32_t kArrivalsPerOperation = 1 << 16;  // maximum blocks of a launch

// Kernel parameter, passed by value.
struct DeviceComm {
  char* workspace[kMaxWorldSize];  // every rank's workspace, as this rank maps it
  HostMailbox* mailbox;
  uint64_t slot_bytes;
  uint64_t staging_bytes;
  uint64_t timeout_ns;
  uint32_t rank;
  uint32_t world_size;
  uint32_t takes_tickets;  // this launch: not all of its blocks run at once, so they take tickets (P2)
  uint32_t port_entries_log2;
  uint32_t call;    // this launch: a hash of its arguments, equal on all ranks; odd
  PortRing* ports;  // request ring of the port channels, in host memory
  // Multicast mapping of all ranks' workspaces: a store goes to the same offset of each (switch_channel.cuh). nullptr
  // where NVLink multicast is not used.
  char* multicast;
};

LLM_COMM_DEVICE CommState* state_of(const DeviceComm& comm) {
  return reinterpret_cast<CommState*>(comm.workspace[comm.rank]);
}

LLM_COMM_DEVICE WaitBounds bounds_of(const DeviceComm& comm) {
  CommState& state = *state_of(comm);
  return {comm.mailbox,     &state.aborted,
          &state.last_poll, &state.exited,
          comm.timeout_ns,  FaultReports(comm.workspace, kFaultReportsOffset, comm.rank, comm.world_size)};
}

// Ticket of this block, or of its cluster. Collective over the block; uses one word of dynamic shared memory, so call
// it before anything else does.
LLM_COMM_DEVICE_CALL uint32_t take_ticket(CommState* state, uint32_t cluster_blocks) {
  auto* const ticket = shared_memory<uint32_t>();
  if (thread_index() == 0 && cluster_block_rank() == 0) {
    *ticket = count_up(&state->tickets, block_count() / cluster_blocks - 1);
  }
  block_sync();
  const uint32_t number = cluster_blocks == 1 ? *ticket : of_first_in_cluster(ticket);
  block_sync();
  return number;
}

// Index of `sender` among the ranks other than `receiver`. Per-sender storage has no entry for the receiver itself.
LLM_COMM_DEVICE uint32_t among_others(uint32_t sender, uint32_t receiver) {
  return sender < receiver ? sender : sender - 1;
}

// Number of this block for P1 and P2, from 0. Collective over the block; must be the first thing that a kernel does.
LLM_COMM_DEVICE uint32_t block_number(const DeviceComm& comm) {
  return comm.takes_tickets != 0 ? take_ticket(state_of(comm), 1) : block_index();
}
// Number of this block's cluster of `cluster_blocks` blocks. Otherwise as block_number().
LLM_COMM_DEVICE uint32_t cluster_number(const DeviceComm& comm, uint32_t cluster_blocks) {
  return comm.takes_tickets != 0 ? take_ticket(state_of(comm), cluster_blocks) : cluster_index();
}

// Value that an operation adds to CommState::order. The low half of the sum shows whether every operation had a number
// of its own. The high half is the same on all ranks if the same calls had the same numbers.
LLM_COMM_HOST_DEVICE constexpr uint64_t share_of_order(uint64_t sequence, uint32_t call) {
  const auto number = static_cast<uint32_t>(sequence);
  return uint64_t{number * call} << 32 | number;
}

// Values that a wait needs of its operation.
struct OperationInWait {
  OperationKind kind;
  uint64_t arrivals;
  uint64_t bytes;
};

// check_wait() for a wait of an operation. All arguments are in registers or kernel parameters at the call.
LLM_COMM_DEVICE_CALL LateWait check_wait_of_operation(const DeviceComm& comm, uint64_t start, OperationInWait op,
                                                      uint32_t peer, uint32_t phase) {
  return check_wait(start, bounds_of(comm), {comm.rank, op.kind, op.arrivals / kArrivalsPerOperation, op.bytes}, peer,
                    phase);
}

// One collective operation as one thread sees it. Construct it before grid_dependency_wait(), so that addresses are
// computed early. Call begin() after it.
class Operation {
 public:
  LLM_COMM_DEVICE Operation(const DeviceComm& comm, OperationKind kind, uint64_t bytes)
      : comm_(comm),
        state_(state_of(comm)),
        slot_bytes_(comm.slot_bytes),
        kind_(kind),
        bytes_(bytes),
        arrival_(block_index() == 0 ? kArrivalsPerOperation - (block_count() - 1) : 1) {}
  // Not copyable: only one object records an aborted wait. A copy would continue to wait and to send.
  Operation(const Operation&) = delete;

  // Reads this operation's number. Returns false once a wait of this communicator has been aborted. The kernel must
  // then send nothing: slots may not hold the sentinel, and peers may still read what this rank sent.
  //
  // Each thread loads the word itself. If the abort happens at that moment, threads of one block get different results.
  // A thread may return: a block barrier does not wait for it. The other threads must not depend on what it would have
  // written to shared memory.
  LLM_COMM_DEVICE bool begin() { return begin(load_state()); }

  // begin() in two steps, for a kernel that issues other loads before it waits for this one.
  LLM_COMM_DEVICE Line load_state() const { return load_line(state_); }
  LLM_COMM_DEVICE bool begin(Line state) {
    arrivals_ = static_cast<uint64_t>(state.word[1]) << 32 | state.word[0];
    // `zero` is always 0. Using it keeps its register live: ptxas would give the register of an unread word to the next
    // load, which would then wait for this one.
    aborted_ = (state.word[2] | state.word[3]) != 0;
    return !aborted_;
  }

  LLM_COMM_DEVICE uint64_t sequence() const { return arrivals_ / kArrivalsPerOperation; }
  // True if this operation uses slot 1.
  LLM_COMM_DEVICE bool is_odd() const { return (static_cast<uint32_t>(arrivals_) & kArrivalsPerOperation) != 0; }

  // Line 0 of slot 0 in the workspace of `rank`. Valid before begin().
  LLM_COMM_DEVICE Line* slots(uint32_t rank) const {
    return reinterpret_cast<Line*>(comm_.workspace[rank] + kHeaderBytes);
  }

  LLM_COMM_DEVICE uint64_t precomputed() const { return reinterpret_cast<uint64_t>(state_) + slot_bytes_ + arrival_; }

  // Converts an address in slot 0 to the same offset of this operation's slot.
  LLM_COMM_DEVICE Line* in_slot(Line* line) const {
    return reinterpret_cast<Line*>(reinterpret_cast<char*>(line) + (is_odd() ? slot_bytes_ : 0));
  }

  // After an aborted wait all later waits of this thread return false at once: a kernel of many tiles drains in one
  // time-out.
  template <class Poll>
  LLM_COMM_DEVICE bool wait_until(Poll poll, uint32_t peer, uint32_t phase) {
    return wait_for_all(poll, [&] { return peer; }, phase);
  }
  // Waits for several peers. late() returns one that has not answered.
  template <class Poll, class Late>
  LLM_COMM_DEVICE bool wait_for_all(Poll poll, Late late, uint32_t phase) {
    if (aborted_) return false;
    aborted_ = !poll_until(
        poll, [&](uint64_t start) { return check_wait_of_operation(comm_, start, in_wait(), late(), phase); });
    return !aborted_;
  }

  // For a wait in a separate, non-inlined function: pass in_wait() to check_wait_of_operation(), and call note_abort()
  // if the wait was aborted.
  LLM_COMM_DEVICE OperationInWait in_wait() const { return {kind_, arrivals_, bytes_}; }
  LLM_COMM_DEVICE void note_abort() { aborted_ = true; }

  // True if a wait of this thread has been aborted, or begin() returned false.
  LLM_COMM_DEVICE bool aborted() const { return aborted_; }

  // Counts this block in. One thread of every block calls it once, when every thread of the block has called begin()
  // and a block_sync(). It need not be the last call: the next operation reads the number only after this grid has
  // ended. An operation that overlaps this one before then reads the same number; the host detects that.
  //
  // Block 0 also updates `order`. The update returns nothing, so no thread waits for it, and it follows what the block
  // sent.
  LLM_COMM_DEVICE void arrive() const {
    add_relaxed(&state_->arrivals, arrival_);
    if (block_index() == 0) add_relaxed(&state_->order, share_of_order(sequence(), comm_.call));
  }

  // Claims the communicator on this GPU for a launch; `launch` is any number but 0. Returns false if another launch
  // holds the claim, which means that two operations overlap. Called by one thread of a grid.
  LLM_COMM_DEVICE bool claim(uint32_t launch) const { return compare_and_swap(&state_->claim, 0u, launch) == 0u; }
  LLM_COMM_DEVICE void release() const { store_relaxed(&state_->claim, 0u); }

  // Fails the communicator on this GPU. If this is the first failure, note() writes additional data and the error is
  // reported.
  template <class Note>
  LLM_COMM_DEVICE void fail(ErrorCause cause, uint32_t peer, uint32_t phase, Note note) const {
    if (!abort_communicator(bounds())) return;
    note();
    report_error(bounds(), site(), cause, peer, phase);
  }

  // Stores a fault report at every rank that names this rank, so that every wait for it ends.
  LLM_COMM_DEVICE void report_failure() const { bounds().fault_reports.send(comm_.rank); }

 private:
  static_assert(kSlots == 2, "is_odd() takes the parity of the sequence number");

  LLM_COMM_DEVICE WaitBounds bounds() const { return bounds_of(comm_); }
  LLM_COMM_DEVICE WaitSite site() const { return {comm_.rank, kind_, sequence(), bytes_}; }

  const DeviceComm& comm_;
  CommState* state_;
  uint64_t slot_bytes_;
  OperationKind kind_;
  uint64_t bytes_;
  uint32_t arrival_;
  uint64_t arrivals_ = 0;
  bool aborted_ = false;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
