// Communicators over the emulated core, each rank a thread of this process: set-up through file descriptors, all-reduces
// of changing size and plan, an abort. Usage: core <all-reduces>. Exit status: 0 all right, 1 not.
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "host/core.h"

namespace {

using namespace llm_comm::host;  // NOLINT: a test of it

constexpr int kWorld = 3;
constexpr uint32_t kFloat32 = 2;
constexpr uint64_t kSlotBytes = 64 * 1024;

std::atomic<int> failures = 0;

void expect(bool holds, int rank, const char* what) {
  if (holds) return;
  std::printf("rank %d: %s\n", rank, what);
  ++failures;
}

struct Meeting {
  std::barrier<> barrier{kWorld};
  WorkspaceHandle handles[kWorld];
};

std::unique_ptr<Core> connect(Meeting& meeting, int rank) {
  std::unique_ptr<Core> core = make_emulated_core({rank, kWorld, kSlotBytes, 30.0, false, true});
  meeting.handles[rank] = core->create_workspace(false);
  meeting.barrier.arrive_and_wait();
  for (int peer = 0; peer < kWorld; ++peer) {
    if (peer != rank) core->map_peer(peer, meeting.handles[peer]);
  }
  meeting.barrier.arrive_and_wait();
  close(meeting.handles[rank].fd);
  core->send_marks();
  meeting.barrier.arrive_and_wait();
  expect(core->peers_unseen().empty(), rank, "a peer's mark has not come");
  return core;
}

bool reduce(Core& core, int rank, uint64_t call) {
  const uint64_t count = 1 + call * 7919 % 1500;
  const LaunchPlan plan{static_cast<uint32_t>(call % 2), static_cast<uint32_t>(1 + call % 3), 2,
                        static_cast<uint32_t>(call % 2), call % 5 == 0 ? count / 2 + 1 : count};
  std::vector<float> values(count);
  for (uint64_t i = 0; i < count; ++i) values[i] = static_cast<float>((rank + 1) * call + i);
  const auto prepared = core.prepare_all_reduce(count, kFloat32, plan);
  const auto address = reinterpret_cast<uint64_t>(values.data());
  if (!prepared->run(address, address, 0)) return false;
  for (uint64_t i = 0; i < count; ++i) {
    if (values[i] != static_cast<float>(6 * call + kWorld * i)) return false;
  }
  return true;
}

void run_rank(Meeting& meeting, int rank, uint64_t calls) {
  const std::unique_ptr<Core> core = connect(meeting, rank);
  for (uint64_t call = 0; call < calls; ++call) expect(reduce(*core, rank, call), rank, "a sum is wrong");
  meeting.barrier.arrive_and_wait();
  // The others never join this call. Another thread, as a monitor would be, ends it.
  if (rank == 0) {
    std::thread monitor([&] { core->abort(); });
    float value = 1;
    const auto address = reinterpret_cast<uint64_t>(&value);
    core->prepare_all_reduce(1, kFloat32, {0, 1, 2, 0, 1})->run(address, address, 0);
    monitor.join();
  }
  meeting.barrier.arrive_and_wait();  // nobody unmaps what others still use
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t calls = argc > 1 ? std::strtoull(argv[1], nullptr, 0) : 40;
  Meeting meeting;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kWorld; ++rank) ranks.emplace_back(run_rank, std::ref(meeting), rank, calls);
  for (std::thread& rank : ranks) rank.join();
  return failures == 0 ? 0 : 1;
}
