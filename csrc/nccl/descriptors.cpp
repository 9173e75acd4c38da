#include "nccl/descriptors.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "nccl/failure.h"

namespace llm_comm::nccl {

namespace {

constexpr const char* kWhat = "exchange of the descriptors of workspaces";
constexpr char kAnswer = '+';
// Pause before the next attempt to connect to a peer whose queue is full or that cut the connection.
constexpr int kRetryMilliseconds = 5;
// Maximum connections that have sent nothing. A rank whose connection is dropped connects again.
constexpr size_t kMostSilent = 64;
constexpr int kAcceptedAtOnce = 128;
constexpr size_t kMostDescriptors = 2;

// Message of a rank, sent together with its descriptors: the workspace, then the process.
struct Letter {
  Secret secret;
  int32_t rank;
  uint16_t has_workspace;
  uint16_t has_process;
};

socklen_t address_of(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  // Abstract address: the leading zero byte says so. Nothing remains in the file system when the process dies.
  std::memcpy(address.sun_path + 1, name.data(), std::min(name.size(), sizeof(address.sun_path) - 1));
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

Descriptor open_own_process() {
#ifdef SYS_pidfd_open
  return Descriptor(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
#else
  return Descriptor();
#endif
}

// Process at the other end, in this process's PID namespace, as of its connect() or listen().
ucred peer_of(int socket) {
  ucred who{};
  socklen_t length = sizeof(who);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &length) != 0) fail_with_errno(kWhat);
  return who;
}

struct Mail {
  explicit Mail(Letter& letter) : part{&letter, sizeof(letter)} {
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
  }
  iovec part;
  alignas(cmsghdr) char control[CMSG_SPACE(kMostDescriptors * sizeof(int))]{};
  msghdr header{};
};

bool send_letter(int to, Letter letter, const std::vector<int>& descriptors) {
  Mail mail(letter);
  if (descriptors.empty()) {
    mail.header.msg_control = nullptr;
    mail.header.msg_controllen = 0;
  } else {
    const size_t bytes = descriptors.size() * sizeof(int);
    mail.header.msg_controllen = CMSG_SPACE(bytes);
    cmsghdr* const rights = CMSG_FIRSTHDR(&mail.header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(bytes);
    std::memcpy(CMSG_DATA(rights), descriptors.data(), bytes);
  }
  const ssize_t sent = sendmsg(to, &mail.header, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent == static_cast<ssize_t>(sizeof(letter))) return true;
  if (sent < 0 && (errno == EPIPE || errno == ECONNRESET || errno == EINTR || errno == EAGAIN)) return false;
  fail_with_errno(kWhat);
}

std::vector<Descriptor> descriptors_of(msghdr& header) {
  std::vector<Descriptor> all;
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = 0; at + CMSG_LEN(sizeof(int)) <= part->cmsg_len; at += sizeof(int)) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + at, sizeof(fd));
      all.emplace_back(fd);
    }
  }
  return all;
}

// One run of an exchange. This rank sends to its peers one after the other and meanwhile receives from them.
class Run {
 public:
  Run(int rank, const std::vector<std::string>& names, const Secret& secret, int workspace, int server,
      int rank_is_lost, double limit_s)
      : rank_(rank), names_(names), server_(server), rank_is_lost_(rank_is_lost), deadline_(limit_s) {
    process_ = open_own_process();
    letter_ = {secret, rank, workspace >= 0, static_cast<bool>(process_)};
    if (workspace >= 0) descriptors_.push_back(workspace);
    if (process_) descriptors_.push_back(process_.fd());
    received_.workspaces.resize(names.size());
    received_.processes.resize(names.size());
    has_come_.assign(names.size(), false);
    has_come_.at(static_cast<size_t>(rank)) = true;
    skip_this_rank();
  }

  DescriptorExchange::Result run() {
    while (next_ < names_.size() || is_one_missing()) {
      if (deadline_.is_over()) throw Failure(ncclRemoteError, std::string(kWhat) + ": " + what_is_missing());
      if (!outgoing_ && next_ < names_.size()) call();
      wait();
    }
    return std::move(received_);
  }

 private:
  bool is_one_missing() const { return std::find(has_come_.begin(), has_come_.end(), false) != has_come_.end(); }

  std::string what_is_missing() const {
    const auto missing = std::find(has_come_.begin(), has_come_.end(), false);
    return missing != has_come_.end()
               ? "rank " + std::to_string(missing - has_come_.begin()) + " sent nothing in time (LLM_COMM_TIMEOUT_S)"
               : "rank " + std::to_string(next_) + " took nothing in time (LLM_COMM_TIMEOUT_S)";
  }

  void wait() {
    std::vector<pollfd> polls{{rank_is_lost_, POLLIN, 0}, {server_, POLLIN, 0}, {outgoing_.fd(), POLLIN, 0}};
    for (const Descriptor& one : silent_) polls.push_back({one.fd(), POLLIN, 0});
    int limit = deadline_.milliseconds_left();
    if (!outgoing_ && next_ < names_.size()) limit = std::min(limit, kRetryMilliseconds);
    if (poll(polls.data(), polls.size(), limit) <= 0) return;
    if (polls[0].revents != 0) throw Failure(ncclRemoteError, std::string(kWhat) + ": a rank is lost");
    if (outgoing_ && polls[2].revents != 0) hear_answer();
    std::vector<Descriptor> have_spoken;
    for (size_t i = polls.size() - 1; i > 2; --i) {
      if (polls[i].revents == 0) continue;
      have_spoken.push_back(std::move(silent_[i - 3]));
      silent_.erase(silent_.begin() + static_cast<std::ptrdiff_t>(i) - 3);
    }
    for (Descriptor& one : have_spoken) listen_to(std::move(one));
    if (polls[1].revents != 0) accept_some();
  }

