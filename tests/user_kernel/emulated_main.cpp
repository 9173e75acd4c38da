// Runs the kernels of exchange.cuh on two emulated GPUs, each a thread of this process, and that of turns.cuh on one. Exit
// status 0: all data was right, all blocks had their turn, and the wait in vain ended with a record of whom it had waited for.
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "exchange.cuh"
#include "llm_comm/emulator/executor.h"
#include "turns.cuh"

namespace {

using user::Exchange;

constexpr uint64_t kLines = 777;
constexpr uint32_t kRounds = 50;
constexpr uint32_t kThreads = 96;

struct Gpu {
  std::vector<llm_comm::Line> buffer = std::vector<llm_comm::Line>(3 * kLines + 1);
  std::vector<llm_comm::Line> source = std::vector<llm_comm::Line>(kLines);
  std::vector<llm_comm::Line> received = std::vector<llm_comm::Line>(kLines);
  uint64_t signals_received = 0;
  uint64_t signals_sent = 0;
  uint64_t signals_awaited = 0;
  uint32_t aborted = 0;
  uint32_t last_look = 0;
  uint32_t exited = 0;
  uint32_t failures = 0;
  llm_comm::HostMailbox mailbox{};
  llm_comm::emulator::Executor executor;

  Exchange exchange(uint32_t rank, Gpu& peer, uint64_t timeout_ns) {
    Exchange e{};
    e.channel.semaphore = {&peer.signals_received, &signals_received, &signals_sent, &signals_awaited};
    e.channel.local = reinterpret_cast<char*>(buffer.data());
    e.channel.remote = reinterpret_cast<char*>(peer.buffer.data());
    e.channel.bounds = {&mailbox, &aborted, &last_look, &exited, timeout_ns};
    e.channel.site = {rank, llm_comm::OperationKind::kUser, 7, kLines};
    e.channel.peer = 1 - rank;
    e.source = source.data();
    e.received = received.data();
    e.lines = kLines;
    e.rounds = kRounds;
    e.failures = &failures;
    return e;
  }

