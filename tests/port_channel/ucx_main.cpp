// The kernels of exchange.cuh on two emulated GPUs, each in a process of its own, whose proxies reach each other by UCX alone; and
// what a proxy says of a process that dies, that ends, or whose address is none. Exit status: 0 all right; 77: there is no UCX.
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "emulator/executor.h"
#include "exchange.cuh"
#include "host/memory_transport.h"
#include "host/ucx/ucx_transport.h"

namespace {

using namespace llm_comm;        // NOLINT: a test of it
using namespace llm_comm::host;  // NOLINT
using ports::Exchange;
using std::chrono::microseconds;

constexpr uint32_t kThreads = 8;
constexpr uint64_t kMinuteNs = 60'000'000'000;
constexpr int kSkipped = 77;

bool all = true;

void expect(bool holds, const char* what) {
  std::printf("%s: %s\n", what, holds ? "yes" : "NO");
  all &= holds;
}

// Passes texts to the other process, in turn.
class Wire {
 public:
  explicit Wire(int fd) : fd_(fd) {}
  void send(const std::string& text) const {
    const uint64_t length = text.size();
    write_all(&length, sizeof(length));
    write_all(text.data(), text.size());
  }
  std::string receive() const {
    uint64_t length = 0;
    read_all(&length, sizeof(length));
    std::string text(length, '\0');
    read_all(text.data(), length);
    return text;
  }
  std::string swap(const std::string& text) const {
    send(text);
    return receive();
  }

 private:
  void write_all(const void* from, size_t bytes) const {
    if (write(fd_, from, bytes) != static_cast<ssize_t>(bytes)) throw std::runtime_error("the other process is gone");
  }
  void read_all(void* to, size_t bytes) const {
    for (size_t done = 0; done < bytes;) {
      const ssize_t got = read(fd_, static_cast<char*>(to) + done, bytes - done);
      if (got <= 0) throw std::runtime_error("the other process is gone");
      done += static_cast<size_t>(got);
    }
  }
  int fd_;
};

// A rank of two, connected to the other.
struct Gpu {
  WorkspaceLayout layout;
  uint32_t rank;
  uint64_t lines;
  std::vector<Line> workspace = std::vector<Line>(layout.bytes() / sizeof(Line));
  std::vector<Line> nowhere = std::vector<Line>(kHeaderBytes / sizeof(Line));  // for notes to the other
  std::vector<Line> source = std::vector<Line>(lines);
  HostMailbox mailbox{};
  uint64_t rounds = 0;
  uint32_t failures = 0;
  emulator::Executor executor;
  std::unique_ptr<Ports> proxy;

  Gpu(uint32_t rank, const Wire& wire, uint64_t lines)
      : layout(sizeof(Line), lines * sizeof(Line)), rank(rank), lines(lines) {
    auto transport = std::make_unique<UcxTransport>(memory(), layout.bytes());
    const auto has_failed = [this] {
      return (__atomic_load_n(&mailbox.end_reasons, __ATOMIC_ACQUIRE) & kAbortRequest) != 0;
    };
    const std::string theirs = wire.swap(transport->address());
    std::vector<UcxTransport::Peer> peers(2);
    peers[1 - rank] = {theirs, "rank " + std::to_string(1 - rank) + " (host-b)"};
    transport->connect(rank, peers, has_failed);
    PortOwner owner{{}, layout.bytes(), rank, 2, has_failed, nullptr};
    owner.workspace[rank] = memory();
    owner.workspace[1 - rank] = transport->memory_of(1 - rank);
    owner.fail = [this] { __atomic_fetch_or(&mailbox.end_reasons, kAbortRequest, __ATOMIC_RELEASE); };
    proxy = std::make_unique<ProxyPorts>(
        std::make_unique<AnonymousMemory>(port_ring_bytes(ProxyPorts::kEntriesLog2)), std::move(transport),
        Patience{microseconds(0), microseconds(0), microseconds(200), microseconds(50)});
    proxy->start(owner);
  }

  // The other process may wait for what the proxy has not taken yet.
  ~Gpu() {
    const auto* const ports = reinterpret_cast<const PortState*>(memory() + kPortsOffset);
    if (mailbox.end_reasons == 0) proxy->settle(ports->head, std::chrono::minutes(1));
  }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  char* memory() { return reinterpret_cast<char*>(workspace.data()); }

