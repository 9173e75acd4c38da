// Allocates the workspaces of a communicator's ranks and maps each on all other ranks.
#pragma once

#include <string>
#include <vector>

#include "host/core.h"
#include "nccl/bootstrap.h"
#include "nccl/descriptors.h"

namespace llm_comm::nccl {

// Collective. Verifies the mappings with a store of every rank to every other one. Returns pidfds of the peers by rank
// (DescriptorExchange::Result). Throws Failure on all ranks alike.
std::vector<Descriptor> map_workspaces(host::Core& core, Bootstrap& bootstrap, DescriptorExchange& exchange,
                                       const std::vector<std::string>& names, double limit_s);

}  // namespace llm_comm::nccl
