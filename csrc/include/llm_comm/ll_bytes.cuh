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

class LLBytes {
 public:
  // What `sender_lines` lines of each of the other ranks of `world` take of a slot, in bytes.
  LLM_COMM_HOST static constexpr uint64_t slot_bytes(uint64_t sender_lines, uint64_t world) {
    return (world - 1) * sender_lines * (sizeof(Line) + sizeof(uint32_t));
  }

  // Of a session whose slots are divided into `sender_lines`.
  LLM_COMM_DEVICE LLBytes(LLSession& session, const DeviceComm& comm, uint64_t sender_lines)
      : session_(session),
        to_masks_(static_cast<uint64_t>(comm.world_size - 1) * sender_lines * sizeof(Line)),
        sender_lines_(sender_lines) {}

  LLM_COMM_DEVICE void send(uint64_t place, Line payload) const {
    session_.send(place, payload);
    const AmbiguousWords words = ambiguous_words(payload);
    if (words.are_there) store_relaxed(mask(session_.slot_of_peer(), session_.sends_as(), place), words.mask);
  }

  // Re-arms what it has received.
  LLM_COMM_DEVICE Line receive(uint64_t place, uint32_t phase) {
    const Line line = session_.receive(place, phase);
    if (session_.aborted()) return line;
    session_.re_arm(place);
    if (!has_ambiguous_words(line)) return line;
    uint32_t* const incoming = mask(session_.own_slot(), session_.receives_as(), place);
    uint32_t found = kSentinel;
    session_.wait_until(
        [&] {
          found = load_relaxed(incoming);
          return found != kSentinel;
        },
        phase);
    if (session_.aborted()) return line;
    store_relaxed(incoming, kSentinel);
    return decode_ambiguous(line, found);
  }

 private:
  LLM_COMM_DEVICE uint32_t* mask(char* slot, uint32_t sender, uint64_t place) const {
    return reinterpret_cast<uint32_t*>(slot + to_masks_) + sender * sender_lines_ + place;
  }

  LLSession& session_;
  uint64_t to_masks_;  // bytes from the beginning of a slot
  uint64_t sender_lines_;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
