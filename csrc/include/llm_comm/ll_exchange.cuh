// The exchange of sentinel lines (line.cuh) through the slots of a workspace: send, receive, re-arm.
#pragma once

#include "llm_comm/line.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// `line` lies in the peer's slot.
LLM_COMM_DEVICE void send_line(Line* line, Line payload) { store_line_relaxed(line, encode_sentinel(payload)); }

// One poll for a line, which is loaded whatever `value` holds. True once it has come.
LLM_COMM_DEVICE bool poll_line(const Line* line, Line& value) {
  value = load_line_relaxed(line);
  return has_arrived(value);
}

// `line` lies in this rank's slot; `op` is an Operation (operation.cuh). If the wait ends without the line, words that have
// not arrived are NaN, so that nobody takes the result for a sum.
template <class Op>
LLM_COMM_DEVICE Line receive_line(const Line* line, Op& op, uint32_t peer, uint32_t phase) {
  Line value = armed_line();
  op.wait_until([&] { return poll_line(line, value); }, peer, phase);
  return value;
}

// One poll for several lines, whose loads are under way at the same time. A line that is armed_line() is loaded; another one has
// come, or is not wanted. True once all have come. A single one is loaded in any case: do not poll for a line that is not wanted.
template <uint32_t N>
LLM_COMM_DEVICE bool poll_lines(const Line* const (&from)[N], Line (&lines)[N]) {
  bool have_come = true;
  if constexpr (N == 1) {
    // Nobody polls once it has come, so there is nothing to ask before.
    have_come = poll_line(from[0], lines[0]);
  } else {
    LLM_COMM_UNROLL(32)
    for (uint32_t i = 0; i < N; ++i) load_line_relaxed_if(!has_arrived(lines[i]), from[i], lines[i]);
    LLM_COMM_UNROLL(32)
    for (uint32_t i = 0; i < N; ++i) have_come = have_come && has_arrived(lines[i]);
  }
  return have_come;
}

// After the line has been received: `line` lies in this rank's slot.
LLM_COMM_DEVICE void re_arm_line(Line* line) { store_line_relaxed(line, armed_line()); }

}  // namespace llm_comm::inline LLM_COMM_TARGET
