// StreamCopies: copies of a call between its kernels, on the caller's stream or on a side stream
// (algorithms/stream_copies.cuh). Used by the CUDA launcher.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "host/copy.h"
#include "host/cuda/driver.h"

namespace llm_comm::host {

class StreamCopies {
  // Side stream with the events that order it against the caller's stream.
  struct Lane {
    cudaStream_t stream = nullptr;
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
    std::vector<cudaEvent_t> events;
  };

 public:
  // Call with the device current. Throws std::runtime_error.
  StreamCopies();
  StreamCopies(const StreamCopies&) = delete;
  StreamCopies& operator=(const StreamCopies&) = delete;
  ~StreamCopies();

  // Enqueues copies; later work of the stream waits for all of them. Copies marked is_stored run beside those of the
  // copy engines. Call with the device current. Throws std::runtime_error.
  void enqueue(const std::vector<Copy>& copies, cudaStream_t stream);

  // Copies on a side stream (SideStreamCopies of target.h). The functions throw std::runtime_error.
  class SideStream {
   public:
    SideStream(StreamCopies& copies, int device, cudaStream_t stream);

    void follow();
    void copy(const std::vector<Copy>& copies);
    void record_event(uint32_t number);
    void wait_event(uint32_t number);
    void join();

   private:
    DeviceGuard guard_;
    Lane& lane_;
    cudaStream_t stream_;
  };

 private:
  Lane& lane_of(cudaStream_t stream);

  std::vector<Lane> lanes_;
};

}  // namespace llm_comm::host
