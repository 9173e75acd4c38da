#include "nccl/bootstrap.h"

#include <netinet/tcp.h>
#include <poll.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "nccl/failure.h"
#include "nccl/interface.h"

namespace llm_comm::nccl {

Bootstrap::Bootstrap(const MeetingPlace& place, int rank, int world, double limit_s)
    : rank_(rank), world_(world), limit_s_(limit_s), secret_(place.secret) {
  const Deadline deadline(limit_s);
  const std::string where = "meeting of the ranks at " + describe(place.address);
  socket_ = Descriptor(socket(place.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket_) fail_with_errno("socket");
  if (connect(socket_.fd(), reinterpret_cast<const sockaddr*>(&place.address), length_of(place.address)) != 0) {
    if (errno != EINPROGRESS) fail_with_errno(where);
    wait_until_ready(socket_.fd(), POLLOUT, deadline, where.c_str());
    int error = 0;
    socklen_t length = sizeof(error);
    getsockopt(socket_.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) throw Failure(ncclSystemError, where + ": " + std::strerror(error));
  }
  const int on = 1;
  setsockopt(socket_.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  const Hello hello{Hello::kMagic, place.secret, static_cast<uint32_t>(rank), static_cast<uint32_t>(world)};
  send_all(socket_.fd(), &hello, sizeof(hello), deadline, where.c_str());
  Welcome welcome;
  receive_all(socket_.fd(), &welcome, sizeof(welcome), deadline, where.c_str());
  if (welcome.has_real_id != 0) real_id_ = welcome.real_id;
}

std::vector<std::string> Bootstrap::exchange(std::string_view message) {
  constexpr const char* kWhat = "exchange between the ranks of a communicator";
  if (message.size() > kMaxMessageBytes) {
    throw std::invalid_argument("a message of " + std::to_string(message.size()) + " bytes; at most " +
                                std::to_string(kMaxMessageBytes));
  }
  const Deadline deadline(limit_s_);
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
