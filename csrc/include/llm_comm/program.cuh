// What a kernel of llm_comm.dsl is given, which its core launches as one of the communicator's operations (host/prepared_program.h).
//
// A program's buffers lie in a workspace of its own, in symmetric memory, which has two halves: operation e uses half e % 2, as it
// uses slot e % 2 of an algorithm. So what operation.cuh says of slots and of sequences of operations holds here too, and
// rules R1 and R2 bind programs: dsl.check() sees to them.
#pragma once

#include "llm_comm/channels.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// By value. The channels are those of the workspace.
struct ProgramArgs : Channels {
  char* at[kMaxWorldSize];  // the workspace of this rank, of the next one, ..., as this rank maps them
  char* input;
  char* output;
  uint64_t part_bytes;   // of a part of the message: all of it, or what there is for each rank
  uint64_t bytes;        // of the message, for errors
  uint64_t input_place;  // in the symmetric heap, where peers use it
  uint64_t output_place;
  OperationKind kind;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
