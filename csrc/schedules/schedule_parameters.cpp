#include "schedules/schedule_parameters.h"

#include <algorithm>

namespace llm_comm::inline LLM_COMM_TARGET::schedules {

emulator::ScheduleParameters draw_schedule_parameters(uint32_t ranks, emulator::Random& random) {
  emulator::ScheduleParameters parameters;
  parameters.memory.stale = random.pick({0u, 0u, 16u, 64u, 160u});
  parameters.memory.overtake = random.pick({0u, 64u, 256u});
  parameters.memory.delay = random.pick({0u, 8u, 64u, 256u});
  parameters.memory.local_delay = random.pick({0u, 0u, 8u, 64u});
  if (random.chance(64)) parameters.memory.slow_links = random.next() & random.next() & random.next();

  emulator::SchedulerParameters& scheduler = parameters.scheduler;
  scheduler.policy =
      random.pick({emulator::Policy::kUniform, emulator::Policy::kWeighted, emulator::Policy::kPriorities});
  // As many as 8 ranks have, so that seeds of smaller worlds draw alike.
  const uint32_t weights = std::max<uint32_t>(ranks, kMaxExactWorld);
  for (uint32_t i = 0; i < weights; ++i) scheduler.weight[i] = 1u << random.below(10);
  scheduler.change = random.pick({0u, 64u, 1024u});
  scheduler.preempt = random.pick({0u, 16u, 96u, 256u});
  scheduler.samples = random.between(1, 4);
  scheduler.resident_threads = random.pick({1u, 16u, 48u, 256u});
  scheduler.start_order =
      random.pick({emulator::StartOrder::kAscending, emulator::StartOrder::kDescending, emulator::StartOrder::kAny});
  scheduler.launch_delay = random.pick({0u, 16u, 512u});
  scheduler.completion_delay = random.pick({0u, 16u, 512u});
  if (random.chance(64)) {
    parameters.stalls.push_back(
        {random.below(ranks), random.between(1, 1u << random.below(10)), random.between(1, 20'000)});
  }
  return parameters;
}

namespace {

const char* text(emulator::Ending ending) {
  switch (ending) {
    case emulator::Ending::kStuck:
      return "threads wait for a barrier or a grid that nobody will reach or end";
    case emulator::Ending::kTooLong:
      return "it did not end";
    case emulator::Ending::kFault:
      return "an access that is not defined";
    case emulator::Ending::kDone:
      break;
  }
  return "";
}

}  // namespace

std::string describe(emulator::Ending ending, const emulator::Machine& machine) {
  return std::string(text(ending)) + (machine.fault().empty() ? "" : ": ") + machine.fault();
}

}  // namespace llm_comm::inline LLM_COMM_TARGET::schedules
