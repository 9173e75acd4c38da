// The FIFO through which threads of a GPU ask a proxy on the host to move data (port_channel.cuh). It lies in host memory that the
// device maps; host and device share this file.
//
// A thread takes a place by a counter in device memory, and writes the request as packets, each half of which carries a flag: the
// round in which this place is used. So the proxy needs no other word to know that a request is there, whole, and nobody waits for
// requests of other threads. The proxy counts what it has taken in `tail`: places that may be written again.
#pragma once

#include "llm_comm/platform_types.h"

namespace llm_comm {

// What a request asks for, in this order.
inline constexpr uint32_t kPortPut = 1;  // `bytes` from `source` to `destination`
inline constexpr uint32_t kPortSignal =
    2;  // `value` to `word` of the peer, behind all that was put to this peer before
inline constexpr uint32_t kPortEcho =
    4;  // `value` to `word` of this rank, when all before that went to this peer has been done

struct PortRequest {
  uint32_t peer;
  uint32_t parts;        // kPortPut | ...
  uint64_t source;       // address in this rank's memory
  uint64_t destination;  // offset in the peer's workspace, or with kInHeap a place in the symmetric heap
  uint64_t bytes;
  uint64_t word;  // the same, of a workspace or of the heap
  uint64_t value;
};

inline constexpr uint64_t kInHeap = uint64_t{1} << 63;  // the other bits are a place (workspace_layout.h)

inline constexpr uint32_t kWordsOfPortRequest = sizeof(PortRequest) / sizeof(uint32_t);

// A word of the request in the lower half, the flag in the upper one.
struct alignas(16) PortEntry {
  uint64_t half[kWordsOfPortRequest];
};

// `1 << entries_log2` entries follow it.
struct alignas(64) PortRing {
  uint64_t tail;
};

LLM_COMM_HOST constexpr uint64_t port_ring_bytes(uint32_t entries_log2) {
  return sizeof(PortRing) + (sizeof(PortEntry) << entries_log2);
}

// Not 0, which the ring holds at first.
LLM_COMM_HOST constexpr uint32_t port_flag(uint64_t position, uint32_t entries_log2) {
  return static_cast<uint32_t>(position >> entries_log2) + 1;
}

LLM_COMM_HOST constexpr uint64_t port_entry_offset(uint64_t position, uint32_t entries_log2) {
  return sizeof(PortRing) + (position & ((uint64_t{1} << entries_log2) - 1)) * sizeof(PortEntry);
}

}  // namespace llm_comm
