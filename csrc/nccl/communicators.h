// Map from handles of the API to our communicators. With a real NCCL library the handle is that library's, so that its
// other functions accept it too. Without one the handle is the address of our communicator.
#pragma once

#include <memory>

#include "nccl/communicator.h"

namespace llm_comm::nccl {

// nullptr if only the real library knows the handle, or nobody. Throws Failure (ncclInvalidUsage) if the handle was
// created before this process was forked.
std::shared_ptr<Communicator> find(ncclComm_t handle);
void add(ncclComm_t handle, std::shared_ptr<Communicator> communicator);
// Removes and returns the communicator, as find().
std::shared_ptr<Communicator> remove(ncclComm_t handle);

}  // namespace llm_comm::nccl
