#include "nccl/hub.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "nccl/interface.h"
#include "nccl/log.h"
#include "nccl/quiet_thread.h"
#include "nccl/sockets.h"

namespace llm_comm::nccl {

namespace {

// A new connection must identify itself within kHelloLimitS. At most kMaxUnidentified unidentified connections are
// kept.
constexpr double kHelloLimitS = 10;
constexpr size_t kMaxUnidentified = 256;
constexpr int kAcceptedAtOnce = 128;
constexpr size_t kReadAtOnce = 1 << 16;

struct Connection {
  Descriptor socket;
  Deadline hello_by{kHelloLimitS};
  int rank = -1;  // -1: not identified
  std::string in;
  std::string out;
  bool is_gone = false;
};

class Hub {
 public:
  Hub(Descriptor server, const Secret& secret, const std::optional<ncclUniqueId>& real_id, double limit_s)
      : server_(std::move(server)), secret_(secret), limit_s_(limit_s) {
    if (real_id) welcome_ = {1, *real_id};
  }

  void run() {
    while (!has_ended()) {
      wait();
      if (server_) take_new_ones();
      for (const auto& connection : connections_) serve(*connection);
      finish_round();
      for (const auto& connection : connections_) flush(*connection);
      drop_those_gone();
      if (all_by_ && all_by_->is_over() && !has_all()) {
        warn("of " + std::to_string(world_) + " ranks " + std::to_string(count_known()) +
             " connected to the hub of their communicator in time");
        return;
      }
    }
  }

 private:
  bool has_all() const { return has_begun_; }
  bool has_ended() const { return has_lost_one_ || (has_begun_ && connections_.empty()); }
  size_t count_known() const {
    return static_cast<size_t>(
        std::count_if(connections_.begin(), connections_.end(), [](const auto& g) { return g->rank >= 0; }));
  }

  void wait() {
    polls_.clear();
    for (const auto& connection : connections_) {
      const short events = static_cast<short>(POLLIN | (connection->out.empty() ? 0 : POLLOUT));
      polls_.push_back({connection->socket.fd(), events, 0});
    }
    if (server_) polls_.push_back({server_.fd(), POLLIN, 0});
    int limit = -1;
    const auto look_at = [&](const Deadline& deadline) {
      const int left = deadline.milliseconds_left();
      limit = limit < 0 ? left : std::min(limit, left);
    };
    if (all_by_ && !has_begun_) look_at(*all_by_);
    for (const auto& connection : connections_) {
      if (connection->rank < 0) look_at(connection->hello_by);
    }
    poll(polls_.data(), polls_.size(), limit);
  }

