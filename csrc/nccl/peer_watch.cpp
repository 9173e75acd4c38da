#include "nccl/peer_watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>

#include "nccl/quiet_thread.h"

namespace llm_comm::nccl {

PeerWatch::PeerWatch(std::vector<Descriptor> processes, std::function<void(int rank)> has_exited)
    : has_exited_(std::move(has_exited)) {
  for (size_t rank = 0; rank < processes.size(); ++rank) {
    if (processes[rank]) peers_.push_back({static_cast<int>(rank), std::move(processes[rank])});
  }
  if (peers_.empty()) return;
  stop_ = Descriptor(eventfd(0, EFD_CLOEXEC));
  if (!stop_) return;
  thread_ = start_quiet_thread([this] { run(); });
}

PeerWatch::~PeerWatch() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  const ssize_t written = write(stop_.fd(), &one, sizeof(one));
  (void)written;  // cannot fail on an eventfd
  thread_.join();
}

void PeerWatch::run() {
  while (!peers_.empty()) {
    std::vector<pollfd> polls{{stop_.fd(), POLLIN, 0}};
    for (const Peer& peer : peers_) polls.push_back({peer.process.fd(), POLLIN, 0});
    if (poll(polls.data(), polls.size(), -1) < 0) continue;
    if (polls[0].revents != 0) return;
    for (size_t i = polls.size() - 1; i > 0; --i) {
      if (polls[i].revents == 0) continue;
      has_exited_(peers_[i - 1].rank);
      peers_.erase(peers_.begin() + static_cast<std::ptrdiff_t>(i) - 1);
    }
  }
}

}  // namespace llm_comm::nccl
