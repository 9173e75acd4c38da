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

// A new connection must identify itself within kHelloLimitS. At most kMostStrangers unidentified connections are kept.
constexpr double kHelloLimitS = 10;
constexpr size_t kMostStrangers = 256;
constexpr int kAcceptedAtOnce = 128;
constexpr size_t kReadAtOnce = 1 << 16;

struct Guest {
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
      for (const auto& guest : guests_) serve(*guest);
      finish_round();
      for (const auto& guest : guests_) flush(*guest);
      drop_those_gone();
      if (all_by_ && all_by_->is_over() && !has_all()) {
        warn("of " + std::to_string(world_) + " ranks " + std::to_string(count_known()) +
             " came to their meeting place in time");
        return;
      }
    }
  }

 private:
  bool has_all() const { return has_begun_; }
  bool has_ended() const { return has_lost_one_ || (has_begun_ && guests_.empty()); }
  size_t count_known() const {
    return static_cast<size_t>(
        std::count_if(guests_.begin(), guests_.end(), [](const auto& g) { return g->rank >= 0; }));
  }

  void wait() {
    polls_.clear();
    for (const auto& guest : guests_) {
      const short events = static_cast<short>(POLLIN | (guest->out.empty() ? 0 : POLLOUT));
      polls_.push_back({guest->socket.fd(), events, 0});
    }
    if (server_) polls_.push_back({server_.fd(), POLLIN, 0});
    int limit = -1;
    const auto look_at = [&](const Deadline& deadline) {
      const int left = deadline.milliseconds_left();
      limit = limit < 0 ? left : std::min(limit, left);
    };
    if (all_by_ && !has_begun_) look_at(*all_by_);
    for (const auto& guest : guests_) {
      if (guest->rank < 0) look_at(guest->hello_by);
    }
    poll(polls_.data(), polls_.size(), limit);
  }

  void take_new_ones() {
    // evict_stranger() may identify the last rank, which closes the server.
    for (int i = 0; i < kAcceptedAtOnce && server_; ++i) {
      Descriptor socket(accept4(server_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) {
        const int error = errno;
        if (error == EINTR || error == ECONNABORTED) continue;
        if (has_no_room(error)) {
          if (evict_stranger()) continue;
          // The same connection would be announced again at once.
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        return;
      }
      const int on = 1;
      setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
      if (guests_.size() - count_known() >= kMostStrangers) evict_stranger();
      guests_.push_back(std::make_unique<Guest>());
      guests_.back()->socket = std::move(socket);
    }
  }

  // Drops the unidentified connection that has been silent longest. A rank whose hello has arrived meanwhile is
  // identified instead.
  bool evict_stranger() {
    for (auto guest = guests_.begin(); guest != guests_.end(); ++guest) {
      if ((*guest)->rank < 0) serve(**guest);
      if ((*guest)->rank >= 0) continue;
      guests_.erase(guest);
      return true;
    }
    return false;
  }

  void serve(Guest& guest) {
    char buffer[4096];
    // Reads no more than a hello from an unidentified connection.
    const size_t most = guest.rank < 0 ? sizeof(Hello) : kReadAtOnce;
    while (!guest.is_gone && guest.in.size() < most) {
      const size_t room = std::min(sizeof(buffer), most - guest.in.size());
      const ssize_t got = recv(guest.socket.fd(), buffer, room, MSG_DONTWAIT);
      if (got > 0) {
        guest.in.append(buffer, static_cast<size_t>(got));
      } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
        guest.is_gone = true;
      } else {
        break;
      }
    }
    if (guest.rank < 0) greet(guest);
    if (guest.rank < 0 && guest.hello_by.is_over()) guest.is_gone = true;
    if (guest.rank >= 0 && !has_message(guest) && is_too_long(guest)) guest.is_gone = true;
  }

  void greet(Guest& guest) {
    if (guest.in.size() < sizeof(Hello)) return;
    Hello hello;
    std::memcpy(&hello, guest.in.data(), sizeof(hello));
    guest.in.erase(0, sizeof(hello));
    const bool is_known =
        hello.magic == Hello::kMagic && are_equal(hello.secret.data(), secret_.data(), secret_.size());
    if (!is_known || has_begun_) {
      refuse(guest, Answer::kUnknown);
      return;
    }
    if (world_ == 0) {
      if (hello.world == 0 || hello.world > kMaxRanks) {
        refuse(guest, Answer::kNoPlaceFor);
        return;
      }
      world_ = hello.world;
      all_by_.emplace(limit_s_);
      ranks_.assign(world_, nullptr);
    }
    if (hello.world != world_ || hello.rank >= world_ || ranks_[hello.rank] != nullptr) {
      warn("rank " + std::to_string(hello.rank) + " of " + std::to_string(hello.world) +
           " came to the meeting place of " + std::to_string(world_) +
           " ranks, where it does not fit, or has come before: the communicator cannot be made");
      refuse(guest, Answer::kNoPlaceFor);
      has_lost_one_ = true;
      return;
    }
    guest.rank = static_cast<int>(hello.rank);
    ranks_[hello.rank] = &guest;
    guest.out.push_back(static_cast<char>(Answer::kKnown));
    if (std::find(ranks_.begin(), ranks_.end(), nullptr) != ranks_.end()) return;
    has_begun_ = true;
    for (Guest* const rank : ranks_) rank->out.append(reinterpret_cast<const char*>(&welcome_), sizeof(welcome_));
    // Refuse further connections.
    server_ = Descriptor();
    for (const auto& stranger : guests_) stranger->is_gone |= stranger->rank < 0;
  }

  static void refuse(Guest& guest, Answer answer) {
    guest.is_gone = true;
    (void)!send(guest.socket.fd(), &answer, sizeof(answer), MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  static uint32_t announced(const Guest& guest) {
    uint32_t bytes = 0;
    if (guest.in.size() >= sizeof(bytes)) std::memcpy(&bytes, guest.in.data(), sizeof(bytes));
    return bytes;
  }
  static bool is_too_long(const Guest& guest) {
    return announced(guest) > kMaxMessageBytes || guest.in.size() > sizeof(uint32_t) + kMaxMessageBytes;
  }
  static bool has_message(const Guest& guest) {
    return guest.in.size() >= sizeof(uint32_t) && announced(guest) <= kMaxMessageBytes &&
           guest.in.size() >= sizeof(uint32_t) + announced(guest);
  }

  void finish_round() {
    if (!has_begun_ || has_lost_one_) return;
    for (Guest* const rank : ranks_) {
      if (rank == nullptr || rank->is_gone || !has_message(*rank)) return;
    }
    std::string all;
    for (Guest* const rank : ranks_) {
      const size_t bytes = sizeof(uint32_t) + announced(*rank);
      all.append(rank->in, 0, bytes);
      rank->in.erase(0, bytes);
    }
    for (Guest* const rank : ranks_) rank->out.append(all);
  }

  static void flush(Guest& guest) {
    while (!guest.is_gone && !guest.out.empty()) {
      const ssize_t sent = send(guest.socket.fd(), guest.out.data(), guest.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent > 0) {
        guest.out.erase(0, static_cast<size_t>(sent));
      } else if (errno != EINTR) {
        guest.is_gone = errno != EAGAIN;
        return;
      }
    }
  }

  // Once a rank has left, no round can complete. The other connections are closed after their last answers are sent.
  void drop_those_gone() {
    for (const auto& guest : guests_) {
      if (!guest->is_gone || guest->rank < 0) continue;
      ranks_[static_cast<size_t>(guest->rank)] = nullptr;
      if (!has_begun_) has_lost_one_ = true;
      has_left_ = true;
    }
    std::erase_if(guests_, [&](const auto& guest) { return guest->is_gone || (has_left_ && guest->out.empty()); });
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
  std::vector<std::unique_ptr<Guest>> guests_;
  std::vector<Guest*> ranks_;
  std::vector<pollfd> polls_;
};

}  // namespace

MeetingPlace open_hub(const std::optional<ncclUniqueId>& real_id, double limit_s) {
  MeetingPlace place{};
  place.address = interface_of_host().address;
  Descriptor server(socket(place.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!server) fail_with_errno("socket");
  const auto address = reinterpret_cast<sockaddr*>(&place.address);
  if (bind(server.fd(), address, length_of(place.address)) != 0) fail_with_errno("bind to " + describe(place.address));
  constexpr int kBacklog = 4096;  // the kernel may use less (net.core.somaxconn)
  if (listen(server.fd(), kBacklog) != 0) fail_with_errno("listen");
  socklen_t length = sizeof(place.address);
  if (getsockname(server.fd(), address, &length) != 0) fail_with_errno("getsockname");
  fill_randomly(place.secret.data(), place.secret.size());
  auto hub = std::make_unique<Hub>(std::move(server), place.secret, real_id, limit_s);
  // Detached and self-contained: the process that makes an id need not take part in the communicator.
  start_quiet_thread([hub = std::move(hub)] {
    try {
      hub->run();
    } catch (const std::exception& error) {
      warn(std::string("the meeting place of a communicator has failed: ") + error.what());
    }
  }).detach();
  return place;
}

}  // namespace llm_comm::nccl
