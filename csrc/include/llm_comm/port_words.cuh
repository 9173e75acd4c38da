// Port requests and arrival words for operations with a DirectSession or HBSession (direct_port.cuh and
// two_shot_port.cuh
// in csrc/optional). PortSession uses the same words: one for each sender, hop and block; steps.cuh defines their
// values.
#pragma once

#include "llm_comm/hb_session.cuh"
#include "llm_comm/port_channel.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

class PortWords {
 public:
  LLM_COMM_DEVICE PortWords(const DeviceComm& comm, uint32_t block) : comm_(comm), block_(block) {}

  // Requests a put to a symmetric offset of the peer, followed by a signal. `wait(poll)`: a bounded wait. False: it was
  // aborted.
  template <class Wait>
  LLM_COMM_DEVICE bool put_to_heap(uint32_t peer, uint64_t symmetric_offset, const void* from, uint64_t bytes,
                                   uint32_t hop, uint64_t value, Wait wait) const {
    return PortFifo(comm_).push({peer, kPortPut | kPortSignal, reinterpret_cast<uint64_t>(from),
                                 kInHeap | symmetric_offset, bytes, arrival_offset(comm_.rank, hop), value},
                                wait);
  }
  // Requests a put without a signal. The signal of the next put to the same peer covers both.
  template <class Wait>
  LLM_COMM_DEVICE bool put_to_heap_unsignalled(uint32_t peer, uint64_t symmetric_offset, const void* from,
                                               uint64_t bytes, Wait wait) const {
    return PortFifo(comm_).push(
        {peer, kPortPut, reinterpret_cast<uint64_t>(from), kInHeap | symmetric_offset, bytes, 0, 0}, wait);
  }

  // Waits until the arrival word holds `value` or a later one.
  template <class Wait>
  LLM_COMM_DEVICE bool wait_for_data(uint32_t peer, uint32_t hop, uint64_t value, Wait wait) const {
    const auto* const word = reinterpret_cast<const uint64_t*>(comm_.workspace[comm_.rank] + arrival_offset(peer, hop));
    return wait([&] { return poll_acquire(word, HasReached{value}); });
  }

  // Offset of the arrival word, the same in every rank's workspace.
  LLM_COMM_DEVICE uint64_t arrival_offset(uint32_t sender, uint32_t hop) const {
    return kPortSemaphoresOffset + (uint64_t{sender} * kPortWords + hop * (kPortWords / 2) + block_) * sizeof(uint64_t);
  }

 private:
  const DeviceComm& comm_;
  uint32_t block_;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
