// Every way in which a MemoryChannel and a PortChannel move data, each in a kernel: block k of a rank talks to its k-th peer, in rounds.
// Of the pairs of ranks that have not met, the first in the order of (lower rank, higher rank) waits for no other: so blocks that
// start by number meet, however few of them run at once.
#pragma once

#include "channel_memory.cuh"
#include "llm_comm/memory_channel.cuh"
#include "llm_comm/operation.cuh"
#include "llm_comm/port_channel.cuh"

namespace drill {

using namespace llm_comm;  // NOLINT: kernels are written in the terms of the library

struct MessageArgs {
  DeviceComm comm;
  uint64_t channel_offset;    // in every rank's memory: ChannelMemory by peer
  ChannelCounters* counters;  // by peer
  const Line* source;         // [peer][round][line]
  Line* received;             // [peer][round][line]
  uint64_t* words;            // [peer][round]: what came as a single word (kPut)
  uint32_t lines;
  uint32_t rounds;
  uint32_t first_flag;
};

struct MessageParty {
  uint32_t peer;
  MemoryChannel channel;
  ChannelMemory* own;
  const Line* source;
  Line* received;
  uint64_t* words;

  LLM_COMM_DEVICE MessageParty(const MessageArgs& args, uint32_t block)
      : peer(block < args.comm.rank ? block : block + 1),
        own(memory(args, args.comm.rank, peer)),
        source(args.source + static_cast<uint64_t>(peer) * args.rounds * args.lines),
        received(args.received + static_cast<uint64_t>(peer) * args.rounds * args.lines),
        words(args.words + static_cast<uint64_t>(peer) * args.rounds) {
    ChannelMemory* const remote = memory(args, peer, args.comm.rank);
    channel.semaphore = {&remote->received, &own->received, &args.counters[peer].sent, &args.counters[peer].awaited};
    channel.local = reinterpret_cast<char*>(own);
    channel.remote = reinterpret_cast<char*>(remote);
    channel.bounds = bounds_of(args.comm);
    channel.site = {args.comm.rank, OperationKind::kUser, 0, args.lines * sizeof(Line)};
    channel.peer = peer;
  }

  static LLM_COMM_DEVICE ChannelMemory* memory(const MessageArgs& args, uint32_t rank, uint32_t peer) {
    return reinterpret_cast<ChannelMemory*>(args.comm.workspace[rank] + args.channel_offset) + peer;
  }

