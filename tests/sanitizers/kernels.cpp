// All-reduces of changing size, grid and algorithm on emulated GPUs that run ahead of each other, each a thread of this
// process; checks every sum. Usage: kernels <operations>. Exit status: 0 all right, 1 a wrong sum, 2 an expired wait.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "algorithms/registry.h"
#include "emulator/executor.h"
#include "host/memory_transport.h"

namespace {

using namespace llm_comm;  // NOLINT: a test of its kernels

constexpr int kWorld = 3;
constexpr uint32_t kMaxCount = 1500;
constexpr uint32_t kTileLinesLog2 = 2;
constexpr uint32_t kTileLines = 1 << kTileLinesLog2;
constexpr uint64_t kSlotBytes = 64 * 1024;
constexpr uint64_t kStagingBytes = 16 * 1024;
constexpr WorkspaceLayout kLayout(kSlotBytes, kStagingBytes);
constexpr uint64_t kTimeoutNs = 1'000'000'000;
constexpr uint32_t kSentinelNan = 0xFFFFFFFFu;
constexpr uint32_t kNan = 0x7FFFFFFFu;

enum Outcome { kRight = 0, kWrongSum = 1, kExpired = 2 };

// Fixed by the number of the operation, so that all GPUs agree without talking.
struct Call {
  uint32_t operation;

  uint32_t count() const { return 1 + operation * 7919 % kMaxCount; }
  // At most one for each tile, as the kernels demand.
  uint32_t blocks() const {
    const uint32_t lines = (count() * sizeof(float) + sizeof(Line) - 1) / sizeof(Line);
    const uint32_t tiled = one_shot() ? lines : (lines + kWorld - 1) / kWorld;
    return std::min(1 + operation % 3, (tiled + kTileLines - 1) / kTileLines);
  }
  uint32_t depth() const { return operation / 3 % 2 + (by_port() ? 1 : 0); }
  bool one_shot() const { return operation % 5 < 2; }
  bool by_port() const { return operation % 5 == 2; }
  uint32_t nan_element() const { return operation * 31 % count(); }
  uint32_t nan_rank() const { return operation % kWorld; }

  // Small integers: their sums are exact. One element is a NaN with the bits of a line that has not arrived.
  uint32_t input(uint32_t rank, uint32_t element) const {
    if (rank == nan_rank() && element == nan_element()) return kSentinelNan;
    return float_to_bits(static_cast<float>((rank + 1) * (operation % 1000) + element));
  }
  uint32_t sum(uint32_t element) const {
    if (element == nan_element()) return kNan;
    return float_to_bits(static_cast<float>(6 * (operation % 1000) + kWorld * element));
  }
};

struct Gpu {
  std::vector<Line> workspace = std::vector<Line>(kLayout.bytes() / sizeof(Line));
  HostMailbox mailbox{};
  std::unique_ptr<host::Ports> proxy = host::make_emulated_ports();
  emulator::Executor executor;
};

AllReduceArgs arguments(std::vector<Gpu>& gpus, uint32_t rank) {
  AllReduceArgs args{};
  for (int peer = 0; peer < kWorld; ++peer) {
    args.comm.workspace[peer] = reinterpret_cast<char*>(gpus[peer].workspace.data());
  }
  args.comm.mailbox = &gpus[rank].mailbox;
  args.comm.slot_bytes = kSlotBytes;
  args.comm.staging_bytes = kStagingBytes;
  args.comm.world_size = kWorld;
  args.comm.ports = gpus[rank].proxy->ring();
  args.comm.port_entries_log2 = gpus[rank].proxy->entries_log2();
  args.comm.timeout_ns = kTimeoutNs;
  args.comm.rank = rank;
  args.tile_lines = 1u << kTileLinesLog2;
  args.tile_lines_log2 = kTileLinesLog2;
  return args;
}

void launch(emulator::Executor& executor, const Call& call, const AllReduceArgs& args) {
  constexpr uint32_t kThreads = kWorld * kTileLines;
  const size_t shared_bytes = 2 * kThreads * sizeof(Line);
  executor.run({call.blocks(), kThreads, shared_bytes}, [&] {
    if (call.by_port()) {
      all_reduce_port<DataType::kFloat32, kWorld>(args);
    } else if (call.one_shot()) {
      all_reduce_one_shot<DataType::kFloat32, kWorld, false>(args);
    } else {
      all_reduce_two_shot<DataType::kFloat32, kWorld, false>(args);
    }
  });
}

// `count` words that end with the allocation: a sanitizer sees the first byte behind them. Every other operation begins a
// word behind a line, so that all goes element by element.
class Buffer {
 public:
  Buffer(uint32_t count, bool is_aligned)
      : memory_(new uint32_t[count + (is_aligned ? 0 : 1)]), first_(memory_.get() + (is_aligned ? 0 : 1)) {}

  uint32_t* words() const { return first_; }

 private:
  std::unique_ptr<uint32_t[]> memory_;
  uint32_t* first_;
};

void start_proxy(std::vector<Gpu>& gpus, uint32_t rank) {
  host::PortOwner owner{{}, kLayout.bytes(), rank, kWorld, [] { return false; }, [] {}};
  for (int peer = 0; peer < kWorld; ++peer)
    owner.workspace[peer] = reinterpret_cast<char*>(gpus[peer].workspace.data());
  gpus[rank].proxy->start(owner);
}

void run_rank(std::vector<Gpu>& gpus, uint32_t rank, uint32_t operations, std::atomic<int>& outcome) {
  AllReduceArgs args = arguments(gpus, rank);
  for (Call call{0}; call.operation < operations && outcome == kRight; ++call.operation) {
    const Buffer input(call.count(), call.operation % 2 == 0);
    const Buffer result(call.count(), call.operation % 4 < 2);
    uint32_t* const output = result.words();
    for (uint32_t i = 0; i < call.count(); ++i) input.words()[i] = call.input(rank, i);
    args.input = input.words();
    args.output = output;
    args.count = call.count();
    args.depth = call.depth();
    launch(gpus[rank].executor, call, args);
    int found = gpus[rank].mailbox.error.complete != 0 ? kExpired : kRight;
    for (uint32_t i = 0; i < call.count() && found == kRight; ++i) {
      if (output[i] != call.sum(i)) found = kWrongSum;
    }
    int none = kRight;
    if (found == kRight || !outcome.compare_exchange_strong(none, found)) continue;
    std::printf("rank %u, operation %u: %s\n", rank, call.operation, found == kExpired ? "expired wait" : "wrong sum");
    for (Gpu& gpu : gpus) store_relaxed(&gpu.mailbox.end_reasons, kAbortRequest);  // nobody waits for it any more
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto operations = static_cast<uint32_t>(argc > 1 ? std::atoi(argv[1]) : 1000);
  std::vector<Gpu> gpus(kWorld);
  for (Gpu& gpu : gpus) {
    for (const Region& region : kLayout.regions().region) {
      std::memset(gpu.workspace.data() + region.offset / sizeof(Line), region.initial_byte, region.bytes);
    }
  }
  for (uint32_t rank = 0; rank < kWorld; ++rank) start_proxy(gpus, rank);
  std::atomic<int> outcome = kRight;
  std::vector<std::thread> ranks;
  for (uint32_t rank = 0; rank < kWorld; ++rank) {
    ranks.emplace_back([&, rank] { run_rank(gpus, rank, operations, outcome); });
  }
  for (std::thread& rank : ranks) rank.join();
  return outcome;
}
