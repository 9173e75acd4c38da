// Hub: a thread in the process that made the ncclUniqueId, where the ranks of a communicator meet. It recognizes ranks
// by the secret. In each round it collects one message of every rank and sends all messages to every rank. If a rank
// leaves or is lost, the hub disconnects the others, so that none waits for it.
#pragma once

#include <optional>

#include "nccl/unique_id.h"

namespace llm_comm::nccl {

// Opens a hub. Its thread ends with the last rank's connection. `real_id`: sent to all ranks. `limit_s`: time within
// which all ranks must connect after the first one. Throws Failure.
HubAddress open_hub(const std::optional<ncclUniqueId>& real_id, double limit_s);

}  // namespace llm_comm::nccl
