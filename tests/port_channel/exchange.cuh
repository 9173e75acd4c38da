// Two GPUs swap buffers through a PortChannel, round after round, in every way that it offers.
#pragma once

#include "llm_comm/port_channel.cuh"

namespace ports {

using namespace llm_comm;  // NOLINT: the kernel is written in the terms of the library

// A bit for what went wrong.
enum Failure : uint32_t { kDataDiffers = 1, kWaitAborted = 2 };

struct Exchange {
  DeviceComm comm;
  Line* source;         // of this GPU, of `lines` lines
  uint64_t* rounds_of;  // that have been made by launches before: a graph can be replayed
  uint64_t lines;
  uint32_t rounds;
  uint32_t* failures;
};

LLM_COMM_DEVICE uint32_t sent_word(uint32_t rank, uint64_t round, uint64_t index) {
  return (rank + 1) * 0x01000000u + static_cast<uint32_t>(round % 64) * 0x00040000u + static_cast<uint32_t>(index);
}

LLM_COMM_DEVICE void note(uint32_t* failures, uint32_t failure) {
  for (uint32_t seen = load_relaxed(failures);;) {
    const uint32_t found = compare_and_swap(failures, seen, seen | failure);
    if (found == seen) return;
    seen = found;
  }
}

// One block, with a word of shared memory. Each round: what has just been written is put, in two parts; when it has been flushed, it
// is overwritten; what the peer has put is looked at when its signal has come; then both say that they have looked.
LLM_COMM_KERNEL(512) exchange(LLM_COMM_KERNEL_PARAM Exchange e) {
  constexpr uint32_t kData = 0, kLooked = 1;  // semaphores
  grid_dependency_wait();
  const uint32_t rank = e.comm.rank;
  const PortChannel port{e.comm, {rank, OperationKind::kUser, 0, e.lines * sizeof(Line)}, 1 - rank};
  const uint64_t to = staging_offset(e.comm);
  const Line* const received = reinterpret_cast<const Line*>(e.comm.workspace[rank] + to);
  const uint64_t first_round = load_relaxed(e.rounds_of);
  uint32_t* const agreed = shared_memory<uint32_t>();
  const auto lead = [&](auto steps) {  // by one thread of the block, for all
    block_sync();
    if (thread_index() == 0) *agreed = steps();
    block_sync();
    if (*agreed == 0 && thread_index() == 0) note(e.failures, kWaitAborted);
    return *agreed != 0;
  };
  for (uint64_t round = first_round + 1; round <= first_round + e.rounds; ++round) {
    for (uint64_t i = thread_index(); i < e.lines; i += block_threads()) {
      Line line;
      for (uint32_t w = 0; w < 4; ++w) line.word[w] = sent_word(rank, round, 4 * i + w);
      store_line(e.source + i, line);
    }
    const bool has_left = lead([&] {
      const uint64_t half = e.lines / 2 * sizeof(Line);
      const uint64_t rest = e.lines * sizeof(Line) - half;
      const char* const behind = reinterpret_cast<const char*>(e.source) + half;
      if (!port.put(to, e.source, half)) return false;
      const bool is_put = round % 2 == 0 ? port.put_with_signal(to + half, behind, rest, kData, round)
                                         : port.put(to + half, behind, rest) && port.signal(kData, round);
      return is_put && port.flush();
    });
    if (!has_left) return;
    for (uint64_t i = thread_index(); i < e.lines; i += block_threads()) store_line(e.source + i, Line{});
    if (!lead([&] { return port.wait(kData, round); })) return;
    for (uint64_t i = thread_index(); i < e.lines; i += block_threads()) {
      const Line line = load_line(received + i);
      for (uint32_t w = 0; w < 4; ++w) {
        if (line.word[w] != sent_word(1 - rank, round, 4 * i + w)) note(e.failures, kDataDiffers);
      }
    }
    if (!lead([&] { return port.signal(kLooked, round) && port.wait(kLooked, round); })) return;
  }
  if (thread_index() == 0) store_relaxed(e.rounds_of, first_round + e.rounds);
}

// Waits for what never comes.
LLM_COMM_KERNEL(512) wait_in_vain(LLM_COMM_KERNEL_PARAM Exchange e) {
  grid_dependency_wait();
  const PortChannel port{e.comm, {e.comm.rank, OperationKind::kUser, 7, 0}, 1 - e.comm.rank};
  if (thread_index() == 0 && !port.wait(2, 1)) note(e.failures, kWaitAborted);
}

// More requests than the FIFO has places, by all threads at once.
LLM_COMM_KERNEL(512) flood(LLM_COMM_KERNEL_PARAM Exchange e) {
  grid_dependency_wait();
  const PortChannel port{e.comm, {e.comm.rank, OperationKind::kUser, 0, 0}, 1 - e.comm.rank};
  const uint64_t to = staging_offset(e.comm) + thread_index() * sizeof(Line);
  for (uint32_t round = 0; round < e.rounds; ++round) {
    if (!port.put(to, e.source + thread_index(), sizeof(Line))) note(e.failures, kWaitAborted);
  }
  if (!port.flush()) note(e.failures, kWaitAborted);
}

}  // namespace ports
