// DescriptorExchange: passes file descriptors between ranks over unix sockets of one host and network namespace. The
// C++ counterpart of llm_comm/runtime/descriptors.py.
#pragma once

#include <string>
#include <vector>

#include "nccl/sockets.h"
#include "nccl/unique_id.h"

namespace llm_comm::nccl {

class DescriptorExchange {
 public:
  // Listens under a random name. Throws Failure.
  DescriptorExchange();

  const std::string& name() const { return name_; }

  // By rank; empty for this rank.
  struct Result {
    std::vector<Descriptor> workspaces;  // empty for a rank that sent none
    std::vector<Descriptor> processes;   // pidfds; empty for a rank of this process, or where the kernel has no pidfd
  };
  // Sends `workspace` (-1: none) and a pidfd of this process to all other ranks and receives theirs. A rank repeats its
  // message until it is answered, so a connection may be cut at any time without loss. Messages of processes that do
  // not know the secret or belong to another user are ignored.
  // - `names`: socket names of all ranks, which must be listening.
  // - `rank_is_lost`: a descriptor that becomes readable when a rank is lost.
  //
  // Throws Failure; it then closes its socket, which the other ranks notice.
  Result run(int rank, const std::vector<std::string>& names, const Secret& secret, int workspace, int rank_is_lost,
             double limit_s);

 private:
  std::string name_;
  Descriptor server_;
};

}  // namespace llm_comm::nccl
