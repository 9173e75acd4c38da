#include "host/cuda/stream_copies.h"

#include <algorithm>

#include "host/cuda/driver.h"

namespace llm_comm::host {

namespace {

struct Capture {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;

  bool operator==(const Capture& other) const { return status == other.status && id == other.id; }
};

Capture capture_of(cudaStream_t stream) {
  Capture capture;
  check(cudaStreamGetCaptureInfo(stream, &capture.status, &capture.id), "cudaStreamGetCaptureInfo");
  if (capture.status == cudaStreamCaptureStatusNone) capture.id = 0;
  return capture;
}

void enqueue_one(const Copy& copy, cudaStream_t stream) {
  check(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDefault, stream), "a copy of a collective");
}

}  // namespace

// A stream that takes part in a capture is left alone: to destroy it would end the capture.
StreamCopies::~StreamCopies() {
  const BesideCaptures beside;
  for (const Lane& lane : lanes_) {
    cudaStreamCaptureStatus status{};
    if (cudaStreamIsCapturing(lane.stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone) continue;
    cudaEventDestroy(lane.begin);
    cudaEventDestroy(lane.end);
    cudaStreamDestroy(lane.stream);
  }
}

void StreamCopies::enqueue(const std::vector<Copy>& copies, cudaStream_t stream) {
  const auto is_local = [](const Copy& copy) { return copy.is_local; };
  const bool forks =
      std::any_of(copies.begin(), copies.end(), is_local) && !std::all_of(copies.begin(), copies.end(), is_local);
  if (!forks) {
    for (const Copy& copy : copies) enqueue_one(copy, stream);
    return;
  }
  const Lane& lane = lane_beside(stream);
  check(cudaEventRecord(lane.begin, stream), "cudaEventRecord");
  check(cudaStreamWaitEvent(lane.stream, lane.begin, 0), "cudaStreamWaitEvent");
  for (const Copy& copy : copies) enqueue_one(copy, copy.is_local ? lane.stream : stream);
  check(cudaEventRecord(lane.end, lane.stream), "cudaEventRecord");
  check(cudaStreamWaitEvent(stream, lane.end, 0), "cudaStreamWaitEvent");
}

// A stream that was drawn into a capture belongs to it until the capture ends: calls of others need another one.
StreamCopies::Lane& StreamCopies::lane_beside(cudaStream_t stream) {
  const Capture own = capture_of(stream);
  for (Lane& lane : lanes_) {
    const Capture other = capture_of(lane.stream);
    if (other.status == cudaStreamCaptureStatusNone || other == own) return lane;
  }
  const BesideCaptures beside;
  Lane lane;
  check(cudaStreamCreateWithFlags(&lane.stream, cudaStreamNonBlocking), "cudaStreamCreate");
  check(cudaEventCreateWithFlags(&lane.begin, cudaEventDisableTiming), "cudaEventCreate");
  check(cudaEventCreateWithFlags(&lane.end, cudaEventDisableTiming), "cudaEventCreate");
  lanes_.push_back(lane);
  return lanes_.back();
}

}  // namespace llm_comm::host
