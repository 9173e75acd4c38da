// Exports a DSL kernel (llm_comm.dsl) from a shared library that runs it under seeded schedules of the deterministic
// emulator. Python's llm_comm.dsl.schedules compiles such libraries with LLM_COMM_DETERMINISTIC and fills in the
// structs.
#pragma once

#include "llm_comm/program.cuh"

namespace llm_comm::inline LLM_COMM_TARGET::schedules {

// A message size and the kernel's grid for it.
struct ProgramSize {
  uint64_t part_bytes;  // bytes of a shard of the message; whole elements of 4 bytes
  uint32_t blocks;
  uint32_t threads;
};

// Bytes of the workspace that hold the sentinel at first.
struct SentinelRange {
  uint64_t begin;
  uint64_t end;
};

// Properties of a DSL kernel. The kernel is compiled for fp32 elements.
struct Program {
  uint32_t world;
  uint32_t groups;        // groups of blocks that wait for each other
  uint32_t root;          // rank whose input counts, if results are one rank's
  bool has_parted_input;  // one shard per rank, else a single one
  bool has_parted_output;
  bool adds_up;              // results are sums over all ranks; else data is moved
  bool sums_in_rank_order;   // sums are bitwise those of reduce.cuh; else only exact sums are compared
  bool works_in_place;       // the output may be the input
  bool has_symmetric_input;  // peers access it, so it has the same symmetric offset on all ranks
  bool has_symmetric_output;
  uint32_t semaphores;  // semaphores of its channels
  uint64_t shared_bytes;
  uint64_t workspace_bytes;
  const SentinelRange* sentinel_ranges;
  uint32_t sentinel_range_count;
  uint32_t size_count;
  const ProgramSize* sizes;
};

enum class Failure : uint32_t { kNone, kResult, kWait, kNotReset, kUndefined };

// Result of the schedules: of the first that failed, else of the last one.
struct Outcome {
  Failure failure;
  uint32_t rank;       // where it failed
  uint32_t peer;       // of a wait: the rank that was waited for
  uint32_t schedules;  // number of schedules run
  uint64_t seed;
  uint64_t step;         // step of the first failure in the schedule
  uint64_t steps;        // length of the schedule
  uint64_t element;      // index of a wrong result, or workspace byte of a line that does not hold the sentinel
  uint64_t part_bytes;   // size of a shard in the failed call
  uint64_t fingerprint;  // hash of the order and the value of every access
  char text[512];
};

using ProgramKernel = void (*)(ProgramArgs);

// Runs schedules first_seed, first_seed + 1, ... until one fails. `trace`: file that receives every access, or nullptr.
// Not reentrant.
void explore(const Program& program, ProgramKernel kernel, uint64_t first_seed, uint32_t count, const char* trace,
             Outcome& outcome);

}  // namespace llm_comm::inline LLM_COMM_TARGET::schedules

// Function that a library with one kernel exports.
#define LLM_COMM_EXPLORED_KERNEL(name)                                                                               \
  extern "C" void llm_comm_explore(const llm_comm::schedules::Program* program, uint64_t first_seed, uint32_t count, \
                                   const char* trace, llm_comm::schedules::Outcome* outcome) {                       \
    llm_comm::schedules::explore(*program, &name, first_seed, count, trace, *outcome);                               \
  }
