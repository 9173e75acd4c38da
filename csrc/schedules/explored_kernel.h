// The kernel of a program of llm_comm.dsl in a shared library that runs it under seeded schedules of the deterministic emulator.
// Python's llm_comm.dsl.schedules compiles such libraries, with LLM_COMM_DETERMINISTIC, and fills in the structs.
#pragma once

#include "llm_comm/program.cuh"

namespace llm_comm::inline LLM_COMM_TARGET::schedules {

// A size of messages, and the grid that the kernel has for it.
struct ProgramSize {
  uint64_t part_bytes;  // of a part of the message: whole elements of 4 bytes
  uint32_t blocks;
  uint32_t threads;
};

// Bytes of the workspace that hold the sentinel at first.
struct ArmedRange {
  uint64_t begin;
  uint64_t end;
};

// What is known of a program beside its kernel, which is one for elements of fp32.
struct Program {
  uint32_t world;
  uint32_t groups;        // of blocks, which wait for each other
  uint32_t root;          // whose input counts where results are one rank's
  bool has_parted_input;  // a part for each rank, else one
  bool has_parted_output;
  bool adds_up;              // results are sums of all ranks; else they are moved
  bool sums_in_rank_order;   // and these are bitwise the one sum (reduce.cuh); else they are only exact
  bool works_in_place;       // the output may be the input
  bool has_symmetric_input;  // peers use it, so it lies at the same place on all ranks
  bool has_symmetric_output;
  uint32_t semaphores;  // of its channels
  uint64_t shared_bytes;
  uint64_t workspace_bytes;
  const ArmedRange* armed;
  uint32_t armed_count;
  uint32_t size_count;
  const ProgramSize* sizes;
};

enum class Failure : uint32_t { kNone, kResult, kWait, kNotArmed, kUndefined };

// How schedules went: of the first that failed, else of the last one.
struct Outcome {
  Failure failure;
  uint32_t rank;       // where it failed
  uint32_t peer;       // of a wait: whom it was for
  uint32_t schedules;  // that were run
  uint64_t seed;
  uint64_t step;         // of the schedule: what failed first failed here
  uint64_t steps;        // of the schedule
  uint64_t element;      // of a result: which; of a line that is not armed: its byte of the workspace
  uint64_t part_bytes;   // of the call that failed
  uint64_t fingerprint;  // changes with every access, its order and its value
  char text[512];
};

using ProgramKernel = void (*)(ProgramArgs);

// Runs schedules first_seed, first_seed + 1, ... until one fails. `trace`: a file that gets every access, or nullptr. One call at a
// time.
void explore(const Program& program, ProgramKernel kernel, uint64_t first_seed, uint32_t count, const char* trace,
             Outcome& outcome);

}  // namespace llm_comm::inline LLM_COMM_TARGET::schedules

// What a library offers of its one kernel.
#define LLM_COMM_EXPLORED_KERNEL(name)                                                                               \
  extern "C" void llm_comm_explore(const llm_comm::schedules::Program* program, uint64_t first_seed, uint32_t count, \
                                   const char* trace, llm_comm::schedules::Outcome* outcome) {                       \
    llm_comm::schedules::explore(*program, &name, first_seed, count, trace, *outcome);                               \
  }
