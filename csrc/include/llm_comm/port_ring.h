// Request ring (FIFO) of the port channels: GPU threads write requests, the host proxy reads them (port_channel.cuh).
// It lies in host memory that the device maps. Host and device share this file.
//
// A thread takes a position from a counter in device memory and writes its request as packets. Each half of a packet
// carries a flag: the round in which the entry is used. The flag tells the proxy that a request is complete, so no
// other word is needed and no thread waits for the requests of others. The proxy publishes the number of requests it
// has read in `tail`; the entries before it may be overwritten.
#pragma once

#include "llm_comm/platform_types.h"

namespace llm_comm {

// Parts of a request, executed in this order.
inline constexpr uint32_t kPortPut = 1;     // copy `bytes` from `source` to `destination`
inline constexpr uint32_t kPortSignal = 2;  // write `value` to `word` of the peer, after all earlier puts to it
inline constexpr uint32_t kPortLocalCompletion =
    4;  // write `value` to `word` of this rank once all earlier requests for the peer are complete

struct PortRequest {
  uint32_t peer;
  uint32_t parts;        // kPortPut | ...
  uint64_t source;       // address in this rank's memory
  uint64_t destination;  // offset in the peer's workspace, or kInHeap and a symmetric offset
  uint64_t bytes;
  uint64_t word;  // destination of the signal: offset in a workspace, or kInHeap and a symmetric offset
  uint64_t value;
};

inline constexpr uint64_t kInHeap = uint64_t{1} << 63;  // the other bits are a symmetric offset (workspace_layout.h)

inline constexpr uint32_t kWordsOfPortRequest = sizeof(PortRequest) / sizeof(uint32_t);

// Each half holds one word of the request in its lower 32 bits and the flag in its upper 32 bits.
struct alignas(16) PortEntry {
  uint64_t half[kWordsOfPortRequest];
};

// Header of the ring. `1 << entries_log2` entries follow it.
struct alignas(64) PortRing {
  uint64_t tail;
};

LLM_COMM_HOST constexpr uint64_t port_ring_bytes(uint32_t entries_log2) {
  return sizeof(PortRing) + (sizeof(PortEntry) << entries_log2);
}

// Flag of the round of `position`. Never 0, the initial value of the ring.
LLM_COMM_HOST constexpr uint32_t port_flag(uint64_t position, uint32_t entries_log2) {
  return static_cast<uint32_t>(position >> entries_log2) + 1;
}

LLM_COMM_HOST constexpr uint64_t port_entry_offset(uint64_t position, uint32_t entries_log2) {
  return sizeof(PortRing) + (position & ((uint64_t{1} << entries_log2) - 1)) * sizeof(PortEntry);
}

}  // namespace llm_comm
