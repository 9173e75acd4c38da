#include "host/port_batch.h"

#include <algorithm>

namespace llm_comm::host {

const std::vector<PortStep>& PortBatch::steps() {
  steps_.clear();
  values_.clear();
  values_.reserve(requests_.size() * 2);  // no reallocation: steps point into it
  if (sort_puts()) {
    merge_puts();
    merge_words(kPortSignal);
    merge_words(kPortLocalCompletion);
  } else {
    take_in_turn();
  }
  return steps_;
}

// Sorts the puts by destination. Returns false if two destinations overlap.
bool PortBatch::sort_puts() {
  sorted_.clear();
  std::copy_if(requests_.begin(), requests_.end(), std::back_inserter(sorted_),
               [](const PortRequest& request) { return (request.parts & kPortPut) != 0; });
  std::sort(sorted_.begin(), sorted_.end(),
            [](const PortRequest& a, const PortRequest& b) { return a.destination < b.destination; });
  const auto overlap = [](const PortRequest& a, const PortRequest& b) {
    return a.destination + a.bytes > b.destination;
  };
  return std::adjacent_find(sorted_.begin(), sorted_.end(), overlap) == sorted_.end();
}

void PortBatch::merge_puts() {
  for (const PortRequest& put : sorted_) {
    if (put.bytes == 0) continue;
    PortStep* const last = steps_.empty() ? nullptr : &steps_.back();
    if (last != nullptr && last->to + last->bytes == put.destination && last->from + last->bytes == put.source) {
      last->bytes += put.bytes;
    } else {
      steps_.push_back({kPortPut, put.destination, put.source, put.bytes, nullptr, 0});
    }
  }
}

void PortBatch::merge_words(uint32_t part) {
  sorted_.clear();
  std::copy_if(requests_.begin(), requests_.end(), std::back_inserter(sorted_),
               [part](const PortRequest& request) { return (request.parts & part) != 0; });
  std::stable_sort(sorted_.begin(), sorted_.end(),
                   [](const PortRequest& a, const PortRequest& b) { return a.word < b.word; });
  for (size_t i = 0; i < sorted_.size(); ++i) {
    const PortRequest& request = sorted_[i];
    if (i + 1 < sorted_.size() && sorted_[i + 1].word == request.word) continue;
    values_.push_back(request.value);
    PortStep* const last = steps_.empty() ? nullptr : &steps_.back();
    if (last != nullptr && last->part == part && last->to + last->count * sizeof(uint64_t) == request.word) {
      ++last->count;
    } else {
      steps_.push_back({part, request.word, 0, 0, &values_.back(), 1});
    }
  }
}

void PortBatch::take_in_turn() {
  for (const PortRequest& request : requests_) {
    if ((request.parts & kPortPut) != 0 && request.bytes != 0) {
      steps_.push_back({kPortPut, request.destination, request.source, request.bytes, nullptr, 0});
    }
    for (const uint32_t part : {kPortSignal, kPortLocalCompletion}) {
      if ((request.parts & part) == 0) continue;
      values_.push_back(request.value);
      steps_.push_back({part, request.word, 0, 0, &values_.back(), 1});
    }
  }
}

}  // namespace llm_comm::host
