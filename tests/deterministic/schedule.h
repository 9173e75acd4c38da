// One schedule: all of it follows from its seed.
#pragma once

#include <string>
#include <vector>

#include "emulator/deterministic/machine.h"
#include "gcn/code.h"

namespace drill {

struct Options {
  // Only schedules about this: "" (all), or the name of a subject (subject_names()).
  std::string algorithm;
  // No calls but those that a schedule is about.
  bool alone = false;
  // See weak_memory.h.
  bool grid_end_performs = true;
  // Worlds of more than kMaxExactWorld ranks. Seeds mean other schedules than without.
  bool large = false;
  // In every schedule a rank dies or comes too late, not in some.
  bool mishaps = false;
  // Ranks of every schedule; 0: the seed draws them.
  uint32_t ranks = 0;
  // Kernels that run as machine code in place of the emulated ones.
  const gcn::MachineCode* machine_code = nullptr;
};

// What a mishap led to. `kAllFailed`: all ranks but one at most.
enum class MishapOutcome { kNone, kNobodyFailed, kSomeFailed, kAllFailed };

struct Result {
  std::string failure;  // "" if all was as promised
  std::string description;
  uint64_t steps;
  uint64_t fingerprint;
  MishapOutcome mishap;
};

// Algorithms as operation/algorithm, and forms of message passing.
std::vector<std::string> subject_names();

// Throws std::invalid_argument for an unknown algorithm.
Result run_schedule(llm_comm::emulator::Machine& machine, uint64_t seed, const Options& options);

llm_comm::emulator::Machine make_machine();

}  // namespace drill
