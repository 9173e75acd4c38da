// Looks out for processes of peers that exit.
#pragma once

#include <sys/types.h>

#include <functional>
#include <thread>
#include <vector>

#include "nccl/sockets.h"

namespace llm_comm::nccl {

class PeerWatch {
 public:
  // `processes`: by rank; 0 and this process are not watched, and none is where the kernel has no pidfd. `has_exited` is called in
  // the thread of the watch.
  PeerWatch(const std::vector<pid_t>& processes, std::function<void(int rank)> has_exited);
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;
  ~PeerWatch();

 private:
  struct Peer {
    int rank;
    Descriptor process;
  };
  void run();

  std::vector<Peer> peers_;
  Descriptor stop_;
  std::function<void(int)> has_exited_;
  std::thread thread_;
};

}  // namespace llm_comm::nccl
