// Communicators over the emulated core, each rank a thread of this process: set-up through file descriptors,
// all-reduces of changing size and plan, plain and fused, by two threads of a rank in turn and counted, an abort, a
// time-out. All the while another thread of each rank looks on, as the watchdog of the library does
// (llm_comm/runtime/watchdog.py). Usage: core <all-reduces>. Exit status: 0 all right, 1 not.
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <optional>
#include <thread>
#include <vector>

#include "host/core.h"
#include "host/counted_call.h"
#include "host/planner.h"

namespace {

using namespace llm_comm;        // NOLINT: a test of it
using namespace llm_comm::host;  // NOLINT

constexpr int kWorld = 3;
constexpr uint64_t kSlotBytes = 64 * 1024;
constexpr uint64_t kStagingBytes = 32 * 1024;
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
  std::unique_ptr<Core> core = make_emulated_core({rank, kWorld, kSlotBytes, timeout_s, false, true, kStagingBytes});
  meeting.handles[rank] = core->create_workspace(Sharing::kDescriptor);
  meeting.barrier.arrive_and_wait();
  for (int peer = 0; peer < kWorld; ++peer) {
    if (peer != rank) core->map_peer(peer, meeting.handles[peer]);
  }
  meeting.barrier.arrive_and_wait();
  close(meeting.handles[rank].fd);
  core->bind_multicast();  // an emulated switch needs no object
  core->send_marks();
  meeting.barrier.arrive_and_wait();
  expect(core->peers_unseen().empty(), rank, "a peer's mark has not come");
  return core;
}

// Algorithm `index` of an operation, modulo how many there are. Not those of symmetric tensors, as there is no heap,
// and not those over port channels: ThreadSanitizer takes the mappings of a workspace for different memory, so it does
// not see that a proxy has read a tensor before it is written (kernels.cpp has them).
uint32_t algorithm_of(const std::string& operation, uint64_t index) {
  std::vector<uint32_t> found;
  for (uint32_t number = 0; number < algorithms().size(); ++number) {
    const Algorithm& algorithm = algorithms()[number];
    if (algorithm.operation->name != operation || algorithm.info->symmetric != 0) continue;
    if (*algorithm.info->wire != 0) continue;  // sums are not exact; the schedules have them
    if (algorithm.info->protocol != std::string("Port")) found.push_back(number);
  }
  return found[index % found.size()];
}

std::unique_ptr<PreparedCall> prepare_all_reduce(Core& core, uint64_t count, uint64_t algorithm, const Tiling& tiling) {
  const Problem problem{count, 0, DataType::kFloat32, kWorld, {}};
  return core.prepare(algorithm_of("all_reduce", algorithm), problem, tiling);
}

// Of one element, one-shot.
std::unique_ptr<PreparedCall> prepare_one_element(Core& core) {
  return prepare_all_reduce(core, 1, 0, {.blocks = 1, .tile_lines = 4, .cluster = 1, .depth = 0, .launch_units = 1});
}

template <class Call, size_t N>
bool run(Call& call, const uint64_t (&buffers)[N]) {
  return call.run(buffers, 0) != Outcome::kFailed;
}

bool reduce(Core& core, int rank, uint64_t call) {
  const uint64_t count = 1 + call * 7919 % 1500;
  const Tiling tiling{.blocks = static_cast<uint32_t>(1 + call % 3),
                      .tile_lines = 4,
                      .cluster = 1,
                      .depth = static_cast<uint32_t>(2 + call % 2),
                      .launch_units = call % 5 == 0 ? count / 8 * 4 + 4 : count};  // whole lines
  std::vector<float> values(count);
  for (uint64_t i = 0; i < count; ++i) values[i] = static_cast<float>((rank + 1) * call + i);
  const auto prepared = prepare_all_reduce(core, count, call, tiling);
  const auto address = reinterpret_cast<uint64_t>(values.data());
  if (!run(*prepared, {address, address})) return false;
  for (uint64_t i = 0; i < count; ++i) {
    if (values[i] != static_cast<float>(6 * call + kWorld * i)) return false;
  }
  return true;
}

