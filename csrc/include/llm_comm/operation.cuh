// What a kernel knows of its communicator, and the session object of one collective operation.
//
// Why two slots are enough for any sequence of sizes, grids and algorithms
// ---------------------------------------------------------------------------------
// Operations of a communicator are numbered 0, 1, 2, ... in the same order on all ranks; operation e uses slot e % 2.
// Two rules bind every algorithm:
//
//   R1: a rank that ends operation e has received, directly or through others, something that every other rank sent in
//       e. So it knows that every rank has begun e.
//   R2: in operation e a rank re-arms each line of its own slot that it received, and ends e only when that is done.
//
// A grid begins after the grids before it on its stream have ended (grid_dependency_wait), so a rank that has begun e
// has ended e - 1. Let rank B write into the slot of rank A for operation e. B has begun e, so it has ended e - 1, so by
// R1 A has begun e - 1, so A has ended e - 2, the last operation in that slot, and by R2 all its lines are armed.
//
// That A's lines "are armed" when A begins the next operation holds for B's stores too, though nothing that B reads is a
// release: griddepcontrol.wait and the end of a grid promise that the stores of earlier grids are performed, and the
// one place where A's own stores and those of its peers to A's memory are performed is the L2 of A. The PTX memory model
// by itself does not order the two (docs/develop/testing.md).
//
// Nothing in the argument depends on which block or thread handles a line, so sizes and grids may change from one
// operation to the next. One slot would not do: B may end e before A has read what B sent in e.
//
// The number of the operation lives in device memory, so a CUDA graph can be replayed any number of times, between other
// graphs and eager calls. It is derived from one word that all blocks read and all blocks add to, without waiting: block
// 0 adds kArrivalsPerOperation - (blocks - 1), each other block 1. The quotient by kArrivalsPerOperation turns over only
// when the last block of an operation has arrived, so a block that starts late still reads its own operation's number,
// and different grids need no reset.
//
// Progress: which blocks of a grid wait for each other
// ---------------------------------------------------------------------------------
// A block waits for the blocks of other ranks that send what it is to receive, which may not have started there: a grid may
// have more blocks than fit on a device, and a device starts them in an order of its own. Two rules make every grid end:
//
//   P1: what a block waits for is sent by blocks of the same number or of lower ones. All ranks have the same grid.
//   P2: numbers follow the order in which blocks start. Where all blocks of a grid run at once any numbers will do, so they
//       are those of the hardware. Else a block takes a ticket when it starts. (The core asks for a device of its own: what
//       other kernels take of it, docs/operate/failures.md tells under "Several groups".)
//
// So the lowest number that has not ended on every rank has started everywhere, or starts as soon as a lower one has ended,
// and by P1 it does not wait for what starts later.
//
// The tickets are a counter that starts again with the last ticket of a grid. A block takes its ticket before it lets the next
// grid be launched, so no two grids of a stream take tickets at once.
//
// A block lets the next grid be launched only when it has passed grid_dependency_wait(): so of a stream, one grid at most is
// on the device besides the one that runs. Were it earlier, all grids that are enqueued would come, each as far as its own
// wait. They would take the room that grids of other ranks on this device, or of another communicator, need before the first
// of them can end (docs/experiments/progress.md).
#pragma once

#include "llm_comm/port_ring.h"
#include "llm_comm/wait.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr uint32_t kArrivalsPerOperation = 1 << 16;  // bounds the blocks of a launch

// Kernel parameter, by value.
struct DeviceComm {
  char* workspace[kMaxWorldSize];  // every rank's workspace, as this rank maps it
  HostMailbox* mailbox;
  uint64_t slot_bytes;
  uint64_t staging_bytes;
  uint64_t timeout_ns;
  uint32_t rank;
  uint32_t world_size;
  uint32_t takes_tickets;  // of this launch: not all of its blocks run at once
  uint32_t port_entries_log2;
  uint32_t call;    // of this launch: a hash of what it does, the same on all ranks. Odd
  PortRing* ports;  // in host memory
  // The workspaces of all ranks as one: what is stored here is stored at the same place of each (switch_channel.cuh). nullptr
  // where NVLink multicast is not used.
  char* multicast;
};

