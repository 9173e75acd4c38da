// Litmus tests of the words by which threads of the host and GPU threads tell each other of data: no reader may see a
// word before the data that it publishes. Each test passes data many times between threads that run the library's code.
// Usage: litmus [rounds]. Exit status: 0 all right.
//
// A CPU of x86-64 keeps the order of stores and of loads whatever the code asks for. There these tests find only what
// the compiler reorders, or code in the wrong order. ThreadSanitizer (tests/sanitizers) and the machine code for Arm
// (tests/emulated/test_host_order.py) show orders that are missing.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "emulator/executor.h"
#include "host/launch_queue.h"
#include "host/memory_transport.h"
#include "llm_comm/port_channel.cuh"

namespace {

using namespace llm_comm;        // NOLINT: a test of it
using namespace llm_comm::host;  // NOLINT

// Polls without a fiber, busily at first, so that a reader is there when a word is stored. False after a minute.
template <class Poll>
bool spin(Poll poll) {
  constexpr uint32_t kBusyPolls = 1024;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  for (uint32_t polls = 1; !poll(); ++polls) {
    if (polls % kBusyPolls != 0) continue;
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

// ---- The ring, the proxy, and the words that it stores ---------------------------------------------------------------

constexpr uint64_t kWords = 1 << 16;  // takes long enough to copy that a reader can come too early
constexpr WorkspaceLayout kLayout(16, kWords * sizeof(uint64_t));

struct Rank {
  std::vector<Line> memory = std::vector<Line>(kLayout.bytes() / sizeof(Line));
  DeviceComm comm{};
  std::unique_ptr<Ports> proxy = make_emulated_ports();

  char* workspace() { return reinterpret_cast<char*>(memory.data()); }
};

// Rank 0 puts words to rank 1 with a signal, and overwrites them when they have been sent. Rank 1 looks at what it got.
bool pass_by_proxy(uint64_t rounds) {
  Rank ranks[2];
  for (uint32_t rank = 0; rank < 2; ++rank) {
    PortOwner owner{{}, kLayout.bytes(), rank, 2, [] { return false; }, [] {}};
    DeviceComm& comm = ranks[rank].comm;
    for (uint32_t r = 0; r < 2; ++r) comm.workspace[r] = owner.workspace[r] = ranks[r].workspace();
    comm.slot_bytes = kLayout.slot_bytes();
    comm.rank = rank;
    comm.world_size = 2;
    comm.ports = ranks[rank].proxy->ring();
    comm.port_entries_log2 = ranks[rank].proxy->entries_log2();
    ranks[rank].proxy->start(owner);
  }
  constexpr uint64_t kSignal = kPortsOffset + offsetof(PortState, received);
  const uint64_t staging = staging_offset(ranks[0].comm);
  std::atomic<uint64_t> taken = 0;
  bool is_right = true;
  std::thread receiver([&] {
    const auto* const signal = reinterpret_cast<const uint64_t*>(ranks[1].workspace() + kSignal);
    const auto* const words = reinterpret_cast<const uint64_t*>(ranks[1].workspace() + staging);
    for (uint64_t round = 1; round <= rounds && is_right; ++round) {
      is_right = spin([&] { return load_acquire(signal) >= round; });
      for (uint64_t i = 0; i < kWords; ++i) is_right &= words[i] == round * (i + 1);
      taken.store(round, std::memory_order_release);
    }
    taken.store(rounds, std::memory_order_release);
  });
  const PortFifo fifo(ranks[0].comm);
  const auto wait = [](auto poll) { return spin(poll); };
  std::vector<uint64_t> source(kWords);
  for (uint64_t round = 1; round <= rounds; ++round) {
    for (uint64_t i = 0; i < kWords; ++i) source[i] = round * (i + 1);
    const auto from = reinterpret_cast<uint64_t>(source.data());
    if (!fifo.push({1, kPortPut | kPortSignal, from, staging, kWords * sizeof(uint64_t), kSignal, round}, wait) ||
        !fifo.flush(1, wait)) {
      break;
    }
    for (uint64_t& word : source) word = 0;
    if (!spin([&] { return taken.load(std::memory_order_acquire) >= round; })) break;
  }
  receiver.join();
  for (Rank& rank : ranks) rank.proxy->stop();
  return is_right;
}

// ---- The mailbox -----------------------------------------------------------------------------------------------------

void report(HostMailbox& mailbox, uint32_t number) {
  WaitBounds bounds{};
  bounds.mailbox = &mailbox;
  for (CallSignature& call : mailbox.calls) call.count = number;
  report_error(bounds, {number, OperationKind::kUser, number, number}, ErrorCause::kMismatch, number, number);
}

bool is_reported(const HostMailbox& mailbox) { return has_error(mailbox); }

// A GPU thread reports errors, each with the calls of all ranks; the watchdog reads each as soon as it is complete.
bool report_errors(uint64_t rounds) {
  HostMailbox mailbox{};
  std::atomic<uint64_t> awaited = 0;
  bool is_right = true;
  std::thread watchdog([&] {
    for (uint32_t number = 1; number <= rounds; ++number) {
      awaited.store(number, std::memory_order_release);
      const ErrorRecord& error = mailbox.error;
      is_right &= spin([&] { return is_reported(mailbox); });
      is_right &= error.rank == number && error.peer == number && error.phase == number;
      is_right &= error.sequence == number && error.bytes == number;
      for (const CallSignature& call : mailbox.calls) is_right &= call.count == number;
      mailbox = HostMailbox{};
    }
  });
  for (uint32_t number = 1; number <= rounds; ++number) {
    if (!spin([&] { return awaited.load(std::memory_order_acquire) >= number; })) break;
    report(mailbox, number);
  }
  watchdog.join();
  return is_right;
}

// ---- Grids -----------------------------------------------------------------------------------------------------------

// Two emulated GPUs exchange a line in each grid, by two slots in turn, and reset what they got (R1 and R2 of
// operation.cuh). If a grid's line overtakes the reset of the grid before it, the peer's next line may be lost.
bool exchange_lines(uint64_t rounds) {
  Line slots[2][2];
  for (auto& of_rank : slots) of_rank[0] = of_rank[1] = sentinel_line();
  std::atomic<bool> is_right = true;
  const auto run = [&](uint32_t rank) {
    emulator::Executor gpu(rank);
    for (uint32_t round = 0; round < rounds && is_right; ++round) {
      gpu.run({1, 1, 0}, [&] {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
        store_line_relaxed(&slots[1 - rank][round % 2], Line{{round, round, round, round}});
        Line line = sentinel_line();
        while (!has_arrived(line) && std::chrono::steady_clock::now() < deadline) {
          line = load_line_relaxed(&slots[rank][round % 2]);
          spin_hint();
        }
        for (const uint32_t word : line.word) {
          if (word != round) is_right = false;
        }
        store_line_relaxed(&slots[rank][round % 2], sentinel_line());
      });
    }
  };
  std::thread other([&] { run(1); });
  run(0);
  other.join();
  return is_right;
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t rounds = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1000;
  bool all = true;
  const auto expect = [&](bool holds, const char* what) {
    std::printf("%s: %s\n", what, holds ? "yes" : "NO");
    all &= holds;
  };
  expect(pass_by_proxy(rounds), "data is there before its signal, and sent before its local completion");
  expect(report_errors(100 * rounds), "an error is there before it is complete");
  expect(exchange_lines(rounds), "a line is reset before the next grid sends");
  return all ? 0 : 1;
}
