// The kernels of exchange.cuh on two emulated GPUs with proxies of the library, and what a proxy does when something
// goes wrong. Usage: ports [without-forks]. Exit status: 0 all right.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "emulator/executor.h"
#include "exchange.cuh"
#include "host/memory_transport.h"
#include "llm_comm/port_words.cuh"

namespace {

using namespace llm_comm;        // NOLINT: a test of it
using namespace llm_comm::host;  // NOLINT
using ports::Exchange;

constexpr uint64_t kLines = 333;
constexpr uint32_t kThreads = 8;
constexpr uint64_t kMinuteNs = 60'000'000'000;
constexpr WorkspaceLayout kLayout(16, kLines * sizeof(Line));
constexpr uint64_t kHeapBytes = 64;

struct Gpu {
  std::vector<Line> workspace = std::vector<Line>(kLayout.bytes() / sizeof(Line));
  std::vector<Line> source = std::vector<Line>(kLines);
  std::vector<char> heap = std::vector<char>(kHeapBytes);
  HostMailbox mailbox{};
  uint64_t rounds = 0;
  uint32_t failures = 0;
  emulator::Executor executor;
  std::unique_ptr<Ports> proxy;

  char* memory() { return reinterpret_cast<char*>(workspace.data()); }
};

struct World {
  Gpu gpus[2];

  explicit World(const std::function<std::unique_ptr<Ports>()>& make = make_emulated_ports) {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      gpus[rank].proxy = make();
      PortOwner owner{{}, kLayout.bytes(), rank, 2, [] { return false; }, nullptr};
      for (uint32_t r = 0; r < 2; ++r) owner.workspace[r] = gpus[r].memory();
      owner.find_in_heap = [this](uint32_t r, uint64_t place, uint64_t bytes) {
        return place <= kHeapBytes && bytes <= kHeapBytes - place ? gpus[r].heap.data() + place : nullptr;
      };
      owner.fail = [&mailbox = gpus[rank].mailbox] {
        __atomic_fetch_or(&mailbox.end_reasons, kAbortRequest, __ATOMIC_RELEASE);
      };
      gpus[rank].proxy->start(owner);
    }
  }

  Exchange exchange(uint32_t rank, uint32_t rounds, uint64_t timeout_ns) {
    Exchange e{};
    for (uint32_t r = 0; r < 2; ++r) e.comm.workspace[r] = gpus[r].memory();
    Gpu& gpu = gpus[rank];
    e.comm.mailbox = &gpu.mailbox;
    e.comm.slot_bytes = kLayout.slot_bytes();
    e.comm.staging_bytes = kLayout.staging_bytes();
    e.comm.timeout_ns = timeout_ns;
    e.comm.rank = rank;
    e.comm.world_size = 2;
    e.comm.ports = gpu.proxy->ring();
    e.comm.port_entries_log2 = gpu.proxy->entries_log2();
    e.source = gpu.source.data();
    e.rounds_of = &gpu.rounds;
    e.lines = kLines;
    e.rounds = rounds;
    e.failures = &gpu.failures;
    return e;
  }

  void run(uint32_t rank, void (*kernel)(Exchange), uint32_t rounds, uint64_t timeout_ns = kMinuteNs) {
    const Exchange e = exchange(rank, rounds, timeout_ns);
    gpus[rank].executor.run({1, kThreads, sizeof(Line)}, [&] { kernel(e); });
  }
  void run_on_both(void (*kernel)(Exchange), uint32_t rounds) {
    std::thread other([&] { run(1, kernel, rounds); });
    run(0, kernel, rounds);
    other.join();
  }
  bool is_right() const { return gpus[0].failures == 0 && gpus[1].failures == 0; }
};

bool all = true;

void expect(bool holds, const char* what) {
  std::printf("%s: %s\n", what, holds ? "yes" : "NO");
  all &= holds;
}

void pass_data() {
  World world;
  for (int launch = 0; launch < 3; ++launch) world.run_on_both(&ports::exchange, 40);
  expect(world.is_right() && world.gpus[0].rounds == 120, "what is put, signalled and flushed arrives");
}