LLM_COMM_DEVICE CommState* state_of(const DeviceComm& comm) {
  return reinterpret_cast<CommState*>(comm.workspace[comm.rank]);
}

LLM_COMM_DEVICE WaitBounds bounds_of(const DeviceComm& comm) {
  CommState& state = *state_of(comm);
  return {comm.mailbox,  &state.aborted,  &state.last_poll,
          &state.exited, comm.timeout_ns, Suspicions(comm.workspace, kNotesOffset, comm.rank, comm.world_size)};
}

// The number that a block's start gives it; of a cluster, the number of its first block. All threads make the call, before
// anything of shared memory is used, of which there must be a word.
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

// Which of the other ranks of `receiver` a sender is: what is kept for each of them has no place for oneself.
LLM_COMM_DEVICE uint32_t among_others(uint32_t sender, uint32_t receiver) {
  return sender < receiver ? sender : sender - 1;
}

// What a kernel of collectives asks first, with all its threads: this block's number, from 0 (P2).
LLM_COMM_DEVICE uint32_t block_number(const DeviceComm& comm) {
  return comm.takes_tickets != 0 ? take_ticket(state_of(comm), 1) : block_index();
}
// The same of a block's cluster, which has so many blocks.
LLM_COMM_DEVICE uint32_t cluster_number(const DeviceComm& comm, uint32_t cluster_blocks) {
  return comm.takes_tickets != 0 ? take_ticket(state_of(comm), cluster_blocks) : cluster_index();
}

// What an operation adds to CommState::order. The low halves add up to what the count of operations says, if each had a number of its
// own; the high halves are the same on all ranks where like operations had like numbers.
LLM_COMM_HOST_DEVICE constexpr uint64_t share_of_order(uint64_t sequence, uint32_t call) {
  const auto number = static_cast<uint32_t>(sequence);
  return uint64_t{number * call} << 32 | number;
}

// What a wait needs to know of its operation.
struct OperationInWait {
  OperationKind kind;
  uint64_t arrivals;
  uint64_t bytes;
};

// check_wait() of an operation's wait. What it is given is what is at hand in registers or in the kernel's parameters.
LLM_COMM_DEVICE_CALL LateWait check_wait_of_operation(const DeviceComm& comm, uint64_t start, OperationInWait op,
                                                      uint32_t peer, uint32_t phase) {
  return check_wait(start, bounds_of(comm), {comm.rank, op.kind, op.arrivals / kArrivalsPerOperation, op.bytes}, peer,
                    phase);
}

// One collective operation as one thread sees it. Construct it before grid_dependency_wait(), so that
// addresses are ready, and begin() it after.
class Operation {
 public:
  LLM_COMM_DEVICE Operation(const DeviceComm& comm, OperationKind kind, uint64_t bytes)
      : comm_(comm),
        state_(state_of(comm)),
        slot_bytes_(comm.slot_bytes),
        kind_(kind),
        bytes_(bytes),
        arrival_(block_index() == 0 ? kArrivalsPerOperation - (block_count() - 1) : 1) {}
  // An aborted wait is noted in one object only: a copy would go on waiting and sending.
  Operation(const Operation&) = delete;

  // Reads this operation's number. False once a wait of this communicator has been aborted: slots are no longer armed as
  // they should be, and peers may still read what this rank sent. So send nothing.
  //
  // Each thread loads the word for itself. If the abort happens at this moment, threads of one block get different answers.
  // A thread that returns is not waited for by a barrier of the block, but what it would have written to shared memory, or
  // delivered, does not come: the others must not need it.
  LLM_COMM_DEVICE bool begin() { return begin(load_state()); }

