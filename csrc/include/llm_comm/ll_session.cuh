// LLSession: one thread's view of an LL operation that exchanges 16-byte lines with one peer. The LL algorithms use it:
//
//   LLSession session(comm, kind, bytes, rank, peer);
//   session.divide_slots(lines);                  // every rank sends `lines` lines to each peer
//   session.wait_for_grids_before();
//   if (session.begin()) ...                      // reads the operation number; false: aborted
//   session.enter_slot();
//   session.send(index, line);                    // to the peer
//   line = session.receive(index, phase);         // what the peer sent to the same index
//   session.reset(index);                        // R2 of operation.cuh
//   block_sync(); session.arrive();               // one thread of each block
//
// Layout of a slot: one region of `sender_lines` lines for each other rank, in rank order. `index` is a line index in
// such a region. An algorithm of two phases lays a second division after the first; `part` is the line at which the
// second one begins. A thread whose peer is its own rank uses a region after those of the others. It may send and
// receive only if the algorithm reserves that region.
//
// LLSessionOf<Peers> is the same for a thread that exchanges lines with all other ranks:
//
//   LLSessionOf<World - 1> session(comm, kind, bytes, rank);
//   session.send_to(k, index, line);                       // to rank + 1 + k, modulo the world size
//   session.receive_each(index, is_wanted, lines, phase);  // [i]: from the i-th of the other ranks, in rank order
//   session.reset_of(i, index);
//
// The steps are separate calls, and begin() does not enter the slot, because their order matters: loads between the
// steps overlap, which is worth microseconds (docs/experiments/first_send.md).
#pragma once

#include "llm_comm/ll_exchange.cuh"
#include "llm_comm/operation.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

template <uint32_t Peers>
class LLSessionOf {
 public:
  // Construct the session and divide the slots before wait_for_grids_before(). `bytes`: message size, for error
  // reports.
  LLM_COMM_DEVICE LLSessionOf(const DeviceComm& comm, OperationKind kind, uint64_t bytes, uint32_t rank, uint32_t peer)
      : op_(comm, kind, bytes),
        rank_(rank),
        peer_(peer),
        sends_as_(rank == peer ? comm.world_size - 1 : among_others(rank, peer)),
        receives_as_(rank == peer ? comm.world_size - 1 : among_others(peer, rank)) {
    static_assert(Peers == 1, "a thread of several peers has all of them");
  }

  // For a thread that exchanges lines with all other ranks, of which there are `Peers`.
  LLM_COMM_DEVICE LLSessionOf(const DeviceComm& comm, OperationKind kind, uint64_t bytes, uint32_t rank)
      : op_(comm, kind, bytes), rank_(rank), peer_(1 - rank), sends_as_(0), receives_as_(0) {}

  // receiver(k): the rank that send_to(k, ...) sends to. sender(i): the rank whose line receive_each() returns in [i].
  LLM_COMM_DEVICE uint32_t receiver(uint32_t k) const {
    if constexpr (Peers == 1) {
      return peer_;
    } else {
      return rank_ + 1 + k <= Peers ? rank_ + 1 + k : rank_ + k - Peers;
    }
  }
  LLM_COMM_DEVICE uint32_t sender(uint32_t i) const {
    if constexpr (Peers == 1) {
      return peer_;
    } else {
      return i < rank_ ? i : i + 1;
    }
  }
  // Region indices: sends_as(k) in the slot of receiver(k), receives_as(i) in this rank's slot.
  LLM_COMM_DEVICE uint32_t sends_as(uint32_t k) const {
    if constexpr (Peers == 1) {
      return sends_as_;
    } else {
      return among_others(rank_, receiver(k));
    }
  }
  LLM_COMM_DEVICE uint32_t receives_as(uint32_t i) const {
    if constexpr (Peers == 1) {
      return receives_as_;
    } else {
      return i;
    }
  }

