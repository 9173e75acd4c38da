// Set-up of a communicator that is disturbed at the worst moment: a rank that pauses between connecting and its first
// word, a flood of connections, a rank that dies. The library's calls of send(), sendmsg() and accept4() come here, and
// wait. Usage: disturbed <scenario>.
#include <dlfcn.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "nccl/unique_id.h"
#include "ranks.h"

namespace {

using llm_comm::nccl::Hello;
using nccl_test::Rank;
using nccl_test::Ranks;

// Of connections that say nothing, those that a hub keeps; and more than it, or a rank, keeps.
constexpr int kMaxUnidentified = 256;
constexpr int kFlood = 300;

using Step = std::function<void(int socket)>;
// Runs before this thread's next message of the kind, once.
thread_local Step before_hello;
thread_local Step before_descriptor;
thread_local Step before_answer;  // to a descriptor
std::atomic<int> hellos = 0;
std::atomic<int> accepted = 0;
std::atomic<bool> is_gate_closed = false;  // accept4() waits
std::atomic<int> waiting_at_gate = 0;
std::atomic<bool> may_say_hello = false;

struct Address {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
};

Address peer_of(int socket) {
  Address peer;
  EXPECT(getpeername(socket, reinterpret_cast<sockaddr*>(&peer.address), &peer.length) == 0);
  return peer;
}

void wait_until(const std::function<bool()>& holds) {
  constexpr int kAttempts = 20000;
  for (int i = 0; i < kAttempts && !holds(); ++i) usleep(1000);
  EXPECT(holds());
}

void wait_until_cut_off(int socket) {
  wait_until([socket] {
    pollfd one{socket, POLLRDHUP, 0};
    return poll(&one, 1, 0) == 1;
  });
}

// Connections that say nothing.
class Strangers {
 public:
  Strangers(const Address& to, int count) {
    for (int i = 0; i < count; ++i) {
      sockets_.push_back(socket(to.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
      EXPECT(connect(sockets_.back(), reinterpret_cast<const sockaddr*>(&to.address), to.length) == 0);
    }
  }
  Strangers(const Strangers&) = delete;
  Strangers& operator=(const Strangers&) = delete;
  ~Strangers() {
    for (const int one : sockets_) close(one);
  }

 private:
  std::vector<int> sockets_;
};

void come_after_a_flood(int socket) {
  const Strangers flood(peer_of(socket), kFlood);
  wait_until_cut_off(socket);
}

void make_and_add_up(Rank& self, const ncclUniqueId& id) {
  ncclComm_t comm = nullptr;
  EXPECT_OK(ncclCommInitRank(&comm, self.world(), id, self.rank()));
  float one = 1;
  EXPECT_OK(ncclAllReduce(&one, &one, 1, ncclFloat32, ncclSum, comm, nullptr));
  EXPECT(one == static_cast<float>(self.world()));
  EXPECT_OK(ncclCommDestroy(comm));
}

void pause_before_hello(Rank& self) {
  const ncclUniqueId id = self.next_id();
  if (self.rank() == 1) before_hello = come_after_a_flood;
  make_and_add_up(self, id);
}

void pause_before_descriptor(Rank& self) {
  const ncclUniqueId id = self.next_id();
  if (self.rank() == 1) before_descriptor = come_after_a_flood;
  make_and_add_up(self, id);
}

// The hub takes one connection too many while the hello of the oldest one has come, but is not read. No rank says hello
// twice.
void flood_after_hello(Rank& self) {
  const ncclUniqueId id = self.next_id();
  hellos = accepted = 0;
  self.barrier();
  std::thread flood;
  if (self.rank() == 1) {
    before_hello = [&](int socket) {
      wait_until([] { return hellos == 1 && accepted == 2; });
      flood = std::thread([&self, hub = peer_of(socket)] {
        const Strangers most(hub, kMaxUnidentified - 1);
        wait_until([] { return accepted == 2 + kMaxUnidentified - 1; });
        is_gate_closed = true;
        const Strangers last(hub, 1);
        wait_until([] { return waiting_at_gate == 1; });
        may_say_hello = true;
        wait_until([&] { return hellos == self.world(); });
        is_gate_closed = false;
        self.barrier();
      });
      wait_until([] { return may_say_hello.load(); });
    };
  }
  make_and_add_up(self, id);
  if (self.rank() == 1) {
    if (flood.joinable()) flood.join();
    EXPECT(hellos == self.world());
  } else {
    self.barrier();
  }
}

// Rank 1 has served rank 0 and taken what rank 2 sent. Rank 2 is told at once, and does not wait until the time is up.
void death_before_descriptor(Rank& self) {
  const ncclUniqueId id = self.next_id();
  if (self.rank() == 0) before_answer = [](int) { usleep(300000); };
  if (self.rank() == 1) {
    before_descriptor = [](int) { before_descriptor = [](int) { _exit(1); }; };
  }
  ncclComm_t comm = nullptr;
  EXPECT_RESULT(ncclCommInitRank(&comm, self.world(), id, self.rank()), ncclRemoteError);
}

void run_once(Step& step, int socket) {
  if (step) std::exchange(step, nullptr)(socket);
}

}  // namespace

extern "C" ssize_t send(int socket, const void* data, size_t bytes, int flags) {
  static const auto real = reinterpret_cast<decltype(&send)>(dlsym(RTLD_NEXT, "send"));
  const uint64_t magic = Hello::kMagic;
  constexpr size_t kWithoutVersion = 6;
  const bool is_hello = bytes == sizeof(Hello) && std::memcmp(data, &magic, kWithoutVersion) == 0;
  if (bytes == 1) run_once(before_answer, socket);
  if (!is_hello) return real(socket, data, bytes, flags);
  run_once(before_hello, socket);
  const ssize_t sent = real(socket, data, bytes, flags);
  ++hellos;
  return sent;
}

extern "C" ssize_t sendmsg(int socket, const msghdr* message, int flags) {
  static const auto real = reinterpret_cast<decltype(&sendmsg)>(dlsym(RTLD_NEXT, "sendmsg"));
  run_once(before_descriptor, socket);
  return real(socket, message, flags);
}

extern "C" int accept4(int socket, sockaddr* address, socklen_t* length, int flags) {
  static const auto real = reinterpret_cast<decltype(&accept4)>(dlsym(RTLD_NEXT, "accept4"));
  if (is_gate_closed) {
    ++waiting_at_gate;
    wait_until([] { return !is_gate_closed; });
    --waiting_at_gate;
  }
  const int one = real(socket, address, length, flags);
  if (one >= 0) ++accepted;
  return one;
}

int main(int argc, char** argv) {
  struct Entry {
    void (*scenario)(Rank&);
    Ranks kind = Ranks::kThreads;
    int dies = -1;
    int world = 2;
  };
  const std::map<std::string, Entry> scenarios{
      {"flood_after_hello", {flood_after_hello}},
      {"pause_before_descriptor", {pause_before_descriptor}},
      {"pause_before_hello", {pause_before_hello}},
      {"death_before_descriptor", {death_before_descriptor, Ranks::kProcesses, 1, 3}},
  };
  // A rank that waits for the time-out is ended before.
  constexpr unsigned kLimitS = 60;
  setenv("LLM_COMM_TIMEOUT_S", "600", 1);
  setenv("LLM_COMM_WORKSPACE_BYTES", "4M", 1);
  for (const auto& [name, entry] : scenarios) {
    if (argc > 1 && name != argv[1]) continue;
    const auto body = [&scenario = entry.scenario](Rank& self) {
      alarm(kLimitS);
      scenario(self);
    };
    nccl_test::run_ranks(entry.kind, entry.world, body, entry.dies);
  }
  return nccl_test::failures() == 0 ? 0 : 1;
}
