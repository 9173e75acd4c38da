// PeerWatch: a thread that detects the exit of peers' processes. Used by Communicator.
#pragma once

#include <functional>
#include <thread>
#include <vector>

#include "nccl/sockets.h"

namespace llm_comm::nccl {

class PeerWatch {
 public:
  // `processes`: pidfds by rank; empty ones are not watched. Ranks exchange pidfds because a PID means nothing in
  // another PID namespace (container). `has_exited` is called on the watch thread.
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
