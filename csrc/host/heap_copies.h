// Copies of a launch to the tensors of all ranks, which lie at one place of the symmetric heap.
#pragma once

#include <cstdint>
#include <vector>

#include "algorithms/stream_copies.cuh"
#include "host/copy.h"
#include "host/segments.h"

namespace llm_comm::host {

// What an operation's enqueue() is given (stream_copies.cuh).
template <class Launcher>
class HeapCopies {
 public:
  // `place`: of the symmetric tensors.
  HeapCopies(Launcher& launcher, const Segments& segments, uint64_t place, const uint64_t* buffers, uint64_t stream)
      : launcher_(launcher), segments_(segments), place_(place), buffers_(buffers), stream_(stream) {}

  // Behind what has been launched.
  void copy(const std::vector<StreamCopy>& copies) { launcher_.copy(placed(copies), stream_); }

  // For copies beside what is launched (CopiesBeside in target.h).
  auto beside() { return launcher_.beside(stream_); }

  // Where a tensor is not in the heap there is nowhere to copy to, and its kernels say so.
  std::vector<Copy> placed(const std::vector<StreamCopy>& copies) const {
    std::vector<Copy> all;
    if (place_ == kNoPlace) return all;
    for (const StreamCopy& copy : copies) {
      char* const to = segments_.address(copy.rank, place_ + copy.to, copy.bytes);
      const char* const from = reinterpret_cast<const char*>(buffers_[copy.buffer]) + copy.from;
      if (to != nullptr && to != from) all.push_back({to, from, copy.bytes, copy.is_stored});
    }
    return all;
  }

 private:
  Launcher& launcher_;
  const Segments& segments_;
  uint64_t place_;
  const uint64_t* buffers_;
  uint64_t stream_;
};

}  // namespace llm_comm::host
