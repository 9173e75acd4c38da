// What the ranks of a communicator tell each other at first, and what follows from it: the same on all.
#pragma once

#include <string>
#include <vector>

#include "algorithms/launch_shape.h"

namespace llm_comm::nccl {

struct Entry {
  std::string host;     // alike for processes that reach each other's memory
  std::string name;     // of its socket for descriptors
  std::string device;   // as tuning tables have it
  std::string uuid;     // of its GPU; "": emulated
  std::string options;  // what has to be alike
  std::string table;
  std::string objection;  // why this rank cannot be set up, or nothing
  uint32_t sm_count = 0;
  uint32_t max_cluster = 0;
  uint32_t compute_capability = 0;
  bool is_enabled = true;
  bool share_gpu = false;
  bool has_real_library = false;

  std::string bytes() const;
  // Throws std::invalid_argument for what no rank writes.
  static Entry from(const std::string& bytes);
};

struct Agreement {
  bool uses_real_library = false;
  std::string why_not_served;  // or nothing
  Limits limits{};             // of all ranks' devices; no bytes of a workspace
};

// `is_offered_real`: who made the id had a library behind this one, too. Throws Failure where there can be no communicator.
Agreement agree(const std::vector<Entry>& entries, bool is_offered_real);

// Of this process: boot and network namespace, in which abstract sockets are found.
std::string host_identity();

}  // namespace llm_comm::nccl
