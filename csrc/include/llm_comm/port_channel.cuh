// PortChannel: a GPU thread asks a proxy on the host to move data to one peer (MSCCL++, arXiv 2504.09014). Within a
// node copy engines move the data: they use no SM and reach a higher bandwidth than stores of a kernel. PortFifo
// carries the requests of port algorithms and of HeapPortChannel (channels.cuh), which DSL and user kernels use.
// PortChannel serves node_exchange.cuh.
//
//   put(destination, source, bytes)  copies bytes of this rank's memory to an offset in the peer's workspace, later
//   signal(semaphore, value)         the peer's wait() for this or a lower value returns once everything that this
//                                    thread has put to that peer has arrived
//   put_with_signal(...)             both, as one request
//   flush()                          returns when all requests of this thread for this peer are complete. Until then,
//                                    or until a word from the peer confirms arrival, the source of a put must not
//                                    change
//   wait(semaphore, value)           waits for a signal of the peer; later reads see what the peer put before it
//
// The values of a semaphore must only grow. The caller chooses them, so nothing is counted or reset here. A CUDA graph
// can be replayed if the values derive from device memory, for example from the operation number.
//
// Every wait is bounded, including the wait for a free ring entry; false means that it was aborted. Any thread may make
// a request. The request is a release, which the proxy acquires: it also covers what the block wrote before a
// block_sync().
#pragma once

#include "llm_comm/line.cuh"
#include "llm_comm/operation.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

LLM_COMM_DEVICE PortState* port_state(const DeviceComm& comm, uint32_t rank) {
  return reinterpret_cast<PortState*>(comm.workspace[rank] + kPortsOffset);
}

// Offset of the staging memory in a workspace.
LLM_COMM_DEVICE uint64_t staging_offset(const DeviceComm& comm) { return kHeaderBytes + kSlots * comm.slot_bytes; }

// Request ring as GPU threads use it. `wait(poll)`: a bounded wait that returns false if it was aborted.
class PortFifo {
 public:
  LLM_COMM_DEVICE explicit PortFifo(const DeviceComm& comm) : comm_(comm), state_(port_state(comm, comm.rank)) {}

  template <class Wait>
  LLM_COMM_DEVICE bool push(const PortRequest& request, Wait wait) const {
    return write(fetch_add(&state_->head, 1), request, wait);
  }

  template <class Wait>
  LLM_COMM_DEVICE bool flush(uint32_t peer, Wait wait) const {
    const uint64_t position = fetch_add(&state_->head, 1);
    const uint64_t word = kPortsOffset + offsetof(PortState, flushed) + peer * sizeof(uint64_t);
    if (!write(position, {peer, kPortLocalCompletion, 0, 0, 0, word, position + 1}, wait)) return false;
    return wait(
        [&] { return poll_acquire(&state_->flushed[peer], [&](uint64_t flushed) { return flushed > position; }); });
  }

 private:
  template <class Wait>
  LLM_COMM_DEVICE bool write(uint64_t position, const PortRequest& request, Wait wait) const {
    // The tail lies in host memory, which is slow to read. A thread that reads it publishes the value in device memory.
    const uint64_t entries = uint64_t{1} << comm_.port_entries_log2;
    if (position - load_relaxed(&state_->tail) >= entries) {
      const bool is_free = wait([&] {
        const uint64_t tail = load_acquire(&comm_.ports->tail);
        store_relaxed(&state_->tail, tail);
        return position - tail < entries;
      });
      if (!is_free) return false;
    }
    constexpr uint32_t kPackets = kWordsOfPortRequest / 2;
    // The host has port_flag() and port_entry_offset() for this.
    const uint32_t flag = static_cast<uint32_t>(position >> comm_.port_entries_log2) + 1;
    auto* const entry = reinterpret_cast<PortEntry*>(comm_.ports + 1) + (position & (entries - 1));
    const auto low = [](uint64_t value) { return static_cast<uint32_t>(value); };
    const auto high = [](uint64_t value) { return static_cast<uint32_t>(value >> 32); };
    const auto packet = [&](uint64_t value) { return FlagLine::encode({low(value), high(value)}, flag); };
    const Line packets[kPackets] = {FlagLine::encode({request.peer, request.parts}, flag),
                                    packet(request.source),
                                    packet(request.destination),
                                    packet(request.bytes),
                                    packet(request.word),
                                    packet(request.value)};
    store_packets_release(entry, packets);
    return true;
  }

  const DeviceComm& comm_;
  PortState* state_;
};

// Bounded wait for the peer of a channel, as PortFifo takes it. A struct and not a lambda, because NVRTC rejects
// generic lambdas.
struct PortWait {
  const DeviceComm& comm;
  WaitSite site;
  uint32_t peer;

  template <class Poll>
  LLM_COMM_DEVICE bool operator()(Poll poll) const {
    return wait_until(poll, bounds_of(comm), site, peer, 0);
  }
};

struct PortChannel {
  const DeviceComm& comm;
  WaitSite site;
  uint32_t peer;

  LLM_COMM_DEVICE bool put(uint64_t destination, const void* source, uint64_t bytes) const {
    return request(kPortPut, destination, source, bytes, 0, 0);
  }
  LLM_COMM_DEVICE bool signal(uint32_t semaphore, uint64_t value) const {
    return request(kPortSignal, 0, nullptr, 0, semaphore, value);
  }
  LLM_COMM_DEVICE bool put_with_signal(uint64_t destination, const void* source, uint64_t bytes, uint32_t semaphore,
                                       uint64_t value) const {
    return request(kPortPut | kPortSignal, destination, source, bytes, semaphore, value);
  }

  LLM_COMM_DEVICE bool flush() const { return PortFifo(comm).flush(peer, bounded()); }

  LLM_COMM_DEVICE bool wait(uint32_t semaphore, uint64_t value) const {
    const uint64_t* const received = &port_state(comm, comm.rank)->received[peer][semaphore];
    return bounded()(
        [&] { return poll_acquire(received, [&](uint64_t word) { return word - value <= ~uint64_t{0} / 2; }); });
  }

 private:
  LLM_COMM_DEVICE bool request(uint32_t parts, uint64_t destination, const void* source, uint64_t bytes,
                               uint32_t semaphore, uint64_t value) const {
    const uint64_t word = kPortsOffset + offsetof(PortState, received) +
                          (uint64_t{comm.rank} * kUserPortSemaphores + semaphore) * sizeof(uint64_t);
    return PortFifo(comm).push({peer, parts, reinterpret_cast<uint64_t>(source), destination, bytes, word, value},
                               bounded());
  }

  LLM_COMM_DEVICE PortWait bounded() const { return {comm, site, peer}; }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
