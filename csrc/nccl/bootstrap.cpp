#include "nccl/bootstrap.h"

#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "nccl/failure.h"
#include "nccl/interface.h"

namespace llm_comm::nccl {

namespace {

// Pause between two hellos to a hub that does not answer.
constexpr std::chrono::milliseconds kFirstPause(1);
constexpr std::chrono::milliseconds kLongestPause(1000);

}  // namespace

Bootstrap::Bootstrap(const HubAddress& hub_address, int rank, int world, double limit_s)
    : rank_(rank), world_(world), limit_s_(limit_s), secret_(hub_address.secret) {
  const Deadline deadline(limit_s);
  const std::string where = "hub of the ranks at " + describe(hub_address.address);
  std::string objection;
  for (auto pause = kFirstPause; !say_hello(hub_address, where, deadline, objection);
       pause = std::min(2 * pause, kLongestPause)) {
    if (deadline.is_over()) throw Failure(ncclRemoteError, where + ": no answer in time, at last: " + objection);
    std::this_thread::sleep_for(pause);
  }
  Welcome welcome;
  receive_all(socket_.fd(), &welcome, sizeof(welcome), deadline, where.c_str());
  if (welcome.has_real_id != 0) real_id_ = welcome.real_id;
}

bool Bootstrap::say_hello(const HubAddress& hub_address, const std::string& where, const Deadline& deadline,
                          std::string& objection) {
  socket_ = Descriptor(::socket(hub_address.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket_) fail_with_errno("socket");
  int error = 0;
  if (connect(socket_.fd(), reinterpret_cast<const sockaddr*>(&hub_address.address), length_of(hub_address.address)) !=
      0) {
    error = errno;
    if (error == EINPROGRESS) {
      wait_until_ready(socket_.fd(), POLLOUT, deadline, where.c_str());
      socklen_t length = sizeof(error);
      getsockopt(socket_.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
    }
  }
  if (error != 0) {
    objection = std::strerror(error);
    // Temporary errors: a flood of connections fills the hub's queue, or uses up the ports of this host.
    if (error == ETIMEDOUT || error == ECONNRESET || error == EAGAIN || error == EADDRNOTAVAIL) return false;
    throw Failure(ncclSystemError, where + ": " + objection);
  }
  const int on = 1;
  setsockopt(socket_.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  const Hello hello{Hello::kMagic, hub_address.secret, static_cast<uint32_t>(rank_), static_cast<uint32_t>(world_)};
  Answer answer{};
  try {
    send_all(socket_.fd(), &hello, sizeof(hello), deadline, where.c_str());
    receive_all(socket_.fd(), &answer, sizeof(answer), deadline, where.c_str());
  } catch (const Failure& failure) {
    if (failure.result() != ncclRemoteError || deadline.is_over()) throw;
    objection = "the connection was cut";
    return false;
  }
  if (answer == Answer::kKnown) return true;
  if (answer == Answer::kRejected) {
    throw Failure(ncclInvalidUsage, where + ": rank " + std::to_string(rank_) + " of " + std::to_string(world_) +
                                        " has come before, or other ranks say another number of ranks");
  }
  throw Failure(ncclRemoteError,
                where + ": the ncclUniqueId is damaged, or was made by another communicator or version of llm_comm");
}

std::vector<std::string> Bootstrap::exchange(std::string_view message) {
  if (message.size() > kMaxMessageBytes) {
    throw std::invalid_argument("a message of " + std::to_string(message.size()) + " bytes; at most " +
                                std::to_string(kMaxMessageBytes));
  }
  try {
    return exchange_until(Deadline(limit_s_), message);
  } catch (const Failure&) {
    interrupt();
    throw;
  }
}

std::vector<std::string> Bootstrap::exchange_until(const Deadline& deadline, std::string_view message) {
  constexpr const char* kWhat = "exchange between the ranks of a communicator";
  const auto bytes = static_cast<uint32_t>(message.size());
  std::string framed(reinterpret_cast<const char*>(&bytes), sizeof(bytes));
  framed.append(message);
  send_all(socket_.fd(), framed.data(), framed.size(), deadline, kWhat);
  std::vector<std::string> all;
  for (int rank = 0; rank < world_; ++rank) {
    uint32_t length = 0;
    receive_all(socket_.fd(), &length, sizeof(length), deadline, kWhat);
    if (length > kMaxMessageBytes) throw Failure(ncclRemoteError, std::string(kWhat) + ": a message is too long");
    std::string& of_rank = all.emplace_back(length, '\0');
    receive_all(socket_.fd(), of_rank.data(), length, deadline, kWhat);
  }
  return all;
}

void Bootstrap::interrupt() noexcept { shutdown(socket_.fd(), SHUT_RDWR); }

void Bootstrap::agree(const char* what, std::string objection) {
  constexpr size_t kMost = 1024;
  if (objection.size() > kMost) objection.resize(kMost);
  const std::vector<std::string> objections = exchange(objection);
  for (int rank = 0; rank < world_; ++rank) {
    const std::string& of_rank = objections[static_cast<size_t>(rank)];
    if (of_rank.empty()) continue;
    throw Failure(ncclSystemError, std::string(what) + " failed on rank " + std::to_string(rank) + ": " + of_rank);
  }
}

}  // namespace llm_comm::nccl
