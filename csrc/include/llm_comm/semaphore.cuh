// Semaphore of the memory channels: a pair of counters between two GPUs. Each side counts the signals that it sent and
// the signals that it waited for. Counters only grow, so nothing is reset and a CUDA graph can be replayed.
#pragma once

#include "llm_comm/wait.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// One end of the pair. The peer writes `received`, which lies in this GPU's memory. `sent` and `awaited` are private to
// this end. All three are 0 on both ends before either is used. One thread at a time may use an end.
struct Semaphore {
  uint64_t* peer_received;  // the peer's `received`, as this GPU maps it
  uint64_t* received;
  uint64_t* sent;
  uint64_t* awaited;

  // Makes all earlier writes of this thread visible to the peer before the signal; after a block_sync(), those of the
  // block too. A system-scope release costs more than the data of a small message (published for NVLink 4: about 2 us
  // against 0.8 us). Data that carries its own flag should use relaxed_signal().
  LLM_COMM_DEVICE void signal() const { store_release(peer_received, ++*sent); }

  // Sends the signal and orders no other access.
  LLM_COMM_DEVICE void relaxed_signal() const { store_relaxed(peer_received, ++*sent); }

  // Waits for one more signal and orders this thread's later reads after it. Returns false if the wait was aborted.
  LLM_COMM_DEVICE bool wait(const WaitBounds& bounds, const WaitSite& site, uint32_t peer, uint32_t phase = 0) const {
    const uint64_t expected = ++*awaited;
    return wait_until([&] { return poll_acquire(received, [&](uint64_t count) { return count >= expected; }); }, bounds,
                      site, peer, phase);
  }

  LLM_COMM_DEVICE bool relaxed_wait(const WaitBounds& bounds, const WaitSite& site, uint32_t peer,
                                    uint32_t phase = 0) const {
    const uint64_t expected = ++*awaited;
    return wait_until([&] { return load_relaxed(received) >= expected; }, bounds, site, peer, phase);
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
