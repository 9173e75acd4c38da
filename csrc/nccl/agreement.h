// First exchange of a communicator's ranks, and the decisions that follow from it, the same on all ranks. Used by
// Communicator::set_up().
#pragma once

#include <string>
#include <vector>

#include "algorithms/launch_shape.h"

namespace llm_comm::nccl {

struct Entry {
  std::string host;     // equal for processes that can share memory
  std::string name;     // of its socket for file descriptors
  std::string device;   // as named in tuning tables
  std::string uuid;     // of its GPU; "": emulated
  std::string options;  // options that must agree
  std::string table;
  std::string objection;  // why this rank cannot be set up; empty if it can
  uint32_t sm_count = 0;
  uint32_t max_cluster = 0;
  uint32_t compute_capability = 0;
  bool is_enabled = true;
  bool share_gpu = false;
  bool has_real_library = false;

  std::string bytes() const;
  // Throws std::invalid_argument for bytes that no rank writes.
  static Entry from(const std::string& bytes);
};

struct Agreement {
  bool uses_real_library = false;
  std::string why_not_served;  // empty if llm_comm serves the communicator
  Limits limits{};             // minimum over the ranks' devices; without workspace sizes
};

// `is_offered_real`: the process that made the id has a real NCCL library too. Throws Failure if no communicator is
// possible.
Agreement agree(const std::vector<Entry>& entries, bool is_offered_real);

// Identity of this host: boot id and network namespace, within which abstract sockets are found.
std::string host_identity();

}  // namespace llm_comm::nccl
