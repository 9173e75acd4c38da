// What carries bytes between nodes (host/node_exchange_impl.h), on emulated GPUs, the nodes being threads of this
// process. Two threads of each node make like calls, and then close the exchange both, while another one asks what the
// watch of the library asks. A transport by memcpy stands in for UCX, whose threads and sockets no sanitizer could look
// into. Usage: node_exchange <calls>. Exit status: 0 all right, 1 not.
#include <atomic>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "host/node_exchange.h"
#include "host/ucx/ucx_transport.h"

namespace llm_comm::host {

// The members of UcxTransport, over the memory of this process. An address is where that lies.
namespace {
const ucp::Functions kNoUcx{};
}
UcxTransport::UcxTransport(char* memory, uint64_t bytes) : ucp_(kNoUcx), memory_(memory), bytes_(bytes) {}
UcxTransport::~UcxTransport() = default;
std::string UcxTransport::address() const { return {reinterpret_cast<const char*>(&memory_), sizeof(memory_)}; }
void UcxTransport::connect(uint32_t, const std::vector<Peer>& peers, std::function<bool()>) {
  for (const Peer& peer : peers) {
    lanes_.push_back(std::make_unique<Lane>());
    std::memcpy(&lanes_.back()->memory, peer.address.data(), sizeof(char*));
  }
}
void UcxTransport::begin(uint32_t) {}
void UcxTransport::put(uint32_t, char* to, const char* from, uint64_t bytes) { std::memcpy(to, from, bytes); }
void UcxTransport::signal(uint32_t, uint64_t* to, const uint64_t* values, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) __atomic_store_n(to + i, values[i], __ATOMIC_RELEASE);
}
void UcxTransport::notify_local_completion(uint32_t peer, uint64_t* to, const uint64_t* values, uint32_t count) {
  signal(peer, to, values, count);
}
bool UcxTransport::progress() { return false; }
void UcxTransport::finish() {}

}  // namespace llm_comm::host

namespace {

using namespace llm_comm::host;  // NOLINT: a test of it

constexpr uint32_t kNodes = 2;
constexpr uint64_t kPartBytes = 64;
// More parts than a launch has blocks.
constexpr uint64_t kBytes = 70 * kPartBytes + 24;

std::atomic<int> failures = 0;

void expect(bool holds, uint32_t node, const char* what) {
  if (holds) return;
  std::printf("node %u: %s\n", node, what);
  ++failures;
}

// An all-gather of bytes that name the node.
void gather(NodeExchange& exchange, uint32_t node) {
  const std::vector<char> own(kBytes, static_cast<char>(node + 1));
  std::vector<char> all(kNodes * kBytes);
  std::vector<NodePiece> pieces;
  for (uint64_t of = 0; of < kNodes; ++of) pieces.push_back({0, kBytes, of * kBytes, kBytes});
  const auto address = [](const std::vector<char>& bytes) { return reinterpret_cast<uint64_t>(bytes.data()); };
  expect(exchange.run(address(own), address(all), pieces, 0), node, "a call has failed");
  bool is_right = true;
  for (uint64_t i = 0; i < all.size(); ++i) is_right &= all[i] == static_cast<char>(i / kBytes + 1);
  expect(is_right, node, "what has come is not what the nodes have sent");
}

struct Meeting {
  std::barrier<> barrier{kNodes};
  std::vector<std::string> addresses{kNodes};
};

template <class Step>
void in_two_threads(Step step) {
  std::thread other(step);
  step();
  other.join();
}

void run_node(Meeting& meeting, uint32_t node, int calls) {
  const auto exchange = make_emulated_node_exchange({node, kNodes, kPartBytes, 30.0});
  meeting.addresses[node] = exchange->address();
  meeting.barrier.arrive_and_wait();
  exchange->connect(meeting.addresses, std::vector<std::string>(kNodes, "a node"));
  std::atomic<bool> has_ended = false;
  std::thread watch([&] {
    while (!has_ended) {
      expect(exchange->error().empty() && !exchange->has_been_captured(), node, "the watch is told what is not so");
      std::this_thread::yield();
    }
  });
  in_two_threads([&] {
    exchange->set_limit(20.0);
    for (int call = 0; call < calls; ++call) gather(*exchange, node);
  });
  meeting.barrier.arrive_and_wait();
  in_two_threads([&] { exchange->close(); });
  has_ended = true;
  watch.join();
  try {
    gather(*exchange, node);
    expect(false, node, "a closed exchange takes a call");
  } catch (const std::runtime_error&) {
  }
  meeting.barrier.arrive_and_wait();  // nobody gives memory back that a proxy still writes to
}

}  // namespace

int main(int argc, char** argv) {
  const int calls = argc > 1 ? std::atoi(argv[1]) : 20;
  Meeting meeting;
  std::vector<std::thread> nodes;
  for (uint32_t node = 0; node < kNodes; ++node) nodes.emplace_back(run_node, std::ref(meeting), node, calls);
  for (std::thread& node : nodes) node.join();
  return failures == 0 ? 0 : 1;
}
