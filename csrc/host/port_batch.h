// Requests to one peer that have come together, and what is to be done for them.
//
// A copy takes some microseconds, however small it is, and so does a signal. So puts that are neighbours in the source and in the
// destination become one, and so do signals to neighbouring words. All signals come behind all puts, and echoes last: whoever
// waits for a signal finds what was put before it, and more.
//
// Of several signals to one word only the last is sent: values grow, so whoever waits for one takes a later one too. Where two
// destinations overlap, everything is done as it was asked for, one after the other.
#pragma once

#include <cstdint>
#include <vector>

#include "llm_comm/port_ring.h"

namespace llm_comm::host {

struct PortStep {
  uint32_t part;           // kPortPut, kPortSignal, kPortEcho
  uint64_t to;             // offset in a workspace: the peer's, or this rank's for an echo
  uint64_t from;           // of a put: address
  uint64_t bytes;          // of a put
  const uint64_t* values;  // of the others: of neighbouring words, valid until the batch changes
  uint32_t count;
};

class PortBatch {
 public:
  void clear() { requests_.clear(); }
  void add(const PortRequest& request) { requests_.push_back(request); }
  bool is_empty() const { return requests_.empty(); }
  // What is to be done, in this order. Valid until the batch changes.
  const std::vector<PortStep>& steps();

 private:
  bool sort_puts();
  void merge_puts();
  void merge_words(uint32_t part);
  void take_in_turn();

  std::vector<PortRequest> requests_;
  std::vector<PortRequest> sorted_;  // those with one part
  std::vector<uint64_t> values_;
  std::vector<PortStep> steps_;
};

}  // namespace llm_comm::host
