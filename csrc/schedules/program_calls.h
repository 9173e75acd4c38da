// The calls of a schedule of a program: what the caller's tensors hold, and what comes out.
#pragma once

#include <vector>

#include "emulator/deterministic/random.h"
#include "schedules/explored_kernel.h"

namespace llm_comm::inline LLM_COMM_TARGET::schedules {

struct ProgramCall {
  ProgramSize size;
  bool is_in_place;
  uint64_t input_shift[kMaxWorldSize];  // bytes by which the rank's tensor lies behind a whole line
  uint64_t output_shift[kMaxWorldSize];
  std::vector<uint32_t> input[kMaxWorldSize];  // words, by rank
  std::vector<uint32_t> expected[kMaxWorldSize];
};

ProgramCall draw_call(const Program& program, emulator::Random& random);

}  // namespace llm_comm::inline LLM_COMM_TARGET::schedules
