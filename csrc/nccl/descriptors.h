// File descriptors from rank to rank, over unix sockets of this host (and network namespace): llm_comm/runtime/descriptors.py in C++.
#pragma once

#include <string>
#include <vector>

#include "nccl/sockets.h"
#include "nccl/unique_id.h"

namespace llm_comm::nccl {

class DescriptorExchange {
 public:
  // Listens under a name that nobody else has. Throws Failure.
  DescriptorExchange();

  const std::string& name() const { return name_; }

  // By rank; none of this one.
  struct Result {
    std::vector<Descriptor> workspaces;  // none where a rank has sent none
    std::vector<Descriptor> processes;   // pidfds; none for a rank of this process, nor where a kernel has no pidfd
  };
  // Sends `workspace` (-1: none) and a pidfd of this process to all other ranks, and receives theirs. Every rank sends until it has an
  // answer, so a connection may be cut at any time: a pause between connecting and sending loses nothing.
  // Processes that do not know the secret, or belong to another user, are not listened to.
  // `names`: of the sockets of all ranks, which listen. `rank_is_lost`: a descriptor that becomes readable when a rank is lost.
  // Throws Failure, and takes no more connections then, which the others notice.
  Result run(int rank, const std::vector<std::string>& names, const Secret& secret, int workspace, int rank_is_lost,
             double limit_s);

 private:
  std::string name_;
  Descriptor server_;
};

}  // namespace llm_comm::nccl
