// Random elements for the tensors of schedules.
#pragma once

#include <cstdint>
#include <string>

#include "emulator/deterministic/random.h"
#include "llm_comm/data_type.h"

namespace llm_comm::inline LLM_COMM_TARGET::schedules {

using emulator::Random;

std::string hex(uint64_t value);

// A multiple of 1/64 between -32 and 32: fp32 sums of eight are exact.
uint32_t draw_number(DataType type, Random& random);

// Mostly a number as draw_number(); else random bits, or values that algorithms treat specially.
uint32_t draw_value(DataType type, Random& random);

}  // namespace llm_comm::inline LLM_COMM_TARGET::schedules
