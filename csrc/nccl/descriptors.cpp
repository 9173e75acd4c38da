#include "nccl/descriptors.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <thread>

#include "nccl/failure.h"

namespace llm_comm::nccl {

namespace {

constexpr const char* kWhat = "exchange of the descriptors of workspaces";

struct Letter {
  Secret secret;
  int rank;
};

socklen_t address_of(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  // Abstract, which the byte before it says: nothing is left behind in the file system, whatever becomes of the process.
  std::memcpy(address.sun_path + 1, name.data(), std::min(name.size(), sizeof(address.sun_path) - 1));
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

union Control {
  char bytes[CMSG_SPACE(sizeof(int))];
  cmsghdr alignment;
};

Descriptor send_to(const std::string& name, const Letter& letter, int descriptor, const Deadline& deadline) {
  Descriptor to(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!to) fail_with_errno(kWhat);
  sockaddr_un address;
  const socklen_t length = address_of(name, address);
  while (connect(to.fd(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    if (errno != EAGAIN && errno != EINTR) fail_with_errno(kWhat);  // EAGAIN: its queue is full
    if (deadline.is_over()) throw Failure(ncclRemoteError, std::string(kWhat) + ": a rank takes no connection");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  iovec part{const_cast<Letter*>(&letter), sizeof(letter)};
  Control control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof(control.bytes);
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &descriptor, sizeof(descriptor));
  ssize_t sent;
  do {
    sent = sendmsg(to.fd(), &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent != static_cast<ssize_t>(sizeof(letter))) fail_with_errno(kWhat);
  return to;
}

// A letter and its descriptor; none where what came is no letter of ours.
Descriptor receive(int from, const Secret& secret, int& rank) {
  Letter letter;
  iovec part{&letter, sizeof(letter)};
  Control control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof(control.bytes);
  const ssize_t got = recvmsg(from, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  Descriptor received;
  if (got >= 0) {
    const cmsghdr* const header = CMSG_FIRSTHDR(&message);
    if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS &&
        header->cmsg_len == CMSG_LEN(sizeof(int))) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header), sizeof(fd));
      received = Descriptor(fd);
    }
  }
  const bool is_ours =
      got == static_cast<ssize_t>(sizeof(letter)) && are_equal(letter.secret.data(), secret.data(), secret.size());
  if (!is_ours) return Descriptor();
  rank = letter.rank;
  return received;
}

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
                                                   const Secret& secret, int descriptor, double limit_s) {
  const Deadline deadline(limit_s);
  const size_t world = names.size();
  Result result;
  result.descriptors.resize(world);
  result.processes.resize(world);
  // A letter lies in the connection's buffer until it is fetched, so nobody waits for anybody here. The connections stay open until
  // then: a descriptor in one that is closed could be lost with it.
  std::vector<Descriptor> sent;
  for (size_t peer = 0; peer < world; ++peer) {
    if (static_cast<int>(peer) != rank) sent.push_back(send_to(names[peer], {secret, rank}, descriptor, deadline));
  }
  for (size_t missing = world - 1; missing > 0;) {
    wait_until_ready(server_.fd(), POLLIN, deadline, kWhat);
    const Descriptor from(accept4(server_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!from) {
      if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) continue;
      fail_with_errno(kWhat);
    }
    ucred who{};
    socklen_t length = sizeof(who);
    if (getsockopt(from.fd(), SOL_SOCKET, SO_PEERCRED, &who, &length) != 0 || who.uid != geteuid()) continue;
    // A rank sends at once when it has connected; whoever does not is no rank, and is not waited for long.
    const Deadline soon(std::min(limit_s, 1.0));
    int of = -1;
    Descriptor received;
    try {
      wait_until_ready(from.fd(), POLLIN, soon, kWhat);
      received = receive(from.fd(), secret, of);
    } catch (const Failure&) {
      continue;
    }
    if (!received || of < 0 || of == rank || static_cast<size_t>(of) >= world ||
        result.descriptors[static_cast<size_t>(of)]) {
      continue;
    }
    result.descriptors[static_cast<size_t>(of)] = std::move(received);
    result.processes[static_cast<size_t>(of)] = who.pid;
    --missing;
  }
  return result;
}

}  // namespace llm_comm::nccl
