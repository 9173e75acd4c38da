// A pair of counters between two GPUs: each side counts the signals it has sent and the signals it has waited
// for. The counters only grow, so nothing is reset and a CUDA graph can be replayed.
#pragma once

#include "llm_comm/wait.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// One end of the pair. `received` lies in memory of this GPU that the peer writes; `sent` and `awaited` are private
// to this end. All three start at 0 on both ends before either is used. One thread at a time may use an end.
struct Semaphore {
  uint64_t* peer_received;  // the peer's `received`, as this GPU maps it
  uint64_t* received;
  uint64_t* sent;
  uint64_t* awaited;

  // Makes everything this thread wrote before (and what it observed, after a block_sync the block's writes too)
  // visible to the peer before the signal. A system-scope release costs more than a small message's data does (about
  // 2 us against 0.8 us published for NVLink 4), so data that carries its own flag uses the relaxed form.
  LLM_COMM_DEVICE void signal() const { store_release(peer_received, ++*sent); }

  // Only the signal itself: orders nothing.
  LLM_COMM_DEVICE void relaxed_signal() const { store_relaxed(peer_received, ++*sent); }

  // Waits for one more signal and orders this thread's later reads after it. False if the wait ended without it.
  LLM_COMM_DEVICE bool wait(const WaitBounds& bounds, const WaitSite& site, uint32_t peer, uint32_t phase = 0) const {
    const uint64_t expected = ++*awaited;
    return wait_until([&] { return load_acquire(received) >= expected; }, bounds, site, peer, phase);
  }

  LLM_COMM_DEVICE bool relaxed_wait(const WaitBounds& bounds, const WaitSite& site, uint32_t peer,
                                    uint32_t phase = 0) const {
    const uint64_t expected = ++*awaited;
    return wait_until([&] { return load_relaxed(received) >= expected; }, bounds, site, peer, phase);
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
