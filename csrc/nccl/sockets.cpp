#include "nccl/sockets.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "nccl/failure.h"

namespace llm_comm::nccl {

int Deadline::milliseconds_left() const {
  constexpr std::chrono::milliseconds kDay = std::chrono::hours(24);
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(at_ - std::chrono::steady_clock::now());
  return static_cast<int>(std::clamp(left, std::chrono::milliseconds(0), kDay).count());
}

void fail_with_errno(const std::string& what) {
  const int error = errno;
  throw Failure(ncclSystemError, what + ": " + std::strerror(error));
}

bool is_out_of_resources(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

void wait_until_ready(int fd, short events, const Deadline& deadline, const char* what) {
  for (;;) {
    pollfd poll_of{fd, events, 0};
    const int ready = poll(&poll_of, 1, deadline.milliseconds_left());
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) fail_with_errno(what);
    if (ready == 0 && deadline.is_over()) {
      throw Failure(ncclRemoteError, std::string(what) + ": nothing came in time (LLM_COMM_TIMEOUT_S)");
    }
  }
}

void send_all(int fd, const void* data, size_t bytes, const Deadline& deadline, const char* what) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = send(fd, from, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      from += sent;
      bytes -= static_cast<size_t>(sent);
    } else if (errno == EAGAIN) {
      wait_until_ready(fd, POLLOUT, deadline, what);
    } else if (errno == EPIPE || errno == ECONNRESET) {
      throw Failure(ncclRemoteError, std::string(what) + ": the other side has closed the connection");
    } else if (errno != EINTR) {
      fail_with_errno(what);
    }
  }
}

void receive_all(int fd, void* data, size_t bytes, const Deadline& deadline, const char* what) {
  char* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t received = recv(fd, to, bytes, MSG_DONTWAIT);
    if (received > 0) {
      to += received;
      bytes -= static_cast<size_t>(received);
    } else if (received == 0 || errno == ECONNRESET) {
      throw Failure(ncclRemoteError, std::string(what) + ": the other side has closed the connection");
    } else if (errno == EAGAIN) {
      wait_until_ready(fd, POLLIN, deadline, what);
    } else if (errno != EINTR) {
      fail_with_errno(what);
    }
  }
}

void fill_randomly(void* data, size_t bytes) {
  char* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = getrandom(to, bytes, 0);
    if (got < 0) {
      if (errno == EINTR) continue;
      fail_with_errno("getrandom");
    }
    to += got;
    bytes -= static_cast<size_t>(got);
  }
}

bool are_equal(const void* a, const void* b, size_t bytes) {
  unsigned char difference = 0;
  for (size_t i = 0; i < bytes; ++i) {
    difference |= static_cast<const unsigned char*>(a)[i] ^ static_cast<const unsigned char*>(b)[i];
  }
  return difference == 0;
}

}  // namespace llm_comm::nccl
