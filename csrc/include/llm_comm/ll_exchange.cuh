// The exchange of sentinel lines (line.cuh) through the slots of a workspace: send, receive, re-arm.
#pragma once

#include "llm_comm/line.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// `line` lies in the peer's slot.
LLM_COMM_DEVICE void send_line(Line* line, Line payload) { store_line_relaxed(line, encode_sentinel(payload)); }

// `line` lies in this rank's slot; `op` is an Operation (operation.cuh). If the wait ends without the line, words that have
// not arrived are NaN, so that nobody takes the result for a sum.
template <class Op>
LLM_COMM_DEVICE Line receive_line(const Line* line, Op& op, uint32_t peer, uint32_t phase) {
  Line value = armed_line();
  op.wait_until(
      [&] {
        value = load_line_relaxed(line);
        return has_arrived(value);
      },
      peer, phase);
  return value;
}

// After the line has been received: `line` lies in this rank's slot.
LLM_COMM_DEVICE void re_arm_line(Line* line) { store_line_relaxed(line, armed_line()); }

}  // namespace llm_comm::inline LLM_COMM_TARGET
