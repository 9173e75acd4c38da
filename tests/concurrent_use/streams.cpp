// Streams of emulated GPUs that use one communicator without an order, as graphs replayed on two streams do. Each stream
// is a thread with an executor of its own. Usage: streams overlap | order | ordered. Prints for each rank
// "rank R: cause C, peer P, sums N right M". Or: streams numbers. Prints what the host makes of the numbers of two operations
// (host/order_of_operations.h).
#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "algorithms/all_reduce/one_shot.cuh"
#include "algorithms/check_call.cuh"
#include "emulator/executor.h"
#include "host/order_of_operations.h"

namespace {

using namespace llm_comm;  // NOLINT: a test of its kernels

constexpr uint32_t kWorld = 2;
constexpr uint32_t kCount = 64;
constexpr uint32_t kTileLinesLog2 = 2;
constexpr uint64_t kSlotBytes = 64 * 1024;
// Longer than the other waits of the test take on a busy machine. A sixteenth of it passes before a rank that finds a note
// blames one (record_expired_wait).
constexpr uint64_t kTimeoutNs = 16'000'000'000;

struct Gpu {
  std::vector<Line> workspace = std::vector<Line>((kHeaderBytes + kSlots * kSlotBytes) / sizeof(Line));
  HostMailbox mailbox{};
  std::atomic<int> sums = 0;
  std::atomic<int> right_sums = 0;
};

std::vector<Gpu> gpus(kWorld);

// What a stream of `rank` executes for launch `number`, whose input is that number on every rank.
void all_reduce(emulator::Executor& stream, uint32_t rank, uint32_t number) {
  std::vector<float> input(kCount, static_cast<float>(number));
  std::vector<float> output(kCount);
  AllReduceArgs args{};
  for (uint32_t peer = 0; peer < kWorld; ++peer) {
    args.comm.workspace[peer] = reinterpret_cast<char*>(gpus[peer].workspace.data());
  }
  args.comm.mailbox = &gpus[rank].mailbox;
  args.comm.slot_bytes = kSlotBytes;
  args.comm.timeout_ns = kTimeoutNs;
  args.comm.rank = rank;
  args.comm.world_size = kWorld;
  args.input = input.data();
  args.output = output.data();
  args.count = kCount;
  args.tile_lines = 1u << kTileLinesLog2;
  args.tile_lines_log2 = kTileLinesLog2;
  const CheckCallArgs check{
      args.comm,
      {static_cast<uint32_t>(kAllReduceOneShot), static_cast<uint16_t>(DataType::kFloat32), 0, kCount, number, 0, {}},
      kCount * sizeof(float)};
  constexpr uint32_t kThreads = kWorld << kTileLinesLog2;
  stream.run({1, kWorld, kWorld * sizeof(CheckedCall)}, [&] { check_call(check); });
  stream.run({2, kThreads, 2 * kThreads * sizeof(Line)},
             [&] { all_reduce_one_shot<DataType::kFloat32, kWorld, false>(args); });
  stream.run({1, 1, 0}, [&] { release_call(check); });
  bool is_right = true;
  for (const float element : output) is_right &= element == static_cast<float>(kWorld * number);
  ++gpus[rank].sums;
  if (is_right) ++gpus[rank].right_sums;
}

bool has_error(uint32_t rank) { return load_relaxed(&gpus[rank].mailbox.error.complete) != 0; }

uint32_t claim_of(uint32_t rank) {
  return load_relaxed(&reinterpret_cast<const CommState*>(gpus[rank].workspace.data())->claim);
}

std::thread stream(const std::function<void(emulator::Executor&)>& work) {
  return std::thread([work] {
    emulator::Executor executor;
    work(executor);
  });
}

// Rank 0 begins a second operation while the first waits for rank 1, which comes late.
void overlap() {
  std::thread first = stream([](auto& executor) { all_reduce(executor, 0, 1); });
  while (claim_of(0) == 0) std::this_thread::yield();
  std::thread second = stream([](auto& executor) { all_reduce(executor, 0, 2); });
  second.join();
  std::thread late = stream([](auto& executor) { all_reduce(executor, 1, 1); });
  first.join();
  late.join();
}

// Two grids of a rank, behind kBefore others, each of which takes a number: at once, or one after the other.
constexpr uint64_t kBefore = 7;
host::OrderOnRank order_of_two(uint32_t rank, bool at_once) {
  std::atomic<uint32_t> begun = 0;
  constexpr uint32_t kThreadsOfGrid = 4;
  CommState& state = *reinterpret_cast<CommState*>(gpus[rank].workspace.data());
  state.arrivals = kBefore * kArrivalsPerOperation;
  state.order = host::OrderOnRank::sum_of_numbers(kBefore);
  const auto take_number = [&](emulator::Executor& executor, uint32_t call) {
    DeviceComm comm{};
    comm.workspace[rank] = reinterpret_cast<char*>(gpus[rank].workspace.data());
    comm.rank = rank;
    comm.call = call;
    executor.run({2, kThreadsOfGrid / 2, 0}, [&] {
      Operation operation(comm, kAllReduceOneShot, 0);
      operation.begin();
      ++begun;
      while (at_once && begun < 2 * kThreadsOfGrid) spin_hint();
      block_sync();
      if (thread_index() == 0) operation.arrive();
    });
  };
  std::thread first = stream([&](auto& executor) { take_number(executor, 3); });
  if (!at_once) first.join();
  std::thread second = stream([&](auto& executor) { take_number(executor, 5); });
  if (at_once) first.join();
  second.join();
  return {state.arrivals / kArrivalsPerOperation, state.order};
}

void numbers() {
  const auto print = [](const char* what, const host::OrderOnRank& on, const host::OrderOnRank& peer) {
    std::printf("%s: %d operations, settled %d, overlap %d, differs %d\n", what, static_cast<int>(on.operations),
                on.is_settled(), on.has_overlap(), on.differs_from(peer));
  };
  const host::OrderOnRank together = order_of_two(0, true);
  const host::OrderOnRank in_turn = order_of_two(1, false);
  print("at once", together, in_turn);
  print("in turn", in_turn, together);
  // As read while an operation counts itself: the sum lacks the last one, or has the next one.
  const uint64_t before = host::OrderOnRank::sum_of_numbers(kBefore);
  const auto sum = [&](uint32_t first, uint32_t second) {
    return before + share_of_order(kBefore, first) + share_of_order(kBefore + 1, second);
  };
  print("without the last", {kBefore + 2, before + share_of_order(kBefore, 3)}, in_turn);
  print("with the next", {kBefore + 1, in_turn.order}, in_turn);
  print("in the other order", {kBefore + 2, sum(5, 3)}, in_turn);
  print("one less", {kBefore + 1, before + share_of_order(kBefore, 5)}, in_turn);
}

// Two launches alike in all but their numbers, in another order on each rank.
void order() {
  std::vector<std::thread> ranks;
  for (uint32_t rank = 0; rank < kWorld; ++rank) {
    ranks.push_back(stream([rank](auto& executor) {
      all_reduce(executor, rank, 1 + rank);
      all_reduce(executor, rank, 2 - rank);
    }));
  }
  for (std::thread& rank : ranks) rank.join();
}

// Two streams that take turns: as it should be.
void ordered() {
  std::vector<std::thread> ranks;
  for (uint32_t rank = 0; rank < kWorld; ++rank) {
    for (uint32_t parity = 0; parity < 2; ++parity) {
      ranks.push_back(stream([rank, parity](auto& executor) {
        for (int turn = 0; turn < 100; ++turn) {
          const int before = 2 * turn + static_cast<int>(parity);
          while (gpus[rank].sums != before && !has_error(rank)) std::this_thread::yield();
          all_reduce(executor, rank, parity + 1);
        }
      }));
    }
  }
  for (std::thread& rank : ranks) rank.join();
}

}  // namespace

int main(int argc, char** argv) {
  for (Gpu& gpu : gpus) {
    std::memset(gpu.workspace.data() + kHeaderBytes / sizeof(Line), 0xFF, kSlots * kSlotBytes);
  }
  const std::string scenario = argc > 1 ? argv[1] : "";
  if (scenario == "overlap") {
    overlap();
  } else if (scenario == "order") {
    order();
  } else if (scenario == "ordered") {
    ordered();
  } else if (scenario == "numbers") {
    numbers();
    return 0;
  } else {
    return 2;
  }
  for (uint32_t rank = 0; rank < kWorld; ++rank) {
    const ErrorRecord& error = gpus[rank].mailbox.error;
    const int cause = error.complete != 0 ? static_cast<int>(error.cause) : -1;
    std::printf("rank %u: cause %d, peer %u, sums %d, right %d\n", rank, cause, error.peer, gpus[rank].sums.load(),
                gpus[rank].right_sums.load());
  }
}
