// How a schedule goes: how weak its memory is, how its threads are chosen, and what its ending means.
#pragma once

#include "emulator/deterministic/machine.h"

namespace llm_comm::inline LLM_COMM_TARGET::schedules {

// Drawn from all of them, for so many ranks.
emulator::Temper draw_temper(uint32_t ranks, emulator::Random& random);

// "" or what went wrong, for an ending other than kDone; with what the machine says of it.
std::string describe(emulator::Ending ending, const emulator::Machine& machine);

}  // namespace llm_comm::inline LLM_COMM_TARGET::schedules
