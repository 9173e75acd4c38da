// The copies of a call between its grids, in the caller's stream or beside it (algorithms/stream_copies.cuh).
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "host/copy.h"
#include "host/cuda/driver.h"

namespace llm_comm::host {

class StreamCopies {
  // A stream beside that of the caller, which begins behind it and ends before it goes on.
  struct Lane {
    cudaStream_t stream = nullptr;
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
    std::vector<cudaEvent_t> marks;
  };

 public:
  // With the device current. Throws std::runtime_error.
  StreamCopies();
  StreamCopies(const StreamCopies&) = delete;
  StreamCopies& operator=(const StreamCopies&) = delete;
  ~StreamCopies();

  // What comes next in the stream waits for all of them. Copies that are stored run beside those of the copy engines. With the device
  // current. Throws std::runtime_error.
  void enqueue(const std::vector<Copy>& copies, cudaStream_t stream);

  // Copies in a stream beside the caller's, CopiesBeside of target.h. Its functions throw std::runtime_error.
  class Beside {
   public:
    Beside(StreamCopies& copies, int device, cudaStream_t stream);

    void follow();
    void copy(const std::vector<Copy>& copies);
    void mark(uint32_t number);
    void hold(uint32_t number);
    void join();

   private:
    DeviceGuard guard_;
    Lane& lane_;
    cudaStream_t stream_;
  };

 private:
  Lane& lane_beside(cudaStream_t stream);

  std::vector<Lane> lanes_;
};

}  // namespace llm_comm::host
