// Errors, device scope, streams and events of the HIP runtime. Used by all of host/hip.
#pragma once

#include <hip/hip_runtime_api.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace llm_comm::host::amd {

// Throws std::runtime_error with `what`, which begins with the name of the HIP function, and the error text.
inline void check(hipError_t error, const char* what) {
  if (error == hipSuccess) return;
  static_cast<void>(
      hipGetLastError());  // clears the error, so that the caller's next HIP call does not report it again
  throw std::runtime_error(std::string(what) + ": " + hipGetErrorString(error));
}

// For its scope, calls of this thread neither join nor invalidate a stream capture, whichever thread captures. Not
// sufficient for hipDeviceSynchronize(), which invalidates every capture of the device.
class RelaxedCaptureMode {
 public:
  RelaxedCaptureMode() { exchange(); }
  ~RelaxedCaptureMode() { exchange(); }
  RelaxedCaptureMode(const RelaxedCaptureMode&) = delete;
  RelaxedCaptureMode& operator=(const RelaxedCaptureMode&) = delete;

 private:
  void exchange() { static_cast<void>(hipThreadExchangeStreamCaptureMode(&mode_)); }

  hipStreamCaptureMode mode_ = hipStreamCaptureModeRelaxed;
};

// Makes a device current for a scope, with relaxed capture mode.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    int current = -1;
    check(hipGetDevice(&current), "hipGetDevice");
    if (current == device) return;
    check(hipSetDevice(device), "hipSetDevice");
    previous_ = current;
  }
  ~DeviceScope() {
    if (previous_ >= 0) static_cast<void>(hipSetDevice(previous_));
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  RelaxedCaptureMode relaxed_;
  int previous_ = -1;  // device to return to; -1: the scope's device was current
};

inline bool is_capturing(hipStream_t stream) {
  hipStreamCaptureStatus status{};
  check(hipStreamIsCapturing(stream, &status), "hipStreamIsCapturing");
  return status != hipStreamCaptureStatusNone;
}

class Event {
 public:
  Event() { check(hipEventCreateWithFlags(&event_, hipEventDisableTiming), "hipEventCreateWithFlags"); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { static_cast<void>(hipEventDestroy(event_)); }

  void record(hipStream_t stream) { check(hipEventRecord(event_, stream), "hipEventRecord"); }
  // Later work of the stream waits for the work before record().
  void wait(hipStream_t stream) { check(hipStreamWaitEvent(stream, event_, 0), "hipStreamWaitEvent"); }

 private:
  hipEvent_t event_ = nullptr;
};

// Stream of this library. Has the greatest priority: the runtime maps the streams of one priority to a few hardware
// queues. A copy that shares a queue with the caller's streams would wait behind kernels that wait for other ranks.
class Stream {
 public:
  Stream() {
    int least = 0;
    int greatest = 0;
    check(hipDeviceGetStreamPriorityRange(&least, &greatest), "hipDeviceGetStreamPriorityRange");
    check(hipStreamCreateWithPriority(&stream_, hipStreamNonBlocking, greatest), "hipStreamCreateWithPriority");
  }
  Stream(Stream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  Stream& operator=(Stream&&) = delete;
  // Leaks a stream that takes part in a capture: destroying it would invalidate the capture.
  ~Stream() {
    if (stream_ == nullptr) return;
    const RelaxedCaptureMode relaxed;
    hipStreamCaptureStatus status = hipStreamCaptureStatusNone;
    static_cast<void>(hipStreamIsCapturing(stream_, &status));
    if (status == hipStreamCaptureStatusNone) static_cast<void>(hipStreamDestroy(stream_));
  }

  hipStream_t get() const { return stream_; }
  void synchronize() const { check(hipStreamSynchronize(stream_), "hipStreamSynchronize"); }

 private:
  hipStream_t stream_ = nullptr;
};

}  // namespace llm_comm::host::amd
