// Communicators over the emulated core, each rank a thread of this process: set-up through file descriptors, all-reduces
// of changing size and plan, plain and fused, by two threads of a rank in turn, an abort, a time-out. All the while another
// thread of each rank looks on, as the watchdog of the library does (llm_comm/runtime/watchdog.py).
// Usage: core <all-reduces>. Exit status: 0 all right, 1 not.
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <thread>
#include <vector>

#include "host/core.h"

namespace {

using namespace llm_comm::host;  // NOLINT: a test of it

constexpr int kWorld = 3;
constexpr uint32_t kFloat32 = 2;
constexpr uint32_t kBFloat16 = 0;
constexpr uint64_t kSlotBytes = 64 * 1024;
// Of waits that nobody ends otherwise, and of one that is to expire.
constexpr double kLongTimeout = 30.0;
constexpr double kShortTimeout = 0.2;

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

std::unique_ptr<Core> connect(Meeting& meeting, int rank, double timeout_s) {
  std::unique_ptr<Core> core = make_emulated_core({rank, kWorld, kSlotBytes, timeout_s, false, true});
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

// Rows of zeros: what matters is who accesses what.
bool reduce_fused(Core& core, uint64_t call) {
  constexpr uint32_t kHidden = 96;
  const uint64_t rows = 1 + call % 3;
  const FusedPlan plan{static_cast<uint32_t>(call % 2), 2, 8, 1, 1, rows};
  const auto prepared = core.prepare_add_rms_norm({rows, kHidden, kBFloat16, 0, 1e-5f}, plan);
  const std::vector<uint16_t> zeros(rows * kHidden);
  std::vector<uint16_t> normed(rows * kHidden, 1);
  std::vector<uint16_t> residual(rows * kHidden, 1);
  const auto address = [](const std::vector<uint16_t>& tensor) { return reinterpret_cast<uint64_t>(tensor.data()); };
  if (!prepared->run({address(zeros), address(zeros), address(zeros), address(normed), address(residual), 0}, 0)) {
    return false;
  }
  return normed == zeros && residual == zeros;
}

// What the watchdog asks a core while kernels run.
class Watch {
 public:
  Watch(Core& core, int rank) : thread_([this, &core, rank] { look(core, rank); }) {}
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  ~Watch() {
    stop_ = true;
    thread_.join();
  }

  // Waits until it has seen an error.
  OperationError error() const {
    while (!seen_) std::this_thread::yield();
    return *error_;
  }

 private:
  void look(Core& core, int rank) {
    uint64_t ended = 0;
    uint64_t number = 0;
    while (!stop_) {
      const uint64_t ended_now = core.operations_ended().value_or(ended);
      const uint64_t number_now = core.last_call().number;
      expect(ended_now >= ended && number_now >= number, rank, "what has ended, or was enqueued, is forgotten");
      ended = ended_now;
      number = number_now;
      if (!seen_ && (error_ = core.error())) seen_ = true;
      std::this_thread::yield();
    }
  }

  std::atomic<bool> stop_ = false;
  std::atomic<bool> seen_ = false;
  std::optional<OperationError> error_;
  std::thread thread_;
};

// Alike on all ranks whichever of the two threads comes first: a call of one element, whose input is its result's third.
void share_a_call(Core& core, int rank, uint64_t calls) {
  const auto prepared = core.prepare_all_reduce(1, kFloat32, {0, 1, 2, 0, 1});
  const auto use = [&] {
    for (uint64_t call = 0; call < calls; ++call) {
      const float value = 1;
      float sum = 0;
      prepared->run(reinterpret_cast<uint64_t>(&value), reinterpret_cast<uint64_t>(&sum), 0);
      expect(sum == kWorld, rank, "a sum of two threads' call is wrong");
    }
  };
  std::thread other(use);
  use();
  other.join();
}

// The others never join this call: its wait expires.
void expire(Meeting& meeting, int rank) {
  const std::unique_ptr<Core> core = connect(meeting, rank, kShortTimeout);
  {
    const Watch watch(*core, rank);
    if (rank == 0) {
      float value = 1;
      const auto address = reinterpret_cast<uint64_t>(&value);
      expect(!core->prepare_all_reduce(1, kFloat32, {0, 1, 2, 0, 1})->run(address, address, 0), rank,
             "a call succeeds that nobody else makes");
      const OperationError error = watch.error();
      expect(error.cause == "timeout" && error.peer != rank, rank, "the error is not the one of an expired wait");
    }
    meeting.barrier.arrive_and_wait();
  }
  meeting.barrier.arrive_and_wait();
}

void run_rank(Meeting& meeting, int rank, uint64_t calls) {
  expire(meeting, rank);
  const std::unique_ptr<Core> core = connect(meeting, rank, kLongTimeout);
  const Watch watch(*core, rank);
  for (uint64_t call = 0; call < calls; ++call) {
    expect(reduce(*core, rank, call), rank, "a sum is wrong");
    expect(reduce_fused(*core, call), rank, "a norm of zeros is wrong");
  }
  share_a_call(*core, rank, calls);
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
