// Argument of a kernel written in llm_comm.dsl. The core launches it as an operation of the communicator
// (host/prepared_program.h).
//
// The buffers of a DSL kernel lie in a workspace of its own in symmetric memory. That workspace has two halves:
// operation e uses half e % 2, as other algorithms use slot e % 2. The argument of operation.cuh holds for the halves
// too, and rules R1 and R2 bind DSL kernels. dsl.check() verifies them.
#pragma once

#include "llm_comm/channels.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Passed by value. The channels lead to the workspace of the DSL kernel.
struct ProgramArgs : Channels {
  char* at[kMaxWorldSize];  // workspaces of rank, rank + 1, ... (modulo the world size), as this rank maps them
  char* input;
  char* output;
  uint64_t part_bytes;              // bytes of one shard: the whole message, or what each rank holds of it
  uint64_t bytes;                   // of the message, for error reports
  uint64_t input_symmetric_offset;  // symmetric offset, where peers access the tensor
  uint64_t output_symmetric_offset;
  OperationKind kind;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
