// Options that the NCCL library reads from the environment. llm_comm/config.py documents their meaning.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace llm_comm::nccl {

struct Options {
  bool enable = true;
  // Longer than the Python default: NCCL programs may let a rank wait while another one, for example, writes a
  // checkpoint.
  double timeout_s = 600;
  uint64_t workspace_bytes = 64 << 20;
  bool pdl = true;
  bool debug = false;
  bool share_gpu = false;
  std::string table;      // file name, or empty
  std::string objection;  // why a variable is invalid, or empty; sent to the other ranks

  // Text of the options that must agree on all ranks.
  std::string digest() const;
};

// `variable`: returns an environment variable, or nullptr. Invalid variables keep their defaults.
Options read_options(const std::function<const char*(const char*)>& variable);
Options options_of_process();

}  // namespace llm_comm::nccl