  template <class Count>
  LLM_COMM_DEVICE void divide_slots(Count sender_lines) {
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < Peers; ++i) {
      outgoing_[i] = op_.slots(receiver(i)) + static_cast<uint64_t>(sends_as(i)) * sender_lines;
      incoming_[i] = op_.slots(rank_) + static_cast<uint64_t>(receives_as(i)) * sender_lines;
    }
  }

  // For a kernel whose threads use few lines each: `index` counts from `first_line`. opaque() keeps the compiler from
  // recomputing the address at each use.
  template <class Count>
  LLM_COMM_DEVICE void divide_slots(Count sender_lines, Count first_line) {
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < Peers; ++i) {
      outgoing_[i] = opaque(op_.slots(receiver(i)) + static_cast<uint64_t>(sends_as(i)) * sender_lines + first_line);
      incoming_[i] = opaque(op_.slots(rank_) + static_cast<uint64_t>(receives_as(i)) * sender_lines + first_line);
    }
  }

  // Waits for the earlier grids of the stream. `precomputed`: values that depend on every other address that the kernel
  // uses. The compiler must compute these and the session's addresses before the wait, while the block is idle anyway.
  // The next grid of the stream may be launched from here on (operation.cuh, "Progress"); a later trigger was slower.
  template <class... Values>
  LLM_COMM_DEVICE void wait_for_grids_before(Values... precomputed) const {
    uint64_t slots = 0;
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < Peers; ++i) {
      slots += reinterpret_cast<uint64_t>(outgoing_[i]) + reinterpret_cast<uint64_t>(incoming_[i]);
    }
    grid_dependency_wait_after((slots + ... + precomputed) + op_.precomputed());
    grid_dependency_trigger();
  }

  // As Operation::begin(), in one step or in two. False: send nothing. Other threads of the block may get another
  // answer (Operation::begin).
  LLM_COMM_DEVICE bool begin() { return begin(load_state()); }
  LLM_COMM_DEVICE Line load_state() const { return op_.load_state(); }
  LLM_COMM_DEVICE bool begin(Line state) { return op_.begin(state); }

  // After begin(): switches all addresses to this operation's slot.
  LLM_COMM_DEVICE void enter_slot() {
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < Peers; ++i) {
      outgoing_[i] = op_.in_slot(outgoing_[i]);
      incoming_[i] = op_.in_slot(incoming_[i]);
    }
  }

  LLM_COMM_DEVICE bool begin_in_slot(Line state) {
    const bool begun = begin(state);
    enter_slot();
    return begun;
  }

  // begin() and enter_slot() while the caller's own loads are in flight; they have the same latency as the operation
  // number.
  template <class Load, uint32_t N>
  LLM_COMM_DEVICE bool begin_with_loads(Load (&load)[N], Line (&loaded)[N]) {
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < N; ++i) load[i].begin();
    const bool begun = begin();
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < N; ++i) loaded[i] = load[i].end();
    enter_slot();
    return begun;
  }
  template <class Load>
  LLM_COMM_DEVICE bool begin_with_loads(Load& load, Line& loaded) {
    load.begin();
    const bool begun = begin();
    loaded = load.end();
    enter_slot();
    return begun;
  }

  LLM_COMM_DEVICE void send(uint64_t index, Line payload, uint64_t part = 0) const {
    send_to(0, part + index, payload);
  }
  LLM_COMM_DEVICE void send_to(uint32_t k, uint64_t index, Line payload) const {
    send_line(outgoing_[k] + index, payload);
  }

  // Waits for a line. After an aborted wait, words that have not arrived are NaN and aborted() stays true. `phase`: for
  // error reports.
  LLM_COMM_DEVICE Line receive(uint64_t index, uint32_t phase, uint64_t part = 0) {
    return receive(incoming(index, part), phase);
  }
  LLM_COMM_DEVICE Line receive(const Line* line, uint32_t phase) { return receive_line(line, op_, sender(0), phase); }

  // Waits for the lines at `index` from all peers for which `is_wanted` is set. Each poll loads every line that has not
  // arrived, with all loads in flight at once. Unwanted lines are returned as zeros.
  LLM_COMM_DEVICE void receive_each(uint64_t index, const bool (&is_wanted)[Peers], Line (&lines)[Peers],
                                    uint32_t phase) {
    const Line* from[Peers];
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < Peers; ++i) {
      from[i] = incoming_[i] + index;
      lines[i] = is_wanted[i] ? sentinel_line() : Line{};
    }
    if (Peers == 1 && !is_wanted[0]) return;
    op_.wait_for_all([&] { return poll_lines(from, lines); },
                     [&] {
                       uint32_t late = sender(0);
                       LLM_COMM_UNROLL(8)
                       for (uint32_t i = 1; i < Peers; ++i) late = has_arrived(lines[i]) ? late : sender(i);
                       return late;
                     },
                     phase);
  }

  // The thread that receives a line resets it to the sentinel, for every line (R2).
  LLM_COMM_DEVICE void reset(uint64_t index, uint64_t part = 0) const { reset(incoming(index, part)); }
  LLM_COMM_DEVICE void reset(Line* line) const { reset_line(line); }
  LLM_COMM_DEVICE void reset_of(uint32_t i, uint64_t index) const { reset(incoming_[i] + index); }

  // Address of a line, for a kernel that receives and resets it at different points and computes the address once.
  LLM_COMM_DEVICE Line* incoming(uint64_t index, uint64_t part = 0) const { return incoming_[0] + part + index; }

  LLM_COMM_DEVICE bool aborted() const { return op_.aborted(); }
  LLM_COMM_DEVICE uint64_t sequence() const { return op_.sequence(); }

  // For protocols that store more than lines in a slot (ll_bytes.cuh): start of this operation's slots, and another
  // bounded wait for the peer. Call after begin().
  LLM_COMM_DEVICE char* own_slot() const { return reinterpret_cast<char*>(op_.in_slot(op_.slots(rank_))); }
  LLM_COMM_DEVICE char* slot_of_receiver(uint32_t k) const {
    return reinterpret_cast<char*>(op_.in_slot(op_.slots(receiver(k))));
  }
  template <class Poll>
  LLM_COMM_DEVICE bool wait_until(Poll poll, uint32_t phase) {
    return op_.wait_until(poll, peer_, phase);
  }
  // For a wait in a separate function (Operation::in_wait).
  LLM_COMM_DEVICE OperationInWait in_wait() const { return op_.in_wait(); }
  LLM_COMM_DEVICE void note_abort() { op_.note_abort(); }

  // As Operation::arrive(): called by one thread of each block, when every thread of the block has called begin().
  LLM_COMM_DEVICE void arrive() const { op_.arrive(); }

 private:
  Operation op_;
  uint32_t rank_;
  // Only for a thread with one peer.
  uint32_t peer_;
  uint32_t sends_as_;
  uint32_t receives_as_;
  Line* outgoing_[Peers] = {};
  Line* incoming_[Peers] = {};
};

using LLSession = LLSessionOf<1>;

}  // namespace llm_comm::inline LLM_COMM_TARGET