  void take_new_ones() {
    // evict_unidentified() may identify the last rank, which closes the server.
    for (int i = 0; i < kAcceptedAtOnce && server_; ++i) {
      Descriptor socket(accept4(server_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) {
        const int error = errno;
        if (error == EINTR || error == ECONNABORTED) continue;
        if (is_out_of_resources(error)) {
          if (evict_unidentified()) continue;
          // Wait until descriptors become free: poll() would report the same connection again immediately.
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        return;
      }
      const int on = 1;
      setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
      if (connections_.size() - count_known() >= kMaxUnidentified) evict_unidentified();
      connections_.push_back(std::make_unique<Connection>());
      connections_.back()->socket = std::move(socket);
    }
  }

  // Drops the unidentified connection that has been silent longest. A rank whose hello has arrived meanwhile is
  // identified instead.
  bool evict_unidentified() {
    for (auto connection = connections_.begin(); connection != connections_.end(); ++connection) {
      if ((*connection)->rank < 0) serve(**connection);
      if ((*connection)->rank >= 0) continue;
      connections_.erase(connection);
      return true;
    }
    return false;
  }

  void serve(Connection& connection) {
    char buffer[4096];
    // Reads no more than a hello from an unidentified connection.
    const size_t most = connection.rank < 0 ? sizeof(Hello) : kReadAtOnce;
    while (!connection.is_gone && connection.in.size() < most) {
      const size_t room = std::min(sizeof(buffer), most - connection.in.size());
      const ssize_t got = recv(connection.socket.fd(), buffer, room, MSG_DONTWAIT);
      if (got > 0) {
        connection.in.append(buffer, static_cast<size_t>(got));
      } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
        connection.is_gone = true;
      } else {
        break;
      }
    }
    if (connection.rank < 0) greet(connection);
    if (connection.rank < 0 && connection.hello_by.is_over()) connection.is_gone = true;
    if (connection.rank >= 0 && !has_message(connection) && is_too_long(connection)) connection.is_gone = true;
  }

  void greet(Connection& connection) {
    if (connection.in.size() < sizeof(Hello)) return;
    Hello hello;
    std::memcpy(&hello, connection.in.data(), sizeof(hello));
    connection.in.erase(0, sizeof(hello));
    const bool is_known =
        hello.magic == Hello::kMagic && are_equal(hello.secret.data(), secret_.data(), secret_.size());
    if (!is_known || has_begun_) {
      refuse(connection, Answer::kUnknown);
      return;
    }
    if (world_ == 0) {
      if (hello.world == 0 || hello.world > kMaxRanks) {
        refuse(connection, Answer::kRejected);
        return;
      }
      world_ = hello.world;
      all_by_.emplace(limit_s_);
      ranks_.assign(world_, nullptr);
    }
    if (hello.world != world_ || hello.rank >= world_ || ranks_[hello.rank] != nullptr) {
      warn("rank " + std::to_string(hello.rank) + " of " + std::to_string(hello.world) + " connected to the hub of " +
           std::to_string(world_) +
           " ranks, where it does not fit, or has come before: the communicator cannot be made");
      refuse(connection, Answer::kRejected);
      has_lost_one_ = true;
      return;
    }
    connection.rank = static_cast<int>(hello.rank);
    ranks_[hello.rank] = &connection;
    connection.out.push_back(static_cast<char>(Answer::kKnown));
    if (std::find(ranks_.begin(), ranks_.end(), nullptr) != ranks_.end()) return;
    has_begun_ = true;
    for (Connection* const rank : ranks_) rank->out.append(reinterpret_cast<const char*>(&welcome_), sizeof(welcome_));
    // Refuse further connections.
    server_ = Descriptor();
    for (const auto& connection : connections_) connection->is_gone |= connection->rank < 0;
  }

  static void refuse(Connection& connection, Answer answer) {
    connection.is_gone = true;
    (void)!send(connection.socket.fd(), &answer, sizeof(answer), MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  static uint32_t announced(const Connection& connection) {
    uint32_t bytes = 0;
    if (connection.in.size() >= sizeof(bytes)) std::memcpy(&bytes, connection.in.data(), sizeof(bytes));
    return bytes;
  }
  static bool is_too_long(const Connection& connection) {
    return announced(connection) > kMaxMessageBytes || connection.in.size() > sizeof(uint32_t) + kMaxMessageBytes;
  }
  static bool has_message(const Connection& connection) {
    return connection.in.size() >= sizeof(uint32_t) && announced(connection) <= kMaxMessageBytes &&
           connection.in.size() >= sizeof(uint32_t) + announced(connection);
  }

  void finish_round() {
    if (!has_begun_ || has_lost_one_) return;
    for (Connection* const rank : ranks_) {
      if (rank == nullptr || rank->is_gone || !has_message(*rank)) return;
    }
    std::string all;
    for (Connection* const rank : ranks_) {
      const size_t bytes = sizeof(uint32_t) + announced(*rank);
      all.append(rank->in, 0, bytes);
      rank->in.erase(0, bytes);
    }
    for (Connection* const rank : ranks_) rank->out.append(all);
  }

  static void flush(Connection& connection) {
    while (!connection.is_gone && !connection.out.empty()) {
      const ssize_t sent =
          send(connection.socket.fd(), connection.out.data(), connection.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent > 0) {
        connection.out.erase(0, static_cast<size_t>(sent));
      } else if (errno != EINTR) {
        connection.is_gone = errno != EAGAIN;
        return;
      }
    }
  }

  // Once a rank has left, no round can complete. The other connections are closed after their last answers are sent.
  void drop_those_gone() {
    for (const auto& connection : connections_) {
      if (!connection->is_gone || connection->rank < 0) continue;
      ranks_[static_cast<size_t>(connection->rank)] = nullptr;
      if (!has_begun_) has_lost_one_ = true;
      has_left_ = true;
    }
    std::erase_if(connections_, [&](const auto& connection) {
      return connection->is_gone || (has_left_ && connection->out.empty());
    });
  }

  Descriptor server_;
  Secret secret_;
  double limit_s_;
  Welcome welcome_{};
  uint32_t world_ = 0;
  bool has_begun_ = false;
  bool has_left_ = false;
  bool has_lost_one_ = false;
  std::optional<Deadline> all_by_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::vector<Connection*> ranks_;
  std::vector<pollfd> polls_;
};

}  // namespace

HubAddress open_hub(const std::optional<ncclUniqueId>& real_id, double limit_s) {
  HubAddress hub_address{};
  hub_address.address = interface_of_host().address;
  Descriptor server(socket(hub_address.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!server) fail_with_errno("socket");
  const auto address = reinterpret_cast<sockaddr*>(&hub_address.address);
  if (bind(server.fd(), address, length_of(hub_address.address)) != 0)
    fail_with_errno("bind to " + describe(hub_address.address));
  constexpr int kBacklog = 4096;  // the kernel may use less (net.core.somaxconn)
  if (listen(server.fd(), kBacklog) != 0) fail_with_errno("listen");
  socklen_t length = sizeof(hub_address.address);
  if (getsockname(server.fd(), address, &length) != 0) fail_with_errno("getsockname");
  fill_randomly(hub_address.secret.data(), hub_address.secret.size());
  auto hub = std::make_unique<Hub>(std::move(server), hub_address.secret, real_id, limit_s);
  // Detached and self-contained: the process that makes an id need not take part in the communicator.
  start_quiet_thread([hub = std::move(hub)] {
    try {
      hub->run();
    } catch (const std::exception& error) {
      warn(std::string("the hub of a communicator has failed: ") + error.what());
    }
  }).detach();
  return hub_address;
}

}  // namespace llm_comm::nccl
