// LL lines that carry any bytes (LLSession sends numbers: a word that equals the sentinel arrives as the NaN beside it).
//
// A line that holds such a word, or the word it would become, is followed by a mask, which tells the two apart. Sender and
// receiver see by themselves whether there is one. So a line costs no more than its own bytes where there is none, and
// there hardly ever is: 2 of 2^32 words ask for it.
//
// In a slot the masks lie behind the lines: [sender][line], then [sender][mask], 4 bytes each. They are armed, received and
// re-armed like lines: no mask equals the sentinel.
#pragma once

#include "llm_comm/ll_session.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// The mask of a line that has come; its word is armed again. kSentinel if the wait was aborted. Hardly ever runs: apart from what
// does.
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
  // What `sender_lines` lines of each of the other ranks of `world` take of a slot, in bytes.
  LLM_COMM_HOST static constexpr uint64_t slot_bytes(uint64_t sender_lines, uint64_t world) {
    return (world - 1) * sender_lines * (sizeof(Line) + sizeof(uint32_t));
  }

  // Of a session whose slots are divided into `sender_lines`, with places from `first_line` on.
  LLM_COMM_DEVICE LLBytes(LLSessionOf<Peers>& session, const DeviceComm& comm, uint64_t sender_lines,
                          uint32_t first_line = 0)
      : session_(session),
        comm_(comm),
        to_masks_(static_cast<uint64_t>(comm.world_size - 1) * sender_lines * sizeof(Line)),
        sender_lines_(sender_lines),
        first_line_(first_line) {}

  // To all peers of the session.
  LLM_COMM_DEVICE void send(uint64_t place, Line payload) const {
    LLM_COMM_UNROLL(8)
    for (uint32_t k = 0; k < Peers; ++k) session_.send_to(k, place, payload);
    const AmbiguousWords words = ambiguous_words(payload);
    if (!words.are_there) return;
    LLM_COMM_UNROLL(1)
    for (uint32_t k = 0; k < Peers; ++k) {
      store_relaxed(mask(session_.slot_of_receiver(k), session_.sends_as(k), place), words.mask);
    }
  }

  // As LLSessionOf::receive_each(). Re-arms what it has received.
  LLM_COMM_DEVICE void receive_each(uint64_t place, const bool (&is_wanted)[Peers], Line (&lines)[Peers],
                                    uint32_t phase) {
    session_.receive_each(place, is_wanted, lines, phase);
    if (session_.aborted()) return;
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < Peers; ++i) {
      if (is_wanted[i]) session_.re_arm_of(i, place);
    }
    bool is_any_ambiguous = false;
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < Peers; ++i) is_any_ambiguous = is_any_ambiguous || has_ambiguous_words(lines[i]);
    if (!is_any_ambiguous) return;
    LLM_COMM_UNROLL(8)
    for (uint32_t i = 0; i < Peers; ++i) {
      if (has_ambiguous_words(lines[i])) decode(i, place, lines[i], phase);
    }
  }

  LLM_COMM_DEVICE Line receive(uint64_t place, uint32_t phase) {
    static_assert(Peers == 1);
    Line line[1];
    receive_each(place, {true}, line, phase);
    return line[0];
  }

 private:
  LLM_COMM_DEVICE void decode(uint32_t i, uint64_t place, Line& line, uint32_t phase) {
    if (session_.aborted()) return;
    uint32_t* const incoming = mask(session_.own_slot(), session_.receives_as(i), place);
    const uint32_t found = receive_mask(comm_, incoming, session_.in_wait(), session_.sender(i), phase);
    if (found == kSentinel) {
      session_.note_abort();
    } else {
      line = decode_ambiguous(line, found);
    }
  }

  LLM_COMM_DEVICE uint32_t* mask(char* slot, uint32_t sender, uint64_t place) const {
    return reinterpret_cast<uint32_t*>(slot + to_masks_) + sender * sender_lines_ + first_line_ + place;
  }

  LLSessionOf<Peers>& session_;
  const DeviceComm& comm_;
  uint64_t to_masks_;  // bytes from the beginning of a slot
  uint64_t sender_lines_;
  uint32_t first_line_;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
