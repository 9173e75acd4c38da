// Send, receive and reset of sentinel lines (line.cuh) in the slots of a workspace. LLSession (ll_session.cuh) is built
// on these functions.
#pragma once

#include "llm_comm/line.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// `line` lies in the peer's slot.
LLM_COMM_DEVICE void send_line(Line* line, Line payload) { store_line_relaxed(line, encode_sentinel(payload)); }

// Polls one line once. Loads it whatever `value` holds. Returns true once the line has arrived.
LLM_COMM_DEVICE bool poll_line(const Line* line, Line& value) {
  value = load_line_relaxed(line);
  return has_arrived(value);
}

// Waits for `line` in this rank's slot; `op` is an Operation (operation.cuh). After an aborted wait, words that have
// not arrived are NaN, so the result cannot pass for a valid sum.
template <class Op>
LLM_COMM_DEVICE Line receive_line(const Line* line, Op& op, uint32_t peer, uint32_t phase) {
  Line value = sentinel_line();
  op.wait_until([&] { return poll_line(line, value); }, peer, phase);
  return value;
}

// Polls N lines once, with all loads in flight at the same time. Initialise a wanted line to sentinel_line() and an
// unwanted one to anything else: only lines that read as "not arrived" are loaded. Returns true once all wanted lines
// have arrived. With N == 1 the line is always loaded, so it must be wanted.
template <uint32_t N>
LLM_COMM_DEVICE bool poll_lines(const Line* const (&from)[N], Line (&lines)[N]) {
  bool have_come = true;
  if constexpr (N == 1) {
    // A single line is polled only until it arrives, so testing `lines[0]` first is unnecessary.
    have_come = poll_line(from[0], lines[0]);
  } else {
    LLM_COMM_UNROLL(32)
    for (uint32_t i = 0; i < N; ++i) load_line_relaxed_if(!has_arrived(lines[i]), from[i], lines[i]);
    LLM_COMM_UNROLL(32)
    for (uint32_t i = 0; i < N; ++i) have_come = have_come && has_arrived(lines[i]);
  }
  return have_come;
}

// Resets a received line of this rank's slot to the sentinel.
LLM_COMM_DEVICE void reset_line(Line* line) { store_line_relaxed(line, sentinel_line()); }

}  // namespace llm_comm::inline LLM_COMM_TARGET
