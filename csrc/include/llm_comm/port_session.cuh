// One operation over port channels as one block sees it, which exchanges chunks with the blocks of the same number on the other
// ranks:
//
//   PortSession session(comm, kind, bytes, block, incomplete);
//   session.wait_for_grids_before();
//   session.begin();                                   // all threads
//   session.for_each_peer([&](uint32_t peer) { ... session.put(...), session.signal(...), session.wait...() ... });
//
// Data goes by the proxy, step by step; that a step has come is told by a word which the proxy of the sender writes behind the
// data. What a block has done with it is told by the block itself, by a store to the peer (the words of HB sessions). Both
// hold the number of the operation and a step, as in hb_session.cuh: nothing is re-armed or counted, and a wait may find a later
// step, of this operation or of the next.
//
// Words of one sender and hop lie side by side, by block. So do the chunks of one step (port_chunks.cuh): what the blocks of a grid
// ask for at about the same time, the proxy does as one (host/port_batch.h).
//
// The halves of the staging memory and their rules are those of hb_session.cuh. That a put is done later, by others, changes
// nothing: who puts may write to the memory from that moment until the peer has said that it has taken the data.
#pragma once

#include "llm_comm/port_words.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

class PortSession {
 public:
  // `incomplete`: a word of shared memory.
  LLM_COMM_DEVICE PortSession(const DeviceComm& comm, OperationKind kind, uint64_t bytes, uint32_t block,
                              uint32_t* incomplete)
      : comm_(comm), op_(comm, kind, bytes), block_(block), incomplete_(incomplete) {}

  template <class... Values>
  LLM_COMM_DEVICE void wait_for_grids_before(Values... precomputed) const {
    grid_dependency_wait_after((op_.precomputed() + ... + precomputed));
    grid_dependency_trigger();
  }

  // All threads of the block, of which there are at least as many as ranks.
  LLM_COMM_DEVICE void begin() {
    if (thread_index() == 0) *incomplete_ = 0;
    block_sync();
    if (!op_.begin()) *incomplete_ = 1;  // threads of a block may get different answers: it goes on as one
    block_sync();
    if (thread_index() == 0) op_.arrive();
  }

  // step(peer) by a thread for each peer, then a barrier of the block. False if a step of this block ever was: leave then.
  template <class Step>
  LLM_COMM_DEVICE bool for_each_peer(Step step) {
    const uint32_t peer = thread_index();
    if (*incomplete_ == 0 && peer < comm_.world_size && peer != comm_.rank && !step(peer)) *incomplete_ = 1;
    block_sync();
    return *incomplete_ == 0;
  }

  // ---- By the thread of a peer: false if a wait was aborted ----

  // The data of a step, to an offset in the peer's workspace. Hops: 0 alone, or 0 and 1, which halves the blocks that a grid may
  // have.
  LLM_COMM_DEVICE bool put(uint32_t peer, uint64_t destination, const void* source, uint64_t bytes, uint32_t hop,
                           uint32_t step) {
    return push({peer, kPortPut | kPortSignal, reinterpret_cast<uint64_t>(source), destination, bytes,
                 arrival_offset(comm_.rank, hop), value_of(step)});
  }
  LLM_COMM_DEVICE bool wait_for_data(uint32_t peer, uint32_t hop, uint32_t step, uint32_t phase) {
    return wait_for_word(arrival(peer, hop), step, peer, phase);
  }

  // Asks for word of when all that was put to the peer before has left its source.
  LLM_COMM_DEVICE bool ask_for_echo(uint32_t peer, uint32_t step) {
    return push({peer, kPortEcho, 0, 0, 0, arrival_offset(comm_.rank, 0), value_of(step)});
  }
  // In a world of two: of the one peer.
  LLM_COMM_DEVICE bool wait_for_echo(uint32_t peer, uint32_t step, uint32_t phase) {
    return wait_for_word(arrival(comm_.rank, 0), step, peer, phase);
  }

  // This block has done a step.
  LLM_COMM_DEVICE void signal(uint32_t peer, uint32_t step) const {
    store_release(row().word(comm_, peer, comm_.rank), value_of(step));
  }
  // Until the peer's block of this number has.
  LLM_COMM_DEVICE bool wait_for_step(uint32_t peer, uint32_t step, uint32_t phase) {
    return wait_for_word(row().word(comm_, comm_.rank, peer), step, peer, phase);
  }

 private:
  LLM_COMM_DEVICE bool push(const PortRequest& request) {
    return PortFifo(comm_).push(request, [&](auto poll) { return op_.wait_until(poll, request.peer, 0); });
  }

  LLM_COMM_DEVICE bool wait_for_word(const uint64_t* word, uint32_t step, uint32_t peer, uint32_t phase) {
    return op_.wait_until([&] { return load_acquire(word) - value_of(step) < kFurthestAhead; }, peer, phase);
  }

  LLM_COMM_DEVICE uint64_t value_of(uint32_t step) const { return word_of_step(op_.sequence(), step); }

  LLM_COMM_DEVICE uint64_t arrival_offset(uint32_t sender, uint32_t hop) const {
    return PortWords(comm_, block_).arrival_offset(sender, hop);
  }
  LLM_COMM_DEVICE const uint64_t* arrival(uint32_t sender, uint32_t hop) const {
    return reinterpret_cast<const uint64_t*>(comm_.workspace[comm_.rank] + arrival_offset(sender, hop));
  }
  LLM_COMM_DEVICE SignalRow row() const { return SignalRow::of<CommonSignals>(block_); }

  const DeviceComm& comm_;
  Operation op_;
  uint32_t block_;
  uint32_t* incomplete_;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