  // In two steps, for a kernel that has other loads to make before it waits for this one.
  LLM_COMM_DEVICE Line load_state() const { return load_line(state_); }
  LLM_COMM_DEVICE bool begin(Line state) {
    arrivals_ = static_cast<uint64_t>(state.word[1]) << 32 | state.word[0];
    // `zero` is read too: ptxas gives the register of a word that nobody reads to the next load, which then waits for this one.
    aborted_ = (state.word[2] | state.word[3]) != 0;
    return !aborted_;
  }

  LLM_COMM_DEVICE uint64_t sequence() const { return arrivals_ / kArrivalsPerOperation; }
  // Whether this operation has slot 1.
  LLM_COMM_DEVICE bool is_odd() const { return (static_cast<uint32_t>(arrivals_) & kArrivalsPerOperation) != 0; }

  // Line 0 of slot 0 in the workspace of `rank`. Known before begin().
  LLM_COMM_DEVICE Line* slots(uint32_t rank) const {
    return reinterpret_cast<Line*>(comm_.workspace[rank] + kHeaderBytes);
  }

  LLM_COMM_DEVICE uint64_t precomputed() const { return reinterpret_cast<uint64_t>(state_) + slot_bytes_ + arrival_; }

  // The same offset as `line` has in slot 0, in this operation's slot.
  LLM_COMM_DEVICE Line* in_slot(Line* line) const {
    return reinterpret_cast<Line*>(reinterpret_cast<char*>(line) + (is_odd() ? slot_bytes_ : 0));
  }

  // After an aborted wait, this thread's later ones end at once: a kernel of many tiles drains in one time-out.
  template <class Poll>
  LLM_COMM_DEVICE bool wait_until(Poll poll, uint32_t peer, uint32_t phase) {
    return wait_for_all(poll, [&] { return peer; }, phase);
  }
  // The same for a wait for several peers: late() is one that has not answered.
  template <class Poll, class Late>
  LLM_COMM_DEVICE bool wait_for_all(Poll poll, Late late, uint32_t phase) {
    if (aborted_) return false;
    aborted_ = !poll_until(
        poll, [&](uint64_t start) { return check_wait_of_operation(comm_, start, in_wait(), late(), phase); });
    return !aborted_;
  }

  // For a wait that is a call, so that its code lies apart: check_wait_of_operation() takes the first, and where the wait was
  // aborted, the second tells this operation.
  LLM_COMM_DEVICE OperationInWait in_wait() const { return {kind_, arrivals_, bytes_}; }
  LLM_COMM_DEVICE void note_abort() { aborted_ = true; }

  // Whether a wait of this thread has been aborted, or begin() was false.
  LLM_COMM_DEVICE bool aborted() const { return aborted_; }

  // Every block makes one call, by one of its threads, after all its threads have begun the operation (a block_sync()
  // lies between). It need not be the last thing: what the number tells the next operation is true because that begins
  // when this grid has ended. But until then an operation that overlaps this one gets the same number, which the host finds.
  //
  // Block 0 adds to `order` what tells which number the operation had: nobody waits for it, and it stands behind what the
  // block has sent.
  LLM_COMM_DEVICE void arrive() const {
    add_relaxed(&state_->arrivals, arrival_);
    if (block_index() == 0) add_relaxed(&state_->order, share_of_order(sequence(), comm_.call));
  }

  // Takes the communicator on this GPU for a launch, by any number but 0. False if another launch has it: two operations
  // run at once. One thread of a grid calls these.
  LLM_COMM_DEVICE bool claim(uint32_t launch) const { return compare_and_swap(&state_->claim, 0u, launch) == 0u; }
  LLM_COMM_DEVICE void release() const { store_relaxed(&state_->claim, 0u); }

  // Ends the communicator on this GPU. Where it has not ended before, note() writes what goes with the report.
  template <class Note>
  LLM_COMM_DEVICE void fail(ErrorCause cause, uint32_t peer, uint32_t phase, Note note) const {
    if (!abort_communicator(bounds())) return;
    note();
    report_error(bounds(), site(), cause, peer, phase);
  }

  // Lets every rank that waits for this one end its wait.
  LLM_COMM_DEVICE void tell_of_failure() const { bounds().suspicions.tell(comm_.rank); }

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
