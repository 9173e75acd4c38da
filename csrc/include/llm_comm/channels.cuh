// The channels of one rank of a communicator, for kernels of one's own. Communicator.channels() of Python makes them; a kernel takes
// `const Channels*`:
//
//   channels->memory_channel(peer, semaphore)   a MemoryChannel to a peer: threads store to its memory and load from it
//   channels->port_channel(peer, semaphore)     a HeapPortChannel to a peer: a proxy on the host has data copied there
//
// Both move data between symmetric tensors: offsets are in bytes from the first byte of the tensor that the channels were made for,
// which lies at the same place on every rank. A semaphore belongs to a pair of ranks and a kind of channel; of each there are
// `semaphores`, and no operation of the library uses them. Its counters lie in device memory and only grow, so kernels may follow
// each other, and CUDA graphs be replayed, without a reset. One thread at a time uses an end, so blocks that signal take one each.
//
// The order of the paper: what was put before a signal is there when the peer's wait() has ended. The source of a put by port must
// not change before a flush(). Who puts to memory that is being read must have heard of the reader first.
//
// A wait that is aborted returns false and fails the communicator, as those of its operations do. So does asking for a channel that
// is not there: the one that is given leads to this rank itself, and harms no other.
#pragma once

#include "llm_comm/memory_channel.cuh"
#include "llm_comm/port_channel.cuh"
#include "llm_comm/symmetric.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// An end of a semaphore, zero at first. The peer, or its proxy, writes `received`; the other words are private to this rank.
struct alignas(32) SemaphoreWords {
  uint64_t received;
  uint64_t sent;
  uint64_t awaited;
};

// A port channel whose data goes to a symmetric tensor, and which counts its signals as a Semaphore does. Lives no longer than its
// Channels.
struct HeapPortChannel {
  const DeviceComm& comm;
  SemaphoreWords* end;
  uint64_t peer_received;  // the peer's `received`, as requests name it
  uint64_t memory;         // the tensor, as requests name it
  WaitSite site;
  uint32_t peer;

  // Has `bytes` of this rank's memory copied to the peer, later. Any addresses and sizes.
  LLM_COMM_DEVICE bool put(uint64_t remote_offset, const void* source, uint64_t bytes) const {
    return push({peer, kPortPut, reinterpret_cast<uint64_t>(source), memory + remote_offset, bytes, 0, 0});
  }

  LLM_COMM_DEVICE bool signal() const { return push({peer, kPortSignal, 0, 0, 0, peer_received, ++end->sent}); }

  // Both, as one request.
  LLM_COMM_DEVICE bool put_with_signal(uint64_t remote_offset, const void* source, uint64_t bytes) const {
    return push({peer, kPortPut | kPortSignal, reinterpret_cast<uint64_t>(source), memory + remote_offset, bytes,
                 peer_received, ++end->sent});
  }

  // Waits for one more signal of the peer. Reads behind it find what the peer had put before.
  LLM_COMM_DEVICE bool wait() const {
    const uint64_t expected = ++end->awaited;
    return bounded()([&] { return load_acquire(&end->received) >= expected; });
  }

  // Returns when all that this thread has asked for has been done, to this peer.
  LLM_COMM_DEVICE bool flush() const { return PortFifo(comm).flush(peer, bounded()); }

 private:
  LLM_COMM_DEVICE bool push(const PortRequest& request) const { return PortFifo(comm).push(request, bounded()); }
  LLM_COMM_DEVICE PortWait bounded() const { return {comm, site, peer}; }
};

// The host writes it, to memory of the device.
struct Channels {
  DeviceComm comm;
  uint64_t memory;           // place of the tensor that channels write to
  uint64_t memory_bytes;     // of it
  uint64_t semaphore_words;  // place of the ends of all semaphores of a rank
  uint32_t semaphores;       // of a pair and a kind

  LLM_COMM_DEVICE uint32_t rank() const { return comm.rank; }
  LLM_COMM_DEVICE uint32_t world_size() const { return comm.world_size; }

  // The other ranks. Each rank begins with the one behind it, so that they do not all send to the same one.
  LLM_COMM_DEVICE uint32_t peers() const { return comm.world_size - 1; }
  LLM_COMM_DEVICE uint32_t peer(uint32_t index) const { return (comm.rank + 1 + index) % comm.world_size; }

  // This rank's tensor.
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

  // Of a rank.
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

  // The end that `at` has of a semaphore that it shares with `other`.
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
