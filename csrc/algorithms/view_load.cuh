// The first load of a kernel, in two steps: what else is to be loaded can be on its way meanwhile.
#pragma once

#include "llm_comm/line.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// A line of a View (message.cuh, part_view.cuh), which has
//   is_whole_input(line)     whether the line can be loaded whole
//   input_from(line)         its address
//   load_by_elements(line)   what there is of it, the slow way
//
// Construct it before grid_dependency_wait(). The first step is made without a condition, of `spare` memory where no whole line is
// wanted: branches would come before it.
template <class View>
class ViewLoad {
 public:
  LLM_COMM_DEVICE ViewLoad() {}  // of nothing yet

  LLM_COMM_DEVICE ViewLoad(const View& view, uint32_t line, bool is_wanted, const void* spare)
      : view_(&view),
        line_(line),
        is_later_(is_wanted && !view.is_whole_input(line)),
        address_(is_wanted && !is_later_ ? view.input_from(line) : spare) {}

  LLM_COMM_DEVICE uint64_t precomputed() const { return reinterpret_cast<uint64_t>(address_); }

  LLM_COMM_DEVICE void begin() { value_ = load_line(address_); }

  // The line; unspecified unless wanted.
  LLM_COMM_DEVICE Line end() const { return is_later_ ? view_->load_by_elements(line_) : value_; }

 private:
  const View* view_;
  uint32_t line_;
  bool is_later_;
  const void* address_;
  Line value_{};
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
