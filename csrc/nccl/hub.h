// Where the ranks of a communicator meet: a thread of the process that made the ncclUniqueId. It knows ranks by the secret, and
// then serves rounds: when each rank has sent a message, each gets those of all. Where a rank leaves or is lost it cuts off the others,
// so that nobody waits for it.
#pragma once

#include <optional>

#include "nccl/unique_id.h"

namespace llm_comm::nccl {

// Opens a hub and leaves it to its thread, which ends with the last rank's connection. `real_id`: handed out to all.
// `limit_s`: from the first rank's coming on, all have to come within it. Throws Failure.
MeetingPlace open_hub(const std::optional<ncclUniqueId>& real_id, double limit_s);

}  // namespace llm_comm::nccl