void fill_the_fifo() {
  World world;
  world.run_on_both(&ports::flood, 400);
  expect(world.is_right(), "a full FIFO is waited for");
}

void end_waits() {
  World world;
  world.run(1, &ports::wait_in_vain, 0, 50'000'000);
  const ErrorRecord& record = world.gpus[1].mailbox.error;
  expect(
      world.gpus[1].failures == ports::kWaitAborted && record.complete == 1 && record.peer == 0 && record.sequence == 7,
      "a wait in vain ends and names the peer");
}

class BrokenTransport final : public Transport {
 public:
  explicit BrokenTransport(bool begins) : begins_(begins) {}
  void begin(uint32_t) override {
    if (!begins_) throw std::runtime_error("no engine");
  }
  void put(uint32_t, char*, const char*, uint64_t) override { throw std::runtime_error("the link is down"); }
  void signal(uint32_t, uint64_t*, const uint64_t*, uint32_t) override {}
  void notify_local_completion(uint32_t, uint64_t*, const uint64_t*, uint32_t) override {}
  void finish() override {}

 private:
  bool begins_;
};

std::unique_ptr<Ports> make_broken(bool begins) {
  using std::chrono::microseconds;
  return std::make_unique<ProxyPorts>(std::make_unique<AnonymousMemory>(port_ring_bytes(ProxyPorts::kEntriesLog2)),
                                      std::make_unique<BrokenTransport>(begins),
                                      Patience{microseconds(0), microseconds(0), microseconds(50), microseconds(50)});
}

void tell_of_failures() {
  World world([] { return make_broken(true); });
  world.run(0, &ports::exchange, 1);
  const auto error = world.gpus[0].proxy->error();
  expect(world.gpus[0].failures == ports::kWaitAborted && error && *error == "the link is down",
         "a copy that fails ends the waits of its rank");
  expect(!world.gpus[1].proxy->error(), "and no others");
  std::string text;
  try {
    World([] { return make_broken(false); });
  } catch (const std::runtime_error& error) {
    text = error.what();
  }
  expect(text == "no engine", "a transport that cannot begin is refused");
}

class NotedEnd final : public Transport {
 public:
  explicit NotedEnd(std::atomic<bool>& has_ended) : has_ended_(has_ended) {}
  void begin(uint32_t) override {}
  void put(uint32_t, char*, const char*, uint64_t) override {}
  void signal(uint32_t, uint64_t*, const uint64_t*, uint32_t) override {}
  void notify_local_completion(uint32_t, uint64_t*, const uint64_t*, uint32_t) override {}
  void finish() override { has_ended_ = true; }

 private:
  std::atomic<bool>& has_ended_;
};

// Nobody has to ask for an error, or to make a request.
void end_with_the_communicator() {
  using std::chrono::microseconds;
  std::atomic<bool> has_failed = false;
  std::atomic<bool> has_ended = false;
  ProxyPorts proxy(std::make_unique<AnonymousMemory>(port_ring_bytes(ProxyPorts::kEntriesLog2)),
                   std::make_unique<NotedEnd>(has_ended),
                   Patience{microseconds(0), microseconds(0), microseconds(50), microseconds(50)});
  proxy.start({{}, 0, 0, 2, [&] { return has_failed.load(); }, [] {}});
  const bool began = !has_ended;
  has_failed = true;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!has_ended && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  expect(began && has_ended, "a proxy ends with its communicator");
}

// Empty where it was carried out.
template <class Put>
std::string refusal_of(World& world, Put put) {
  Exchange e = world.exchange(0, 0, kMinuteNs);
  const WaitSite site{0, OperationKind::kUser, 0, 0};
  world.gpus[0].executor.run({1, 1, sizeof(Line)}, [&] {
    const PortChannel port{e.comm, site, 1};
    const auto wait = [&](auto poll) { return wait_until(poll, bounds_of(e.comm), site, 1, 0); };
    put(e, port, wait);
    if (!port.flush()) ports::note(e.failures, ports::kWaitAborted);
  });
  const auto error = world.gpus[0].proxy->error();
  return error && world.gpus[0].failures == ports::kWaitAborted ? *error : "";
}

