// A kernel as a user writes it, outside of the tree of llm_comm: two GPUs swap buffers in every way that a
// MemoryChannel offers, round after round.
#pragma once

#include "llm_comm/memory_channel.cuh"

namespace user {

using namespace llm_comm;  // NOLINT: the kernel is written in the terms of the library

// What a GPU checks for itself; a bit set means that the data was wrong or did not come.
enum Failure : uint32_t {
  kPutNotSeen = 1,
  kGetDiffers = 2,
  kWordNotSeen = 4,
  kPacketsNotSeen = 8,
  kCountDiffers = 16,
};

// Buffer of a GPU: [ lines put by the peer ][ a word ][ packets, twice the lines ]
struct Exchange {
  MemoryChannel channel;
  Line* received;      // private to this GPU, `lines` long
  const Line* source;  // what this GPU sends
  uint64_t lines;
  uint32_t rounds;
  uint32_t* failures;

  LLM_COMM_DEVICE uint64_t bytes() const { return lines * sizeof(Line); }
  LLM_COMM_DEVICE uint64_t word_offset() const { return bytes(); }
  LLM_COMM_DEVICE uint64_t packets_offset() const { return bytes() + sizeof(Line); }
};

// What the GPU with `rank` sends in `round`: every word differs from every other one.
LLM_COMM_DEVICE uint32_t sent_word(uint32_t rank, uint32_t round, uint64_t index) {
  return (rank + 1) * 0x01000000u + round * 0x00010000u + static_cast<uint32_t>(index);
}

LLM_COMM_DEVICE void fill(Line* source, uint64_t lines, uint32_t rank, uint32_t round) {
  for (uint64_t i = thread_index(); i < lines; i += block_threads()) {
    for (uint32_t w = 0; w < 4; ++w) source[i].word[w] = sent_word(rank, round, 4 * i + w);
  }
}

LLM_COMM_DEVICE bool is_from(const Line* received, uint64_t lines, uint32_t rank, uint32_t round) {
  bool same = true;
  for (uint64_t i = thread_index(); i < lines; i += block_threads()) {
    for (uint32_t w = 0; w < 4; ++w) same = same && received[i].word[w] == sent_word(rank, round, 4 * i + w);
  }
  return same;
}

LLM_COMM_DEVICE void note(uint32_t* failures, bool is_right, uint32_t failure) {
  if (is_right) return;
  for (uint32_t seen = load_relaxed(failures);;) {
    const uint32_t found = compare_and_swap(failures, seen, seen | failure);
    if (found == seen) return;
    seen = found;
  }
}

// Both GPUs have reached this point, and what they wrote before is visible to both.
LLM_COMM_DEVICE bool meet(const MemoryChannel& channel) {
  block_sync();
  bool met = true;
  if (thread_index() == 0) {
    channel.signal();
    met = channel.wait();
  }
  block_sync();
  return met;
}

// HB: put and write, then a signal; the peer's copy is read back with get and read.
LLM_COMM_KERNEL(256) exchange_with_signals(LLM_COMM_KERNEL_PARAM Exchange e) {
  const MemoryChannel& channel = e.channel;
  const uint32_t rank = channel.site.rank;
  Line* const source = const_cast<Line*>(e.source);
  for (uint32_t round = 0; round < e.rounds; ++round) {
    fill(source, e.lines, rank, round);
    block_sync();
    channel.put(0, source, e.bytes(), thread_index(), block_threads());
    if (thread_index() == 0) {
      channel.write<uint64_t>(e.word_offset(), sent_word(rank, round, 1 << 15));
    }
    if (!meet(channel)) note(e.failures, false, kPutNotSeen);
    note(e.failures, is_from(reinterpret_cast<const Line*>(channel.local), e.lines, channel.peer, round), kPutNotSeen);
    const uint64_t word = *reinterpret_cast<const uint64_t*>(channel.local + e.word_offset());
    note(e.failures, word == sent_word(channel.peer, round, 1 << 15), kWordNotSeen);

    channel.get(e.received, 0, e.bytes(), thread_index(), block_threads());
    block_sync();
    note(e.failures, is_from(e.received, e.lines, rank, round), kGetDiffers);
    note(e.failures, channel.read<uint64_t>(e.word_offset()) == sent_word(rank, round, 1 << 15), kGetDiffers);
    if (!meet(channel)) note(e.failures, false, kPutNotSeen);  // the buffers may be written again
  }
}

// LL: the lines carry flags. The signals only keep the rounds apart; what they order is not needed to read.
LLM_COMM_KERNEL(256) exchange_packets(LLM_COMM_KERNEL_PARAM Exchange e) {
  const MemoryChannel& channel = e.channel;
  Line* const source = const_cast<Line*>(e.source);
  for (uint32_t round = 0; round < e.rounds; ++round) {
    const uint32_t flag = round + 1;
    fill(source, e.lines, channel.site.rank, round);
    block_sync();
    channel.put_packets(e.packets_offset(), source, e.bytes(), flag, thread_index(), block_threads());
    const bool arrived =
        channel.read_packets(e.received, e.packets_offset(), e.bytes(), flag, thread_index(), block_threads());
    block_sync();
    note(e.failures, arrived && is_from(e.received, e.lines, channel.peer, round), kPacketsNotSeen);
    if (!meet(channel)) note(e.failures, false, kPacketsNotSeen);
  }
}

// Relaxed signals carry nothing but their number, so one side can count what the other does.
LLM_COMM_KERNEL(256) count_signals(LLM_COMM_KERNEL_PARAM Exchange e) {
  if (thread_index() != 0) return;
  for (uint32_t round = 0; round < e.rounds; ++round) e.channel.relaxed_signal();
  for (uint32_t round = 0; round < e.rounds; ++round) {
    note(e.failures, e.channel.relaxed_wait(), kCountDiffers);
  }
}

// Asks whether it is this thread that looks at time `now`: one of all threads is to say yes.
LLM_COMM_KERNEL(256) count_looks(LLM_COMM_KERNEL_PARAM WaitBounds bounds, uint64_t now, uint64_t* looks) {
  if (bounds.elect_poller(now)) add_relaxed(looks, 1);
}

// Waits for what never comes.
LLM_COMM_KERNEL(256) wait_in_vain(LLM_COMM_KERNEL_PARAM Exchange e) {
  if (thread_index() == 0) note(e.failures, e.channel.wait(), kCountDiffers);
}

}  // namespace user
