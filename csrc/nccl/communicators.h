// Our communicator beside a handle of the API. Where there is a real library the handle is that library's, so that functions which are
// not known here take it too; else it is made of ours.
#pragma once

#include <memory>

#include "nccl/communicator.h"

namespace llm_comm::nccl {

// Nothing where the handle is the real library's alone, or of nobody. Throws Failure (ncclInvalidUsage) where it was made by a process
// that has forked this one.
std::shared_ptr<Communicator> find(ncclComm_t handle);
void add(ncclComm_t handle, std::shared_ptr<Communicator> communicator);
// Returns what was there; as find().
std::shared_ptr<Communicator> remove(ncclComm_t handle);

}  // namespace llm_comm::nccl
