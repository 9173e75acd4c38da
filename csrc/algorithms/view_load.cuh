// ViewLoad: the first load of a kernel in two steps, so that other loads can be in flight at the same time.
#pragma once

#include "llm_comm/line.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Load of a line of a View (message.cuh, shard_view.cuh). A View has
//
//   is_whole_input(line)     true if the line can be loaded whole
//   input_from(line)         its address
//   load_by_elements(line)   the slow path for partial or unaligned lines
//
// Construct it before grid_dependency_wait(). begin() loads unconditionally, from `spare` memory if no whole line is
// wanted: a condition would cost a branch in front of the load.
template <class View>
class ViewLoad {
 public:
  LLM_COMM_DEVICE ViewLoad() {}  // an empty load

  LLM_COMM_DEVICE ViewLoad(const View& view, uint32_t line, bool is_wanted, const void* spare)
      : view_(&view),
        line_(line),
        is_later_(is_wanted && !view.is_whole_input(line)),
        address_(is_wanted && !is_later_ ? view.input_from(line) : spare) {}

  LLM_COMM_DEVICE uint64_t precomputed() const { return reinterpret_cast<uint64_t>(address_); }

  LLM_COMM_DEVICE void begin() { value_ = load_line(address_); }

  // Returns the line; unspecified unless wanted.
  LLM_COMM_DEVICE Line end() const { return is_later_ ? view_->load_by_elements(line_) : value_; }

 private:
  const View* view_;
  uint32_t line_;
  bool is_later_;
  const void* address_;
  Line value_{};
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
