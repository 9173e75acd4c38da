// MemoryChannel: threads of one GPU store to and load from the memory of one peer (MSCCL++, arXiv 2504.09014). For user
// kernels and DSL kernels.
//
// Two protocols share the memory. Never use both for the same bytes: a raw data word could look like a flag.
// - HB: put/get/read/write move plain 16-byte lines; signal/wait order them with one synchronization per large chunk.
// - LL: put_packets/read_packets move lines that carry their own readiness (line.cuh), without a signal.
//
// Offsets are in bytes from the channel's two bases. `threads` threads with indices 0..threads-1 make a bulk call
// together.
#pragma once

#include "llm_comm/line.cuh"
#include "llm_comm/ll_exchange.cuh"
#include "llm_comm/semaphore.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

struct MemoryChannel {
  Semaphore semaphore;
  char* local;   // this GPU's buffer, where the peer's writes land
  char* remote;  // the peer's buffer, as this GPU maps it
  WaitBounds bounds;
  WaitSite site;
  uint32_t peer;

  // Copies `bytes` (a multiple of 16; offsets and bases 16-byte aligned) from this GPU to the peer.
  LLM_COMM_DEVICE void put(uint64_t remote_offset, const void* source, uint64_t bytes, uint32_t thread,
                           uint32_t threads) const {
    copy(remote + remote_offset, static_cast<const char*>(source), bytes, thread, threads);
  }

  // Copies `bytes` from the peer to this GPU; alignment as for put.
  LLM_COMM_DEVICE void get(void* destination, uint64_t remote_offset, uint64_t bytes, uint32_t thread,
                           uint32_t threads) const {
    copy(static_cast<char*>(destination), remote + remote_offset, bytes, thread, threads);
  }

  template <class T>
  LLM_COMM_DEVICE T read(uint64_t remote_offset) const {
    return load_plain(reinterpret_cast<const T*>(remote + remote_offset));
  }

  template <class T>
  LLM_COMM_DEVICE void write(uint64_t remote_offset, T value) const {
    store_plain(reinterpret_cast<T*>(remote + remote_offset), value);
  }

  LLM_COMM_DEVICE void signal() const { semaphore.signal(); }
  LLM_COMM_DEVICE void relaxed_signal() const { semaphore.relaxed_signal(); }
  LLM_COMM_DEVICE bool wait() const { return semaphore.wait(bounds, site, peer); }
  LLM_COMM_DEVICE bool relaxed_wait() const { return semaphore.relaxed_wait(bounds, site, peer); }

  // Sends `bytes` as flag lines, which take 2 * bytes at remote_offset. `bytes` is a multiple of 8, the source 8-byte
  // aligned, remote_offset 16-byte aligned. `flag` must differ from the flags that the lines carried earlier.
  LLM_COMM_DEVICE void put_packets(uint64_t remote_offset, const void* source, uint64_t bytes, uint32_t flag,
                                   uint32_t thread, uint32_t threads) const {
    const FlagLine* payload = static_cast<const FlagLine*>(source);
    for (uint64_t i = thread; i < bytes / sizeof(FlagLine); i += threads) {
      store_packet_relaxed(remote + remote_offset + i * sizeof(Line), FlagLine::encode(payload[i], flag));
    }
  }

  // Receives what the peer sent by put_packets() of the same size and flag. Returns false if a wait was aborted.
  LLM_COMM_DEVICE bool read_packets(void* destination, uint64_t local_offset, uint64_t bytes, uint32_t flag,
                                    uint32_t thread, uint32_t threads) const {
    FlagLine* payload = static_cast<FlagLine*>(destination);
    for (uint64_t i = thread; i < bytes / sizeof(FlagLine); i += threads) {
      Line line;
      const bool arrived = wait_until(
          [&] {
            line = load_packet_relaxed(local + local_offset + i * sizeof(Line));
            return FlagLine::has_arrived(line, flag);
          },
          bounds, site, peer, 0);
      if (!arrived) return false;
      payload[i] = FlagLine::decode(line);
    }
    return true;
  }

 private:
  static LLM_COMM_DEVICE void copy(char* to, const char* from, uint64_t bytes, uint32_t thread, uint32_t threads) {
    for (uint64_t offset = thread * sizeof(Line); offset < bytes; offset += threads * sizeof(Line)) {
      store_line(to + offset, load_line(from + offset));
    }
  }
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
