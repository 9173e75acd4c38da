// Channels of one rank, for kernels outside this library. `Communicator.channels()` (Python) creates a `Channels`
// object. A kernel takes a `const Channels*`:
//
//   channels->memory_channel(peer, semaphore)   a MemoryChannel: threads load from and store to the peer's memory
//   channels->port_channel(peer, semaphore)     a HeapPortChannel: the host proxy copies data to the peer
//
// Both channels move data between symmetric tensors. Offsets count bytes from the start of the tensor that the channels
// were created for. That tensor has the same symmetric offset on every rank.
//
// A semaphore belongs to one pair of ranks and one kind of channel. Each pair and kind has `semaphores` of them, which
// no operation of the library uses. The counters lie in device memory and only grow, so kernels may follow each other
// and CUDA graphs may be replayed without a reset. One thread at a time may use an end: blocks that signal need one
// semaphore each.
//
// Ordering (as in the MSCCL++ paper): data put before a signal is visible when the peer's wait() returns. The source of
// a put through a port must not change before flush() returns. A rank must not put to memory that its peer is still
// reading: the reader has to signal first.
//
// An aborted wait returns false and fails the communicator, like a wait of the library's own operations. A request for
// a channel that does not exist also fails the communicator; the channel returned then leads to this rank itself.
#pragma once

#include "llm_comm/memory_channel.cuh"
#include "llm_comm/port_channel.cuh"
#include "llm_comm/symmetric.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// One end of a semaphore. All words are zero at first. The peer or its proxy writes `received`; only this rank accesses
// `sent` and `awaited`.
struct alignas(32) SemaphoreWords {
  uint64_t received;
  uint64_t sent;
  uint64_t awaited;
};

// Port channel whose destination is a symmetric tensor and whose signals are counted as in Semaphore. Holds a reference
// to its Channels, which must outlive it.
struct HeapPortChannel {
  const DeviceComm& comm;
  SemaphoreWords* end;
  uint64_t peer_received;  // `received` of the peer's end, as a heap offset for requests
  uint64_t memory;         // the tensor, as a heap offset for requests
  WaitSite site;
  uint32_t peer;

  // Requests a copy of `bytes` from this rank's memory to the peer. The copy runs later. Any alignment and size.
  LLM_COMM_DEVICE bool put(uint64_t remote_offset, const void* source, uint64_t bytes) const {
    return push({peer, kPortPut, reinterpret_cast<uint64_t>(source), memory + remote_offset, bytes, 0, 0});
  }

  LLM_COMM_DEVICE bool signal() const { return push({peer, kPortSignal, 0, 0, 0, peer_received, ++end->sent}); }

  // Put and signal as one request.
  LLM_COMM_DEVICE bool put_with_signal(uint64_t remote_offset, const void* source, uint64_t bytes) const {
    return push({peer, kPortPut | kPortSignal, reinterpret_cast<uint64_t>(source), memory + remote_offset, bytes,
                 peer_received, ++end->sent});
  }

  // Waits for one more signal of the peer. Later reads of this thread see what the peer put before that signal.
  LLM_COMM_DEVICE bool wait() const {
    const uint64_t expected = ++end->awaited;
    return bounded()([&] { return poll_acquire(&end->received, [&](uint64_t count) { return count >= expected; }); });
  }

  // Returns when everything that this thread requested for this peer is complete.
  LLM_COMM_DEVICE bool flush() const { return PortFifo(comm).flush(peer, bounded()); }

 private:
  LLM_COMM_DEVICE bool push(const PortRequest& request) const { return PortFifo(comm).push(request, bounded()); }
  LLM_COMM_DEVICE PortWait bounded() const { return {comm, site, peer}; }
};

// Kernel argument of user kernels. The host writes it into device memory.
struct Channels {
  DeviceComm comm;
  uint64_t memory;           // symmetric offset of the tensor that the channels access
  uint64_t memory_bytes;     // size of that tensor
  uint64_t semaphore_words;  // symmetric offset of a rank's semaphore ends
  uint32_t semaphores;       // per pair of ranks and kind of channel

  LLM_COMM_DEVICE uint32_t rank() const { return comm.rank; }
  LLM_COMM_DEVICE uint32_t world_size() const { return comm.world_size; }

  // Enumerates the other ranks, starting at rank + 1, so that the ranks do not all send to the same peer first.
  LLM_COMM_DEVICE uint32_t peers() const { return comm.world_size - 1; }
  LLM_COMM_DEVICE uint32_t peer(uint32_t index) const { return (comm.rank + 1 + index) % comm.world_size; }

  // Address of this rank's tensor.
  LLM_COMM_DEVICE char* local() const { return address_of(comm, comm.rank, memory); }

  LLM_COMM_DEVICE MemoryChannel memory_channel(uint32_t peer, uint32_t semaphore = 0) const {
    check(peer, semaphore);
    SemaphoreWords* const end = end_of(comm.rank, kMemory, peer, semaphore);
    SemaphoreWords* const of_peer = end_of(peer, kMemory, comm.rank, semaphore);
    return {{&of_peer->received, &end->received, &end->sent, &end->awaited},
            local(),
            address_of(comm, peer, memory),
            bounds_of(comm),
            site(),
            peer};
  }

  LLM_COMM_DEVICE HeapPortChannel port_channel(uint32_t peer, uint32_t semaphore = 0) const {
    check(peer, semaphore);
    const uint64_t received = semaphore_words + index_of(kPort, comm.rank, semaphore) * sizeof(SemaphoreWords) +
                              offsetof(SemaphoreWords, received);
    return {comm, end_of(comm.rank, kPort, peer, semaphore), kInHeap | received, kInHeap | memory, site(), peer};
  }

  // Bytes that the semaphore ends of one rank take.
  LLM_COMM_HOST static constexpr uint64_t bytes_of_semaphores(uint32_t world_size, uint32_t semaphores) {
    return uint64_t{kKinds} * world_size * semaphores * sizeof(SemaphoreWords);
  }

 private:
  static constexpr uint32_t kMemory = 0;
  static constexpr uint32_t kPort = 1;
  static constexpr uint32_t kKinds = 2;

  LLM_COMM_DEVICE uint64_t index_of(uint32_t kind, uint32_t other, uint32_t semaphore) const {
    return (uint64_t{kind} * comm.world_size + other) * semaphores + semaphore;
  }

  // Address of rank `at`'s end of the semaphore that it shares with `other`.
  LLM_COMM_DEVICE SemaphoreWords* end_of(uint32_t at, uint32_t kind, uint32_t other, uint32_t semaphore) const {
    return reinterpret_cast<SemaphoreWords*>(address_of(comm, at, semaphore_words)) + index_of(kind, other, semaphore);
  }

  LLM_COMM_DEVICE void check(uint32_t& peer, uint32_t& semaphore) const {
    if (peer < comm.world_size && semaphore < semaphores) return;
    const WaitBounds bounds = bounds_of(comm);
    if (abort_communicator(bounds)) report_error(bounds, site(semaphore), ErrorCause::kNoChannel, peer, 0);
    peer = comm.rank;
    semaphore = 0;
  }

  LLM_COMM_DEVICE WaitSite site(uint64_t sequence = 0) const {
    return {comm.rank, OperationKind::kUser, sequence, memory_bytes};
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
