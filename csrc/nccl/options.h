// The options that this library reads from the environment; llm_comm/config.py says what they mean.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace llm_comm::nccl {

struct Options {
  bool enable = true;
  // Longer than elsewhere: NCCL's users may let a rank wait for another one that, say, writes a checkpoint.
  double timeout_s = 600;
  uint64_t workspace_bytes = 64 << 20;
  bool pdl = true;
  bool debug = false;
  bool share_gpu = false;
  std::string table;      // a file, or nothing
  std::string objection;  // why a variable cannot be read, or nothing: the other ranks are to hear of it

  // What has to be alike on all ranks, as a text.
  std::string digest() const;
};

// `variable`: the value of a variable of the environment, or nullptr. Those that cannot be read keep their defaults.
Options read_options(const std::function<const char*(const char*)>& variable);
Options options_of_process();

}  // namespace llm_comm::nccl
