// Signal words of HB and port operations, which carry an operation number and a step (hb_session.cuh has the rules),
// and the addresses of staging memory.
#pragma once

#include "llm_comm/operation.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

inline constexpr uint32_t kMaxStepsLog2 = 16;  // bound on the steps of an operation
// A wait for step s of operation e accepts words from word_of_step(e, s) up to this much more. The sender may have gone
// on to a later step, or to the next operation, but no further (H1, H2 of hb_session.cuh). Older words, and the initial
// fill of the workspace, differ by more in unsigned arithmetic.
inline constexpr uint64_t kFurthestAhead = uint64_t{2} << kMaxStepsLog2;

// Whether a signal word says that the sender has reached a step.
struct HasReached {
  uint64_t word_of_step;

  LLM_COMM_DEVICE bool operator()(uint64_t word) const { return word - word_of_step < kFurthestAhead; }
};

// Signal words of the blocks of one number, on all ranks. Only the signal range that owns them creates a SignalRow.
class SignalRow {
 public:
  // `block`: below Range::kBlocks, which bounds the grid.
  template <class Range>
  LLM_COMM_DEVICE static SignalRow of(uint32_t block) {
    return SignalRow(Range::kFirst + block);
  }

  // The word in receiver's workspace by which `sender` signals its steps.
  LLM_COMM_DEVICE uint64_t* word(const DeviceComm& comm, uint32_t receiver, uint32_t sender) const {
    return reinterpret_cast<uint64_t*>(comm.workspace[receiver] + kSignalsOffset) + row_ * kMaxWorldSize + sender;
  }

 private:
  LLM_COMM_DEVICE explicit SignalRow(uint32_t row) : row_(row) {}

  uint32_t row_;
};

// Value of the signal word for a step of an operation.
LLM_COMM_DEVICE uint64_t word_of_step(uint64_t sequence, uint32_t step) { return (sequence << kMaxStepsLog2) + step; }

// Words from `sender` to `receiver` that are not steps: the symmetric offset of its output, and the last operation
// whose data it has received.
LLM_COMM_DEVICE uint64_t* offset_word(const DeviceComm& comm, uint32_t receiver, uint32_t sender) {
  return reinterpret_cast<uint64_t*>(comm.workspace[receiver] + kOutputOffsetsOffset) + sender;
}
LLM_COMM_DEVICE uint64_t* end_word(const DeviceComm& comm, uint32_t receiver, uint32_t sender) {
  return reinterpret_cast<uint64_t*>(comm.workspace[receiver] + kEndsOffset) + sender;
}

// First line of a half of a rank's staging memory. Operations use the halves for their two exchanges, or one half
// alone. When a line may be written again, the file of each operation says: step_pipeline.cuh, port_chunks.cuh,
// switch_chunks.cuh and two_shot_ld_reduce.cuh.
LLM_COMM_DEVICE Line* staging_of(const DeviceComm& comm, uint32_t rank, uint32_t half) {
  const uint64_t half_lines = comm.staging_bytes / (2 * sizeof(Line));
  return reinterpret_cast<Line*>(comm.workspace[rank] + kHeaderBytes + kSlots * comm.slot_bytes) + half * half_lines;
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
