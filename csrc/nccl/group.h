// Calls between ncclGroupStart() and ncclGroupEnd() of a thread: what is served here waits until the end, what is not goes to the real
// library at once, in a group of its own there. So communicators of one thread do not wait for each other.
#pragma once

#include <functional>
#include <memory>

#include "nccl/communicator.h"

namespace llm_comm::nccl {

// Makes communicators, and may wait for other ranks. What it throws or returns is the group's result.
using Job = std::function<ncclResult_t()>;

struct QueuedJob {
  Job job;
  int device;  // current while it runs
  // Over whose ranks it makes one, or none. The jobs of one communicator run in their order, as on all of its ranks.
  std::shared_ptr<Communicator> communicator = nullptr;
};

struct QueuedCall {
  std::shared_ptr<Communicator> communicator;
  Message message;
  const void* send;
  void* recv;
  uint64_t stream;
};

bool is_in_group();
void begin_group();
// Runs what the group holds, if it is the outermost. Throws Failure for an end without its beginning.
ncclResult_t end_group();
// Ends it and runs nothing.
ncclResult_t simulate_end_of_group(ncclSimInfo_t* info);

// Now, or at the end of the group.
ncclResult_t run_or_queue(QueuedJob job);
ncclResult_t run_or_queue(QueuedCall call);
// Before a call of the real library: in a group it has to be in one, too.
void join_group_of_real_library();
// What goes wrong in a group is the result of its end too.
void note_failure(ncclResult_t result);

}  // namespace llm_comm::nccl