// Rows of zeros: what matters is who accesses what. Without quantization; FP8 with a given scale, with one for each row,
// and with one for each group, by rows and by padded columns; NVFP4 and MXFP8 with scales in tiles, which are zeros.
// Every buffer ends where its last element does.
bool reduce_fused(Core& core, uint64_t call) {
  constexpr uint64_t kCodes[] = {0, 1, 2, 3, 8, 9, 11};
  const uint64_t rows = 1 + call % 3;
  const uint64_t quantization = kCodes[call / 3 % std::size(kCodes)];
  const bool has_blocks = quantization > 8;
  const uint32_t groups = quantization < 3 || has_blocks ? 0 : 3;
  const uint32_t hidden = groups == 0 ? 96 : 128 * groups;
  const uint64_t tiles = quantization == 9 ? 2 : 1;
  const uint64_t scales = has_blocks          ? tiles * 512 / sizeof(float)
                          : quantization == 8 ? (groups - 1) * 4 + rows
                          : quantization == 3 ? groups * rows
                          : quantization == 2 ? rows
                                              : 1;
  const Problem problem{rows * hidden, hidden, DataType::kBFloat16, kWorld, {1e-5, static_cast<double>(quantization)}};
  const Tiling tiling{
      .blocks = 2, .tile_lines = groups == 0 ? 8u : 16u, .cluster = 1, .depth = 2, .launch_units = rows};
  const auto prepared = core.prepare(algorithm_of("all_reduce_add_rms_norm", call), problem, tiling);
  const std::vector<uint16_t> zeros(rows * hidden);
  const std::vector<uint16_t> weight(hidden);
  std::vector<uint8_t> normed(rows * hidden * (quantization == 0 ? 4 : quantization == 9 ? 1 : 2) / 2, 1);
  std::vector<uint16_t> residual(rows * hidden, 1);
  std::vector<float> scale(scales, 1.0f);
  const std::vector<float> global_scale{1.0f};
  const auto address = [](const auto& tensor) { return reinterpret_cast<uint64_t>(tensor.data()); };
  if (!run(*prepared, {address(zeros), address(zeros), address(weight), address(normed), address(residual),
                       quantization == 0 ? 0 : address(scale), quantization == 9 ? address(global_scale) : 0})) {
    return false;
  }
  const bool has_scales = has_blocks ? scale == std::vector<float>(scales) : scale[0] > 0;
  return normed == std::vector<uint8_t>(normed.size()) && residual == zeros && has_scales;
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

// Alike on all ranks whichever of the two threads comes first: a call of one element, whose input is its result's
// third.
void share_a_call(Core& core, int rank, uint64_t calls) {
  const auto statistics = std::make_shared<CallStatistics>();
  const CountedCall prepared{prepare_one_element(core), Counter{statistics, sizeof(float)}};
  const auto use = [&] {
    for (uint64_t call = 0; call < calls; ++call) {
      const float value = 1;
      float sum = 0;
      run(prepared, {reinterpret_cast<uint64_t>(&value), reinterpret_cast<uint64_t>(&sum)});
      expect(sum == kWorld, rank, "a sum of two threads' call is wrong");
    }
  };
  std::thread other(use);
  use();
  other.join();
  expect(statistics->calls == 2 * calls && statistics->bytes == 2 * calls * sizeof(float), rank,
         "a call is not counted");
  expect(statistics->captured_calls == 0, rank, "a call is counted as captured");
}

// What is counted of calls that end in each way.
void count_outcomes() {
  struct Told final : PreparedCall {
    Outcome outcome = Outcome::kFailed;
    Outcome run(const uint64_t*, uint64_t) override { return outcome; }
  };
  const auto statistics = std::make_shared<CallStatistics>();
  auto owned = std::make_unique<Told>();
  Told& told = *owned;
  const CountedCall call{std::move(owned), Counter{statistics, 100}};
  for (const Outcome outcome : {Outcome::kFailed, Outcome::kEnqueued, Outcome::kCaptured, Outcome::kCaptured}) {
    told.outcome = outcome;
    expect(call.run(nullptr, 0) == outcome, 0, "a counted call ends in another way");
  }
  expect(statistics->calls == 1 && statistics->bytes == 100, 0, "calls are miscounted");
  expect(statistics->captured_calls == 2 && statistics->captured_bytes == 200, 0, "captured calls are miscounted");
}

// The others never join this call: its wait expires.
void expire(Meeting& meeting, int rank) {
  const std::unique_ptr<Core> core = connect(meeting, rank, kShortTimeout);
  {
    const Watch watch(*core, rank);
    if (rank == 0) {
      float value = 1;
      const auto address = reinterpret_cast<uint64_t>(&value);
      expect(!run(*prepare_one_element(*core), {address, address}), rank, "a call succeeds that nobody else makes");
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
    run(*prepare_one_element(*core), {address, address});
    monitor.join();
  }
  meeting.barrier.arrive_and_wait();  // nobody unmaps what others still use
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t calls = argc > 1 ? std::strtoull(argv[1], nullptr, 0) : 40;
  count_outcomes();
  Meeting meeting;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kWorld; ++rank) ranks.emplace_back(run_rank, std::ref(meeting), rank, calls);
  for (std::thread& rank : ranks) rank.join();
  return failures == 0 ? 0 : 1;
}
