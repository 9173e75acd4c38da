// Schedule parameters: draws the weakness of memory and the scheduler's behaviour, and describes how a schedule ended.
#pragma once

#include "emulator/deterministic/machine.h"

namespace llm_comm::inline LLM_COMM_TARGET::schedules {

// Draws random parameters for `ranks` ranks.
emulator::ScheduleParameters draw_schedule_parameters(uint32_t ranks, emulator::Random& random);

// Description of an ending other than kDone, with the machine's fault; "" for kDone.
std::string describe(emulator::Ending ending, const emulator::Machine& machine);

}  // namespace llm_comm::inline LLM_COMM_TARGET::schedules
