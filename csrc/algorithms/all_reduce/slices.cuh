// Slices of a message, one for each rank, which reduces it. Used by two-shot all-reduce.
#pragma once

#include "algorithms/all_reduce/message.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Lines of a slice. The last slices may be short or empty.
LLM_COMM_DEVICE uint32_t lines_of_slice(uint32_t owner, uint32_t slice, uint32_t lines) {
  const uint32_t first = owner * slice;
  return first >= lines ? 0 : (lines - first < slice ? lines - first : slice);
}

// A rank's slice as a view of lines.
template <DataType D>
class Slice {
 public:
  LLM_COMM_DEVICE Slice(const Message<D>& message, uint32_t owner, uint32_t slice, uint32_t lines)
      : message_(message), first_(owner * slice), lines_(lines_of_slice(owner, slice, lines)) {}

  LLM_COMM_DEVICE uint32_t lines() const { return lines_; }
  LLM_COMM_DEVICE Line load(uint32_t line) const { return message_.load(first_ + line); }
  LLM_COMM_DEVICE void store(uint32_t line, Line value) const { message_.store(first_ + line, value); }

 private:
  const Message<D>& message_;
  uint32_t first_;
  uint32_t lines_;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
