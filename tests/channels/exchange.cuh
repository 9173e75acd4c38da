// A kernel as a user writes it for the channels of a communicator: every rank exchanges with every other one in every way that a
// channel offers, and each notes what was wrong. For emulated GPUs and, by NVRTC, for real ones.
#include "llm_comm/channels.cuh"

using namespace llm_comm;

enum Failure : uint32_t {
  kPutNotSeen = 1,
  kGetDiffers = 2,
  kWordDiffers = 4,
  kPacketsNotSeen = 8,
  kCountDiffers = 16,
  kPortNotSeen = 32,
  kWaitAborted = 64,
};

// What a rank has for each other one, of its tensor: [ lines put | lines by port | packets, twice the lines | a word | lines to send ]
struct Part {
  uint64_t lines;
  LLM_COMM_DEVICE uint64_t bytes() const { return lines * sizeof(Line); }
  LLM_COMM_DEVICE uint64_t by_port() const { return bytes(); }
  LLM_COMM_DEVICE uint64_t packets() const { return 2 * bytes(); }
  LLM_COMM_DEVICE uint64_t word() const { return 4 * bytes(); }
  LLM_COMM_DEVICE uint64_t to_send() const { return 4 * bytes() + sizeof(Line); }
  LLM_COMM_DEVICE uint64_t size() const { return 5 * bytes() + sizeof(Line); }
};

// Every word differs from every other one.
LLM_COMM_DEVICE uint32_t sent_word(uint32_t from, uint32_t to, uint32_t round, uint64_t index) {
  return (from + 1) * 0x10000000u + (to + 1) * 0x01000000u + round * 0x00010000u + static_cast<uint32_t>(index);
}

LLM_COMM_DEVICE void fill(char* lines, uint64_t count, uint32_t from, uint32_t to, uint32_t round) {
  for (uint64_t i = thread_index(); i < count; i += block_threads()) {
    Line line;
    for (uint32_t w = 0; w < 4; ++w) line.word[w] = sent_word(from, to, round, 4 * i + w);
    store_line(lines + i * sizeof(Line), line);
  }
}

LLM_COMM_DEVICE bool is_from(const char* lines, uint64_t count, uint32_t from, uint32_t to, uint32_t round) {
  bool same = true;
  for (uint64_t i = thread_index(); i < count; i += block_threads()) {
    const Line line = load_line(lines + i * sizeof(Line));
    for (uint32_t w = 0; w < 4; ++w) same = same && line.word[w] == sent_word(from, to, round, 4 * i + w);
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

// By all threads, which meet behind the last.
template <class Step>
LLM_COMM_DEVICE void for_each_peer(const Channels& channels, Step step) {
  for (uint32_t i = 0; i < channels.peers(); ++i) step(channels.peer(i));
  block_sync();
}

// One block. `received`: memory of this GPU alone, for the lines of a part. `first`: how many rounds there have been before.
extern "C" LLM_COMM_KERNEL(128) exchange(const Channels* channels, uint64_t lines, uint32_t first, uint32_t rounds,
                                         char* received, uint32_t* failures) {
  const Part part{lines};
  const uint32_t rank = channels->rank();
  // Where a rank has what belongs to another one.
  const auto place = [&](uint32_t other) { return other * part.size(); };
  const auto meet = [&](uint32_t semaphore) {
    block_sync();
    if (thread_index() < channels->peers()) {
      const MemoryChannel channel = channels->memory_channel(channels->peer(thread_index()), semaphore);
      channel.signal();
      note(failures, channel.wait(), kWaitAborted);
    }
    block_sync();
  };
  for (uint32_t round = first; round < first + rounds; ++round) {
    meet(0);
    for_each_peer(*channels, [&](uint32_t peer) {
      fill(channels->local() + place(peer) + part.to_send(), lines, rank, peer, round);
    });
    for_each_peer(*channels, [&](uint32_t peer) {
      const MemoryChannel channel = channels->memory_channel(peer, 1);
      const char* const source = channel.local + place(peer) + part.to_send();
      channel.put(place(rank), source, part.bytes(), thread_index(), block_threads());
      channel.put_packets(place(rank) + part.packets(), source, part.bytes(), round + 1, thread_index(),
                          block_threads());
      if (thread_index() == 0) {
        channel.write<uint64_t>(place(rank) + part.word(), sent_word(rank, peer, round, 0xFFFF));
        const HeapPortChannel port = channels->port_channel(peer, 2);
        note(failures, port.put(place(rank) + part.by_port(), source, part.bytes() / 2), kWaitAborted);
        note(failures,
             port.put_with_signal(place(rank) + part.by_port() + part.bytes() / 2, source + part.bytes() / 2,
                                  part.bytes() - part.bytes() / 2),
             kWaitAborted);
      }
    });
    for_each_peer(*channels, [&](uint32_t peer) {
      const MemoryChannel channel = channels->memory_channel(peer, 1);
      const bool arrived = channel.read_packets(received, place(peer) + part.packets(), part.bytes(), round + 1,
                                                thread_index(), block_threads());
      block_sync();
      note(failures, arrived && is_from(received, lines, peer, rank, round), kPacketsNotSeen);
      block_sync();
    });
    meet(0);
    for_each_peer(*channels, [&](uint32_t peer) {
      const MemoryChannel channel = channels->memory_channel(peer, 1);
      note(failures, is_from(channel.local + place(peer), lines, peer, rank, round), kPutNotSeen);
      const uint64_t word = load_plain(reinterpret_cast<const uint64_t*>(channel.local + place(peer) + part.word()));
      note(failures, word == sent_word(peer, rank, round, 0xFFFF), kWordDiffers);
      channel.get(received, place(rank), part.bytes(), thread_index(), block_threads());
      block_sync();
      note(failures, is_from(received, lines, rank, peer, round), kGetDiffers);
      note(failures, channel.read<uint64_t>(place(rank) + part.word()) == sent_word(rank, peer, round, 0xFFFF),
           kGetDiffers);
      block_sync();
    });
    if (thread_index() < channels->peers()) {
      const uint32_t peer = channels->peer(thread_index());
      const MemoryChannel channel = channels->memory_channel(peer, 1);
      for (uint32_t i = 0; i < 3; ++i) channel.relaxed_signal();
      for (uint32_t i = 0; i < 3; ++i) note(failures, channel.relaxed_wait(), kCountDiffers);
      const HeapPortChannel port = channels->port_channel(peer, 2);
      note(failures, port.wait(), kWaitAborted);
      note(failures, port.signal() && port.wait(), kWaitAborted);
      note(failures, port.flush(), kWaitAborted);
    }
    block_sync();
    for_each_peer(*channels, [&](uint32_t peer) {
      note(failures, is_from(channels->local() + place(peer) + part.by_port(), lines, peer, rank, round), kPortNotSeen);
    });
  }
}
