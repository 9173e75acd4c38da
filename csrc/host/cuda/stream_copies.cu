#include "host/cuda/stream_copies.h"

#include <algorithm>
#include <stdexcept>

#include "host/cuda/driver.h"
#include "llm_comm/workspace_layout.h"

namespace llm_comm::host {

namespace {

// A quarter of the SMs of a large GPU: enough for the rank's own shard to be complete before its copies to the peers
// (docs/experiments/channels.md). Not measured: other numbers.
constexpr uint32_t kStoreBlocks = 32;
constexpr uint32_t kStoreThreads = 512;
constexpr uint32_t kStoresUnderWay = 4;  // loads in flight per thread

struct StoredCopies {
  Copy copy[kMaxWorldSize];
  uint32_t count;
};

// Executes the copies one after the other, each with the whole grid. Addresses are aligned to uint4.
__global__ void __launch_bounds__(kStoreThreads) store_copies(const __grid_constant__ StoredCopies stored) {
  const uint64_t threads = uint64_t{gridDim.x} * blockDim.x;
  const uint64_t thread = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
#pragma unroll 1
  for (uint32_t c = 0; c < stored.count; ++c) {
    const Copy& copy = stored.copy[c];
    const auto* const from = reinterpret_cast<const uint4*>(copy.from);
    auto* const to = reinterpret_cast<uint4*>(copy.to);
    const uint64_t whole = copy.bytes / sizeof(uint4);
    for (uint64_t i = thread; i < whole; i += kStoresUnderWay * threads) {
      uint4 line[kStoresUnderWay];
#pragma unroll
      for (uint32_t j = 0; j < kStoresUnderWay; ++j) {
        if (i + j * threads < whole) line[j] = from[i + j * threads];
      }
#pragma unroll
      for (uint32_t j = 0; j < kStoresUnderWay; ++j) {
        if (i + j * threads < whole) to[i + j * threads] = line[j];
      }
    }
    const uint64_t rest = whole * sizeof(uint4) + thread;
    if (rest < copy.bytes) copy.to[rest] = copy.from[rest];
  }
}

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

cudaEvent_t make_event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  return event;
}

// Makes later work of `later` wait for the current work of `earlier`.
void order(cudaStream_t earlier, cudaEvent_t event, cudaStream_t later) {
  check(cudaEventRecord(event, earlier), "cudaEventRecord");
  check(cudaStreamWaitEvent(later, event, 0), "cudaStreamWaitEvent");
}

bool is_aligned(const Copy& copy) {
  return (reinterpret_cast<uint64_t>(copy.to) | reinterpret_cast<uint64_t>(copy.from)) % sizeof(uint4) == 0;
}

// Copies that are not 16-byte aligned use the copy engines.
void enqueue_stored(const std::vector<Copy>& copies, cudaStream_t stream) {
  StoredCopies stored{};
  for (const Copy& copy : copies) {
    if (!copy.is_stored) continue;
    if (!is_aligned(copy)) {
      enqueue_one(copy, stream);
      continue;
    }
    if (stored.count == kMaxWorldSize) throw std::logic_error("more copies are stored than there are ranks");
    stored.copy[stored.count++] = copy;
  }
  if (stored.count == 0) return;
  void* parameters[] = {&stored};
  check(cudaLaunchKernel(store_copies, kStoreBlocks, kStoreThreads, parameters, 0, stream),
        "launch of the stores of a collective");
}

}  // namespace

// Loads the kernel now: loading may wait for running kernels, and those may be waiting for peers.
StreamCopies::StreamCopies() {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, store_copies), "cudaFuncGetAttributes");
}

// Leaks a stream that takes part in a capture: destroying it would invalidate the capture.
StreamCopies::~StreamCopies() {
  const RelaxedCaptureMode relaxed;
  for (const Lane& lane : lanes_) {
    cudaStreamCaptureStatus status{};
    if (cudaStreamIsCapturing(lane.stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone) continue;
    cudaEventDestroy(lane.begin);
    cudaEventDestroy(lane.end);
    for (cudaEvent_t event : lane.events) cudaEventDestroy(event);
    cudaStreamDestroy(lane.stream);
  }
}

void StreamCopies::enqueue(const std::vector<Copy>& copies, cudaStream_t stream) {
  const auto is_stored = [](const Copy& copy) { return copy.is_stored; };
  if (std::none_of(copies.begin(), copies.end(), is_stored)) {
    for (const Copy& copy : copies) enqueue_one(copy, stream);
    return;
  }
  const Lane& lane = lane_of(stream);
  order(stream, lane.begin, lane.stream);
  for (const Copy& copy : copies) {
    if (!copy.is_stored) enqueue_one(copy, stream);
  }
  enqueue_stored(copies, lane.stream);
  order(lane.stream, lane.end, stream);
}

StreamCopies::SideStream::SideStream(StreamCopies& copies, int device, cudaStream_t stream)
    : guard_(device), lane_(copies.lane_of(stream)), stream_(stream) {}

void StreamCopies::SideStream::follow() { order(stream_, lane_.begin, lane_.stream); }

void StreamCopies::SideStream::copy(const std::vector<Copy>& copies) {
  for (const Copy& copy : copies) enqueue_one(copy, lane_.stream);
}

void StreamCopies::SideStream::record_event(uint32_t number) {
  while (lane_.events.size() <= number) lane_.events.push_back(make_event());
  check(cudaEventRecord(lane_.events[number], lane_.stream), "cudaEventRecord");
}

void StreamCopies::SideStream::wait_event(uint32_t number) {
  check(cudaStreamWaitEvent(stream_, lane_.events.at(number), 0), "cudaStreamWaitEvent");
}

void StreamCopies::SideStream::join() { order(lane_.stream, lane_.end, stream_); }

// Returns a side stream. A stream that has joined a capture belongs to it until the capture ends, so other calls need
// another one.
StreamCopies::Lane& StreamCopies::lane_of(cudaStream_t stream) {
  const Capture own = capture_of(stream);
  for (Lane& lane : lanes_) {
    const Capture other = capture_of(lane.stream);
    if (other.status == cudaStreamCaptureStatusNone || other == own) return lane;
  }
  const RelaxedCaptureMode relaxed;
  Lane lane;
  check(cudaStreamCreateWithFlags(&lane.stream, cudaStreamNonBlocking), "cudaStreamCreate");
  lane.begin = make_event();
  lane.end = make_event();
  lanes_.push_back(lane);
  return lanes_.back();
}

}  // namespace llm_comm::host