  // ---- Sending to the peers ----

  void skip_this_rank() {
    if (next_ == static_cast<size_t>(rank_)) ++next_;
  }

  // Connects and sends. If that fails temporarily, a later call tries again.
  void call() {
    const std::string of_peer = std::string(kWhat) + ": rank " + std::to_string(next_);
    Descriptor to(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!to) fail_with_errno(kWhat);
    sockaddr_un address;
    const socklen_t length = address_of(names_[next_], address);
    if (connect(to.fd(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
      if (errno == EAGAIN || errno == EINTR) return;  // the peer's queue is full
      fail_with_errno(of_peer + " takes no connection, because it has given up or is lost");
    }
    const uid_t owner = peer_of(to.fd()).uid;
    if (owner != geteuid()) {
      throw Failure(ncclSystemError, of_peer + " runs as user " + std::to_string(owner) + " and rank " +
                                         std::to_string(rank_) + " as " + std::to_string(geteuid()) +
                                         "; all ranks must run as one user");
    }
    if (send_letter(to.fd(), letter_, descriptors_)) outgoing_ = std::move(to);
  }

  void hear_answer() {
    char answer = 0;
    const ssize_t got = recv(outgoing_.fd(), &answer, 1, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    outgoing_ = Descriptor();
    if (got != 1 || answer != kAnswer) return;  // the connection was cut: call() tries again
    ++next_;
    skip_this_rank();
  }

  // ---- Receiving from the peers, or from unknown processes ----

  void accept_some() {
    for (int i = 0; i < kAcceptedAtOnce; ++i) {
      Descriptor from(accept4(server_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!from) {
        if (errno == EINTR || errno == ECONNABORTED) continue;
        if (errno == EAGAIN) return;
        if (is_out_of_resources(errno) && drop_silent()) continue;
        fail_with_errno(kWhat);
      }
      if (peer_of(from.fd()).uid == geteuid()) listen_to(std::move(from));
    }
  }

  void listen_to(Descriptor from) {
    if (has_spoken(from.fd())) return;
    if (silent_.size() == kMostSilent) silent_.erase(silent_.begin());
    silent_.push_back(std::move(from));
  }

  // Drops connections that have sent nothing. Returns whether there were any.
  bool drop_silent() {
    const bool was_one = !silent_.empty();
    silent_.clear();
    return was_one;
  }

  // Receives a rank's message and answers it. Returns true if anything arrived or the connection is closed.
  bool has_spoken(int from) {
    Letter letter;
    Mail mail(letter);
    const ssize_t got = recvmsg(from, &mail.header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0) return errno != EAGAIN && errno != EINTR;
    std::vector<Descriptor> descriptors = descriptors_of(mail.header);
    if (got != static_cast<ssize_t>(sizeof(letter)) ||
        !are_equal(letter.secret.data(), letter_.secret.data(), letter.secret.size())) {
      return true;
    }
    const auto of = static_cast<size_t>(letter.rank);
    if (letter.rank < 0 || of >= has_come_.size() || has_come_[of]) return true;
    const size_t announced = (letter.has_workspace != 0 ? 1u : 0u) + (letter.has_process != 0 ? 1u : 0u);
    if (descriptors.size() != announced) {
      // Without an answer the rank sends again.
      if ((mail.header.msg_flags & MSG_CTRUNC) == 0 || drop_silent()) return true;
      throw Failure(ncclSystemError,
                    std::string(kWhat) + ": no room for those of rank " + std::to_string(of) + ": raise RLIMIT_NOFILE");
    }
    if (letter.has_workspace != 0) received_.workspaces[of] = std::move(descriptors.front());
    // Ranks of this process need no watch.
    if (letter.has_process != 0 && peer_of(from).pid != getpid()) {
      received_.processes[of] = std::move(descriptors.back());
    }
    has_come_[of] = true;
    (void)!send(from, &kAnswer, 1, MSG_NOSIGNAL | MSG_DONTWAIT);  // a rank that has given up reports it in the vote
    return true;
  }

  int rank_;
  const std::vector<std::string>& names_;
  int server_;
  int rank_is_lost_;
  Deadline deadline_;
  Descriptor process_;
  Letter letter_;
  std::vector<int> descriptors_;  // to be sent
  size_t next_ = 0;               // peer to send to
  Descriptor outgoing_;           // connection that waits for its answer
  std::vector<Descriptor> silent_;
  std::vector<bool> has_come_;
  DescriptorExchange::Result received_;
};

}  // namespace

DescriptorExchange::DescriptorExchange()
    : name_("llm_comm_nccl_"), server_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  if (!server_) fail_with_errno(kWhat);
  unsigned char word[16];
  fill_randomly(word, sizeof(word));
  for (const unsigned char byte : word) {
    for (const int digit : {byte >> 4, byte & 15}) name_ += "0123456789abcdef"[digit];
  }
  sockaddr_un address;
  const socklen_t length = address_of(name_, address);
  constexpr int kBacklog = 4096;
  if (bind(server_.fd(), reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(server_.fd(), kBacklog) != 0) {
    fail_with_errno(kWhat);
  }
}

DescriptorExchange::Result DescriptorExchange::run(int rank, const std::vector<std::string>& names,
                                                   const Secret& secret, int workspace, int rank_is_lost,
                                                   double limit_s) {
  try {
    return Run(rank, names, secret, workspace, server_.fd(), rank_is_lost, limit_s).run();
  } catch (const Failure&) {
    server_ = Descriptor();
    throw;
  }
}

}  // namespace llm_comm::nccl
