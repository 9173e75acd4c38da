// The copies of a call between its grids, in the caller's stream (algorithms/stream_copies.cuh).
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "host/copy.h"

namespace llm_comm::host {

// Copies that are stored run beside those of the copy engines.
class StreamCopies {
 public:
  // With the device current. Throws std::runtime_error.
  StreamCopies();
  StreamCopies(const StreamCopies&) = delete;
  StreamCopies& operator=(const StreamCopies&) = delete;
  ~StreamCopies();

  // What comes next in the stream waits for all of them. With the device current. Throws std::runtime_error.
  void enqueue(const std::vector<Copy>& copies, cudaStream_t stream);

 private:
  // A stream beside that of the caller, which begins behind it and ends before it goes on.
  struct Lane {
    cudaStream_t stream = nullptr;
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
  };

  Lane& lane_beside(cudaStream_t stream);

  std::vector<Lane> lanes_;
};

}  // namespace llm_comm::host