  void run(void (*kernel)(Exchange), uint32_t count) {
    Exchange e{};
    e.comm.workspace[rank] = memory();
    e.comm.workspace[1 - rank] = reinterpret_cast<char*>(nowhere.data());
    e.comm.mailbox = &mailbox;
    e.comm.slot_bytes = layout.slot_bytes();
    e.comm.staging_bytes = layout.staging_bytes();
    e.comm.timeout_ns = kMinuteNs;
    e.comm.rank = rank;
    e.comm.world_size = 2;
    e.comm.ports = proxy->ring();
    e.comm.port_entries_log2 = proxy->entries_log2();
    e.source = source.data();
    e.rounds_of = &rounds;
    e.lines = lines;
    e.rounds = count;
    e.failures = &failures;
    executor.run({1, kThreads, sizeof(Line)}, [&] { kernel(e); });
  }

  // The proxy's error, which comes within a while.
  std::string error() const {
    for (int i = 0; i < 2000 && !proxy->error(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return proxy->error().value_or("");
  }
};

// Both processes do the same; what they say is the first one's.
void pass_data(uint32_t rank, const Wire& wire) {
  {
    Gpu gpu(rank, wire, 333);
    for (int launch = 0; launch < 3; ++launch) gpu.run(&ports::exchange, 40);
    expect(gpu.failures == 0 && gpu.rounds == 120, "what is put, signalled and flushed arrives");
    gpu.run(&ports::flood, 400);
    expect(gpu.failures == 0, "a full FIFO is waited for");
  }
  {
    Gpu gpu(rank, wire, 100'003);
    gpu.run(&ports::exchange, 8);
    expect(gpu.failures == 0, "large puts arrive before their signals");
  }
  wire.swap("");
}

// The second process ends its proxy, while the first one has requests of its own under way.
void end_in_turn(uint32_t rank, const Wire& wire) {
  auto gpu = std::make_unique<Gpu>(rank, wire, 333);
  gpu->run(&ports::exchange, 3);
  if (rank == 1) {
    gpu.reset();
    wire.send("");
    wire.receive();
    return;
  }
  wire.receive();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  expect(!gpu->proxy->error(), "a peer that has said farewell is no error");
  wire.send("");
}

void refuse_addresses(uint32_t rank) {
  if (rank != 0) return;
  std::vector<char> memory(4096), others(8192);
  const auto refused = [&](const std::string& address) {
    UcxTransport transport(memory.data(), memory.size());
    try {
      transport.connect(0, {{"", "me"}, {address, "rank 1"}}, nullptr);
    } catch (const std::runtime_error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const std::string right = UcxTransport(memory.data(), memory.size()).address();
  expect(refused("x") == "the address of rank 1 is too short", "what is no address is refused");
  expect(refused(right.substr(0, right.size() - 1)) == "the address of a peer is too short",
         "an address that is cut off is refused");
  expect(
      refused(UcxTransport(others.data(), others.size()).address()).find("is of 8192 bytes of memory, not of 4096") !=
          std::string::npos,
      "a peer with other memory is refused");
}

// The second process dies.
void lose_the_other(uint32_t rank, const Wire& wire) {
  Gpu gpu(rank, wire, 333);
  gpu.run(&ports::exchange, 3);
  wire.swap("");
  if (rank == 1) kill(getpid(), SIGKILL);
  gpu.run(&ports::exchange, 1 << 30);
  expect(gpu.failures == ports::kWaitAborted, "waits for a process that has died end");
  expect(gpu.error().find("UCX: the connection to rank 1 (host-b) has ended: ") == 0, "and the error names its rank");
}

int run_rank(uint32_t rank, int fd) {
  try {
    const Wire wire(fd);
    pass_data(rank, wire);
    refuse_addresses(rank);
    end_in_turn(rank, wire);
    lose_the_other(rank, wire);
  } catch (const std::exception& error) {
    expect(false, error.what());
  }
  return all ? 0 : 1;
}

}  // namespace

int main() {
  try {
    std::printf("UCX %s\n", ucp::version().c_str());
  } catch (const std::runtime_error& error) {
    std::printf("%s\n", error.what());
    return kSkipped;
  }
  std::fflush(stdout);
  int fds[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, fds) != 0) return 1;
  const pid_t child = fork();
  if (child == 0) {
    close(fds[0]);
    std::_Exit(run_rank(1, fds[1]));
  }
  close(fds[1]);
  const int result = run_rank(0, fds[0]);
  int status = 0;
  waitpid(child, &status, 0);
  expect(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "the second process was right until it died");
  return result == 0 && all ? 0 : 1;
}
