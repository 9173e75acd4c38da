// Copies of a launch into the tensors of all ranks, which have the same symmetric offset on each.
#pragma once

#include <cstdint>
#include <vector>

#include "algorithms/stream_copies.cuh"
#include "host/copy.h"
#include "host/windows.h"

namespace llm_comm::host {

// Passed to an operation's enqueue() (stream_copies.cuh).
template <class Launcher>
class HeapCopies {
 public:
  // `symmetric_offset`: symmetric offset of the tensors.
  HeapCopies(Launcher& launcher, const Windows& windows, uint64_t symmetric_offset, const uint64_t* buffers,
             uint64_t stream)
      : launcher_(launcher),
        windows_(windows),
        symmetric_offset_(symmetric_offset),
        buffers_(buffers),
        stream_(stream) {}

  // Enqueues copies after everything launched on the stream.
  void copy(const std::vector<StreamCopy>& copies) { launcher_.copy(placed(copies), stream_); }

  // Returns the side stream for copies that overlap the launches (SideStreamCopies in target.h).
  auto side_stream() { return launcher_.side_stream(stream_); }

  // Returns the copies with their addresses. It leaves out copies of a buffer onto itself and copies to an address that
  // is not in the heap; there are none if this rank's tensor is not in it (kNoSymmetricOffset). The kernels around the
  // copies report a tensor outside the heap.
  std::vector<Copy> placed(const std::vector<StreamCopy>& copies) const {
    std::vector<Copy> all;
    if (symmetric_offset_ == kNoSymmetricOffset) return all;
    for (const StreamCopy& copy : copies) {
      char* const to = windows_.address(copy.rank, symmetric_offset_ + copy.to, copy.bytes);
      const char* const from = reinterpret_cast<const char*>(buffers_[copy.buffer]) + copy.from;
      if (to != nullptr && to != from) all.push_back({to, from, copy.bytes, copy.is_stored});
    }
    return all;
  }

 private:
  Launcher& launcher_;
  const Windows& windows_;
  uint64_t symmetric_offset_;
  const uint64_t* buffers_;
  uint64_t stream_;
};

}  // namespace llm_comm::host
