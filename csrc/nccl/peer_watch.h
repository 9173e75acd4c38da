// Looks out for processes of peers that exit.
#pragma once

#include <functional>
#include <thread>
#include <vector>

#include "nccl/sockets.h"

namespace llm_comm::nccl {

class PeerWatch {
 public:
  // `processes`: pidfds by rank, or none, which is not watched. The ranks send each other theirs, because a number of a process means
  // nothing in another PID namespace (of a container). `has_exited` is called in the thread of the watch.
  PeerWatch(std::vector<Descriptor> processes, std::function<void(int rank)> has_exited);
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
