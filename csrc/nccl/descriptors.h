// Descriptors of workspaces from rank to rank, over unix sockets of this host (and network namespace).
#pragma once

#include <sys/types.h>

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

  struct Result {
    std::vector<Descriptor> descriptors;  // by rank; none of this one
    std::vector<pid_t> processes;         // by rank, as this process sees them; 0: not
  };
  // Sends `descriptor` to all others and gets theirs. `names`: of all ranks, whose sockets listen. Descriptors of those who do not know
  // the secret, or are of another user, are dropped. Throws Failure.
  Result run(int rank, const std::vector<std::string>& names, const Secret& secret, int descriptor, double limit_s);

 private:
  std::string name_;
  Descriptor server_;
};

}  // namespace llm_comm::nccl
