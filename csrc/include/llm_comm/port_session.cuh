// PortSession: one block's view of an operation over port channels. The port algorithms use it to exchange chunks with
// the block of the same number on every other rank:
//
//   PortSession session(comm, kind, bytes, block, incomplete);
//   session.wait_for_grids_before();
//   session.begin();                                   // all threads
//   session.for_each_peer([&](uint32_t peer) { ... session.put(...), session.signal(...), session.wait...() ... });
//
// Two kinds of words order the steps. The sender's proxy writes an arrival word after the data of a step. The receiving
// block stores a signal word to the peer when it has consumed a step (the signal words of HB sessions). Both hold the
// operation number and the step, as in hb_session.cuh: nothing is reset, and a wait may read a later step or the next
// operation.
//
// Words of one sender and hop are adjacent, ordered by block, and so are the chunks of one step (port_chunks.cuh). The
// proxy merges requests that the blocks of a grid make at about the same time (host/port_batch.h).
//
// Staging memory and its rules H1 and H2 are those of hb_session.cuh. A put runs later and on another engine, but the
// rules do not change: a put may write the destination from the request until the peer signals that it has consumed the
// data.
#pragma once

#include "llm_comm/port_words.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

class PortSession {
 public:
  // `incomplete`: one word of shared memory.
  LLM_COMM_DEVICE PortSession(const DeviceComm& comm, OperationKind kind, uint64_t bytes, uint32_t block,
                              uint32_t* incomplete)
      : comm_(comm), op_(comm, kind, bytes), block_(block), incomplete_(incomplete) {}

  template <class... Values>
  LLM_COMM_DEVICE void wait_for_grids_before(Values... precomputed) const {
    grid_dependency_wait_after((op_.precomputed() + ... + precomputed));
    grid_dependency_trigger();
  }

  // Collective over the block, which has at least one thread per rank.
  LLM_COMM_DEVICE void begin() {
    if (thread_index() == 0) *incomplete_ = 0;
    block_sync();
    if (!op_.begin()) *incomplete_ = 1;  // threads may get different results: the block decides as one
    block_sync();
    if (thread_index() == 0) op_.arrive();
  }

  // Calls step(peer) on one thread per peer, then synchronizes the block. Returns false, on all threads, if any step of
  // this block has ever returned false. The block must then leave the kernel.
  template <class Step>
  LLM_COMM_DEVICE bool for_each_peer(Step step) {
    const uint32_t peer = thread_index();
    if (*incomplete_ == 0 && peer < comm_.world_size && peer != comm_.rank && !step(peer)) *incomplete_ = 1;
    block_sync();
    return *incomplete_ == 0;
  }

  // ---- Called by the thread of a peer. False: a wait was aborted. ----

  // Sends the data of a step to an offset in the peer's workspace. `hop`: 0, or 0 and 1 for algorithms of two hops,
  // whose grids may have half as many blocks.
  LLM_COMM_DEVICE bool put(uint32_t peer, uint64_t destination, const void* source, uint64_t bytes, uint32_t hop,
                           uint32_t step) {
    return push({peer, kPortPut | kPortSignal, reinterpret_cast<uint64_t>(source), destination, bytes,
                 arrival_offset(comm_.rank, hop), value_of(step)});
  }
  LLM_COMM_DEVICE bool wait_for_data(uint32_t peer, uint32_t hop, uint32_t step, uint32_t phase) {
    return wait_for_word(arrival(peer, hop), step, peer, phase);
  }

  // Requests local completion: the proxy writes a word when all earlier puts to the peer have left their source.
  LLM_COMM_DEVICE bool request_local_completion(uint32_t peer, uint32_t step) {
    return push({peer, kPortLocalCompletion, 0, 0, 0, arrival_offset(comm_.rank, 0), value_of(step)});
  }
  // Waits for local completion. All peers share one word, so this works for two ranks only.
  LLM_COMM_DEVICE bool wait_for_local_completion(uint32_t peer, uint32_t step, uint32_t phase) {
    return wait_for_word(arrival(comm_.rank, 0), step, peer, phase);
  }

  // Signals that this block has finished `step`.
  LLM_COMM_DEVICE void signal(uint32_t peer, uint32_t step) const {
    store_release(row().word(comm_, peer, comm_.rank), value_of(step));
  }
  // Waits until the peer's block of this number has finished `step`.
  LLM_COMM_DEVICE bool wait_for_step(uint32_t peer, uint32_t step, uint32_t phase) {
    return wait_for_word(row().word(comm_, comm_.rank, peer), step, peer, phase);
  }

 private:
  LLM_COMM_DEVICE bool push(const PortRequest& request) {
    return PortFifo(comm_).push(request, [&](auto poll) { return op_.wait_until(poll, request.peer, 0); });
  }

  LLM_COMM_DEVICE bool wait_for_word(const uint64_t* word, uint32_t step, uint32_t peer, uint32_t phase) {
    return op_.wait_until([&] { return poll_acquire(word, HasReached{value_of(step)}); }, peer, phase);
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
