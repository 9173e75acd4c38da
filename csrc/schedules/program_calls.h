// Calls of a schedule of a DSL kernel: content of the caller's tensors and expected results.
#pragma once

#include <vector>

#include "emulator/deterministic/random.h"
#include "schedules/explored_kernel.h"

namespace llm_comm::inline LLM_COMM_TARGET::schedules {

struct ProgramCall {
  ProgramSize size;
  bool is_in_place;
  uint64_t input_shift[kMaxWorldSize];  // distance in bytes of the rank's tensor from a line boundary
  uint64_t output_shift[kMaxWorldSize];
  std::vector<uint32_t> input[kMaxWorldSize];  // words, by rank
  std::vector<uint32_t> expected[kMaxWorldSize];
};

ProgramCall draw_call(const Program& program, emulator::Random& random);

}  // namespace llm_comm::inline LLM_COMM_TARGET::schedules
