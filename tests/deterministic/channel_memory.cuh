// What a pair of ranks needs for a MemoryChannel and a PortChannel.
#pragma once

#include "llm_comm/platform_types.h"

namespace drill {

using namespace llm_comm;  // NOLINT: kernels are written in the terms of the library

inline constexpr uint32_t kChannelLines = 6;

// A rank's memory for one peer. The counters that only this rank uses lie elsewhere.
struct ChannelMemory {
  alignas(16) uint64_t received;
  uint64_t word;
  Line lines[kChannelLines];
  Line packets[2 * kChannelLines];
  Line outgoing[kChannelLines];  // what this rank's proxy brings to the peer
  Line brought[kChannelLines];   // what the peer's has brought
};

// What a rank keeps for one peer, private to it.
struct ChannelCounters {
  uint64_t sent;
  uint64_t awaited;
  uint64_t rounds;  // by a port channel
};

// How data passes: the kernels of message_passing.cuh.
enum class Form : uint32_t { kPut, kGet, kPackets, kPort };

}  // namespace drill