  void launch(void (*kernel)(Exchange), const Exchange& e) {
    executor.run({1, kThreads, 0}, [&] { kernel(e); });
  }
};

bool run_on_both(const char* name, void (*kernel)(Exchange)) {
  Gpu gpus[2];
  constexpr uint64_t kMinuteNs = 60'000'000'000;
  std::thread other([&] { gpus[1].launch(kernel, gpus[1].exchange(1, gpus[0], kMinuteNs)); });
  gpus[0].launch(kernel, gpus[0].exchange(0, gpus[1], kMinuteNs));
  other.join();
  std::printf("%s: failures %u and %u\n", name, gpus[0].failures, gpus[1].failures);
  return gpus[0].failures == 0 && gpus[1].failures == 0;
}

bool wait_ends() {
  Gpu gpus[2];
  gpus[1].launch(&user::wait_in_vain, gpus[1].exchange(1, gpus[0], 50'000'000));
  const llm_comm::ErrorRecord& record = gpus[1].mailbox.error;
  std::printf("wait_in_vain: failures %u, complete %u, rank %u waited for %u in operation %llu\n", gpus[1].failures,
              record.complete, record.rank, record.peer, static_cast<unsigned long long>(record.sequence));
  return gpus[1].failures == user::kCountDiffers && gpus[1].aborted == 1 && record.complete == 1 && record.rank == 1 &&
         record.peer == 0 && record.sequence == 7 && record.bytes == kLines && gpus[1].last_look != 0;
}

// However many threads wait, one in each interval looks at host memory and for notes.
bool looks_are_rationed() {
  Gpu gpu;
  const auto looks_at = [&](uint64_t timeout_ns, uint64_t now) {
    const llm_comm::WaitBounds bounds{&gpu.mailbox, &gpu.aborted, &gpu.last_look, &gpu.exited, timeout_ns};
    uint64_t looks = 0;
    gpu.executor.run({4, kThreads, 0}, [&] { user::count_looks(bounds, now, &looks); });
    return looks;
  };
  constexpr uint64_t kSecondNs = 1'000'000'000;
  constexpr uint64_t kShortNs = 4'000'000;  // 1953 intervals of about 2 us
  bool right = looks_at(30 * kSecondNs, 5 * kSecondNs) == 1;
  right &= looks_at(30 * kSecondNs, 5 * kSecondNs + 1000) == 0;
  right &= looks_at(30 * kSecondNs, 5 * kSecondNs + 2'000'000) == 1;
  right &= looks_at(kShortNs, 6 * kSecondNs) == 1;
  right &= looks_at(kShortNs, 6 * kSecondNs + 5'000) == 1;
  std::printf("looks are rationed: %s\n", right ? "yes" : "no");
  return right;
}

// A wait for a rank whose process has exited, of which the host knows: it ends without the time-out, but what comes between
// the look that finds out and the next one counts.
bool waits_for_an_exited_rank_end() {
  constexpr uint64_t kMinuteNs = 60'000'000'000;
  constexpr uint32_t kExited = 2;
  constexpr uint32_t kHostKnows = 1u << kExited;
  const auto wait_for = [](Gpu& gpu, uint32_t peer, uint32_t failed_polls, uint32_t host_knows) {
    const llm_comm::WaitBounds bounds{&gpu.mailbox, &gpu.aborted, &gpu.last_look, &gpu.exited, kMinuteNs};
    gpu.mailbox.end_reasons = host_knows;
    bool has_come = false;
    gpu.executor.run({1, 1, 0}, [&] {
      uint32_t polls = 0;
      has_come = llm_comm::wait_until([&] { return polls++ == failed_polls; }, bounds,
                                      {0, llm_comm::OperationKind::kUser, 7, kLines}, peer, 0);
    });
    return has_come;
  };
  constexpr uint32_t kPolls = llm_comm::kPollsPerCheck;
  Gpu in_time, in_vain, of_another, told;
  bool right = wait_for(in_time, kExited, 2 * kPolls - 1, kHostKnows) && in_time.aborted == 0;
  right &= wait_for(of_another, 1, 100 * kPolls, kHostKnows) && of_another.aborted == 0;
  told.exited = kHostKnows;  // by another thread, which took the look though it waits for another rank
  right &= !wait_for(told, kExited, 2 * kPolls, 0) && told.aborted == 1;
  right &= !wait_for(in_vain, kExited, 2 * kPolls, kHostKnows) && in_vain.aborted == 1 && in_vain.exited == kHostKnows;
  const llm_comm::ErrorRecord& record = in_vain.mailbox.error;
  right &= record.complete == 1 && record.peer == kExited &&
           record.cause == static_cast<uint32_t>(llm_comm::ErrorCause::kPeerExited);
  std::printf("waits for an exited rank end: %s\n", right ? "yes" : "no");
  return right;
}

// Blocks of one launch after the other, in whatever order they start: two run at once.
bool blocks_take_turns() {
  constexpr uint64_t kSecondsNs = 10'000'000'000;
  constexpr uint32_t kBlocks = 12;
  constexpr uint32_t kThreadsOfBlock = 512;
  Gpu gpu;
  llm_comm::CommState state{};
  uint32_t turn = 0;
  const user::Turns turns{&state, &turn, {&gpu.mailbox, &gpu.aborted, &gpu.last_look, &gpu.exited, kSecondsNs}};
  bool right = llm_comm::emulator::Executor::resident_blocks(kThreadsOfBlock, 1) < kBlocks &&
               llm_comm::emulator::Executor::resident_blocks(0, 0) == 1;  // of a grid that cannot be launched
  for (int launch = 0; launch < 20; ++launch) {
    gpu.executor.run({kBlocks, kThreadsOfBlock, sizeof(llm_comm::Line)}, [&] { user::take_turns(turns); });
    right &= turn == 0 && gpu.aborted == 0;
  }
  std::printf("blocks take turns: %s\n", right ? "yes" : "no");
  return right;
}

}  // namespace

int main() {
  bool all = run_on_both("exchange_with_signals", &user::exchange_with_signals);
  all &= run_on_both("exchange_packets", &user::exchange_packets);
  all &= run_on_both("count_signals", &user::count_signals);
  all &= wait_ends();
  all &= looks_are_rationed();
  all &= waits_for_an_exited_rank_end();
  all &= blocks_take_turns();
  return all ? 0 : 1;
}