void refuse_what_is_beyond() {
  World world;
  const std::string of_workspace = refusal_of(
      world, [](const Exchange& e, const PortChannel& port, auto) { port.put(kLayout.bytes() - 8, e.source, 16); });
  expect(of_workspace.find("beyond its symmetric heap or its workspace") != std::string::npos,
         "a put beyond the workspace is refused");

  const auto to_heap = [](World& ranks, uint64_t bytes) {
    return refusal_of(ranks, [=](const Exchange& e, const PortChannel&, auto wait) {
      PortWords(e.comm, 0).put_to_heap(1, symmetric_offset_at(0, 16), e.source, bytes, 0, 1, wait);
    });
  };
  World heaps;
  heaps.gpus[0].source[0].word[0] = 0x01020304;
  const bool was_done = to_heap(heaps, kHeapBytes - 16).empty();
  expect(was_done && std::memcmp(heaps.gpus[1].heap.data() + 16, heaps.gpus[0].source.data(), kHeapBytes - 16) == 0,
         "a put up to the end of the heap is done");
  expect(to_heap(heaps, kHeapBytes - 15).find("beyond its symmetric heap") != std::string::npos,
         "a put beyond the heap is refused");
}

// A fork has neither the thread nor a use for it, and ends.
void survive_a_fork() {
  World world;
  world.run_on_both(&ports::exchange, 2);
  const pid_t child = fork();
  if (child == 0) {
    for (Gpu& gpu : world.gpus) gpu.proxy.reset();
    _exit(7);
  }
  int status = 0;
  waitpid(child, &status, 0);
  world.run_on_both(&ports::exchange, 2);
  expect(WIFEXITED(status) && WEXITSTATUS(status) == 7 && world.is_right(),
         "a fork drops the proxy, its parent keeps it");
}

void merge_requests() {
  PortBatch batch;
  const auto put = [&](uint64_t to, uint64_t from, uint64_t bytes, uint64_t word, uint64_t value) {
    batch.add({0, kPortPut | kPortSignal, from, to, bytes, word, value});
  };
  put(96, 1096, 16, 24, 5);
  put(64, 1064, 32, 16, 5);
  put(200, 1200, 8, 40, 5);
  batch.add({0, kPortLocalCompletion, 0, 0, 0, 32, 9});
  batch.add({0, kPortLocalCompletion, 0, 0, 0, 32, 10});
  const std::vector<PortStep> steps = batch.steps();
  bool right = steps.size() == 5 && steps[0].part == kPortPut && steps[0].to == 64 && steps[0].from == 1064 &&
               steps[0].bytes == 48 && steps[1].part == kPortPut && steps[1].to == 200;
  right = right && steps[2].part == kPortSignal && steps[2].to == 16 && steps[2].count == 2 && steps[3].to == 40;
  right = right && steps[4].part == kPortLocalCompletion && steps[4].count == 1 && steps[4].values[0] == 10;
  expect(right, "neighbours become one copy, signals come behind, local_completions last");

  batch.clear();
  put(64, 1064, 32, 16, 1);
  put(80, 2000, 32, 16, 2);
  const std::vector<PortStep> in_turn = batch.steps();
  expect(in_turn.size() == 4 && in_turn[1].part == kPortSignal && in_turn[2].part == kPortPut && in_turn[2].to == 80,
         "what overlaps is done in turn");
}

}  // namespace

int main(int argc, char** argv) {
  pass_data();
  fill_the_fifo();
  end_waits();
  tell_of_failures();
  refuse_what_is_beyond();
  end_with_the_communicator();
  if (argc < 2 || std::strcmp(argv[1], "without-forks") != 0) survive_a_fork();
  merge_requests();
  return all ? 0 : 1;
}
