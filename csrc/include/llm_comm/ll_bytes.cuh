// LL lines that carry arbitrary bytes, for operations that move data without adding it. LLSession alone sends numbers:
// a word equal to the sentinel arrives as kSentinel - 1, another NaN.
//
// A line with a word equal to the sentinel or to kSentinel - 1 is followed by a mask that tells the two apart. Sender
// and receiver each see from the line whether a mask exists. Lines without such words cost nothing extra, and they are
// rare: 2 of 2^32 values.
//
// Masks lie after the lines of a slot: [sender][line], then [sender][mask], 4 bytes each. They are received and reset
// like lines. No mask equals the sentinel.
#pragma once

#include "llm_comm/ll_session.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Waits for a mask and resets its word to the sentinel. Returns kSentinel if the wait was aborted. Runs rarely, so it
// is a call outside the hot path.
LLM_COMM_DEVICE_CALL uint32_t receive_mask(const DeviceComm& comm, uint32_t* incoming, OperationInWait op,
                                           uint32_t peer, uint32_t phase) {
  uint32_t found = kSentinel;
  const auto has_come = [&] {
    found = load_relaxed(incoming);
    return found != kSentinel;
  };
  if (!poll_until(has_come, [&](uint64_t start) { return check_wait_of_operation(comm, start, op, peer, phase); })) {
    return kSentinel;
  }
  store_relaxed(incoming, kSentinel);
  return found;
}

template <uint32_t Peers>
class LLBytes {
 public:
  // Bytes of a slot that `sender_lines` lines of every other rank need, masks included.
  LLM_COMM_HOST static constexpr uint64_t slot_bytes(uint64_t sender_lines, uint64_t world) {
    return (world - 1) * sender_lines * (sizeof(Line) + sizeof(uint32_t));
  }

  // For a session whose slots are divided into `sender_lines` lines per sender. `index` counts from `first_line`.
  LLM_COMM_DEVICE LLBytes(LLSessionOf<Peers>& session, const DeviceComm& comm, uint64_t sender_lines,
                          uint32_t first_line = 0)
      : session_(session),
        comm_(comm),
        to_masks_(static_cast<uint64_t>(comm.world_size - 1) * sender_lines * sizeof(Line)),
        sender_lines_(sender_lines),
        first_line_(first_line) {}

  // Sends to all peers of the session.
  LLM_COMM_DEVICE void send(uint64_t index, Line payload) const {
    LLM_COMM_UNROLL(8)
    for (uint32_t k = 0; k < Peers; ++k) session_.send_to(k, index, payload);
    const AmbiguousWords words = ambiguous_words(payload);
    if (!words.are_there) return;
    LLM_COMM_UNROLL(1)
    for (uint32_t k = 0; k < Peers; ++k) {
      store_relaxed(mask(session_.slot_of_receiver(k), session_.sends_as(k), index), words.mask);
    }
  }

  // As LLSessionOf::receive_each(), but also resets the received lines to the sentinel.
  LLM_COMM_DEVICE void receive_each(uint64_t index, const bool (&is_wanted)[Peers], Line (&lines)[Peers],
                                    uint32_t phase) {
    session_.receive_each(index, is_wanted, lines, phase);
    if (session_.aborted()) return;
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < Peers; ++i) {
      if (is_wanted[i]) session_.reset_of(i, index);
    }
    bool is_any_ambiguous = false;
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < Peers; ++i) is_any_ambiguous = is_any_ambiguous || has_ambiguous_words(lines[i]);
    if (!is_any_ambiguous) return;
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < Peers; ++i) {
      if (has_ambiguous_words(lines[i])) decode(i, index, lines[i], phase);
    }
  }

  LLM_COMM_DEVICE Line receive(uint64_t index, uint32_t phase) {
    static_assert(Peers == 1);
    Line line[1];
    receive_each(index, {true}, line, phase);
    return line[0];
  }

  // Original of a line that the caller has received and reset itself, for threads that poll several lines of the peer.
  LLM_COMM_DEVICE Line restore(uint64_t index, Line line, uint32_t phase) {
    static_assert(Peers == 1);
    if (has_ambiguous_words(line)) decode(0, index, line, phase);
    return line;
  }

 private:
  LLM_COMM_DEVICE void decode(uint32_t i, uint64_t index, Line& line, uint32_t phase) {
    if (session_.aborted()) return;
    uint32_t* const incoming = mask(session_.own_slot(), session_.receives_as(i), index);
    const uint32_t found = receive_mask(comm_, incoming, session_.in_wait(), session_.sender(i), phase);
    if (found == kSentinel) {
      session_.note_abort();
    } else {
      line = decode_ambiguous(line, found);
    }
  }

  LLM_COMM_DEVICE uint32_t* mask(char* slot, uint32_t sender, uint64_t index) const {
    return reinterpret_cast<uint32_t*>(slot + to_masks_) + sender * sender_lines_ + first_line_ + index;
  }

  LLSessionOf<Peers>& session_;
  const DeviceComm& comm_;
  uint64_t to_masks_;  // offset of the masks in a slot
  uint64_t sender_lines_;
  uint32_t first_line_;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
