// Copies of a launch into the tensors of all ranks, which have the same symmetric offset on each.
#pragma once

#include <cstdint>
#include <vector>

#include "algorithms/stream_copies.cuh"
#include "host/copy.h"
#include "host/segments.h"

namespace llm_comm::host {

// Passed to an operation's enqueue() (stream_copies.cuh).
template <class Launcher>
class HeapCopies {
 public:
  // `place`: symmetric offset of the tensors.
  HeapCopies(Launcher& launcher, const Segments& segments, uint64_t place, const uint64_t* buffers, uint64_t stream)
      : launcher_(launcher), segments_(segments), place_(place), buffers_(buffers), stream_(stream) {}

  // Enqueues copies after everything launched on the stream.
  void copy(const std::vector<StreamCopy>& copies) { launcher_.copy(placed(copies), stream_); }

  // Returns the side stream for copies that overlap the launches (CopiesBeside in target.h).
  auto beside() { return launcher_.beside(stream_); }

  // Returns the copies with their addresses. It leaves out copies of a buffer onto itself and copies to an address that is
  // not in the heap; there are none if this rank's tensor is not in it (kNoPlace). The kernels around the copies report a
  // tensor outside the heap.
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
