// Steps of an operation, of which blocks tell their peers by words (hb_session.cuh has the rules), and the staging memory.
#pragma once

#include "llm_comm/operation.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr uint32_t kMaxStepsLog2 = 16;  // of an operation
// A word of a step may be so much larger than that of the step which is waited for.
inline constexpr uint64_t kFurthestAhead = uint64_t{2} << kMaxStepsLog2;

// The word of a step of an operation, and where `sender` tells it to the block of this number on `receiver`.
LLM_COMM_DEVICE uint64_t word_of_step(uint64_t sequence, uint32_t step) { return (sequence << kMaxStepsLog2) + step; }
LLM_COMM_DEVICE uint64_t* step_word(const DeviceComm& comm, uint32_t block, uint32_t receiver, uint32_t sender) {
  return reinterpret_cast<uint64_t*>(comm.workspace[receiver] + kSemaphoresOffset) + block * kMaxWorldSize + sender;
}

// The first line of a half of a rank's staging memory.
LLM_COMM_DEVICE Line* staging_of(const DeviceComm& comm, uint32_t rank, uint32_t half) {
  const uint64_t half_lines = comm.staging_bytes / (2 * sizeof(Line));
  return reinterpret_cast<Line*>(comm.workspace[rank] + kHeaderBytes + kSlots * comm.slot_bytes) + half * half_lines;
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