  // Both sides have come here; what each wrote before is visible to the other. False if the other one did not come.
  LLM_COMM_DEVICE bool meet(uint32_t* agreed) const {
    block_sync();
    if (thread_index() == 0) {
      channel.signal();
      *agreed = channel.wait();
    }
    block_sync();
    return *agreed != 0;
  }
};

// Lines and a word go to the peer, which reads them where they land.
LLM_COMM_KERNEL(1024) pass_by_put(LLM_COMM_KERNEL_PARAM MessageArgs args) {
  const uint32_t block = block_number(args.comm);
  grid_dependency_wait();
  const MessageParty party(args, block);
  uint32_t* const agreed = shared_memory<uint32_t>();
  for (uint32_t round = 0; round < args.rounds; ++round) {
    const Line* const source = party.source + round * args.lines;
    party.channel.put(offsetof(ChannelMemory, lines), source, args.lines * sizeof(Line), thread_index(),
                      block_threads());
    if (thread_index() == block_threads() - 1) {
      party.channel.write<uint64_t>(offsetof(ChannelMemory, word), *reinterpret_cast<const uint64_t*>(source));
    }
    if (!party.meet(agreed)) return;
    for (uint32_t i = thread_index(); i < args.lines; i += block_threads()) {
      party.received[round * args.lines + i] = load_line(&party.own->lines[i]);
    }
    if (thread_index() == 0) party.words[round] = load_plain(&party.own->word);
    if (!party.meet(agreed)) return;  // the lines may be written again
  }
}

// Each side fills its own memory, from which the other one fetches.
LLM_COMM_KERNEL(1024) pass_by_get(LLM_COMM_KERNEL_PARAM MessageArgs args) {
  const uint32_t block = block_number(args.comm);
  grid_dependency_wait();
  const MessageParty party(args, block);
  uint32_t* const agreed = shared_memory<uint32_t>();
  for (uint32_t round = 0; round < args.rounds; ++round) {
    for (uint32_t i = thread_index(); i < args.lines; i += block_threads()) {
      store_line(&party.own->lines[i], party.source[round * args.lines + i]);
    }
    if (!party.meet(agreed)) return;
    party.channel.get(party.received + round * args.lines, offsetof(ChannelMemory, lines), args.lines * sizeof(Line),
                      thread_index(), block_threads());
    if (!party.meet(agreed)) return;
  }
}

// Packets carry their own readiness; relaxed signals say that those of a round have been read.
LLM_COMM_KERNEL(1024) pass_by_packets(LLM_COMM_KERNEL_PARAM MessageArgs args) {
  const uint32_t block = block_number(args.comm);
  grid_dependency_wait();
  const MessageParty party(args, block);
  uint32_t* const agreed = shared_memory<uint32_t>();
  const uint64_t bytes = args.lines * sizeof(Line);
  for (uint32_t round = 0; round < args.rounds; ++round) {
    const uint32_t flag = args.first_flag + round;
    party.channel.put_packets(offsetof(ChannelMemory, packets), party.source + round * args.lines, bytes, flag,
                              thread_index(), block_threads());
    party.channel.read_packets(party.received + round * args.lines, offsetof(ChannelMemory, packets), bytes, flag,
                               thread_index(), block_threads());
    block_sync();
    if (thread_index() == 0) {
      party.channel.relaxed_signal();
      *agreed = party.channel.relaxed_wait();
    }
    block_sync();
    if (*agreed == 0) return;
  }
}

// What a block has just written is put by the proxy. When that has been flushed, the block overwrites it.
LLM_COMM_KERNEL(1024) pass_by_port(LLM_COMM_KERNEL_PARAM MessageArgs args) {
  constexpr uint32_t kData = 0, kTaken = 1;  // semaphores
  const uint32_t block = block_number(args.comm);
  grid_dependency_wait();
  const MessageParty party(args, block);
  const PortChannel port{args.comm, party.channel.site, party.peer};
  const auto offset =
      static_cast<uint64_t>(reinterpret_cast<char*>(party.channel.remote) - args.comm.workspace[party.peer]);
  const uint64_t bytes = args.lines * sizeof(Line);
  uint32_t* const agreed = shared_memory<uint32_t>();
  const auto lead = [&](auto steps) {  // by one thread of the block, for all
    block_sync();
    if (thread_index() == 0) *agreed = steps();
    block_sync();
    return *agreed != 0;
  };
  for (uint32_t round = 0; round < args.rounds; ++round) {
    const uint64_t value = args.counters[party.peer].rounds + round + 1;
    for (uint32_t i = thread_index(); i < args.lines; i += block_threads()) {
      store_line(&party.own->outgoing[i], party.source[round * args.lines + i]);
    }
    const bool has_left = lead([&] {
      const uint64_t to = offset + offsetof(ChannelMemory, brought);
      if (round % 2 == 0) return port.put_with_signal(to, party.own->outgoing, bytes, kData, value) && port.flush();
      return port.put(to, party.own->outgoing, bytes) && port.signal(kData, value) && port.flush();
    });
    if (!has_left) return;
    for (uint32_t i = thread_index(); i < args.lines; i += block_threads()) store_line(&party.own->outgoing[i], Line{});
    if (!lead([&] { return port.wait(kData, value); })) return;
    for (uint32_t i = thread_index(); i < args.lines; i += block_threads()) {
      party.received[round * args.lines + i] = load_line(&party.own->brought[i]);
    }
    if (!lead([&] { return port.signal(kTaken, value) && port.wait(kTaken, value); })) return;
  }
  if (thread_index() == 0) args.counters[party.peer].rounds += args.rounds;
}

}  // namespace drill
