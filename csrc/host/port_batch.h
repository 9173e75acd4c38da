// PortBatch: requests for one peer that the proxy found together, merged into fewer transport calls. Used by
// ProxyPorts.
//
// Every copy and every signal costs some microseconds, however small it is. Puts that are adjacent in source and
// destination are therefore merged, and so are signals to adjacent words. All puts come first, then all signals, then
// all local completions. A waiter thus finds at least the data that was put before its signal.
//
// Of several signals to one word only the last is sent: values only grow, so a waiter accepts the later one too. If two
// destinations overlap, nothing is merged and the requests are executed in order.
#pragma once

#include <cstdint>
#include <vector>

#include "llm_comm/port_ring.h"

namespace llm_comm::host {

struct PortStep {
  uint32_t part;   // one of kPortPut, kPortSignal, kPortLocalCompletion
  uint64_t to;     // destination: workspace offset or heap offset; the peer's, or this rank's for kPortLocalCompletion
  uint64_t from;   // put: source address
  uint64_t bytes;  // put: size
  const uint64_t* values;  // signal, local_completion: values of adjacent words; valid until the batch changes
  uint32_t count;
};

class PortBatch {
 public:
  void clear() { requests_.clear(); }
  void add(const PortRequest& request) { requests_.push_back(request); }
  bool is_empty() const { return requests_.empty(); }
  // Steps to execute, in this order. Valid until the batch changes.
  const std::vector<PortStep>& steps();

 private:
  bool sort_puts();
  void merge_puts();
  void merge_words(uint32_t part);
  void take_in_turn();

  std::vector<PortRequest> requests_;
  std::vector<PortRequest> sorted_;  // requests with the part that is being merged
  std::vector<uint64_t> values_;
  std::vector<PortStep> steps_;
};

}  // namespace llm_comm::host
