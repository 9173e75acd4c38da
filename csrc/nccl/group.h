// Calls between ncclGroupStart() and ncclGroupEnd() of a thread. Calls served by llm_comm are queued until the end.
// Other calls go to the real NCCL library at once, inside a group of that library. So communicators of one thread do
// not block each other.
#pragma once

#include <functional>
#include <memory>

#include "nccl/communicator.h"

namespace llm_comm::nccl {

// Creates communicators; may wait for other ranks. Its result or exception is the group's result.
using Job = std::function<ncclResult_t()>;

struct QueuedJob {
  Job job;
  int device;  // made current while the job runs
  // Parent whose ranks the job uses, or nullptr. Jobs of one parent run in order, as on all of its ranks.
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
// Ends a group; the outermost one runs its content. Throws Failure if there is no group.
ncclResult_t end_group();
// Ends a group without running its content.
ncclResult_t simulate_end_of_group(ncclSimInfo_t* info);

// Run the job or call now, or queue it if a group is open.
ncclResult_t run_or_queue(QueuedJob job);
ncclResult_t run_or_queue(QueuedCall call);
// Call before a function of the real library: opens a group there if one is open here.
void join_group_of_real_library();
// Records an error of a call in a group, for the result of the group's end.
void note_failure(ncclResult_t result);

}  // namespace llm_comm::nccl
