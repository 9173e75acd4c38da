// One LL operation as one thread sees it, which exchanges lines with one peer:
//
//   LLSession session(comm, kind, bytes, rank, peer);
//   session.divide_slots(lines);                  // every rank sends so many lines to each peer
//   session.wait_for_grids_before();
//   if (session.begin()) ...                      // which operation this is, and whether it may go on
//   session.enter_slot();
//   session.send(place, line);                    // to the peer
//   line = session.receive(place, phase);         // what the peer has sent to the same place
//   session.re_arm(place);                        // R2 of operation.cuh
//   block_sync(); session.arrive();               // one thread of each block
//
// A slot is divided among the other ranks, in their order, of which each has `sender_lines` lines. A place is a line of such
// a part. An algorithm of two phases has two such divisions, one behind the other; `part`
// is where its second one begins. For a thread whose peer is its own rank there is a part behind those of the others, if the
// algorithm makes room for it; else it must not send or receive.
//
// Where a thread exchanges lines with several peers, LLSessionOf<Peers> is the same for them together:
//
//   LLSessionOf<World - 1> session(comm, kind, bytes, rank);
//   session.send_to(k, place, line);              // to the k-th rank behind this one, round the ring: ranks begin at different peers
//   session.receive_each(place, is_wanted, lines, phase);  // [i]: of the i-th of the other ranks
//   session.re_arm_of(i, place);
//
// The steps are separate, and begin() does not enter the slot, because their order in a kernel is worth microseconds: what is
// loaded between them is under way at the same time (docs/experiments/first_send.md).
#pragma once

#include "llm_comm/ll_exchange.cuh"
#include "llm_comm/operation.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

template <uint32_t Peers>
class LLSessionOf {
 public:
  // Construct it, and divide the slots, before the wait for the grids before this one. `bytes`: of the message, for errors.
  LLM_COMM_DEVICE LLSessionOf(const DeviceComm& comm, OperationKind kind, uint64_t bytes, uint32_t rank, uint32_t peer)
      : op_(comm, kind, bytes),
        rank_(rank),
        peer_(peer),
        sends_as_(rank == peer ? comm.world_size - 1 : among_others(rank, peer)),
        receives_as_(rank == peer ? comm.world_size - 1 : among_others(peer, rank)) {
    static_assert(Peers == 1, "a thread of several peers has all of them");
  }

  // All other ranks, of which there are `Peers`.
  LLM_COMM_DEVICE LLSessionOf(const DeviceComm& comm, OperationKind kind, uint64_t bytes, uint32_t rank)
      : op_(comm, kind, bytes), rank_(rank), peer_(1 - rank), sends_as_(0), receives_as_(0) {}

  // Whom send_to(k, ...) means, and from whom line [i] of receive_each() is.
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
  // Their parts of the receiver's slots and of this rank's.
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

  // The same for a kernel whose threads keep to few lines: places count from `first_line`, and the sum is not made again.
  template <class Count>
  LLM_COMM_DEVICE void divide_slots(Count sender_lines, Count first_line) {
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < Peers; ++i) {
      outgoing_[i] = opaque(op_.slots(receiver(i)) + static_cast<uint64_t>(sends_as(i)) * sender_lines + first_line);
      incoming_[i] = opaque(op_.slots(rank_) + static_cast<uint64_t>(receives_as(i)) * sender_lines + first_line);
    }
  }

  // `precomputed`: values that change with every address that the kernel loads from or stores to besides. They are computed
  // before the wait, as are those of this session; behind it they would be computed while nothing else is under way. The next
  // grid of the stream may be launched from then on (operation.cuh, "Progress"); later was slower.
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

  // As of Operation, in one step or in two. False: send nothing, and mind what Operation::begin() says of the other threads
  // of the block.
  LLM_COMM_DEVICE bool begin() { return begin(load_state()); }
  LLM_COMM_DEVICE Line load_state() const { return op_.load_state(); }
  LLM_COMM_DEVICE bool begin(Line state) { return op_.begin(state); }

  // After begin(): from now on lines are those of this operation's slot.
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

  // Both steps, beside loads of the caller's that are as far away as the operation's number.
  template <class Load, uint32_t N>
  LLM_COMM_DEVICE bool begin_beside(Load (&load)[N], Line (&loaded)[N]) {
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < N; ++i) load[i].begin();
    const bool begun = begin();
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < N; ++i) loaded[i] = load[i].end();
    enter_slot();
    return begun;
  }
  template <class Load>
  LLM_COMM_DEVICE bool begin_beside(Load& load, Line& loaded) {
    load.begin();
    const bool begun = begin();
    loaded = load.end();
    enter_slot();
    return begun;
  }

  LLM_COMM_DEVICE void send(uint64_t place, Line payload, uint64_t part = 0) const {
    send_to(0, part + place, payload);
  }
  LLM_COMM_DEVICE void send_to(uint32_t k, uint64_t place, Line payload) const {
    send_line(outgoing_[k] + place, payload);
  }

  // Where the wait ends without the line, words that have not arrived are NaN, and aborted() is true from then on. `phase`:
  // for errors.
  LLM_COMM_DEVICE Line receive(uint64_t place, uint32_t phase, uint64_t part = 0) {
    return receive(incoming(place, part), phase);
  }
  LLM_COMM_DEVICE Line receive(const Line* line, uint32_t phase) { return receive_line(line, op_, sender(0), phase); }

  // The lines at one place of all peers for which `is_wanted`, waiting for all together: each poll loads those that have not
  // come, so their loads are under way at the same time. The other lines are zeros.
  LLM_COMM_DEVICE void receive_each(uint64_t place, const bool (&is_wanted)[Peers], Line (&lines)[Peers],
                                    uint32_t phase) {
    const Line* from[Peers];
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < Peers; ++i) {
      from[i] = incoming_[i] + place;
      lines[i] = is_wanted[i] ? armed_line() : Line{};
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

  // Every line that was received, by the thread that received it.
  LLM_COMM_DEVICE void re_arm(uint64_t place, uint64_t part = 0) const { re_arm(incoming(place, part)); }
  LLM_COMM_DEVICE void re_arm(Line* line) const { re_arm_line(line); }
  LLM_COMM_DEVICE void re_arm_of(uint32_t i, uint64_t place) const { re_arm(incoming_[i] + place); }

  // For a kernel that receives and re-arms far apart: the address, which is computed once.
  LLM_COMM_DEVICE Line* incoming(uint64_t place, uint64_t part = 0) const { return incoming_[0] + part + place; }

  LLM_COMM_DEVICE bool aborted() const { return op_.aborted(); }
  LLM_COMM_DEVICE uint64_t sequence() const { return op_.sequence(); }

  // For protocols that put more into a slot than lines (ll_bytes.cuh), after begin(): where this operation's slots begin, and
  // another wait for the peer.
  LLM_COMM_DEVICE char* own_slot() const { return reinterpret_cast<char*>(op_.in_slot(op_.slots(rank_))); }
  LLM_COMM_DEVICE char* slot_of_receiver(uint32_t k) const {
    return reinterpret_cast<char*>(op_.in_slot(op_.slots(receiver(k))));
  }
  template <class Poll>
  LLM_COMM_DEVICE bool wait_until(Poll poll, uint32_t phase) {
    return op_.wait_until(poll, peer_, phase);
  }
  // For a wait that is a call (operation.cuh).
  LLM_COMM_DEVICE OperationInWait in_wait() const { return op_.in_wait(); }
  LLM_COMM_DEVICE void note_abort() { op_.note_abort(); }

  // As of Operation: by one thread of each block, after all its threads have begun.
  LLM_COMM_DEVICE void arrive() const { op_.arrive(); }

 private:
  Operation op_;
  uint32_t rank_;
  // Of a thread with one peer.
  uint32_t peer_;
  uint32_t sends_as_;
  uint32_t receives_as_;
  Line* outgoing_[Peers] = {};
  Line* incoming_[Peers] = {};
};

using LLSession = LLSessionOf<1>;

}  // namespace llm_comm::inline LLM_COMM_TARGET
